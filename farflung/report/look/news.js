const EVERY = 1500;
const main = document.querySelector("main"), gone = document.createElement("p");
gone.id = "gone";
gone.textContent = "farflung watch does not answer: what is shown is old. Start it again, and this page goes on.";

function plots() {
  return [...main.querySelectorAll(".js-plotly-plot")];
}
function replace(section, html) {
  const places = [...section.querySelectorAll(".wide")].map(box => [box.scrollLeft, box.scrollTop]);
  section.innerHTML = html;
  markAll(section);
  section.querySelectorAll(".wide").forEach((box, n) => { if (places[n]) [box.scrollLeft, box.scrollTop] = places[n]; });
}
async function drawAnew() {
  const answer = await fetch("/now");
  const anew = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
  plots().forEach(plot => Plotly.purge(plot));
  main.innerHTML = anew.innerHTML;
  Object.assign(main.dataset, {...anew.dataset});
  markAll(main);
  await program;
  draw();
}
async function look() {
  if (!main.dataset.epoch) return drawAnew();
  const have = plots().map(plot => plot.data.map(trace => trace.x.length).join(",")).join(";");
  const answer = await fetch("/news?" + new URLSearchParams({epoch: main.dataset.epoch, since: main.dataset.since, have}));
  const news = await answer.json();
  gone.remove();
  if (news.epoch !== main.dataset.epoch) return drawAnew();
  main.dataset.since = news.since;
  for (const [name, html] of Object.entries(news.sections)) replace(document.getElementById(name), html);
  for (const [number, traces] of Object.entries(news.points)) {
    const numbers = Object.keys(traces).map(Number), all = Object.values(traces);
    await Plotly.extendTraces(plots()[number], {x: all.map(line => line[0]), y: all.map(line => line[1])}, numbers);
  }
}
async function stayAlive() {
  try { if (!document.hidden) await look(); } catch (error) { document.body.append(gone); }
  setTimeout(stayAlive, EVERY);
}
stayAlive();
