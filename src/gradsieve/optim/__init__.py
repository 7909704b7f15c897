"""Optimizers that exchange gradients as they step, the way in for loops without DDP; and one for what is delivered."""

from gradsieve.optim.adam import Adam, AdamW
from gradsieve.optim.lazy import LazyAdam
from gradsieve.optim.papers import GaussianKSGD, GTopkSGD, OkTopkSGD
from gradsieve.optim.wrapper import DistributedOptimizer

__all__ = ["Adam", "AdamW", "DistributedOptimizer", "GTopkSGD", "GaussianKSGD", "LazyAdam", "OkTopkSGD"]
