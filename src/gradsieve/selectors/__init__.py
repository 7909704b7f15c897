"""Selectors: which entries a rank sends. Each is one file, and one line here."""

from typing import Any

from gradsieve.registry import Registry
from gradsieve.selectors.chunks import Chunks
from gradsieve.selectors.dgc import Dgc
from gradsieve.selectors.everything import Everything
from gradsieve.selectors.exact import Exact
from gradsieve.selectors.gaussian import Gaussian
from gradsieve.selectors.gaussian_paper import GaussianPaper
from gradsieve.selectors.protocol import Selector
from gradsieve.selectors.random import Random
from gradsieve.selectors.threshold import Threshold
from gradsieve.selectors.window import Window

__all__ = ["SELECTORS", "Everything", "Selector"]

SELECTORS: Registry[type[Selector[Any]]] = Registry(
    "selector",
    {
        "exact": Exact,
        "threshold": Threshold,
        "gaussian": Gaussian,
        "gaussian_paper": GaussianPaper,
        "dgc": Dgc,
        "random": Random,
        "window": Window,
        "chunks": Chunks,
    },
)
"""All selectors by name."""
