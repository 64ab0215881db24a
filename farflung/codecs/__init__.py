"""Floor 2: how a message becomes bytes, and back."""

from farflung.codecs.base import Codec, Packet, PacketError
from farflung.codecs.dense import Dense

__all__ = ["Codec", "Dense", "Packet", "PacketError"]
