"""Floor 5: shows a run folder, live and afterwards. It reads that folder and nothing else."""

from farflung.report.html import write_report
from farflung.report.live import Others, watch
from farflung.report.peers import last_told
from farflung.report.read import Run, missing_from, read_run

__all__ = ["Others", "Run", "last_told", "missing_from", "read_run", "watch", "write_report"]
