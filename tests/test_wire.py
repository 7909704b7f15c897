"""Messages: what goes in comes out, and what is not a message is refused before it is used."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import MessageError, MismatchError, SparseVector
from gradsieve.comm import Comm
from gradsieve.kernels.gaps import GapPlan
from gradsieve.testing import run_ranks
from gradsieve.wire import HEADER_BYTES, Channel
from gradsieve.wire.indices import GAPS, PLAIN, IndexCode
from gradsieve.wire.message import Expected, pack, unpack

EXPECTED = Expected(rank=0, numel=50, k=5)


def vector(
    indices: list[int], values: list[float], numel: int = 50, dtype: torch.dtype = torch.float32
) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=dtype), numel)


def with_word(message: Tensor, position: int, value: int) -> Tensor:
    changed = message.clone()
    changed[8 * position : 8 * position + 8].view(torch.int64)[0] = value
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indices", [[], [7], [0, 3, 49], list(range(50)), list(range(1, 50, 2)), list(range(30))])
def test_round_trip_in_both_layouts(indices: list[int], dtype: torch.dtype) -> None:
    sent = vector(indices, [float(i - 7) for i in indices], dtype=dtype)  # a zero among them: a sum that cancelled
    message = pack(sent, EXPECTED, 0, 50)
    arrived = unpack(message, EXPECTED, 0, 50, source=1)
    assert torch.equal(arrived.indices, sent.indices)
    assert torch.equal(arrived.values, sent.values)
    assert not torch.signbit(arrived.values[arrived.values == 0]).any()


def test_a_crowded_region_travels_as_its_values_alone() -> None:
    few, many = vector([20, 29], [1.0, 2.0]), vector(list(range(20, 29)), [1.0] * 9)
    assert pack(few, EXPECTED, 20, 30).numel() == HEADER_BYTES + 8 + 2 * 4
    assert pack(many, EXPECTED, 20, 30).numel() == HEADER_BYTES + 10 * 4


def test_indices_beyond_int32_travel_as_int64() -> None:
    numel = 2**31 + 10
    expected = Expected(rank=0, numel=numel, k=1)
    sent = vector([1, 5, 2**31 + 3], [1.0, 2.0, 3.0], numel)
    arrived = unpack(pack(sent, expected, 0, numel), expected, 0, numel, source=1)
    assert arrived.indices.tolist() == [1, 5, 2**31 + 3]
    assert arrived.values.tolist() == [1.0, 2.0, 3.0]


GOOD = pack(vector([10, 11, 30], [1.0, 2.0, 3.0]), EXPECTED, 0, 50)
BAD = {
    "too short": (GOOD[:7], "7 bytes are no message"),
    "cut off": (GOOD[:-4], "64 bytes came, 68 were announced"),
    "too long": (torch.cat([GOOD, GOOD[:8]]), "76 bytes came, 68 were announced"),
    "not ours": (with_word(GOOD, 0, 12345), "unknown header 0x3039"),
    "negative count": (with_word(GOOD, 4, -3), "-3 entries announced"),
    "unknown index code": (with_word(GOOD, 5, 7), "unknown index code 0x7"),
    "no gap width": (with_word(GOOD, 5, 1), "unknown index code 0x1"),
    "huge gap width": (with_word(GOOD, 5, 1 | 60 << 8 | 60 << 16), "unknown index code"),
    "more wide gaps than entries": (with_word(GOOD, 5, 1 | 5 << 8 | 5 << 16 | 4 << 24), "unknown index code"),
    "region elsewhere": (with_word(GOOD, 3, 60), "unknown index code .* from 60"),
    "huge count": (with_word(GOOD, 4, 1 << 60), "entries announced, at most 50"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_messages_are_refused(name: str) -> None:
    message, sentence = BAD[name]
    with pytest.raises(MessageError, match=f"rank 0: malformed message from rank 3: .*{sentence}"):
        unpack(message, EXPECTED, 0, 50, source=3)


def test_disagreement_names_both_sides() -> None:
    with pytest.raises(MismatchError, match="rank 0: numel must be the same .* 51 on rank 3 and 50 here"):
        unpack(with_word(GOOD, 1, 51), EXPECTED, 0, 50, source=3)
    with pytest.raises(MismatchError, match="rank 0: k must be the same .* 6 on rank 3 and 5 here"):
        unpack(with_word(GOOD, 2, 6), EXPECTED, 0, 50, source=3)
    with pytest.raises(MismatchError, match="the wire version must be the same .* 9 on rank 3 and 1 here"):
        unpack(with_word(GOOD, 0, int(GOOD[:8].view(torch.int64)) + (8 << 16)), EXPECTED, 0, 50, source=3)


@pytest.mark.parametrize("indices", [[50, 51, 52], [-1, 3, 4], [5, 5, 6], [9, 8, 20], [2**31 - 1, 0, 1]])
def test_plain_indices_out_of_range_or_order_are_refused(indices: list[int]) -> None:
    plain = IndexCode(PLAIN, 3, 4)
    data = plain.write(torch.tensor(indices, dtype=torch.int32), 0)
    assert "strictly increasing in [0, 50)" in plain.read(data, 50, 0, 50)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (GapPlan(8, 8, 0), [0xFF]),  # a wide gap that is not there
        (GapPlan(4, 8, 1), [0x0, 0x5]),  # a wide gap that nobody refers to
        (GapPlan(8, 8, 0), [0x31]),  # index 49 is the last that is allowed; then 50 follows
        (GapPlan(4, 40, 1), [0xF, (1 << 40) - 1]),  # far beyond
    ],
)
def test_gaps_that_make_no_sense_are_refused(code: GapPlan, words: list[int]) -> None:
    data = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
    assert "do not stay within [0, 50)" in IndexCode(GAPS, 2, 4, code).read(data, 50, 0, 50)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 2), unique=True, min_size=1, max_size=60),
    st.integers(0, 10**6),
    st.sampled_from([2**31 - 1, 2**33]),
)
def test_indices_come_back_from_the_smallest_code(drawn: list[int], low: int, numel: int) -> None:
    dtype = torch.int32 if numel < 2**31 else torch.int64
    indices = torch.tensor(sorted(i for i in drawn if i >= low), dtype=dtype)
    code = IndexCode.smallest(indices, low)
    data = code.write(indices, low)
    assert data.numel() == code.num_bytes <= (indices.numel() * dtype.itemsize + 7) // 8 * 8
    again = IndexCode.from_word(code.word, indices.numel(), numel)
    assert again is not None
    assert torch.equal(again.read(data, numel, low, numel), indices)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.02, 0.1])
def test_indices_cost_little_more_than_their_entropy(density: float) -> None:
    numel = 1_000_000
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(numel, generator=generator) < density
    stretches = (torch.rand(numel // 1000, generator=generator) < 4 * density).repeat_interleave(1000)
    clustered = stretches & (torch.rand(numel, generator=generator) < 0.25)
    for chosen in (uniform, clustered):
        indices = chosen.nonzero().flatten().int()
        share = indices.numel() / numel
        entropy_bits = -numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
        assert 8 * IndexCode.smallest(indices, 0).num_bytes <= 1.25 * entropy_bits


def test_indices_must_lie_in_the_receivers_own_region() -> None:
    with pytest.raises(MessageError, match=r"gaps that do not stay within \[0, 20\)"):
        unpack(GOOD, EXPECTED, 0, 20, source=1)
    crowded = pack(vector(list(range(20, 30)), [1.0] * 10), EXPECTED, 20, 30)
    with pytest.raises(MessageError, match=r"range \[20, 30\) is not within \[10, 25\)"):
        unpack(crowded, EXPECTED, 10, 25, source=1)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_are_a_vector_or_an_error(noise: bytes, keep_header: bool) -> None:
    """Whatever arrives, the result is well formed or a typed error: nothing else, and no memory touched."""
    junk = torch.tensor(list(noise), dtype=torch.uint8)
    message = torch.cat([GOOD[: HEADER_BYTES - 8], junk]) if keep_header else junk
    try:
        arrived = unpack(message.clone(), EXPECTED, 0, 50, source=1)
    except (MessageError, MismatchError):
        return
    SparseVector(arrived.indices, arrived.values, 50)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, GOOD.numel() - 1), st.integers(0, 255))
def test_one_changed_byte_is_a_vector_or_an_error(position: int, value: int) -> None:
    message = GOOD.clone()
    message[position] = value
    try:
        arrived = unpack(message, EXPECTED, 0, 50, source=1)
    except (MessageError, MismatchError):
        return
    SparseVector(arrived.indices, arrived.values, 50)


def test_blocks_that_overlap_are_refused() -> None:
    def rank(comm: Comm) -> None:
        start = 10 - 5 * comm.rank
        Channel(comm, 50, 5).gather_blocks(vector([start, start + 2], [1.0, 1.0]))

    with pytest.raises(MessageError, match="the block of rank 1 begins at index 5, but earlier blocks reach to 12"):
        run_ranks(2, rank)
