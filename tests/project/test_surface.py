"""What `gradsieve` shows, what it still serves, and module names of earlier versions."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import gradsieve
from gradsieve.checkpoint import read_states


def test_all_and_dir_show_what_a_user_needs() -> None:
    assert dir(gradsieve) == sorted(gradsieve.__all__)
    assert {"attach", "Sieve", "sparse_allreduce", "recipe"} <= set(gradsieve.__all__)
    assert len(gradsieve.__all__) <= 30
    assert len(set(gradsieve.__all__)) == len(gradsieve.__all__)


def test_a_star_import_brings_them() -> None:
    names: dict[str, object] = {}
    exec("from gradsieve import *", names)
    assert set(gradsieve.__all__) == set(names) - {"__builtins__"}


@pytest.mark.parametrize("name", sorted(gradsieve._HOME_OF))
def test_a_name_is_its_modules_own(name: str) -> None:
    assert getattr(gradsieve, name) is getattr(import_module(f"gradsieve.{gradsieve._HOME_OF[name]}"), name)


def test_names_below_are_served_but_not_shown() -> None:
    for name in ("Comm", "Codec", "InputError", "REDUCERS", "SELECTORS", "Sink", "SparseVector"):
        assert name in gradsieve._HOME_OF
        assert name not in dir(gradsieve)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        _ = gradsieve.atach


@pytest.mark.parametrize("module", ["accelerate", "lightning", "transformers"])
def test_front_is_the_former_name_of_integrations(module: str) -> None:
    spec = find_spec(f"gradsieve.front.{module}")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin) == Path(gradsieve.__file__).parent / "integrations" / f"{module}.py"


def test_former_names_can_be_imported() -> None:
    assert import_module("gradsieve.dcp").read_states is read_states
    assert callable(import_module("gradsieve.front.accelerate").save_with)
