"""Named combinations: a selector, a reducer and a form of error feedback that belong together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradsieve.errors import InputError
from gradsieve.feedback import Feedback, MomentumResidual, NoFeedback, Residual
from gradsieve.reducers import Reducer
from gradsieve.reducers.dense import Dense
from gradsieve.reducers.gtopk import GTopk
from gradsieve.reducers.oktopk import OkTopk
from gradsieve.reducers.spardl import SparDL
from gradsieve.reducers.topka import TopkA
from gradsieve.reducers.topkdsa import TopkDsa
from gradsieve.registry import Registry
from gradsieve.selectors import Everything, Selector
from gradsieve.selectors.chunks import Chunks
from gradsieve.selectors.dgc import Dgc
from gradsieve.selectors.exact import Exact
from gradsieve.selectors.gaussian import Gaussian
from gradsieve.selectors.random import Random
from gradsieve.selectors.threshold import Threshold
from gradsieve.selectors.window import Window
from gradsieve.wire import Codec


@dataclass(frozen=True)
class Recipe:
    """What to send, how to sum it, what to do with the rest."""

    selector: Selector[Any]
    reducer: Reducer[Any]
    feedback: Feedback[Any] = Residual()


@dataclass(frozen=True)
class DenseRecipe(Recipe):
    """Everything, by the backend's all_reduce."""

    selector: Selector[Any] = Everything()
    reducer: Reducer[Any] = Dense()
    feedback: Feedback[Any] = NoFeedback()


@dataclass(frozen=True)
class TopkARecipe(Recipe):
    """Exact top-k, gathered by all and added locally."""

    selector: Selector[Any] = Exact()
    reducer: Reducer[Any] = TopkA()


@dataclass(frozen=True)
class TopkDsaRecipe(Recipe):
    """Exact top-k, split over equal regions, added by their owners, gathered (SparCML)."""

    selector: Selector[Any] = Exact()
    reducer: Reducer[Any] = TopkDsa()


@dataclass(frozen=True)
class GTopkRecipe(Recipe):
    """Exact top-k, merged along a tree that keeps k at every node (gTop-k)."""

    selector: Selector[Any] = Exact()
    reducer: Reducer[Any] = GTopk()


@dataclass(frozen=True)
class GaussianKRecipe(Recipe):
    """A threshold from mean and deviation, gathered by all (GaussianK-SGD)."""

    selector: Selector[Any] = Gaussian()
    reducer: Reducer[Any] = TopkA()


@dataclass(frozen=True)
class OkTopkRecipe(Recipe):
    """A reused threshold, balanced regions, a global threshold: traffic that does not grow with workers (Ok-Topk)."""

    selector: Selector[Any] = Threshold()
    reducer: Reducer[Any] = OkTopk()


@dataclass(frozen=True)
class DgcRecipe(Recipe):
    """A sampled threshold, gathered by all, with momentum correction and factor masking (DGC)."""

    selector: Selector[Any] = Dgc()
    reducer: Reducer[Any] = TopkA()
    feedback: Feedback[Any] = MomentumResidual()


@dataclass(frozen=True)
class RandomKRecipe(Recipe):
    """k entries by lot, the same on all ranks: the baseline."""

    selector: Selector[Any] = Random()
    reducer: Reducer[Any] = TopkA()


@dataclass(frozen=True)
class SparDLRecipe(Recipe):
    """Exact top-k, reduced block by block in log P rounds (SparDL)."""

    selector: Selector[Any] = Exact()
    reducer: Reducer[Any] = SparDL()


@dataclass(frozen=True)
class OneBitRecipe(Recipe):
    """A moving window of consecutive entries, one bit each, added by the owners of its regions."""

    selector: Selector[Any] = Window()
    reducer: Reducer[Any] = TopkDsa(codec=Codec(values="bit"))


@dataclass(frozen=True)
class SparseLoCoRecipe(Recipe):
    """Top-k of each chunk of 4,096 entries, two bits each, gathered by all (SparseLoCo, for updates)."""

    selector: Selector[Any] = Chunks()
    reducer: Reducer[Any] = TopkA(codec=Codec(values="twobit"))


OWN = "own"  # the recipe's own code
TORCH_NAMES = {"bfloat16": "bf16", "float16": "fp16"}  # of value codes

RECIPES: Registry[type[Recipe]] = Registry(
    "recipe",
    {
        "dense": DenseRecipe,
        "topka": TopkARecipe,
        "topkdsa": TopkDsaRecipe,
        "gtopk": GTopkRecipe,
        "gaussiank": GaussianKRecipe,
        "oktopk": OkTopkRecipe,
        "dgc": DgcRecipe,
        "randomk": RandomKRecipe,
        "spardl": SparDLRecipe,
        "onebit": OneBitRecipe,
        "sparseloco": SparseLoCoRecipe,
    },
)


def recipe(name: str, *, values: str = OWN, indices: str = OWN) -> Recipe:
    """The named recipe with its default settings, and with other codes for what it sends.

    `values` is one of exact, plain, float32, bf16, fp16, int8, int4, sign, bit, twobit: the sender keeps the rounding
    error. `indices` is one of auto, plain, blocks, gaps, bitmap. With `own` a recipe has its own: all are exact and
    auto, except that onebit sends values as bit and sparseloco as twobit.
    """
    entry: Any = RECIPES[name]
    made: Recipe = entry()
    own = made.reducer.codec
    codec = Codec(
        own.values if values == OWN else TORCH_NAMES.get(values, values), own.indices if indices == OWN else indices
    )
    if codec == own:
        return made
    if isinstance(made.reducer, Dense):
        raise InputError(
            f"recipe {name!r} sends everything by the backend's all_reduce and has no codes: "
            f"values must be 'exact' and indices 'auto', got {codec.values!r} and {codec.indices!r}"
        )
    return replace(made, reducer=replace(made.reducer, codec=codec))
