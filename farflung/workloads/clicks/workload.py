"""A recommender as a workload: will this click come?"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import counted
from farflung.figure import Figure
from farflung.lazy import Later
from farflung.workloads.clicks.settings import ClicksSettings
from farflung.workloads.dealing import ALL, Deal

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

    from farflung.workloads import base, dealing, held_out
    from farflung.workloads.base import Batch, Ids, Reshape, Score
    from farflung.workloads.clicks import debian, encoding, export, figures, files, model, synthetic
    from farflung.workloads.clicks import log as logs
else:
    np, torch = Later("numpy"), Later("torch")
    base, dealing, held_out = (Later(f"farflung.workloads.{name}") for name in ("base", "dealing", "held_out"))
    debian, encoding, export, figures, files, logs, model, synthetic = (
        Later(f"farflung.workloads.clicks.{name}")
        for name in ("debian", "encoding", "export", "figures", "files", "log", "model", "synthetic")
    )

HELD_OUT_SHARE = 20
"""One click in so many is held out."""
SHOWN = 12
"""Clicks of a sample."""
COLUMNS_SHOWN = 4

MADE = {"synthetic": synthetic, "debian": debian}
"""Data that is made on this machine."""

notes = logging.getLogger("farflung")


class Recommender:
    """A DLRM on a click log; see Workload."""

    Settings = ClicksSettings
    units = "clicks"
    measure = "nats a click"
    units_per_sample = 1
    judged_by = Figure("AUC", more_is_better=True)
    divisible = None

    def __init__(self, settings: ClicksSettings, deal: Deal = ALL) -> None:
        self.settings = settings
        self._deal = deal

    @cached_property
    def _log(self) -> logs.ClickLog:
        log = self._read(self.settings.data)
        logs.refuse_one_sided(log.labels, f"the clicks of {log.where}", "give a log with both kinds")
        return log

    def _read(self, data: str) -> logs.ClickLog:
        return MADE[data].read(self.settings.max_clicks) if data in MADE else files.read(data, self.settings)

    @cached_property
    def _split(self) -> tuple[Ids, Ids]:
        """The clicks to train on, and those of the same log that are held out."""
        held = 0 if self.settings.validation else max(1, len(self._log) // HELD_OUT_SHARE)
        shuffled = dealing.permuted(np.arange(len(self._log)), len(self._log), (0,))
        return np.flatnonzero(shuffled >= held), np.flatnonzero(shuffled < held)

    @cached_property
    def encoder(self) -> encoding.Encoder:
        """What the training clicks have fixed. Raises UserError."""
        return encoding.Encoder.of(self._log, self._split[0], self.settings.max_rows)

    @cached_property
    def _clicks(self) -> encoding.Clicks:
        return self.encoder.encoded(self._log)

    @cached_property
    def _judges(self) -> tuple[logs.ClickLog, Ids]:
        """A log, and which of its clicks the model is judged by."""
        if self.settings.validation:
            log = self._read(self.settings.validation)
            chosen = held_out.evenly(len(log), self.settings.eval_clicks)
        else:
            log, held = self._log, self._split[1]
            chosen = held[held_out.evenly(len(held), self.settings.eval_clicks)]
        which = f"the {counted(len(chosen), 'click')} of {log.where} that the model is judged by"
        logs.refuse_one_sided(log.labels[chosen], which, "give more clicks, or another --validation")
        return log, chosen

    @cached_property
    def judged_on(self) -> encoding.Clicks:
        """The clicks that the model is judged by. Raises UserError."""
        log, chosen = self._judges
        clicks = self._clicks if log is self._log else self.encoder.encoded(log)
        held = encoding.Clicks(*(part[torch.from_numpy(chosen)] for part in clicks))
        unknown = (held.rows == encoding.UNKNOWN).sum(dim=0).tolist()
        if told := [f"{name} {count}" for name, count in zip(self.encoder.words, unknown, strict=True) if count]:
            of = f"of {counted(len(chosen), 'click')} that the model is judged by"
            notes.warning(
                "%s: some categories %s have no row of their own, and take the unknown one (%s); "
                "these are new, or rarer than the first --max-rows",
                *(log.where, of, ", ".join(told)),
            )
        return held

    @property
    def crossing(self) -> str:
        """See Workload."""
        return self.settings.crossing if self.settings.tables == "dealt" else ""

    def tables_and_rest(self, made: model.DLRM) -> tuple[model.Tables, nn.Module]:
        """See Workload."""
        return made.tables, made.interactions

    def check(self) -> None:
        """See Workload."""
        for data in (self.settings.data, self.settings.validation):
            if data and data not in MADE:
                files.paths_of(data)

    def outline(self) -> nn.Module:
        """See Workload."""
        with torch.device("meta"):
            return model.DLRM(**self.shape)

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of the model. Raises UserError."""
        settings, encoder = self.settings, self.encoder
        shape = {"numbers": len(encoder.centres), "rows": encoder.table_rows}
        return shape | {"width": settings.width, "hidden": settings.hidden}

    def build(self, seed: int, reshape: Reshape | None = None) -> Any:
        """See Workload."""
        made = self.outline()
        if reshape:
            reshape(made)
        made.to_empty(device="cpu")
        model.initialise(made, seed)
        return made

    @property
    def available(self) -> int:
        """See Workload."""
        return len(self._split[0])

    @cached_property
    def known(self) -> dict[str, str]:
        """See Workload: a hash of the clicks, and of the rows that their categories have."""
        found = hashlib.sha256(json.dumps(dict(self.encoder.words)).encode())
        for part in self._clicks:
            found.update(part.numpy().tobytes())
        return {self.settings.data: found.hexdigest()}

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        """See Workload."""
        return self._split[0][self._deal.ids(seed, replica, step, size, self.available)]

    def batch(self, ids: Ids) -> Batch:
        """Labels, numbers and rows; see Clicks."""
        return tuple(part[torch.from_numpy(ids)] for part in self._clicks)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean log loss of the guesses, in nats."""
        labels, numbers, rows = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(model(numbers, rows), labels)

    def evaluate(self, model: Any, size: int, device: torch.device) -> Score:
        """The AUC of the clicks held out, and their log loss."""
        labels, numbers, rows = self.judged_on
        batches = zip(torch.split(numbers, size), torch.split(rows, size), strict=True)
        logits = torch.cat([model(*base.to(batch, device)).detach().float().cpu() for batch in batches])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return base.Score(figures.auc(labels, logits), others={"log loss": float(loss)})

    def digest(self) -> str:
        """See Workload."""
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in self.judged_on)).hexdigest()

    def sample(self, model: Any, seed: int, device: torch.device) -> str:
        """A table of some clicks held out, half of which came: the model's guess, what happened, some categories."""
        log, chosen = self._judges
        labels, numbers, rows = self.judged_on
        generator = np.random.default_rng(seed)
        sides = (np.flatnonzero(labels.numpy() == side) for side in (1, 0))
        picked = [generator.permutation(side)[: SHOWN // 2] for side in sides]
        clicks = np.concatenate(picked)
        places = torch.from_numpy(clicks)
        chances = model(*base.to((numbers[places], rows[places]), device)).sigmoid().tolist()
        lines = [["chance", "came", *list(log.categories)[:COLUMNS_SHOWN]]]
        for place, chance in sorted(zip(clicks.tolist(), chances, strict=True), key=lambda one: -one[1]):
            categories = list(log.shown(chosen[place]).values())[:COLUMNS_SHOWN]
            lines.append([f"{chance:.3f}", "yes" if labels[place] else "no", *categories])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        """Writes weights, the model's shape, what makes its inputs of a log, and a page that says how to load it."""
        export.write(target, weights, self.shape, self.encoder)
