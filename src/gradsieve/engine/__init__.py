"""One model's groups and steps, on one rank: what every way in uses."""

from gradsieve.engine.engine import Engine, Settings
from gradsieve.engine.step import Step

__all__ = ["Engine", "Settings", "Step"]
