"""Optimizers: for loops without DDP, for exchanged updates, and for entries that are updated only occasionally."""

from gradsieve.optim.lazy import LazyAdam
from gradsieve.optim.papers import GaussianKSGD, GTopkSGD, OkTopkSGD
from gradsieve.optim.wrapper import DistributedOptimizer
from gradsieve.updates.adam import Adam, AdamW
from gradsieve.updates.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "DistributedOptimizer", "GTopkSGD", "GaussianKSGD", "LazyAdam", "OkTopkSGD"]
