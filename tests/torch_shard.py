"""One shard of a replica, wrapped by its user with FSDP2, in a process of its own: `torch_shard.py METHODS _ OUT`.

Four processes are two islands of two shards. The user's loop knows no pipeline of ours.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Quantize
from farflung.errors import UserError
from farflung.hooks.shards import whole_of
from farflung.inner import MuonAdamW
from farflung.networks import Network, TorchNetwork
from farflung.outer import DisagreementError

METHODS: dict[str, Callable[[], methods.Method]] = {
    "ddp": methods.ddp,
    "diloco": lambda: methods.diloco(every=3),
    "noloco, fragments, delay": lambda: methods.noloco(every=4, fragments=2, delay=1),
    "eager": lambda: methods.eager_diloco(every=3),
    "8 bits": lambda: methods.diloco(every=3, codec=Quantize(8)),
    "muon": lambda: methods.diloco(every=3),
}
STEPS = 8
EVALUATED = ("ddp", "noloco, fragments, delay")


class Model(nn.Module):
    """Matrices of rows that two shards do not divide evenly, and one of a single row, of which one shard has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 1)])

    def forward(self, entering: Tensor) -> Tensor:
        """(n, 6) to (n, 1)."""
        for layer in self.layers[:-1]:
            entering = torch.tanh(layer(entering))
        out: Tensor = self.layers[-1](entering)
        return out


def batch(replica: int, step: int) -> Tensor:
    """(4, 6) numbers that a replica trains on in a step."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * replica + step))


def trained(
    name: str, network: Network, model: nn.Module, replica: int, share: Callable[[Tensor], Tensor]
) -> list[dict[str, Any]]:
    """What the attachment would keep in a checkpoint half-way; leaves the trained weights in the model.

    Half-way the user goes on from that checkpoint.
    """
    states: list[dict[str, Any]] = []
    if name == "muon":
        optimizer: torch.optim.Optimizer = MuonAdamW(model.named_parameters(), lr=0.02)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = 0
    for end in (STEPS // 2 + 1, STEPS):
        with METHODS[name]().attach(model, optimizer, network, deadline_s=60) as outer:
            if states:
                outer.load_state_dict(states[-1])
            while step < end:
                model(share(batch(replica, step))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            states.append(copy.deepcopy(outer.state_dict()))
            weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        if end < STEPS:  # leaving applies rounds that are still pending in the checkpoint
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    parameter.copy_(weights[key])
    return states


def refusal(network: Network, model: nn.Module) -> str:
    """What attaching to a network is refused with."""
    try:
        methods.diloco(every=3).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), network)
    except UserError as error:
        return str(error)
    return ""


def sharded(mesh: Any) -> Model:
    """A new model in shards; the last layer's belong to the root, which stays gathered after an evaluation."""
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for layer in model.layers[:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Its weights."""
    return {key: whole_of(parameter.detach()).clone() for key, parameter in model.named_parameters()}


def ended(name: str, network: Network, model: Model, replica: int, shard: int) -> tuple[Any, Any]:
    """The weights before and after they are averaged at the end: of replicas that had no round in this session."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = methods.local() if name == "local" else methods.noloco(every=3)

    def step(number: int) -> None:
        model(batch(replica, number).chunk(2)[shard]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with method.attach(model, optimizer, network, deadline_s=60) as outer:
        for number in range(4):
            step(number)
        if name == "local":
            before = whole(model)
            outer.finish(average_weights=True)
            return before, whole(model)
        state = outer.state_dict()
    step(4)
    before = whole(model)
    with method.attach(model, optimizer, network, deadline_s=60) as outer:
        outer.load_state_dict(state)
        outer.finish(average_weights=True)
    return before, whole(model)


def frozen(network: Network, model: nn.Module, replica: int, share: Callable[[Tensor], Tensor], case: str = "") -> str:
    """Trains a model whose first and last layers are frozen; where the first moves, or differs, the refusal.

    It is evaluated before each step, which leaves the last layer gathered.
    """
    for place in (0, -1):
        model.layers[place].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    weight = model.layers[0].weight  # type: ignore[index]
    try:
        with torch.no_grad():
            weight.add_(float(case == "differs" and replica == 1))
        with methods.diloco(every=2).attach(model, optimizer, network, deadline_s=60):
            for step in range(5):
                model(share(batch(replica, step))).square().mean().backward()
                with torch.no_grad():
                    model(batch(9, 9))
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    weight.add_(float(case == "moves"))
    except (UserError, DisagreementError) as error:
        return str(error)
    return ""


def evaluated(
    network: Network, model: nn.Module, replica: int, share: Callable[[Tensor], Tensor], method: str
) -> tuple[float, dict[str, Tensor]]:
    """The loss after all weights are averaged, and these; the model is evaluated whenever a user may do so."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    @torch.no_grad()
    def evaluate() -> float:
        return float(model(batch(9, 9)).square().mean())

    evaluate()
    with METHODS[method]().attach(model, optimizer, network, deadline_s=60) as outer:
        for step in range(STEPS - 1):
            model(share(batch(replica, step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluate()
        outer.apply_pending()
        evaluate()
        outer.finish()
        evaluate()
        outer.finish(average_weights=True)
    return evaluate(), whole(model)


def main() -> None:
    """Trains with each method, and leaves the whole weights that came out."""
    from torch.distributed.device_mesh import init_device_mesh

    names, _, out = sys.argv[1:4]
    torch.set_num_threads(1)
    everyone = TorchNetwork.from_env(starting=60)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    replica, shard = divmod(everyone.process, 2)
    results: dict[str, Any] = {}
    for name in names.split(";"):
        model = sharded(mesh["shard"])
        if not results:
            results["refusal"] = refusal(everyone, model)
        network = everyone.among([shard, shard + 2])
        states = trained(name, network, model, replica, lambda whole: whole.chunk(2)[shard])
        cells = states[-1].get("cells", {})
        results[name] = {
            "weights": whole(model),
            "own": sum(p.to_local().numel() for p in model.parameters()),  # type: ignore[attr-defined]
            "anchors": {name: kept["anchor"].numel() for name, kept in cells.items() if "anchor" in kept},
        }
    crossed = everyone.of_islands([(0, 1), (3, 2)])
    results["ended"] = {
        name: ended(name, crossed, sharded(mesh["shard"]), replica, shard) for name in ("local", "noloco, resumed")
    }
    results["evaluated"] = {}
    for name in EVALUATED:
        uneven = everyone.of_islands([(0, 1), (2,), (3,)])
        model = sharded(mesh["shard"]) if replica == 0 else Model()
        share = (lambda whole: whole.chunk(2)[shard]) if replica == 0 else (lambda whole: whole)
        results["evaluated"]["unlike", name] = evaluated(uneven, model, uneven.rank, share, name)
        network, model = everyone.among([shard, shard + 2]), sharded(mesh["shard"])
        share = lambda whole: whole.chunk(2)[shard]  # noqa: E731
        results["evaluated"]["alike", name] = evaluated(network, model, replica, share, name)
    results["frozen"] = {}
    for case in ("", "differs", "moves"):
        uneven = everyone.of_islands([(0, 1), (2,), (3,)])
        model = sharded(mesh["shard"]) if replica == 0 else Model()
        said = frozen(uneven, model, uneven.rank, lambda whole: whole.chunk(2)[shard] if replica == 0 else whole, case)
        results["frozen"][case] = said, whole(model)
    torch.save(results, Path(out) / f"{everyone.process}.pt")


if __name__ == "__main__":
    main()
