"""Floor 5: shows a run folder, live and afterwards. It reads that folder and nothing else."""

from farflung.report.html import write_report
from farflung.report.live import watch
from farflung.report.read import Run, missing_from, read_run

__all__ = ["Run", "missing_from", "read_run", "watch", "write_report"]
