"""Recipes: a selector, a reducer and a form of error feedback that belong together, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    """What to send, how to sum it over all ranks, and what to do with undelivered entries.

    Args:
        selector: Selects the entries that this rank sends.
        reducer: Sums the selected entries of all ranks.
        feedback: Keeps undelivered entries for later steps.

    Example:
        >>> from gradsieve import Recipe
        >>> from gradsieve.reducers.topka import TopkA
        >>> from gradsieve.selectors.exact import Exact
        >>> Recipe(Exact(), TopkA()).feedback
        Residual()
    """

    selector: Selector[Any]
    reducer: Reducer[Any]
    feedback: Feedback[Any] = Residual()


class NamedRecipe(NamedTuple):
    """One row of `RECIPES`: a recipe and its description. Calling the row returns the recipe."""

    description: str
    made: Recipe

    def __call__(self) -> Recipe:
        return self.made


RECIPES: Registry[NamedRecipe] = Registry(
    "recipe",
    {
        "dense": NamedRecipe(
            "Everything, by the backend's all_reduce.",
            Recipe(Everything(), Dense(), NoFeedback()),
        ),
        "topka": NamedRecipe(
            "Exact top-k, gathered by all ranks and added locally.",
            Recipe(Exact(), TopkA()),
        ),
        "topkdsa": NamedRecipe(
            "Exact top-k, split over equal regions, added by their owners, gathered (SparCML).",
            Recipe(Exact(), TopkDsa()),
        ),
        "gtopk": NamedRecipe(
            "Exact top-k, merged along a tree that keeps k at every node (gTop-k).",
            Recipe(Exact(), GTopk()),
        ),
        "gaussiank": NamedRecipe(
            "A threshold from mean and standard deviation, gathered by all ranks (GaussianK-SGD).",
            Recipe(Gaussian(), TopkA()),
        ),
        "oktopk": NamedRecipe(
            "A predicted threshold, balanced regions, a global threshold: traffic that does not grow with the number "
            "of ranks (Ok-Topk).",
            Recipe(Threshold(), OkTopk()),
        ),
        "dgc": NamedRecipe(
            "The threshold of a sample, gathered by all ranks, with momentum correction and factor masking (DGC).",
            Recipe(Dgc(), TopkA(), MomentumResidual()),
        ),
        "randomk": NamedRecipe(
            "k random entries, the same on all ranks: the simplest baseline.",
            Recipe(Random(), TopkA()),
        ),
        "spardl": NamedRecipe(
            "Exact top-k, reduced block by block in log P rounds (SparDL).",
            Recipe(Exact(), SparDL()),
        ),
        "onebit": NamedRecipe(
            "A moving window of consecutive entries, one bit each, added by the owners of its regions.",
            Recipe(Window(), TopkDsa(codec=Codec(values="bit"))),
        ),
        "sparseloco": NamedRecipe(
            "Top-k of each chunk of 4,096 entries, two bits each, gathered by all ranks (SparseLoCo, for updates).",
            Recipe(Chunks(), TopkA(codec=Codec(values="twobit"))),
        ),
    },
)
"""All recipes by name: `RECIPES["oktopk"]()` is a recipe with its default settings. A new recipe is one row here."""

OWN = "own"  # the recipe's own code
TORCH_NAMES = {"bfloat16": "bf16", "float16": "fp16"}  # torch's names of value codes


def recipe(name: str, *, values: str = OWN, indices: str = OWN) -> Recipe:
    """Return a named recipe with its default settings, or with other codes for values and indices.

    Args:
        name: A name in `RECIPES`.
        values: How values are sent: exact, plain, float32, bf16, fp16, int8, int4, sign, bit or twobit. The sender
            keeps the rounding error. `own` is the recipe's code: bit for onebit, twobit for sparseloco, exact for all
            others.
        indices: How indices are sent: auto, plain, blocks, gaps or bitmap. `own` is auto for every recipe.

    Returns:
        The recipe.

    Raises:
        UnknownNameError: There is no such recipe or code.
        InputError: Another code was given for recipe "dense", which is sent by the backend's all_reduce.

    Example:
        >>> import gradsieve
        >>> gradsieve.recipe("oktopk", values="bf16").reducer.codec.values
        'bf16'
    """
    made = RECIPES[name]()
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
