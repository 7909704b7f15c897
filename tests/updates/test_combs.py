"""Combs: every m-th entry, dealt to the ranks in turn. Compiled loops equal torch's views, and no entry is left out."""

from __future__ import annotations

import pytest
import torch

from gradsieve.updates import combs
from gradsieve.updates.combs import Comb

CASES = [(numel, of, ranks) for numel in (1, 7, 64, 1000) for of in (1, 2, 5) for ranks in (1, 3, 4)]


@pytest.mark.parametrize(("numel", "of", "ranks"), CASES)
@pytest.mark.parametrize("views", [False, True], ids=["compiled", "views"])
def test_combs_take_every_entry_once(
    numel: int, of: int, ranks: int, views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if views:
        monkeypatch.setattr(combs, "_is_compiled_for", lambda vector: False)
    vector = torch.arange(numel, dtype=torch.float32)
    parts = [Comb(number, of, ranks).gathered(vector) for number in range(of)]
    assert [part.numel() for part in parts] == [Comb(number, of, ranks).numel(numel) for number in range(of)]
    assert torch.equal(torch.cat(parts).sort().values, vector)
    again = torch.full((numel,), -1.0)
    for number, part in enumerate(parts):
        Comb(number, of, ranks).put_in_(again, part)
    assert torch.equal(again, vector)
    for number, part in enumerate(parts):
        Comb(number, of, ranks).subtract_from_(again, part, 0.5)
    assert torch.equal(again, vector / 2)


def test_an_owners_part_is_a_sample_of_the_whole() -> None:
    """Rank p owns every fourth entry of the comb, not a stretch of the model."""
    values = Comb(1, 2, 4).gathered(torch.arange(800.0)).view(4, -1)
    assert torch.equal(values, torch.arange(800.0).view(-1, 4, 2)[:, :, 1].t())


def test_combs_take_turns() -> None:
    assert [Comb.of_turn(turn, 0.5, 4).number for turn in range(4)] == [0, 1, 0, 1]
    assert Comb.of_turn(7, None, 4) == Comb(0, 1, 4)
    assert Comb.of_turn(3, 1 / 3, 2) == Comb(0, 3, 2)
