async function unpack() {
  const packed = document.getElementById("plotly");
  if (window.Plotly) return;
  if (packed.type !== "application/gzip")
    return new Promise((loaded, failed) => { packed.onload = loaded; packed.onerror = () => failed("no program"); });
  const bytes = Uint8Array.from(atob(packed.textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const program = document.createElement("script");
  program.textContent = await new Response(stream).text();
  document.head.append(program);
}
function colours() {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
  const changes = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": of("--ink")};
  for (const axis of ["xaxis", "yaxis"])
    Object.assign(changes, {
      [axis + ".gridcolor"]: of("--hair"), [axis + ".linecolor"]: of("--line"), [axis + ".zerolinecolor"]: of("--line"),
    });
  return changes;
}
// Where nothing hovers, as on a phone, dragging scrolls the page, and there are no tools in the way.
const hovers = matchMedia("(hover: hover)").matches;
const usable = {
  displaylogo: false, responsive: true, displayModeBar: hovers && "hover", modeBarButtons: [["resetScale2d", "toImage"]],
};
function dressed(layout) {
  if (!hovers) layout.dragmode = false;
  for (const [path, colour] of Object.entries(colours())) {
    const [key, within] = path.split(".");
    if (within) layout[key] = {...layout[key], [within]: colour}; else layout[key] = colour;
  }
  return layout;
}
function draw() {
  for (const figure of document.querySelectorAll("script.figure")) {
    const {data, layout} = JSON.parse(figure.textContent);
    Plotly.newPlot(figure.previousElementSibling, data, dressed(layout), usable);
  }
}
function apologise(error) {
  for (const figure of document.querySelectorAll("script.figure"))
    figure.previousElementSibling.textContent = "The pictures cannot be drawn: " + error +
      ". A report that was written with --small needs plotly's file where it was; one without --small needs nothing.";
}
function mark(box) {
  box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
  box.classList.toggle("ended", box.scrollLeft + box.clientWidth >= box.scrollWidth - 1);
}
const sizes = new ResizeObserver(changes => changes.forEach(change => mark(change.target)));
function markAll(within) {
  for (const box of within.querySelectorAll(".wide")) {
    box.addEventListener("scroll", () => mark(box));
    sizes.observe(box);
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(plot, colours());
});
markAll(document);
const program = unpack(), drawn = program.then(draw);
drawn.catch(apologise);
