"""Sparse vectors as bytes: the only place that knows what an entry looks like on the network."""

from gradsieve.wire.channel import Channel
from gradsieve.wire.message import HEADER_BYTES

__all__ = ["HEADER_BYTES", "Channel"]
