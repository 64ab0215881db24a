"""Rounds in Lightning's Trainer: `callbacks=[Rounds(method, network)]`, of `lightning` or `pytorch_lightning`.

Each process trains its replica alone, on its share of the training data. The rounds are in Lightning's own checkpoint
files, so that `trainer.fit(model, ckpt_path="last")` goes on bit for bit; replica N saves in `replica-N` beside where
replica 0 does. Only replica 0 logs and shows its progress.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any, Unpack

import torch

from farflung.errors import UserError
from farflung.integrations import kept
from farflung.integrations.lightning_parts import OwnFiles, clip_in_mixed_precision, divide
from farflung.integrations.replicas import Seat, refuse_meta
from farflung.networks import Network, PeerLostError
from farflung.outer import Method, Session
from farflung.outer.options import Options, completed

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The names under which there is Lightning; each has a Trainer that takes only callbacks of its own."""

SHOWN = (
    "ModelSummary",
    "RichModelSummary",
    "TQDMProgressBar",
    "RichProgressBar",
    "LearningRateMonitor",
    "DeviceStatsMonitor",
)
"""Callbacks that show something, of which one replica's is enough."""

if TYPE_CHECKING:
    Callback = object
else:
    _USED = [name for name in PACKAGES if name in sys.modules] or [PACKAGES[0]]
    Callback = type("Callback", tuple(importlib.import_module(name).Callback for name in _USED), {})


class Rounds(Callback):
    """Holds a method's rounds with the other replicas while a Lightning Trainer fits a model.

    At the end all replicas get the same, averaged weights.

    Args:
        method: what the rounds are, such as `farflung.methods.noloco(every=50)`.
        network: `farflung.networks.from_env()`.
        options: as `Method.attach` takes them.

    Raises UserError, also when fitting begins, for what cannot work.
    """

    def __init__(self, method: Method, network: Network, **options: Unpack[Options]) -> None:
        chosen = completed(options)
        self.session: Session | None = None
        """The rounds, once fitting has begun."""
        self._method, self._options, self._deadline_s = method, options, chosen["deadline_s"]
        self._seat = Seat(network, chosen["starting_s"])
        self._resumed: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives this replica its data and its places for checkpoints. Raises UserError."""
        if stage != "fit":
            return
        _refuse(trainer)
        try:
            refuse_meta(pl_module)
        except UserError:
            trainer.strategy._lightning_module = None  # which Lightning would try to move, and hide this error
            raise
        self._seat.take()
        strategy = trainer.strategy
        if not isinstance(strategy.checkpoint_io, OwnFiles):
            strategy.checkpoint_io = OwnFiles(strategy.checkpoint_io, self._seat, self._deadline_s)
        if self._seat.replicas > 1:
            self._divide(trainer)

    def _divide(self, trainer: Any) -> None:
        seat = self._seat
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_last", None) == "link":
                raise UserError("save_last='link' would link other replicas' checkpoints; use save_last=True")
            callback._enable_version_counter = False  # each replica must call a checkpoint alike
            if callback.dirpath is None:
                own = str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))
                callback.dirpath = seat.told("folder", own)[0]
        if seat.rank:
            trainer.loggers = []
            trainer.callbacks = [one for one in trainer.callbacks if type(one).__name__ not in SHOWN]
        divide(trainer, seat)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches the method to the optimizers that Lightning has just made."""
        if self.session:
            self.session.undo.close()
        optimizers = [getattr(one, "optimizer", one) for one in trainer.strategy.optimizers]
        self.session = self._method.attach(pl_module, optimizers, self._seat.network, **self._options)
        self.session.undo.callback(clip_in_mixed_precision(trainer.precision_plugin))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Loads the rounds of the checkpoint that Lightning goes on from."""
        assert self.session
        self._seat.agree(
            {
                "max_steps": trainer.max_steps,
                "max_epochs": trainer.max_epochs,
                "the number of batches of an epoch": str(trainer.num_training_batches),
                "the step to go on from": trainer.global_step,
            }
        )
        if trainer.ckpt_path and not self._resumed:
            raise UserError(
                "this checkpoint holds no rounds, since it was saved without them or with save_weights_only; begin "
                "anew with its weights"
            )
        if self._resumed:
            kept.load([self.session], self._seat, self._resumed, "this checkpoint")
            torch.set_rng_state(self._resumed["random"])
            self._resumed = {}

    def state_dict(self) -> dict[str, Any]:
        """The rounds, for Lightning's checkpoints."""
        if not self.session:
            return {}
        return {**kept.state_of([self.session], self._seat), "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what a checkpoint has of the rounds, until weights and optimizers are loaded, too."""
        kept.refuse_other_seat(self._seat, state, "this checkpoint")
        self._resumed = state

    @property
    def state_key(self) -> str:
        """The name of the rounds in a checkpoint."""
        return "farflung"

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the rounds; all replicas get the same, averaged weights."""
        if self.session:
            try:
                self.session.finish(average_weights=True)
            except PeerLostError as lost:
                warnings.warn(f"replica {self._seat.rank} ends with its own weights: {lost}", stacklevel=2)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Gives up the network, since Lightning tears nothing down after an error; what it saves now has the rounds."""
        self._seat.leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes the method off the optimizers."""
        if stage == "fit" and self.session:
            self.session.undo.close()
            self.session = None
            self._seat.leave()


def _refuse(trainer: Any) -> None:
    """Raises UserError for what cannot go with rounds."""
    strategy = type(trainer.strategy).__name__
    if trainer.world_size > 1 or "SingleDevice" not in strategy:
        raise UserError(
            f"{strategy} would join the processes to one model, and each must hold its own; make the Trainer with "
            "devices=1, after the network"
        )
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        if kind in ("EarlyStopping", "Timer"):
            raise UserError(f"{kind} would stop one replica while the others wait for it; leave it out")
        if kind in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"):
            raise UserError(f"{kind} swaps the weights that rounds average; leave it out: the rounds average already")
