"""Rounds in the Trainer of transformers, and so in TRL's trainers: `callbacks=[Rounds(method, network)]`.

Each process trains its replica alone, on its share of the training data, without DistributedDataParallel. Replica 0
saves in `output_dir`, replica N in `output_dir/replica-N`; each checkpoint has the rounds in it, so that
`trainer.train(resume_from_checkpoint=True)` goes on bit for bit. Only replica 0 logs and reports.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback, ProgressCallback

from farflung.errors import UserError
from farflung.integrations import kept
from farflung.integrations.replicas import Seat, believe_alone, refuse_meta
from farflung.networks import Network, PeerLostError
from farflung.outer import Method, Session
from farflung.outer.options import Options, completed


class Rounds(TrainerCallback):  # type: ignore[misc]
    """Holds a method's rounds with the other replicas while a Trainer trains; give it to `Trainer(callbacks=[…])`.

    At the last step all replicas get the same, averaged weights, before the Trainer evaluates and saves them.

    Args:
        method: what the rounds are, such as `farflung.methods.noloco(every=50)`.
        network: `farflung.networks.from_env()`.
        options: as `Method.attach` takes them.

    Raises UserError, also when the Trainer is made or begins to train, for what cannot work.
    """

    def __init__(self, method: Method, network: Network, **options: Unpack[Options]) -> None:
        chosen = completed(options)
        self.session: Session | None = None
        """The rounds, once training has begun."""
        self._method, self._options, self._deadline_s = method, options, chosen["deadline_s"]
        self._seat = Seat(network, chosen["starting_s"])
        self._made = self._ended = False

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Gives this replica its data and its folder. Raises UserError."""
        trainer = _trainer()
        believe_alone()
        _refuse(trainer, args)
        self._made = True
        seat = self._seat
        trainer.train_dataset = seat.share(trainer.train_dataset)
        if args.save_total_limit == 1:
            args.save_total_limit = 2  # of two replicas that are killed, one may not have saved the last one yet
        if seat.rank:
            args.output_dir = str(Path(args.output_dir) / f"replica-{seat.rank}")
            args.push_to_hub = False
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            for kind in (ProgressCallback, PrinterCallback, *get_reporting_integration_callbacks(args.report_to)):
                trainer.remove_callback(kind)
        kept.set_aside_what_not_all_have(Path(args.output_dir), seat)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Attaches the method, and loads the rounds of the checkpoint that the Trainer goes on from."""
        if not self._made:
            raise UserError(
                "Rounds came to this Trainer after it was made, too late to divide its data; "
                "give it to Trainer(callbacks=[Rounds(method, network)])"
            )
        model, optimizer = given["model"], given["optimizer"]
        refuse_meta(model)
        folder = _folder(args, state)
        resumed = kept.read(folder, self._seat) if state.global_step else None
        for module in _saved_by_rank_0(model):
            module.should_save_on_this_rank = _always  # type: ignore[assignment]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate has wrapped it
        self._seat.take()
        self._seat.agree(
            {
                "max_steps": state.max_steps,
                "the step to go on from": state.global_step,
                "save_strategy": str(args.save_strategy),
                "save_steps": state.save_steps,
            }
        )
        if self.session:
            self.session.undo.close()
        self._ended = False
        self.session = self._method.attach(model, optimizer, self._seat.network, **self._options)
        if resumed:
            kept.load([self.session], self._seat, resumed, str(folder))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Ends the rounds at the last step, before the Trainer evaluates and saves the weights."""
        if state.global_step >= state.max_steps:
            self._finish()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Adds the rounds to the checkpoint, and waits until all replicas have saved it."""
        rounds = [self.session] if self.session and not args.save_only_model else []
        kept.write(_folder(args, state), rounds, self._seat)
        if self._seat.replicas > 1:
            try:
                self._seat.told("saved", state.global_step, self._deadline_s)
            except PeerLostError as lost:
                warnings.warn(f"checkpoint {state.global_step} may not be whole everywhere: {lost}", stacklevel=2)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Ends the rounds where training has ended before its last step."""
        self._finish()
        if self.session:
            self.session.undo.close()
            self.session = None
            for module in _saved_by_rank_0(given["model"]):
                vars(module).pop("should_save_on_this_rank", None)
        self._seat.leave()

    def _finish(self) -> None:
        if self.session and not self._ended:
            self._ended = True
            try:
                self.session.finish(average_weights=True)
            except PeerLostError as lost:
                warnings.warn(f"replica {self._seat.rank} ends with its own weights: {lost}", stacklevel=2)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _saved_by_rank_0(model: nn.Module) -> Iterator[nn.Module]:
    """The models that save nothing where torch.distributed says that others are there, which here save their own."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _always(is_main_process: bool) -> bool:
    return is_main_process


def _trainer() -> Trainer:
    """The Trainer that is being made: it gives callbacks all that it has, but not itself."""
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
    raise UserError("Rounds is for the Trainer of transformers; give it to Trainer(callbacks=[…])")


def _refuse(trainer: Trainer, args: TrainingArguments) -> None:
    """Raises UserError for what cannot go with rounds."""
    if trainer.is_deepspeed_enabled or args.deepspeed:
        raise UserError("DeepSpeed divides the optimizer among processes, which rounds cannot see into; leave it out")
    if trainer.is_fsdp_enabled or getattr(args, "fsdp", None):
        raise UserError(
            "FSDP would divide one model among the replicas, and each must hold its own; leave fsdp out, or use "
            "fully_shard and attach in a loop of your own"
        )
    if any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks):
        raise UserError("EarlyStoppingCallback would stop one replica while the others wait for it; leave it out")
    if args.auto_find_batch_size:
        raise UserError("auto_find_batch_size may begin again on one replica alone; set per_device_train_batch_size")
    if str(args.save_strategy) == "best" or getattr(args.save_strategy, "value", "") == "best":
        raise UserError(
            "save_strategy='best' would save other steps on each replica, so that none could be resumed; use steps"
        )
    if args.n_gpu > 1:
        raise UserError(
            f"this process sees {args.n_gpu} GPUs and would use them all; make network and Rounds before anything "
            "touches a GPU"
        )
    refuse_meta(trainer.model)
