"""A run's network, and the conditions of a simulated one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from farflung.errors import UserError
from farflung.networks.registry import NETWORKS, NetworkKind
from farflung.networks.simulator.conditions import Conditions
from farflung.networks.simulator.presets import conditions_named
from farflung.tables import AFTER_RESUME, BETWEEN_MACHINES, BETWEEN_PEERS, Checked, setting


@dataclass(frozen=True)
class NetworkSettings(Checked):
    """How replicas reach each other, and how long they wait."""

    network: str = "torch"
    """torch: real processes over torch.distributed; simulated: one process; internet, folder: see invite."""
    starting: float = setting(600.0, above=0, may_differ=BETWEEN_MACHINES)
    """Longest wait for the other replicas to start, in seconds."""
    independent: bool = False
    """Replicas on this machine are separate peers, as on the internet: when one dies, the others train on."""
    restarts: int = setting(3, least=0, may_differ=AFTER_RESUME | BETWEEN_PEERS)
    """How often a replica is started again when it dies: an independent one, or a peer of several processes."""
    deadline: float = setting(120.0, above=0, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Longest wait for other replicas, in seconds."""
    conditions: str = ""
    """Simulated network: same-rack, two-data-centres, three-regions, home, world, or a TOML file (docs: Conditions)."""
    bandwidth_mbps: float | None = setting(None, above=0)
    """Simulated network: each replica's link, megabits a second each way; unset: the conditions' own (100)."""
    latency_ms: float | None = setting(None, least=0)
    """Simulated network: one way, milliseconds; unset: the conditions' own (20)."""
    step_ms: float | None = setting(None, least=0)
    """Simulated network: how long an inner step computes, milliseconds; unset: the conditions' own (100)."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        super().__post_init__()
        _ = self.kind
        if not (self.independent or self.kind.elastic) and self.restarts != NetworkSettings.restarts:
            raise UserError(
                f"restarts is {self.restarts}, but only independent replicas are started again; add --independent"
            )

    @property
    def kind(self) -> NetworkKind:
        """The network's kind, with its capabilities."""
        return NETWORKS[self.network]

    def simulated_conditions(self) -> Conditions:
        """The simulated network's conditions. Raises UserError, also for settings that other networks do not have."""
        named = ("conditions", "bandwidth_mbps", "latency_ms", "step_ms")
        given = {name: value for name in named if (value := getattr(self, name)) not in (None, "")}
        if given and not self.kind.simulate:
            name, value = next(iter(given.items()))
            raise UserError(f"{name} is {value!r}, but real links are as they are; add --network simulated")
        conditions = conditions_named(given.pop("conditions")) if self.conditions else Conditions()
        return replace(conditions, **given)
