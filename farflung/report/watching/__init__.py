"""A page to watch runs on while they train: it follows their folders, and a browser on this machine shows it."""

from farflung.report.watching.followed import Followed
from farflung.report.watching.server import serve
from farflung.report.watching.visited import Visited

__all__ = ["Followed", "Visited", "serve"]
