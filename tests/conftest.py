"""Fixtures of all areas. Scripts that tests start import `support` too, so its folder is in `PYTHONPATH`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.rank_pool import RankPool

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    """Processes for the tests of one file, see `support.rank_pool`."""
    pool = RankPool()
    yield pool
    pool.stop()
