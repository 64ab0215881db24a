"""`python far_states.py STATES ARGUMENTS`: farflung whose plans of memory have all layers' state lie in one place.

The states are those of each replica, with commas between. A block of gradients is no larger than it must be.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from farflung import cli
from farflung.memory import fitted
from farflung.memory.plan import Plan
from farflung.outer import mean_gradient

states = sys.argv.pop(1).split(",")
search = fitted.search


def placed(*given: Any, **named: Any) -> Plan:
    """A plan, but for where state lies."""
    plan = search(*given, **named)
    state: Any = states[int(os.environ["RANK"])]
    return replace(plan, layers=tuple(replace(layer, state=state) for layer in plan.layers))


fitted.search = placed
mean_gradient.BLOCK = 1
cli.main()
