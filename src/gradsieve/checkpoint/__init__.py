"""Checkpoints: saving and loading the state of a run, also with another number of ranks."""

from gradsieve.checkpoint.dcp import read_states
from gradsieve.checkpoint.reshard import Keep, key_of
from gradsieve.checkpoint.state import packed, unpack_into

__all__ = ["Keep", "key_of", "packed", "read_states", "unpack_into"]
