"""What was sent, what became of it and how long it took: figures, the clock behind them, and where they go."""

from gradsieve.stats.figures import Seconds, Stats, StepStats
from gradsieve.stats.sinks import JsonLines, Sink, Sinks, TensorBoard

__all__ = ["JsonLines", "Seconds", "Sink", "Sinks", "Stats", "StepStats", "TensorBoard"]
