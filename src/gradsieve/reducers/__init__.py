"""Reducers: how all ranks sum their selected entries. Each is one file, and one line here."""

from typing import Any

from gradsieve.reducers.dense import Dense
from gradsieve.reducers.gtopk import GTopk
from gradsieve.reducers.gtopk_paper import GTopkPaper
from gradsieve.reducers.oktopk import OkTopk
from gradsieve.reducers.protocol import Reduced, Reducer
from gradsieve.reducers.spardl import SparDL
from gradsieve.reducers.topka import TopkA
from gradsieve.reducers.topkdsa import TopkDsa
from gradsieve.registry import Registry

__all__ = ["REDUCERS", "Reduced", "Reducer"]

REDUCERS: Registry[type[Reducer[Any]]] = Registry(
    "reducer",
    {
        "dense": Dense,
        "topka": TopkA,
        "topkdsa": TopkDsa,
        "gtopk": GTopk,
        "gtopk_paper": GTopkPaper,
        "oktopk": OkTopk,
        "spardl": SparDL,
    },
)
"""All reducers by name."""
