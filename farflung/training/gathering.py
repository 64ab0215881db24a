"""All of a swarm's weights, stage by stage, from the peers that have them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from farflung.errors import UserError
from farflung.hooks.trained import trainable
from farflung.networks import PeerLostError
from farflung.networks.listening import ListenAddress
from farflung.pipeline.build import pieces_of
from farflung.pipeline.division import divisible, division_of
from farflung.pipeline.mesh import Mesh, MeshCoordinates
from farflung.settings import Settings
from farflung.swarm.states import weights_in
from farflung.training import checkpoint
from farflung.training.onlooker import looking_on
from farflung.training.resharding import buffer_names, whole_weights

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork, Ticket


def gather(network: InternetNetwork, settings: Settings, folder: Path, without: int | None = None) -> int:
    """Writes each stage's weights to a folder, as the parts of averaged ones; the step that the furthest have reached.

    One stage is left out that is there already. No more than one is in memory. Raises UserError and PeerLostError.
    """
    workload, seed = divisible(settings.made_workload()), settings.run.seed
    division, reached = division_of(settings.island, workload, seed), 0
    for stage in range(settings.island.stages):
        if stage == without:
            continue
        state = network.state_of(stage)
        (piece,) = pieces_of(settings.island, workload, division, stage, seed)
        model = piece.model.state_dict() | weights_in(state.tensors, trainable(piece.model))
        part: checkpoint.Weights = {"shard": 0, "model": model, "buffers": buffer_names(piece.model)}
        stem = Mesh(tuple(settings.island.shapes())).file_stem(MeshCoordinates(0, stage))
        checkpoint.write(checkpoint.average_of(folder, stem), part)
        reached = max(reached, int(state.facts["step"]))
    return reached


def whole_swarm(ticket: Ticket, settings: Settings, model: tuple[str, int]) -> tuple[dict[str, Any], str]:
    """The weights of a `model` of which a swarm's peers have the stages now, and which these are. Raises UserError."""
    with looking_on(ticket, ListenAddress()) as network, tempfile.TemporaryDirectory() as scratch:
        network.expect_model(*model)
        try:
            step = gather(cast("InternetNetwork", network), settings, Path(scratch))
        except (PeerLostError, TimeoutError) as error:
            raise UserError(f"not every stage of {ticket.name} can be had now: {error}; try again soon") from error
        except OSError as error:
            remedy = "make room, or have TMPDIR name a folder with more"
            raise UserError(f"cannot write to {scratch}: {error.strerror}; {remedy}") from error
        return whole_weights(checkpoint.averages(Path(scratch))), f"what the swarm's peers had at step {step}"


def gather_at_the_end(network: InternetNetwork, settings: Settings, folder: Path, tell: Callable[[str], None]) -> None:
    """A head, which ends last, gathers the other stages' weights beside its own; tells where they are not all there."""
    if own := int(network.peers.info["stage"]):
        return
    try:
        gather(network, settings, folder, without=own)
    except (UserError, PeerLostError, TimeoutError) as error:
        tell(f"the other stages' weights are not here: {error}; copy their run folders' checkpoints into this one's")
    except OSError as error:
        tell(f"cannot write the other stages' weights to {folder}: {error.strerror}; make room")
