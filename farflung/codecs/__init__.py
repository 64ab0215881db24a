"""Floor 2: how a message becomes bytes, and back. One idea a file; `base.py` and `packets.py` first."""

from farflung.codecs.apart import Apart
from farflung.codecs.base import Chain, Codec, NotFiniteError, Stage, finite
from farflung.codecs.dense import Dense
from farflung.codecs.feedback import ErrorFeedback
from farflung.codecs.floats import Float
from farflung.codecs.frequency import Frequency
from farflung.codecs.lowrank import LowRank
from farflung.codecs.modulo import Modulo
from farflung.codecs.names import CODEC_NAMES, codec_named
from farflung.codecs.packets import Packet, PacketError
from farflung.codecs.quantize import Quantize
from farflung.codecs.threshold import Threshold
from farflung.codecs.topk import TopK
from farflung.renamed import renamed

__all__ = [
    "CODEC_NAMES",
    "Apart",
    "Chain",
    "Codec",
    "Dense",
    "ErrorFeedback",
    "Float",
    "Frequency",
    "LowRank",
    "Modulo",
    "NotFiniteError",
    "Packet",
    "PacketError",
    "Quantize",
    "Stage",
    "Threshold",
    "TopK",
    "codec_named",
    "finite",
]

__getattr__ = renamed(__name__, {"NotFinite": "NotFiniteError"})
