"""`farflung train --independent`, with each step of its replicas stretched to a fixed time.

python -m bench.lib.independent STEP_MS ARGUMENTS
"""

from __future__ import annotations

import sys

from bench.lib import hardship
from farflung.cli import main
from farflung.training import independent

if __name__ == "__main__":
    step_ms, *arguments = sys.argv[1:]
    independent.JOIN = (hardship.__name__, step_ms)
    sys.argv = ["farflung", "train", "--independent", *arguments]
    main()
