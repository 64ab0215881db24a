"""farflung trains one model on machines that are far apart."""

import logging

from farflung import codecs, methods, networks, outer
from farflung.outer import Method

__all__ = ["Method", "codecs", "methods", "networks", "outer"]

logging.getLogger("farflung").addHandler(logging.NullHandler())
