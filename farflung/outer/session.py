"""What is common to all that hooks into a user's training loop."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from farflung.cells import Cell
from farflung.codecs.packets import described
from farflung.errors import UserError
from farflung.formats import KEY, ROUNDS
from farflung.hooks.digests import digest
from farflung.hooks.layouts import first_told
from farflung.hooks.loads import Loads
from farflung.hooks.shards import reshard
from farflung.hooks.start import SETTING, DisagreementError, Fact, agree_on_start, agree_within, choices_apart
from farflung.hooks.steps import hook_steps
from farflung.hooks.strangers import watch_for_strangers
from farflung.hooks.trained import Trained
from farflung.hooks.untrained import Untrained
from farflung.networks.torchrun import tell_launcher
from farflung.outer.averages import Averages
from farflung.outer.columns import Columns, Message
from farflung.outer.departures import Departures
from farflung.outer.faults import Faults
from farflung.outer.holders import Holders
from farflung.outer.options import check_elastic
from farflung.outer.outcomes import Round
from farflung.outer.reports import Reports
from farflung.outer.setup import Setup
from farflung.outer.states import check_cell, refusing_others

if TYPE_CHECKING:
    from farflung.memory.updates import FarUpdates

UNSEEN = (
    "the rounds end, but no step of the attached optimizers was seen; call optimizer.step() itself, not the step of "
    "what wraps it"
)
ENDED = (
    "the rounds have ended with finish(), so this step is this replica's alone; attach again to hold more, or call "
    "average_buffers() where only an evaluation is due"
)


class Session:
    """A context that does something about inner optimizers' steps, and undoes its hooks at the end.

    Public besides the methods: `step`, the inner steps so far, and `network`, the replica's seat.
    """

    def __init__(self, setup: Setup) -> None:
        network, undo = setup.network, setup.undo
        self.method = setup.method
        self.network = network
        self.deadline_s, self.starting_s = setup.options["deadline_s"], setup.options["starting_s"]
        self.outer: Optimizer | None = None
        self.step = 0
        self.trained = Trained(setup.model, setup.optimizers, network)
        undo.callback(self.trained.end)
        settings = {**vars(setup.method), "buffers": setup.options["buffers"]}  # before they do anything together
        told = {what: described(value) for what, value in settings.items()}
        agree_within(self.trained.layout, network.rank, told)
        number = network.attachment()
        self._name = f"attachment {number}"
        self.columns = Columns(network)
        self.departures = Departures(network, self._name)
        self._options = setup.options
        self.holders = setup.options["holders"]
        self._begun = self._noted = self._met = False
        self._returns = 0
        self._ended = self._left = self._warned = False
        self.averages = Averages(self)
        self._reports = Reports(network, setup.options["on_round"])
        self._faults = Faults(network.rank, self.trained.layout)
        self.undo = undo
        self.untrained = Untrained(setup.model, self.trained, undo)
        self._loads = Loads(setup.model, self.trained, undo, watches=lambda: self._noted and self.method.exchanges)
        for optimizer in setup.optimizers:
            undo.callback(hook_steps(optimizer, before=self._before_step))
        if self.method.exchanges:
            watch_for_strangers()
        if network.elastic:
            check_elastic(number, self.untrained.floating(), setup.options["buffers"])

    def __enter__(self) -> Self:
        if self._left:
            raise UserError("this session has ended, so it has no more rounds; attach again")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left = True
        if isinstance(error, Exception):  # before others see that it has left, and end with errors of their own
            with suppress(OSError):  # a full disk hides no error
                tell_launcher(error)
        if error is None:
            self.finish()
        elif not self._ended:
            self.departures.leave(self._next_rounds())
        self.undo.close()

    def apply_pending(self) -> None:
        """Applies pending rounds now, however much of their delay is left."""
        reshard(self.trained.model)

    def land(self) -> None:
        """The old name of `apply_pending`, for one more version."""
        warnings.warn(
            "land is called apply_pending now; the old name goes with the next version", DeprecationWarning, 2
        )
        self.apply_pending()

    @torch.no_grad()
    def finish(self, average_weights: bool = False) -> None:
        """Ends the rounds: applies pending ones, averages the buffers, and the weights where asked.

        Every replica must call it alike. The end of the `with` statement does, if the loop has not. With
        `average_weights` all replicas end with the same ones; an optimizer that has others for evaluation must be
        switched to these before, as with `optimizer.eval()` of schedule-free ones. Steps after it are this replica's
        alone. Replicas that are lost, or do not come to that within ten deadlines, are left out. Raises PeerLostError
        where the rest cannot be reached, and UserError when what is trained has changed.
        """
        if average_weights:
            self.trained.check()
        if not self._ended:
            self._end()
        if average_weights:
            with self.writing_weights():
                self.averages.weights(at_end=True)

    def _end(self) -> None:
        self._ended = True
        if not (self._begun or self.step) and self.method.exchanges:
            warnings.warn(UNSEEN, stacklevel=4)
        self.apply_pending()
        self.departures.leave(self._next_rounds())
        self._settle_at_end()
        self.undo.close()
        self.undo.callback(hook_steps(self.trained.optimizers[-1], after=self._warn_of_steps_alone))
        if self._begun and self.method.exchanges:
            self.averages.buffers(at_end=True)

    def writing_weights(self) -> AbstractContextManager[None]:
        """Within, all weights are written; what optimizers keep beside them goes along."""
        return nullcontext()

    def _next_rounds(self) -> list[int]:
        """The number of each fragment's next round."""
        return []

    def _settle_at_end(self) -> None:
        """Takes back what is not sound in the weights when the rounds end."""

    def _warn_of_steps_alone(self) -> None:
        if not self._warned and not self.trained.again():
            self._warned = True
            warnings.warn(ENDED, stacklevel=6)

    def average_buffers(self) -> None:
        """Averages the model's buffers over all replicas, for an evaluation; every replica must call it alike.

        So it does with frozen weights that differ, since the loop moves them itself. Floating ones get their mean,
        whole numbers their largest, and unit vectors, such as spectral norm's, are taken from the lowest rank.
        Replicas that are lost are left out. Raises PeerLostError where the rest cannot be reached, and UserError where
        sizes differ.
        """
        self.averages.buffers()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has the mean of all replicas' weights and buffers, to evaluate or to save it.

        Every replica must enter it alike, between two steps. At its end the replica's own weights are back, bit for
        bit, so it does not disturb training; rounds under way go on. Raises PeerLostError, and UserError on the
        internet, where nobody waits for the others.
        """
        return self.averages.shown()

    def catch_up(self, wait: float) -> bool:
        """Takes the state of others before training, where it can be had within `wait` seconds; whether it was."""
        return False

    def give(self) -> None:
        """Gives others the state between two steps, where they ask for it and this replica waits for something else."""

    def give_while(self, wanted: Callable[[], bool]) -> None:
        """Gives others the state after the last step while that is `wanted`, where replicas come and go."""

    def spoil(self, reason: str) -> None:
        """Says that training went wrong since the last round: what this replica has is not for the others.

        One of the replica's processes may say so for all of them.
        """
        self._faults.spoil(reason)

    def gradients_from(self, far: Callable[[], FarUpdates | None]) -> None:
        """Has a method that averages gradients do so block by block, and take those that are `far` from there.

        All replicas must do so alike; a session of another method needs none of it. What keeps gradients far hooks the
        optimizer after this session has, so that it steps when the means are there.
        """

    def saved(self) -> None:
        """Says that a checkpoint of it is being written; an elastic network may keep its state, too."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later `load_state_dict` needs to go on bit for bit; not to be called in `on_round`."""
        return {
            KEY: ROUNDS.version,
            "choices": self.choices(),
            "step": self.step,
            **self._reports.state_dict(),
            "faults": self._faults.state_dict(),
            "untrained": self.untrained.state_dict(),
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of the same method, model and optimizers.

        Raises UserError for another's, and changes nothing then.
        """
        with refusing_others():
            ROUNDS.check(state, "this state")
            self._check_state(state)
            self._load(state)

    def has_cells(self, state: dict[str, Any]) -> bool:
        """Whether a state has all cells that this process keeps: other processes kept them behind a gateway."""
        return all(cell.name in state.get("cells", {}) for cell in self._cells_here())

    def _check_state(self, state: dict[str, Any]) -> None:
        if unlike := choices_apart(state.get("choices", {}), self.choices()):  # migrated ones tell of none
            raise UserError(f"this state was saved with another {unlike}; attach that")
        for cell in self._cells_here():
            check_cell(state["cells"].get(cell.name, {}), cell)

    def _cells_here(self) -> list[Cell]:
        """The cells that this process keeps."""
        return []

    def _starts_from(self) -> list[Message]:
        """The weights of these cells when training begins, fragment by fragment."""
        return []

    def _load(self, state: dict[str, Any]) -> None:
        if self._noted and not self.network.elastic:  # whose peers each go back alone
            self._goes_back()
        self.step = state["step"]
        self._reports.load_state_dict(state)
        self._faults.load_state_dict(state["faults"])
        self.untrained.load_state_dict(state["untrained"])
        self._begun = self.step > 0
        self._noted = False
        self._loads.forget()

    def _goes_back(self) -> None:
        """Has the rounds from now on keys of their own: what was exchanged, or said of them, was in others."""
        self._returns += 1
        self._name = f"{self._name.partition(',')[0]}, return {self._returns}"
        self.departures = Departures(self.network, self._name)

    def key(self, what: str) -> str:
        """The key of an exchange: no two attachments on a network share one."""
        return f"{self._name}, {what}"

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self._noted:
            self._loads.check(self.step)
            return
        self._noted = True
        self.trained.check_present()
        self.trained.begin()
        untrained = self.untrained.begin()
        agrees = self.method.exchanges and not self.network.elastic
        if agrees:
            self.meet_islands()
        if not self._begun:
            self._begun = True
            self._begin()
            if agrees:
                self._agree_on_start(untrained)
        self._begin_counting()

    def meet_islands(self) -> None:
        """Learns who keeps which cells, before anything is exchanged; later calls find it known."""
        if self.network.islands and not self._met:
            self._met = True
            core, *_ = self.holders.fragments(self.trained.model, 1, self.trained.named)
            rest = list(self.untrained.buffers()) if self.method.exchanges else []
            self.columns.meet(core.names, rest, self.key("islands"), self.starting_s)

    def _agree_on_start(self, untrained: list[Fact]) -> None:
        facts = self._facts()
        agree_within(self.trained.layout, self.network.rank, {fact.what: fact.told[0] for fact in facts})
        rest = [tuple(tensor.shape) for tensor in self.averaged_besides().values()]
        if self.columns.unlike:
            told = dict(ChainMap(*self.trained.layout.told(self.untrained.told_of_whole())))
            untrained = [Fact(f"values of {name}", (value,)) for name, value in sorted(told.items())]
        differ = ""
        held = self.holders.apart(self._starts_from(), self.method.schedule, everyone := self.network.members())
        columns = [(group, one) for group, cells in held.items() for one in self.columns.of(group, list(cells))]
        for group, column in columns:
            key = self.key("start" if group == everyone else f"start of {group}")
            weights = [tensor for cell in column.cells for tensor in held[group][cell]]
            started_from = [
                *facts,
                Fact("shapes", (str([*(tuple(tensor.shape) for tensor in weights), *rest]),)),
                Fact("weights", (str(digest(weights).tolist()),)),
                *untrained,
            ]
            try:
                agree_on_start(column.network, group, column.key(key), started_from, self.starting_s)
            except DisagreementError as error:  # in the other columns it is waited for
                differ = differ or str(error)
        if differ := first_told(self.trained.layout, differ):
            raise DisagreementError(differ)

    def _facts(self) -> list[Fact]:
        """What must be equal on all replicas, besides the weights."""
        settings = {n: v for n, v in (self.outer.param_groups[0] if self.outer else {}).items() if n != "params"}
        choices = self.choices()
        del choices["inner optimizers"], choices["outer settings"]  # the one may differ, the others are told above
        choices["outer optimizer"] += f" {described(settings)}" + (f" {told}" if (told := self.method.momentum) else "")
        return [Fact(what, (told,), SETTING) for what, told in choices.items()]

    def choices(self) -> dict[str, str]:
        """What the rounds are made of, in words."""
        method = self.method
        parts: dict[str, object] = {
            "schedule": method.schedule,
            "topology": method.topology,
            "codec": method.codec,
            "merge": method.merge,
            "adaptation": method.adapt,
            "way of averaging": method.averaging if method.fuse == "mean" else f"{method.averaging}, {method.fuse}",
            "outer optimizer": type(self.outer).__name__,
            "outer settings": self.outer.defaults if self.outer else {},
            **{type(companion).__name__: companion for companion in method.companions},
            "holders": self.holders,
            "inner optimizers": [type(optimizer).__name__ for optimizer in self.trained.optimizers],
        }
        return {what: described(part) for what, part in parts.items() if part != Holders()}

    def averaged_besides(self) -> dict[str, Tensor]:
        """What is averaged besides the trained weights; islands of unlike layouts have nothing that can be."""
        return {} if self.columns.unlike else self.untrained.named()

    def _look(self) -> None:
        """Finds frozen weights that the loop moves itself. Raises UserError where they cannot go along."""
        moving = self.untrained.look()
        if moving and (self.network.elastic or self.columns.unlike):
            who = "peers on the internet" if self.network.elastic else "islands of unlike layouts"
            raise UserError(
                f"{moving[0]} is frozen, and yet it moves, which {who} cannot average; "
                "keep it outside of the model that is attached"
            )

    def _begin(self) -> None:
        """Takes note of the weights that training starts from, which may have been loaded since attach."""

    def _begin_counting(self) -> None:
        """All replicas are there, and begin their first step, or go on."""

    @property
    def together(self) -> bool:
        """Whether all replicas come to be at this very step, so that they can do something together there."""
        return True

    def report(self, round: Round) -> None:
        """Reports a round that was applied."""
        self._reports.tell(round)

    def on_round(self, listener: Callable[[Round], None]) -> None:
        """Adds a function that is told of every round when it was applied, as `on_round` of attach is."""
        self._reports.listeners.append(listener)

    @property
    def rounds(self) -> int:
        """The rounds that this replica has held with others."""
        return self._reports.held

    @property
    def lost_rounds(self) -> int:
        """The rounds that it has begun with others, and lost."""
        return self._reports.lost

    @property
    def replicas(self) -> int:
        """How many replicas are believed alive, this one among them: the world size."""
        return len(self.network.members())
