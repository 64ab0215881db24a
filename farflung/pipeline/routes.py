"""Which replica's stage a microbatch goes to next: a pure function of what all replicas know."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Permutation = tuple[int, ...]
"""To which replica's next stage each replica's microbatch goes."""


@dataclass(frozen=True)
class Routes:
    """How every microbatch of one step goes through the stages and back.

    Args:
        permutation: of a microbatch and a boundary (0 lies between the first two pieces of the model).
        first: the number of the first of these replicas.
    """

    permutation: Callable[[int, int], Permutation]
    first: int = 0

    def onward(self, replica: int, microbatch: int, boundary: int) -> int:
        """The replica to whose next piece a microbatch goes, and from which its gradient comes back."""
        return self.permutation(microbatch, boundary)[replica - self.first] + self.first

    def back(self, replica: int, microbatch: int, boundary: int) -> int:
        """The replica from whose piece before a boundary a microbatch comes, and to which its gradient goes."""
        return self.permutation(microbatch, boundary).index(replica - self.first) + self.first

    def origin(self, replica: int, microbatch: int, boundaries: int) -> int:
        """The replica whose data a microbatch holds, after so many boundaries."""
        for boundary in reversed(range(boundaries)):
            replica = self.back(replica, microbatch, boundary)
        return replica


def fixed_routes(replicas: int) -> Routes:
    """Every microbatch stays in its replica."""
    stay = tuple(range(replicas))
    return Routes(lambda microbatch, boundary: stay)


def random_routes(replicas: int, seed: int, step: int) -> Routes:
    """A new random permutation for every step, microbatch and boundary (NoLoCo, arXiv 2506.10911; SWARM before it).

    It mixes the replicas' gradients: weights stay closer together, at no extra bytes.
    """

    def permutation(microbatch: int, boundary: int) -> Permutation:
        # A string seeds Python's generator alike on every machine and version.
        generator = random.Random(f"{seed} route {step} {microbatch} {boundary}")
        return tuple(generator.sample(range(replicas), replicas))

    return Routes(permutation)
