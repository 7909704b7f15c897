"""Competing methods by name: DistributedDataParallel and the communication hooks that come with torch."""

from __future__ import annotations

from gradsieve.lab.baselines.baseline import Baseline, dense_bytes
from gradsieve.lab.baselines.hooks import LOCAL_STEPS
from gradsieve.lab.baselines.registry import BASELINES

__all__ = ["BASELINES", "LOCAL_STEPS", "Baseline", "dense_bytes"]
