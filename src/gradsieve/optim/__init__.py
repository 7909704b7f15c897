"""The way in for loops without DDP: optimizers that exchange gradients when they step."""

from gradsieve.optim.papers import GaussianKSGD, GTopkSGD, OkTopkSGD
from gradsieve.optim.wrapper import DistributedOptimizer

__all__ = ["DistributedOptimizer", "GTopkSGD", "GaussianKSGD", "OkTopkSGD"]
