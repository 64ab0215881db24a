"""Floor 2: how a message becomes bytes, and back. One idea a file; `base.py` and `packets.py` first."""

from farflung.codecs.base import Chain, Codec, NotFiniteError, Transform, finite
from farflung.codecs.block_dct import BlockDCT
from farflung.codecs.block_float import BlockFloat
from farflung.codecs.dense import Dense
from farflung.codecs.feedback import ErrorFeedback
from farflung.codecs.lowrank import LowRank
from farflung.codecs.modulo import Modulo
from farflung.codecs.names import CODEC_NAMES, codec_named
from farflung.codecs.packets import Packet, PacketError
from farflung.codecs.quantize import Quantize
from farflung.codecs.split import SplitCodec
from farflung.codecs.threshold import Threshold
from farflung.codecs.topk import TopK
from farflung.renamed import renamed

__all__ = [
    "CODEC_NAMES",
    "BlockDCT",
    "BlockFloat",
    "Chain",
    "Codec",
    "Dense",
    "ErrorFeedback",
    "LowRank",
    "Modulo",
    "NotFiniteError",
    "Packet",
    "PacketError",
    "Quantize",
    "SplitCodec",
    "Threshold",
    "TopK",
    "Transform",
    "codec_named",
    "finite",
]

__getattr__ = renamed(
    __name__,
    {
        "Apart": "SplitCodec",
        "Float": "BlockFloat",
        "Frequency": "BlockDCT",
        "NotFinite": "NotFiniteError",
        "Stage": "Transform",
    },
)
