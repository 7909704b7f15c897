"""Statistics: what was sent and delivered, how long it took, and sinks that record it."""

from gradsieve.stats.figures import Seconds, Stats, StepStats
from gradsieve.stats.sinks import JsonLines, Sink, Sinks, TensorBoard

__all__ = ["JsonLines", "Seconds", "Sink", "Sinks", "Stats", "StepStats", "TensorBoard"]
