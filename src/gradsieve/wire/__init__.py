"""Messages: sparse vectors as bytes, and the channel that reducers send them through."""

from gradsieve.wire.channel import Channel
from gradsieve.wire.message import OVERHEAD_BYTES, Codec

__all__ = ["OVERHEAD_BYTES", "Channel", "Codec"]
