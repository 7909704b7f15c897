"""What a run must know to go on exactly as it would have: saved, loaded, and given to another number of ranks."""

from gradsieve.checkpoint.dcp import read_states
from gradsieve.checkpoint.reshard import Keep, key_of
from gradsieve.checkpoint.state import packed, unpack_into

__all__ = ["Keep", "key_of", "packed", "read_states", "unpack_into"]
