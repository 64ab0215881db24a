"""farflung trains one model on machines that are far apart.

Programs can rely on what is in `__all__`, here and in the rooms that it names; docs/api.md lists it. The rest may
change with any release.
"""

import logging
from typing import TYPE_CHECKING, Any

from farflung import codecs, methods, networks, outer
from farflung.codecs import Codec, Dense, ErrorFeedback, LowRank, Modulo, Quantize, TopK, codec_named
from farflung.errors import UserError
from farflung.formats import package_version
from farflung.networks import (
    Conditions,
    ElasticNetwork,
    Network,
    PeerLostError,
    SimulatedNetwork,
    Simulation,
    TorchNetwork,
    Traffic,
    from_env,
)
from farflung.outer import (
    DisagreementError,
    DivergedError,
    Everyone,
    GossipNesterov,
    Method,
    RandomGroups,
    Round,
    Schedule,
    Session,
)

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork

__all__ = [
    "Codec",
    "Conditions",
    "Dense",
    "DisagreementError",
    "DivergedError",
    "ElasticNetwork",
    "ErrorFeedback",
    "Everyone",
    "GossipNesterov",
    "InternetNetwork",
    "LowRank",
    "Method",
    "Modulo",
    "Network",
    "PeerLostError",
    "Quantize",
    "RandomGroups",
    "Round",
    "Schedule",
    "Session",
    "SimulatedNetwork",
    "Simulation",
    "TopK",
    "TorchNetwork",
    "Traffic",
    "UserError",
    "__version__",
    "codec_named",
    "codecs",
    "from_env",
    "methods",
    "networks",
    "outer",
]

__version__ = package_version()

logging.getLogger("farflung").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "InternetNetwork":  # hivemind is an extra, and takes seconds to import
        from farflung.networks.internet import InternetNetwork

        return InternetNetwork
    raise AttributeError(f"module 'farflung' has no attribute {name!r}")
