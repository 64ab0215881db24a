"""Which part of the model is a core, and who trains no more than that."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.tables import BETWEEN_PEERS, Checked, setting


@dataclass(frozen=True)
class CoreSettings(Checked):
    """A core: a part of the model that is trained alone in every other step, and that weak replicas have alone."""

    core: str = ""
    """lowrank16 or heads2, or another number: the part of the model that weak replicas train; unset: none."""
    core_only_replicas: int = setting(0, least=0)
    """The last replicas that hold, train and send the core only; the others train all of the model."""
    core_only: bool = setting(False, may_differ=BETWEEN_PEERS)
    """On the internet or in a folder: this peer holds, trains and sends the core only."""
    rest_every: int = setting(1, least=1)
    """Rounds of the core to one of the rest."""
