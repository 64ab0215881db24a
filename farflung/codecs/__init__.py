"""Floor 2: how a message becomes bytes, and back. One idea a file; `base.py` and `packets.py` first."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.codecs.base import Codec, Compound, Name, NotFiniteError, Traits
    from farflung.codecs.block_dct import BlockDCT
    from farflung.codecs.block_float import BlockFloat
    from farflung.codecs.chain import Chain, Transform
    from farflung.codecs.dense import Dense
    from farflung.codecs.feedback import ErrorFeedback
    from farflung.codecs.lowrank import LowRank
    from farflung.codecs.modulo import Modulo
    from farflung.codecs.packets import Packet, PacketError
    from farflung.codecs.quantize import Quantize
    from farflung.codecs.registry import CODECS, as_codec, codec_named
    from farflung.codecs.rows import Rows
    from farflung.codecs.sampled import Sampled
    from farflung.codecs.split import SplitCodec
    from farflung.codecs.statistical import Statistical
    from farflung.codecs.threshold import Threshold
    from farflung.codecs.topk import TopK
    from farflung.codecs.values import finite

__all__ = [
    "CODECS",
    "BlockDCT",
    "BlockFloat",
    "Chain",
    "Codec",
    "Compound",
    "Dense",
    "ErrorFeedback",
    "LowRank",
    "Modulo",
    "Name",
    "NotFiniteError",
    "Packet",
    "PacketError",
    "Quantize",
    "Rows",
    "Sampled",
    "SplitCodec",
    "Statistical",
    "Threshold",
    "TopK",
    "Traits",
    "Transform",
    "as_codec",
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
    homes_of(__file__),
)
