"""How soon does a peer train that comes late to a model of 100 million parameters?
On the internet network, in namespaces: it fetches weights and outer momentum from the others; the physical limit is
line rate for these bytes, of which 1.2 times are to be reached, and 90 % of their speed for those that serve it.
Then another one is killed half way and started again. Takes ten minutes, as root.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.lib.hardship import Hardship, check, checks, rate, running
from bench.lib.store import Settings, Store
from bench.lib.table import Part
from bench.lib.training import save_llama
from farflung.events import RoundEvent, StartEvent, StepEvent
from farflung.testing.hosts import unavailable
from farflung.testing.peers import PeerProcess, PeerProcesses
from farflung.testing.waiting import until

needs = unavailable

DIGEST = 64
"""Letters in the name of a file with a piece."""
NOISE = 3e6
"""Bytes that peers tell each other besides."""

MODELS = {
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12},
    "small": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
}


@dataclass(frozen=True)
class Options(Hardship):
    peers: int = 3
    """Peers, the newcomer among them; later there is one more."""
    step_ms: float = 1500.0
    """What one inner step takes."""
    every: int = 60
    """Inner steps between rounds."""
    model: str = "100m"
    """A model of 100 million parameters, or a small one."""


SMOKE = Options(peers=3, step_ms=20, every=5, model="small", pace=0.1)


def run(options: Options, store: Store) -> Iterator[Part]:
    shape = {"num_key_value_heads": MODELS[options.model]["num_attention_heads"], **MODELS[options.model]}
    common = {"vocab_size": 257, "max_position_embeddings": 128, "tie_word_embeddings": True}
    model = save_llama(store.scratch / f"model-{options.model}", **shape, **common)
    settings: Settings = {"model": model, "batch_size": 1, "sequence_length": 16, "eval_sequences": 1}
    settings |= {"eval_every": 100_000, "checkpoint_every": 0, "every": options.every, "deadline": 120.0}
    settings |= {"method": "noloco"}
    settings |= {"inner": "adamw"}  # on processors where bfloat16 is slow, a step of muon takes longer than `step_ms`
    with running(options, store, "join", peers=options.peers + 1, **settings) as (_, peers):
        *others, newcomer, unlucky = peers
        peers.start(len(others))
        calm_from = time.time()
        until(lambda: all(settled(other, calm_from) for other in others), 1200, "a round of each")
        began = time.time()
        calm = rate(others, calm_from, began, held_up=False)  # the newcomer comes between two rounds
        before = received(newcomer)
        newcomer.start()
        peers.wait_for_steps([newcomer], 1, timeout_s=400)
        took = time.time() - began
        serving = rate(others, began, time.time(), held_up=False)
        came, values = received(newcomer) - before, newcomer.events(StartEvent)[0].parameters
        newcomer.kill()
        first, kept, second = killed_half_way(unlucky, peers, 8 * values)
    limit = values * 8 * 8e-6 / options.rate_mbit
    yield checks(
        [
            check(
                f"late join, {values / 1e6:.0f} M parameters: trains after",
                f"{took:.0f} s for {came / 1e6:.0f} of {8e-6 * values:.0f} MB, {took / limit:.2f} x",
                f"1.2 x {limit:.0f} s",
                took / limit <= 1.2,
            ),
            check("speed of those that serve it", f"{serving / calm:.1%}", "90 %", serving / calm >= 0.9),
            check(
                "killed half way: received, kept, received by the second start",
                f"{first / 1e6:.2f}, {kept / 1e6:.2f}, {second / 1e6:.2f} MB",
                f"some kept, 1.1 x the missing {(8 * values - kept) / 1e6:.2f} MB",
                0 < kept < 8 * values and 0 < second <= 1.1 * (8 * values - kept) + NOISE,
            ),
        ]
    )


def settled(peer: PeerProcess, since: float) -> bool:
    """Whether a peer has an outer momentum to fetch, of a round's mean, and steps enough to tell its speed by."""
    averaged = any(event.outcome == "averaged" for event in peer.events(RoundEvent))
    return averaged and len(peer.since(StepEvent, since)) > 1


def killed_half_way(peer: PeerProcess, peers: PeerProcesses, size: int) -> tuple[int, int, int]:
    """Bytes that came to a newcomer before it was killed, that it kept, and that came from then to its first step."""

    def kept() -> int:
        return sum(path.stat().st_size for path in peer.folder.glob("fetched/*") if len(path.name) == DIGEST)

    before = received(peer)
    peer.start()
    until(lambda: kept() >= size / 2 or peer.events(StepEvent), 400, "half of the state")
    peer.kill()
    halfway, left = received(peer), kept()
    peer.start()
    peers.wait_for_steps([peer], 1, timeout_s=400)
    return halfway - before, left, received(peer) - halfway


def received(peer: PeerProcess) -> int:
    """Bytes that have come to a peer's host."""
    path = f"/sys/class/net/{peer.host.interface}/statistics/rx_bytes"
    told, _ = peer.host.popen(["cat", path], stdout=subprocess.PIPE).communicate(timeout=60)
    return int(told)
