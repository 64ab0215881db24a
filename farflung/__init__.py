"""farflung trains one model on machines that are far apart.

Programs can rely on what is in `__all__`, here and in the rooms that it names; docs/api.md lists it. The rest may
change with any release.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from farflung.errors import UserError
from farflung.formats import package_version

if TYPE_CHECKING:
    from farflung import codecs, data, embeddings, integrations, joint, methods, networks, outer
    from farflung.codecs import Codec, Dense, ErrorFeedback, LowRank, Modulo, Quantize, TopK, codec_named
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
    from farflung.networks.internet import InternetNetwork
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
    from farflung.training.run_folder import RunFolder

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
    "RunFolder",
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
    "data",
    "embeddings",
    "from_env",
    "integrations",
    "joint",
    "methods",
    "networks",
    "outer",
]

__version__ = package_version()

logging.getLogger("farflung").addHandler(logging.NullHandler())


ROOMS = ("codecs", "methods", "networks", "outer")


def __getattr__(name: str) -> Any:
    """Imports what is asked for: torch takes seconds, in which the command line must hear signals already."""
    if name in (*ROOMS, "data", "embeddings", "integrations", "joint"):
        return importlib.import_module(f"farflung.{name}")
    if name == "InternetNetwork":
        return importlib.import_module("farflung.training.peer").internet().InternetNetwork  # an extra; says so
    if name == "RunFolder":
        return importlib.import_module("farflung.training.run_folder").RunFolder
    if name in __all__:
        rooms = (importlib.import_module(f"farflung.{room}") for room in ROOMS)
        return next(getattr(room, name) for room in rooms if name in getattr(room, "__all__", ()))
    raise AttributeError(f"module 'farflung' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
