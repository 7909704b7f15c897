"""The former name of `gradsieve.checkpoint.dcp`."""

from gradsieve.checkpoint.dcp import read_states as read_states
