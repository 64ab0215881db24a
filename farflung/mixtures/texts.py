"""Mixtures of text, as the commands use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import exp, inf
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.errors import counted
from farflung.lazy import Later
from farflung.mixtures.settings import SplitSettings

if TYPE_CHECKING:
    from farflung.mixtures import folder as folders
    from farflung.mixtures import joined, routers, split
    from farflung.mixtures.folder import Mixture
    from farflung.networks.base import Network
else:
    folders, joined = Later("farflung.mixtures.folder"), Later("farflung.mixtures.joined")
    routers, split = Later("farflung.mixtures.routers"), Later("farflung.mixtures.split")

EXAMPLE = 100
"""Characters of an example of an expert's text."""
GREATEST = 709.0
"""Nats whose perplexity is still a number."""


class TextKind:
    """See Kind."""

    noun = "sequence"
    exported = "AutoModelForCausalLM loads it with trust_remote_code=True"
    Settings = SplitSettings
    options = frozenset({"text", "prefix"})

    def split(self, settings: SplitSettings, network: Network, tell: Callable[[str], object]) -> Mixture:
        """See Kind: each machine trains its own routers."""
        return split.split(settings, network, lambda one: tell(_round(one)))

    def read(self, folder: Path) -> Mixture:
        """See Kind."""
        return folders.Mixture.read(folder)

    def train_flags(self, mixture: Mixture) -> str:
        """See Kind."""
        return f"--sequence-length {mixture.sequence_length}"

    def dealt(self, mixture: Mixture) -> Iterator[str]:
        """How many sequences each expert has, of each source."""
        for number, (dealt, judged) in enumerate(zip(mixture.dealt, mixture.held_out, strict=True)):
            of = ", ".join(f"{count:,} of {source}" for count, source in zip(dealt, mixture.data, strict=True) if count)
            yield f"expert {number}: {counted(sum(dealt), 'sequence')} ({of}), {judged:,} held out"

    def picture(self, mixture: Mixture) -> None:
        """See Kind: texts are told, not looked at."""

    def told(self, mixture: Mixture, text: str | None = None) -> Iterator[str]:
        """The rounds, and an example of each expert's text; or how likely each router finds another `text`."""
        if text is not None:
            scores = joined.route(mixture, text)
            yield from (f"expert {number}: {-score:.3f} nats a token" for number, score in enumerate(scores))
            yield f"farflung: expert {scores.argmax()} continues this text"
            return
        try:
            yield from [_round(routers.RouterRound(**one)) for one in mixture.rounds]
        except (TypeError, ValueError) as error:
            raise folders.damaged(mixture.folder, error) from error
        yield from self.dealt(mixture)
        for number in range(mixture.experts):
            yield f"expert {number}: {joined.example(mixture, number)[:EXAMPLE]!r}"

    def judged(
        self, mixture: Mixture, experts: Mapping[int, Path], dense: Path | None, prefix: int | None = None
    ) -> Iterator[str]:
        """Each expert's loss, all together's, and that of one model; routers read a `prefix`."""
        score = joined.evaluate(mixture, experts, dense, prefix)
        for one in score.experts:
            instead = f" ({one.instead} of them of missing experts)" if one.instead else ""
            own = "" if one.loss is None else f", {_loss(one.loss)}"
            yield f"expert {one.number}: {counted(one.sequences, 'sequence')}{instead}{own}"
        yield f"mixture: {_loss(score.loss)}"
        if score.dense is not None:
            yield f"dense: {_loss(score.dense)}"

    def join(self, mixture: Mixture, experts: Mapping[int, Path], target: Path) -> None:
        """See Kind."""
        joined.join(mixture, experts, target)


def _round(one: routers.RouterRound) -> str:
    pure = "" if one.purity is None else f", purity {one.purity:.3f}"
    chosen = ", ".join(f"{share:.0%}" for share in one.chosen)
    return f"round {one.number}: {one.loss:.3f} nats a token{pure}; without seats they would take {chosen}"


def _loss(loss: float) -> str:
    perplexity = inf if loss > GREATEST else exp(loss)
    return f"{loss:.4f} nats a token, perplexity {perplexity:.2f}"
