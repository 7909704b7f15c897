"""SparseVector: what it accepts, and what its operations give."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve import InputError, SparseVector
from gradsieve.vector import Removed, Replaced, Rounding, Sum, add


def vector(entries: dict[int, float], numel: int = 10) -> SparseVector:
    return SparseVector(torch.tensor(list(entries), dtype=torch.int64), torch.tensor(list(entries.values())), numel)


def entries(v: SparseVector) -> dict[int, float]:
    return dict(zip(v.indices.tolist(), v.values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("indices", "values", "numel", "sentence"),
    [
        ([[1]], [[1.0]], 3, r"must be 1-D, got shapes \(1, 1\)"),
        ([1, 2], [1.0], 3, "same length, got 2 and 1"),
        ([1.0], [1.0], 3, "indices must be int32 or int64, got torch.float32"),
        ([1], [1], 3, "values must be floating point, got torch.int64"),
        ([3], [1.0], 3, r"strictly increasing in \[0, 3\), got 3 at position 0"),
        ([-1], [1.0], 3, "got -1 at position 0"),
        ([2, 1], [1.0, 1.0], 3, "got 1 at position 1"),
        ([1, 1], [1.0, 1.0], 3, "got 1 at position 1"),
    ],
)
def test_bad_entries_are_refused(indices: list[int], values: list[float], numel: int, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SparseVector(torch.tensor(indices), torch.tensor(values), numel)


def test_strided_values_are_refused() -> None:
    with pytest.raises(InputError, match="must be contiguous"):
        SparseVector(torch.arange(4)[::2], torch.ones(2), 10)


def test_indices_are_as_narrow_as_the_length_allows() -> None:
    assert SparseVector(torch.tensor([1]), torch.ones(1), 2**31 - 1).indices.dtype == torch.int32
    assert SparseVector(torch.tensor([2**31]), torch.ones(1), 2**31 + 1).indices.dtype == torch.int64


def test_a_full_vector_holds_no_indices_and_no_copy() -> None:
    values = torch.tensor([0.0, 1.0, 2.0])
    full = SparseVector.full(values)
    assert full.values is values
    assert full._indices is None
    assert full.indices.tolist() == [0, 1, 2]
    assert full.to_dense().tolist() == [0.0, 1.0, 2.0]
    assert [part.indices.tolist() for part in full.split([0, 2, 3])] == [[0, 1], [2]]


def test_a_vector_is_written_only_where_it_fits() -> None:
    for bad in (torch.ones(9), torch.ones(20)[::2], torch.ones(2, 5)):
        with pytest.raises(InputError, match="a vector of 10 entries needs a contiguous tensor of that length"):
            vector({9: 1.0}).write_to_(bad)


def test_top_keeps_the_lower_index_among_equals() -> None:
    kept, dropped = vector({1: 2.0, 3: -2.0, 4: 5.0, 7: 2.0}).top(2)
    assert (entries(kept), entries(dropped)) == ({1: 2.0, 4: 5.0}, {3: -2.0, 7: 2.0})


def test_above_keeps_nan_always_and_zero_only_at_zero() -> None:
    v = vector({0: 0.0, 2: 1.0, 3: torch.nan, 5: -2.0})
    assert v.above(2.0).indices.tolist() == [3, 5]
    assert v.above(0.0).indices.tolist() == [0, 2, 3, 5]


def test_split_and_concatenate_are_inverse_with_empty_parts() -> None:
    v = vector({0: 1.0, 4: 2.0, 9: 3.0})
    parts = v.split([0, 0, 5, 5, 10])
    assert [part.indices.tolist() for part in parts] == [[], [0, 4], [], [9]]
    assert entries(SparseVector.concatenate(parts)) == entries(v)


def test_without_leaves_what_the_other_does_not_have() -> None:
    v = vector({0: 1.0, 4: 2.0, 9: 3.0})
    assert entries(v.without(vector({4: 7.0, 5: 1.0}))) == {0: 1.0, 9: 3.0}
    assert v.without(SparseVector.full(torch.ones(10))).nnz == 0
    full = SparseVector.full(torch.arange(10.0)).without(v)
    assert (full.nnz, full.is_full) == (7, False)
    assert entries(full) == {i: float(i) for i in range(10) if i not in (0, 4, 9)}


def test_a_remainder_knows_its_change_from_its_whole_only() -> None:
    whole = vector({0: 1.0, 4: 2.0, 9: 3.0})
    part = whole.without(vector({4: 7.0, 5: 1.0}))
    change = part.change_from(whole)
    assert isinstance(change, Removed)
    assert change.positions.tolist() == [4]
    assert part.change_from(vector({0: 1.0, 4: 2.0, 9: 3.0})) is None
    assert part.change_from(whole.split([0, 5, 10])[0]) is None
    assert vector({0: 1.0}).change_from(whole) is None


def test_a_change_stays_known_if_the_vectors_are_copied() -> None:
    """A fast path that depends on which object is passed would be lost without anyone noticing."""
    whole = vector({0: 1.0, 4: 2.0, 9: 3.0})
    again = SparseVector.trusted(whole.entries, whole.numel)
    full = SparseVector.full(torch.arange(10.0))
    for sent, other in ((whole, copy.copy(whole)), (whole, again), (full, SparseVector.full(full.values))):
        assert sent.shares_entries_with(other)
        assert copy.copy(sent.without(vector({4: 7.0}))).change_from(other) is not None


def test_vectors_share_entries_only_if_all_of_them_are_the_same() -> None:
    longer = torch.arange(5.0)
    values = longer[:4]
    some = SparseVector.run(values, 2, 10)
    others = [
        SparseVector.run(values, 3, 10),
        SparseVector.run(values, 2, 11),
        SparseVector.run(values[:3], 2, 10),
        SparseVector.run(values.clone(), 2, 10),
        SparseVector.run(longer[1:], 2, 10),
        SparseVector(torch.arange(2, 6), values, 10),
    ]
    assert not any(some.shares_entries_with(other) for other in others)
    assert not vector({1: 1.0}).shares_entries_with(vector({1: 1.0}))


def test_of_what_was_delivered_the_rounding_error_is_kept() -> None:
    sent = vector({0: 1.25, 4: 2.0, 9: 3.5})
    rounding = Rounding(sent, vector({0: 1.0, 4: 2.0, 9: 3.0}))
    kept = rounding.undelivered(vector({0: 5.0, 4: 5.0, 7: 5.0}))
    change = kept.change_from(sent)
    assert isinstance(change, Replaced)
    assert (change.positions.tolist(), change.values.tolist()) == ([0, 4], [0.25, 0.0])
    assert entries(kept) == {0: 0.25, 9: 3.5}
    assert entries(rounding.error) == {0: 0.25, 9: 0.5}
    assert entries(rounding.undelivered(SparseVector.full(torch.ones(10)))) == {0: 0.25, 9: 0.5}


def test_without_rounding_nothing_is_kept_of_what_was_delivered() -> None:
    sent = vector({0: 1.25, 4: 2.0, 9: 3.5})
    assert Rounding.none(sent).error.nnz == 0
    assert entries(Rounding.none(sent).undelivered(vector({4: 5.0}))) == {0: 1.25, 9: 3.5}


def test_a_sum_is_made_when_asked_for() -> None:
    parts = vector({0: 1.0, 4: 2.0}), vector({4: 3.0})
    total = Sum(parts)
    assert total.parts == parts
    assert (total.nnz, entries(total)) == (2, {0: 1.0, 4: 5.0})


def test_add_refuses_nothing_and_different_lengths() -> None:
    with pytest.raises(InputError, match="at least one vector, got none"):
        add([])
    with pytest.raises(InputError, match="different length: 10 and 11"):
        add([vector({}), vector({}, 11)])


def test_add_works_on_vectors_as_they_arrive() -> None:
    arrived = []

    def arriving() -> object:
        for number in range(5):
            arrived.append(number)
            yield vector({number: 1.0, 9: 1.0})

    assert entries(add(arriving())) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 9: 5.0}
    assert arrived == [0, 1, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30).flatmap(
        lambda numel: st.lists(
            st.dictionaries(st.integers(0, numel - 1), st.integers(-9, 9), max_size=numel),
            min_size=1,
            max_size=6,
        ).map(lambda maps: (numel, maps))
    )
)
def test_add_is_the_dense_sum(drawn: tuple[int, list[dict[int, int]]]) -> None:
    numel, maps = drawn
    vectors = [vector({i: float(m[i]) for i in sorted(m)}, numel) for m in maps]
    assert torch.equal(add(vectors).to_dense(), sum(v.to_dense() for v in vectors))
    assert add(vectors).indices.tolist() == sorted(set().union(*maps))
