"""Shares of the data: everything once an epoch, for any number of ranks, also after a resume."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve import InputError
from gradsieve.lab.data.sampler import Draw, Sampler, Share, ShuffledSampler, evaluation_batches
from gradsieve.lab.data.stream import StreamSampler

KINDS = [ShuffledSampler, StreamSampler]
Kind = Any


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int]:
    size = draw(st.integers(1, 7))
    return draw(st.integers(size, 150)), draw(st.integers(1, 6)), size


def ranks(kind: Kind, num_samples: int, batch: int, size: int, seed: int = 0) -> list[Sampler]:
    return [kind(Share(num_samples, batch, rank, size, seed)) for rank in range(size)]


def seen(draws: list[Draw]) -> list[int]:
    return [index for draw in draws for index in draw.indices.tolist()]


@pytest.mark.parametrize("kind", KINDS)
@given(world=worlds(), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_an_epoch_is_every_sample_once_in_equally_many_steps(
    kind: Kind, world: tuple[int, int, int], seed: int
) -> None:
    num_samples, batch, size = world
    samplers = ranks(kind, num_samples, batch, size, seed)
    expected_steps = samplers[0].steps_left
    epochs = [list(sampler) for sampler in samplers]
    assert {len(draws) for draws in epochs} == {expected_steps}
    assert sorted(index for draws in epochs for index in seen(draws)) == list(range(num_samples))
    for step, draws in enumerate(zip(*epochs, strict=True)):
        counts = [len(draw.indices) for draw in draws]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
        if step < expected_steps - 1:
            assert counts == [batch] * size
    assert max(len(draw.indices) for draws in epochs for draw in draws) <= batch + 1
    assert {sampler.progress for sampler in samplers} == {1.0}


@pytest.mark.parametrize("kind", KINDS)
@given(world=worlds(), stop=st.integers(0, 60))
@settings(deadline=None, max_examples=100)
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(kind: Kind, world: tuple[int, int, int], stop: int) -> None:
    num_samples, batch, size = world
    share = Share(num_samples, batch, size - 1, size, seed=4)
    whole, first, second = kind(share), kind(share), kind(share)
    expected = [draw for _ in range(2) for draw in whole]
    stop = min(stop, len(expected) // 2)
    early = [draw for _, draw in zip(range(stop), first, strict=False)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got = early + list(second)
    while len(got) < len(expected):
        got += list(second)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.indices, theirs.indices)
        assert mine[1:] == theirs[1:]
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@given(world=worlds(), others=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), max_size=3), data=st.data())
@settings(deadline=None, max_examples=150)
def test_after_a_change_of_ranks_every_sample_still_comes_once(
    kind: Kind, world: tuple[int, int, int], others: list[tuple[int, int]], data: st.DataObject
) -> None:
    num_samples, batch, size = world
    state, used = None, []
    for next_batch, next_size in [(batch, size), *others]:
        if next_size > num_samples:
            continue
        samplers = ranks(kind, num_samples, next_batch, next_size)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        if samplers[0].state_dict()["epoch"] == 1:
            assert num_samples - len(used) < next_size  # these few are passed over, as documented
            return
        steps = data.draw(st.integers(0, samplers[0].steps_left - 1))
        for sampler in samplers:
            used += seen([draw for _, draw in zip(range(steps), sampler, strict=False)])
        state = samplers[0].state_dict()
    samplers = ranks(kind, num_samples, 2, 1)
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
        used += seen(list(sampler))
    assert sorted(used) == list(range(num_samples))


def test_orders_differ_between_epochs_and_seeds_and_random_parts_between_ranks() -> None:
    samplers = ranks(ShuffledSampler, 100, 5, 2)
    first, second = seen(list(samplers[0])), seen(list(samplers[0]))
    assert first != second
    assert seen(list(ShuffledSampler(Share(100, 5, 0, 2, seed=1)))) != first
    seeds = [draw.seed for sampler in ranks(ShuffledSampler, 100, 5, 2) for _ in range(2) for draw in sampler]
    assert len(set(seeds)) == len(seeds)


def test_a_stream_continues_column_by_column_and_says_where_it_does_not() -> None:
    sampler = StreamSampler(Share(43, 4, rank=1, size=2))
    draws = list(sampler)
    assert [draw.indices.tolist() for draw in draws[:2]] == [[20, 25, 30, 35], [21, 26, 31, 36]]
    assert [draw.fresh for draw in draws] == [True, False, False, False, False, True]
    whole = [draw for draw in draws if len(draw.indices) == 4]
    for before, after in pairwise(whole):
        assert torch.equal(after.indices, before.indices + 1)


def test_more_workers_than_samples_is_refused() -> None:
    with pytest.raises(InputError, match="more ranks than samples, 4 and 3: use at most 3 ranks"):
        Share(3, 1, rank=0, size=4)


@pytest.mark.parametrize(
    ("share", "sentence"),
    [((10, 0), "batch must be at least 1, got 0"), ((10, 1, 2, 2), "rank must be in 0 to 1, got 2")],
)
def test_bad_shares_are_refused(share: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Share(*share)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_in_other_data_is_refused(kind: Kind) -> None:
    state = kind(Share(10, 2)).state_dict()
    with pytest.raises(InputError, match="saved run had 10 samples, this one has 11: resume with the same data"):
        kind(Share(11, 2)).load_state_dict(state)


@given(num_samples=st.integers(0, 50), batch=st.integers(1, 9), size=st.integers(1, 9))
def test_a_test_set_is_shared_completely(num_samples: int, batch: int, size: int) -> None:
    parts = [evaluation_batches(num_samples, batch, rank, size) for rank in range(size)]
    assert [i for part in parts for indices in part for i in indices.tolist()] == list(range(num_samples))
