"""The groups and steps of one model on one rank. Every entry point uses them."""

from gradsieve.engine.engine import Engine, Settings
from gradsieve.engine.step import Step

__all__ = ["Engine", "Settings", "Step"]
