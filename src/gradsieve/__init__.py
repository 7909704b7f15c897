"""Gradsieve: sparse all-reduce for PyTorch data-parallel training over slow networks."""

from gradsieve.comm import Comm, CountingComm, LocalComm, TorchComm
from gradsieve.errors import (
    GradsieveError,
    InputError,
    MessageError,
    MismatchError,
    PeerLostError,
    UnknownNameError,
)
from gradsieve.functional import sparse_allreduce
from gradsieve.recipes import RECIPES, Recipe
from gradsieve.reducers import REDUCERS, Reduced, Reducer
from gradsieve.selectors import SELECTORS, Selector
from gradsieve.vector import SparseVector
from gradsieve.version import __version__

__all__ = [
    "RECIPES",
    "REDUCERS",
    "SELECTORS",
    "Comm",
    "CountingComm",
    "GradsieveError",
    "InputError",
    "LocalComm",
    "MessageError",
    "MismatchError",
    "PeerLostError",
    "Recipe",
    "Reduced",
    "Reducer",
    "Selector",
    "SparseVector",
    "TorchComm",
    "UnknownNameError",
    "__version__",
    "sparse_allreduce",
]
