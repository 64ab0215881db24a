"""Rounds in loops that use Accelerate: `Accelerator(method, network)` in the place of accelerate's own.

Each process trains its replica alone: `prepare` gives it its share of the data, wraps no model for gradients to
travel, and attaches the method to the optimizers. `save_state` and `load_state` have the rounds with them; replica N
saves in `replica-N` beside the folder. Only replica 0 is the main process, which prints and tracks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from farflung.errors import UserError
from farflung.integrations import generations, kept
from farflung.integrations.replicas import Seat, refuse_meta
from farflung.networks import Network
from farflung.outer import Method, Session
from farflung.outer.options import Options, completed

SEED = 0
"""Of the order of shuffled samples, which must be the same on all replicas, so that no two see the same one."""

DIVIDES = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")
"""Settings of accelerate's own by which several processes hold one model."""


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An Accelerator whose processes are replicas, which hold a method's rounds.

    Prepare a model together with its optimizers and data, and call `end_training()` before you save the model: then
    all replicas have the same, averaged weights. Prepared data is divided among the replicas, data for evaluations,
    too.

    Args:
        method: what the rounds are, such as `farflung.methods.noloco(every=50)`.
        network: `farflung.networks.from_env()`.
        options: as `Method.attach` takes them.
        settings: as accelerate's own takes them.

    Raises UserError for what cannot work.
    """

    def __init__(self, method: Method, network: Network, options: Options | None = None, **settings: Any) -> None:
        if divided := [name for name in DIVIDES if settings.get(name)]:
            raise UserError(
                f"{divided[0]} would divide one model among the replicas, and each must hold its own; leave it out"
            )
        self._method, self._options = method, options or Options()
        chosen = completed(self._options)
        self._deadline_s = chosen["deadline_s"]
        self.seat = Seat(network, chosen["starting_s"])
        self.sessions: list[Session] = []
        """The rounds of each model, once it has been prepared."""
        super().__init__(**settings)
        if self.num_processes > 1 or self.distributed_type != accelerate.DistributedType.NO:
            raise UserError(
                f"{self.distributed_type} would join the processes to one model, and each must hold its own; leave out "
                "DeepSpeed, FSDP and Megatron, or make this Accelerator before anything else of accelerate"
            )
        if self.project_configuration.automatic_checkpoint_naming:
            raise UserError("automatic_checkpoint_naming cannot go with rounds; name the folder: save_state('state')")

    @property
    def is_main_process(self) -> bool:
        """Whether this is replica 0."""
        return self.seat.rank == 0

    is_local_main_process = is_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on replica 0."""
        if self.is_main_process:
            print(*args, **kwargs)  # noqa: T201

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Makes a function that does something on replica 0 alone."""
        assert function is not None

        def on_one(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return on_one

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Starts trackers on replica 0."""
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's; then attaches the method to each model that is given with its optimizers."""
        models = [given for given in args if isinstance(given, nn.Module)]
        for model in models:
            refuse_meta(model)
        prepared = super().prepare(*args, **kwargs)
        given = prepared if isinstance(prepared, tuple) else (prepared,)
        optimizers = [one.optimizer for one in given if isinstance(one, AcceleratedOptimizer)]
        for model in models:
            whole = self.unwrap_model(model)
            own = {*whole.parameters()}
            held = [one for one in optimizers if own.intersection(one.param_groups[0]["params"])]
            optimizers = [one for one in optimizers if one not in held]
            if held:
                self.sessions.append(self._method.attach(whole, held, self.seat.network, **self._options))
        if optimizers:
            raise UserError(
                f"prepare was given a {type(optimizers[0]).__name__} without its model; give both in one call: "
                "model, optimizer, data = accelerator.prepare(model, optimizer, data)"
            )
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As accelerate's, with this replica's batches alone."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.seat.replicas,
            process_index=self.seat.rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=True,
            data_seed=self.dataloader_config.data_seed or SEED,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared.generator = torch.Generator()  # or each beginning would draw from what dropout does, resumed or not
        self._dataloaders.append(prepared)
        return prepared

    def save_state(self, output_dir: str | Path | None = None, *args: Any, **kwargs: Any) -> str:
        """As accelerate's, with the rounds; all replicas call this at the same step."""
        place = self._place(output_dir)
        new = generations.new_of(place)
        part = new.with_suffix(".part")
        generations.remove(part)
        generations.remove(new)
        super().save_state(str(part), *args, **kwargs)
        kept.write(part, self.sessions, self.seat)
        part.rename(new)
        generations.put(place, self.seat, self._step, self._deadline_s)
        return str(place)

    def load_state(self, input_dir: str | Path | None = None, *args: Any, **kwargs: Any) -> None:
        """As accelerate's, with the rounds: the newest state of this folder that all replicas have whole."""
        folder = generations.newest_common(self._place(input_dir), self.seat, kept.step_of)
        super().load_state(str(folder), *args, **kwargs)
        kept.load(self.sessions, self.seat, kept.read(folder, self.seat), str(folder))

    def end_training(self) -> None:
        """Ends the rounds, after which all replicas have the same, averaged weights, and the trackers."""
        for session in self.sessions:
            session.finish(average_weights=True)
            session.undo.close()
        self.sessions.clear()
        self.seat.leave()
        for tracker in self.trackers:  # accelerate's own would end torch's process group, too, which is the network's
            tracker.finish()

    def _place(self, folder: str | Path | None) -> Path:
        if folder is None:
            raise UserError("save_state and load_state need a folder, such as save_state('state')")
        return generations.of_replica(Path(folder).expanduser().absolute(), self.seat.rank)

    @property
    def _step(self) -> int:
        return sum(session.step for session in self.sessions)


__all__ = ["Accelerator"]
