"""Gradsieve: sparse all-reduce for PyTorch data-parallel training over slow networks.

Names are imported when first used: torch takes seconds, and `gradsieve --help` must not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradsieve.version import __version__ as __version__

if TYPE_CHECKING:
    from gradsieve.comm import Comm as Comm
    from gradsieve.comm import CountingComm as CountingComm
    from gradsieve.comm import LocalComm as LocalComm
    from gradsieve.comm import TorchComm as TorchComm
    from gradsieve.ddp import attach as attach
    from gradsieve.engine.rules import Rules as Rules
    from gradsieve.engine.schedules import Constant as Constant
    from gradsieve.engine.schedules import Exponential as Exponential
    from gradsieve.engine.schedules import Schedule as Schedule
    from gradsieve.engine.schedules import Steps as Steps
    from gradsieve.errors import ExchangeError as ExchangeError
    from gradsieve.errors import GradsieveError as GradsieveError
    from gradsieve.errors import InputError as InputError
    from gradsieve.errors import MessageError as MessageError
    from gradsieve.errors import MismatchError as MismatchError
    from gradsieve.errors import PeerLostError as PeerLostError
    from gradsieve.errors import ReplicaError as ReplicaError
    from gradsieve.errors import UnknownNameError as UnknownNameError
    from gradsieve.functional import sparse_allreduce as sparse_allreduce
    from gradsieve.optim import SGD as SGD
    from gradsieve.optim import Adam as Adam
    from gradsieve.optim import AdamW as AdamW
    from gradsieve.optim import DistributedOptimizer as DistributedOptimizer
    from gradsieve.optim import GaussianKSGD as GaussianKSGD
    from gradsieve.optim import GTopkSGD as GTopkSGD
    from gradsieve.optim import LazyAdam as LazyAdam
    from gradsieve.optim import OkTopkSGD as OkTopkSGD
    from gradsieve.recipes import RECIPES as RECIPES
    from gradsieve.recipes import Recipe as Recipe
    from gradsieve.recipes import recipe as recipe
    from gradsieve.reducers import REDUCERS as REDUCERS
    from gradsieve.reducers import Reduced as Reduced
    from gradsieve.reducers import Reducer as Reducer
    from gradsieve.selectors import SELECTORS as SELECTORS
    from gradsieve.selectors import Selector as Selector
    from gradsieve.sieve import Sieve as Sieve
    from gradsieve.stats import Seconds as Seconds
    from gradsieve.stats import Stats as Stats
    from gradsieve.stats import StepStats as StepStats
    from gradsieve.stats.sinks import JsonLines as JsonLines
    from gradsieve.stats.sinks import Sink as Sink
    from gradsieve.stats.sinks import TensorBoard as TensorBoard
    from gradsieve.updates import DILOCO as DILOCO
    from gradsieve.updates import SPARSELOCO as SPARSELOCO
    from gradsieve.updates import Outer as Outer
    from gradsieve.vector import SparseVector as SparseVector
    from gradsieve.wire import Codec as Codec

# `__all__` and `dir` show what most users need. The rest is documented with its module and can be imported from here,
# too. Both tables map a module to its names.
_TOP = {
    "ddp": "attach",
    "engine.rules": "Rules",
    "engine.schedules": "Constant Exponential Steps",
    "errors": "GradsieveError",
    "functional": "sparse_allreduce",
    "optim": "Adam AdamW DistributedOptimizer GTopkSGD GaussianKSGD LazyAdam OkTopkSGD SGD",
    "recipes": "RECIPES Recipe recipe",
    "sieve": "Sieve",
    "stats": "JsonLines Stats TensorBoard",
    "updates": "DILOCO Outer SPARSELOCO",
}
_REST = {
    "comm": "Comm CountingComm LocalComm TorchComm",
    "engine.schedules": "Schedule",
    "errors": "ExchangeError InputError MessageError MismatchError PeerLostError ReplicaError UnknownNameError",
    "reducers": "REDUCERS Reduced Reducer",
    "selectors": "SELECTORS Selector",
    "stats": "Seconds Sink StepStats",
    "vector": "SparseVector",
    "wire": "Codec",
}
_TOP_NAMES = [name for names in _TOP.values() for name in names.split()]
_HOME_OF = {name: home for table in (_TOP, _REST) for home, names in table.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["__version__", *_TOP_NAMES]
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value  # so that this function is called once per name
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_TOP_NAMES])
