"""Messages: what goes in comes out, rounded or not, and what is not a message is refused before it is used."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import MessageError, MismatchError, SparseVector, UnknownNameError
from gradsieve.comm import Comm, CountingComm
from gradsieve.kernels import fields
from gradsieve.kernels.gaps import GapPlan
from gradsieve.testing import run_ranks
from gradsieve.wire import OVERHEAD_BYTES, Channel, Codec
from gradsieve.wire import indices as index_codes
from gradsieve.wire.indices import INDEX_CODES, Bitmap, Blocks, Gaps, IndexCode, Plain, Run
from gradsieve.wire.message import Expected, unpack
from gradsieve.wire.values import VALUE_CODES

CPU = torch.device("cpu")
EXPECTED = Expected(rank=0, numel=50, k=5, dtype=torch.float32, device=CPU)
BITS = {"plain": 64, "float32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "sign": 1, "bit": 1, "twobit": 2}


def expected(numel: int, dtype: torch.dtype = torch.float32) -> Expected:
    return Expected(rank=0, numel=numel, k=1, dtype=dtype, device=CPU)


def vector(
    indices: list[int], values: list[float], numel: int = 50, dtype: torch.dtype = torch.float32
) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=dtype), numel)


def with_word(message: Tensor, position: int, value: int) -> Tensor:
    changed = message.clone()
    changed[8 * position : 8 * position + 8].view(torch.int64)[0] = value
    return changed


@pytest.mark.parametrize("name", INDEX_CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indices", [[], [7], [0, 3, 49], list(range(50)), list(range(1, 50, 2)), list(range(30))])
def test_round_trip_in_every_index_code(indices: list[int], dtype: torch.dtype, name: str) -> None:
    sent = vector(indices, [float(i - 7) for i in indices], dtype=dtype)  # a zero among them: a sum that cancelled
    agreed = expected(50, dtype)
    packed = Codec(indices=name).pack(sent, agreed, 0)
    arrived = unpack(packed.message, agreed, 0, 50, source=1).vector
    assert packed.rounding.exact
    assert packed.rounding.decoded.shares_entries_with(sent)
    assert torch.equal(arrived.indices, sent.indices)
    assert torch.equal(arrived.values, sent.values)


def test_the_smallest_index_code_is_taken() -> None:
    def taken(indices: list[int]) -> type[IndexCode]:
        return type(INDEX_CODES["auto"](np.array(indices, np.int32), 0))

    assert taken(list(range(20, 29))) is Run
    assert taken(list(range(0, 500, 2))) is Bitmap
    assert taken([*range(0, 70_000, 100)]) is Gaps
    assert taken([5, 200]) is Plain
    assert taken([]) is Plain


def test_a_crowded_region_costs_little_more_than_its_values() -> None:
    crowded = vector(list(range(20, 30)), [1.0 + i / 3 for i in range(10)])
    size = Codec().pack(crowded, EXPECTED, 20).message.numel()
    assert size <= OVERHEAD_BYTES + 10 * 4  # a run has no indices at all


def test_indices_beyond_int32_travel_as_int64() -> None:
    numel = 2**31 + 10
    sent = vector([1, 5, 2**31 + 3], [1.0, 2.0, 3.0], numel)
    for name in ("auto", "plain", "gaps"):
        message = Codec(indices=name).pack(sent, expected(numel), 0).message
        arrived = unpack(message, expected(numel), 0, numel, source=1).vector
        assert arrived.indices.tolist() == [1, 5, 2**31 + 3]
        assert arrived.values.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", VALUE_CODES)
def test_the_sender_knows_what_the_receiver_sees(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, and it keeps the rounding error: value = decoded + error."""
    for count in (1, 2, 127, 128, 129, 256, 257, 1000):
        generator = torch.Generator().manual_seed(count)
        values = torch.randn(count, generator=generator, dtype=torch.float64).pow(3).to(dtype)
        sent = SparseVector(torch.arange(count) * 3, values, 3000)
        packed = Codec(values=name).pack(sent, expected(3000, dtype), 0)
        arrived = unpack(packed.message, expected(3000, dtype), 0, 3000, source=1).vector
        bits = torch.int32 if dtype == torch.float32 else torch.int64
        assert torch.equal(arrived.values.view(bits), packed.rounding.decoded.values.view(bits))
        error = packed.rounding.error
        restored = packed.rounding.decoded.to_dense() + error.to_dense()
        largest = float(values.abs().max())  # next to which a small value's remainder is rounded itself
        torch.testing.assert_close(restored, sent.to_dense(), rtol=0, atol=1e-7 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_has_room_for_the_greatest_when_it_is_rounded_up(dtype: torch.dtype) -> None:
    greatest = float(np.array([0x3F83FFFF], np.uint32).view(np.float32)[0])  # three steps above one, rounded four
    sent = vector([3, 5, 8], [1.0, -greatest, 1.0], dtype=dtype)
    packed = Codec(values="bf16").pack(sent, expected(50, dtype), 0)
    arrived = unpack(packed.message, expected(50, dtype), 0, 50, source=1).vector
    assert torch.equal(arrived.values, sent.values.bfloat16().to(dtype))
    assert torch.equal(packed.rounding.decoded.values, arrived.values)


@pytest.mark.parametrize(("name", "most"), [("bf16", 2**-8), ("fp16", 2**-11), ("int8", 1 / 254), ("int4", 1 / 14)])
def test_values_are_rounded_to_the_nearest(name: str, most: float) -> None:
    values = torch.randn(1280, generator=torch.Generator().manual_seed(0))
    sent = SparseVector(torch.arange(1280), values, 1280)
    seen = Codec(values=name).pack(sent, expected(1280), 0).rounding.decoded.values
    if name in ("bf16", "fp16"):
        scale = values.abs()
        assert torch.equal(seen, values.to({"bf16": torch.bfloat16, "fp16": torch.float16}[name]).float())
    else:
        scale = values.view(-1, fields.CHUNK_VALUES).abs().amax(1, keepdim=True).expand(-1, 128).flatten()
    assert ((seen - values).abs() <= 1.0001 * most * scale).all()


def test_a_sign_carries_the_mean_magnitude() -> None:
    values = torch.tensor([1.0, -2.0, 3.0, -4.0])
    seen = Codec(values="sign").pack(SparseVector(torch.arange(4), values, 4), expected(4), 0).rounding.decoded.values
    assert seen.tolist() == [2.5, -2.5, 2.5, -2.5]


def test_a_bit_carries_the_mean_magnitude_of_the_whole_message() -> None:
    """Also where chunks of 1,024 values, which signs are encoded by, differ and the last one is short."""
    values = torch.cat([torch.full((1024,), 1.0), torch.full((1000,), -4.0)])
    packed = Codec(values="bit").pack(SparseVector(torch.arange(2024), values, 2024), expected(2024), 0)
    mean = torch.tensor((1024 * 1.0 + 1000 * 4.0) / 2024)
    assert torch.allclose(packed.rounding.decoded.values, values.sign() * mean)
    arrived = unpack(packed.message, expected(2024), 0, 2024, source=1).vector
    assert torch.equal(arrived.values, packed.rounding.decoded.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_bits_carry_a_sign_and_the_mean_magnitude_below_or_above_the_mean(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.0, 3.0, -12.0, -20.0, 0.0], dtype=dtype)  # 6.33 on average
    values = torch.cat([values.repeat(40), torch.full((16,), 4.0), -1e-3 * torch.ones(40)]).to(dtype)
    sent, agreed = SparseVector(torch.arange(296), values, 296), expected(296, dtype)
    packed = Codec(values="twobit").pack(sent, agreed, 0)
    low = (40 * 6.0 + 16 * 4.0) / (40 * 4 + 16)
    one_turn = torch.tensor([low, -low, low, -16.0, -16.0, low])
    seen = torch.cat([one_turn.repeat(40), torch.full((16,), low), torch.full((40,), -1e-3)]).to(dtype)
    assert torch.allclose(packed.rounding.decoded.values, seen, rtol=1e-6)
    assert torch.equal(packed.rounding.decoded.values[:256].abs().unique(), seen[:256].abs().unique())
    assert torch.equal(unpack(packed.message, agreed, 0, 296, source=1).vector.values, packed.rounding.decoded.values)


def test_two_bits_keep_zeros_and_what_has_two_magnitudes() -> None:
    """A chunk of zeros is zeros, none of them negative, also next to one that is not."""
    zeros, two = torch.full((256,), -0.0), torch.tensor([0.5, -3.0, 0.5, 3.0]).repeat(30)
    mixed = torch.tensor([-0.0, 2.0, -0.0, -2.0]).repeat(10)  # the low level is zero
    for values in (zeros[:7], zeros, torch.cat([zeros, two]), two, mixed):
        sent = SparseVector(torch.arange(values.numel()), values, values.numel())
        packed = Codec(values="twobit").pack(sent, expected(values.numel()), 0)
        arrived = unpack(packed.message, expected(values.numel()), 0, values.numel(), source=1).vector.values
        assert torch.equal(arrived, values)
        assert torch.equal(packed.rounding.decoded.values, values)
        assert not arrived[arrived == 0].signbit().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_bits_leave_half_precision_exact(dtype: torch.dtype) -> None:
    sent = vector([1, 5, 9], [1.0, -2.5, 4.0], dtype=dtype)
    assert Codec(values="twobit").pack(sent, expected(50, dtype), 0).rounding.exact


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e39])
def test_two_bits_of_what_is_too_large_anywhere_are_not_sent(bad: float) -> None:
    values = torch.ones(1300, dtype=torch.float64)
    for position in (0, 700, 1299):
        values[position] = bad
        sent = SparseVector(torch.arange(1300), values, 1300)
        arrived = unpack(Codec(values="twobit").pack(sent, expected(1300, torch.float64), 0).message,
                         expected(1300, torch.float64), 0, 1300, source=1).vector  # fmt: skip
        assert torch.equal(arrived.values.view(torch.int64), values.view(torch.int64))


TWO_BITS = Codec(values="twobit").pack(SparseVector.run(torch.linspace(1, 9, 40), 5, 50), EXPECTED, 0).message
BAD_TWO_BITS = {
    "more in its word": (with_word(TWO_BITS, 6, 8 | 1 << 8), "unknown value code 0x108"),
    "an unknown kind": (with_word(TWO_BITS, 6, 9), "unknown value code 0x9"),
    "more values than came": (with_word(with_word(TWO_BITS, 4, 45), 6, 5), "bytes arrived"),
    "another chunk": (torch.cat([TWO_BITS[:-8], TWO_BITS[-16:]]), "bytes arrived"),
    "cut off": (TWO_BITS[:-8], "but the header announces"),
}


@pytest.mark.parametrize("name", BAD_TWO_BITS)
def test_malformed_two_bits_are_refused(name: str) -> None:
    message, sentence = BAD_TWO_BITS[name]
    with pytest.raises(MessageError, match=sentence):
        unpack(message, EXPECTED, 0, 50, source=1)
    assert unpack(TWO_BITS, EXPECTED, 0, 50, source=1).vector.nnz == 40


@pytest.mark.parametrize("name", BITS)
def test_a_value_takes_the_bits_its_name_says(name: str) -> None:
    count = 20_480
    sent = SparseVector(torch.arange(count), torch.randn(count, dtype=torch.float64), count)
    size = Codec(values=name).pack(sent, expected(count, torch.float64), 0).message.numel()
    per_value = {"int8": 4 / 128, "int4": 4 / 128, "sign": 4 / 1024, "bit": 8 / count, "twobit": 8 / 256}
    scales = count * per_value.get(name, 0)
    most = OVERHEAD_BYTES + scales + count * BITS[name] / 8
    assert size == most or (name == "bf16" and size < 0.9 * most)


def test_magnitudes_that_have_much_in_common_lose_it_and_nothing_else() -> None:
    """Picked values lie within a few powers of two: 23 bits, a sign, and three bits for the exponent."""
    values = torch.randn(10_000).clamp(-7.9, 7.9)
    values = torch.where(values.abs() < 0.0625, 0.0625, values)
    sent = SparseVector(torch.arange(10_000), values, 10_000)
    packed = Codec().pack(sent, expected(10_000), 0)
    assert packed.message.numel() <= OVERHEAD_BYTES + 10_000 * 27 / 8 + 8
    assert torch.equal(unpack(packed.message, expected(10_000), 0, 10_000, 1).vector.values, values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38, 3.3e38])
@pytest.mark.parametrize("name", VALUE_CODES)
def test_what_a_code_cannot_hold_travels_exact(name: str, bad: float) -> None:
    sent = vector([1, 2, 3], [1.0, bad, -2.0])
    packed = Codec(values=name).pack(sent, EXPECTED, 0)
    arrived = unpack(packed.message, EXPECTED, 0, 50, source=1).vector
    assert torch.equal(arrived.values.view(torch.int32), packed.rounding.decoded.values.view(torch.int32))
    if not math.isfinite(bad):
        assert torch.equal(arrived.values.view(torch.int32), sent.values.view(torch.int32))
    assert torch.isfinite(arrived.values).all() == math.isfinite(bad)


@pytest.mark.parametrize("name", ["int8", "int4", "sign", "bit", "twobit"])
def test_values_too_small_for_a_scale_are_left_over(name: str) -> None:
    tiny = vector([1, 2], [1e-45, -1e-44])
    packed = Codec(values=name).pack(tiny, EXPECTED, 0)
    assert torch.isfinite(packed.rounding.decoded.values).all()
    assert torch.equal(packed.rounding.decoded.to_dense() + packed.rounding.error.to_dense(), tiny.to_dense())


def test_unknown_codes_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown value code 'bf61'; did you mean 'bf16'"):
        Codec(values="bf61")
    with pytest.raises(UnknownNameError, match="unknown index code 'gap'; did you mean 'gaps'"):
        Codec(indices="gap")


def test_a_fast_network_gets_plain_entries() -> None:
    """Where a byte takes less time than saving it; never where that would change a result."""

    def sizes(comm: Comm) -> list[int]:
        sent = SparseVector(torch.arange(0, 30_000, 30), torch.linspace(1, 3, 1000), 30_000)
        counted = []
        for seconds_per_byte in (math.inf, 1e-8, 1e-10):
            counting = CountingComm(comm)
            comm.seconds_per_byte = seconds_per_byte
            Channel(counting, sent, 1000, Codec()).gather(sent)
            counted.append(counting.traffic.bytes_received)
        return counted

    unknown, slow, fast = run_ranks(2, sizes)[0]
    assert unknown == slow < 0.7 * fast
    assert fast >= 8 * 1000
    assert Codec(values="bf16").for_link(1e-10) == Codec(values="bf16")


def test_a_note_goes_with_a_message() -> None:
    note = np.array([3.0, 1.5, -2.0], np.float32)
    packed = Codec().pack(vector([3], [1.0]), EXPECTED, 0, note)
    assert unpack(packed.message, EXPECTED, 0, 50, source=1).note.tolist() == [3.0, 1.5, -2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indices", INDEX_CODES)
@pytest.mark.parametrize("name", VALUE_CODES)
@pytest.mark.parametrize(("start", "stop"), [(0, 50), (7, 8), (13, 50), (9, 9)])
def test_a_run_arrives_as_a_run(name: str, indices: str, dtype: torch.dtype, start: int, stop: int) -> None:
    """Without index arrays on either side, whatever the code of indices is."""
    values = torch.linspace(-3, 4, 50)[start:stop].to(dtype)
    sent, agreed = SparseVector.run(values, start, 50), expected(50, dtype)
    packed = Codec(name, indices).pack(sent, agreed, min(start, 5))
    arrived = unpack(packed.message, agreed, 0, 50, source=1).vector
    assert packed.rounding.decoded.is_run
    assert arrived.is_run or arrived.nnz == 0
    assert torch.equal(arrived.indices, sent.indices)
    assert torch.equal(arrived.values, packed.rounding.decoded.values)
    with_indices = Codec(name).pack(SparseVector(sent.indices, values, 50), agreed, min(start, 5))
    assert torch.equal(packed.message, with_indices.message) or sent.nnz == 0


RUN = Codec().pack(SparseVector.run(torch.arange(1.0, 11.0), 20, 50), EXPECTED, 15).message
BAD_RUNS = {
    "begins before its region": (RUN, 16, 50, r"its indices begin at 15, but must be in \[16, 50\)"),
    "ends after its region": (RUN, 0, 29, r"in \[15, 29\)"),
    "begins beyond the range": (with_word(RUN, 5, 1 | 36 << 8), 0, 50, "unknown index code"),
    "ends beyond the range": (with_word(RUN, 5, 1 | 26 << 8), 0, 50, r"in \[15, 50\)"),
    "negative start": (with_word(RUN, 5, 1 | -1 << 8), 0, 50, "unknown index code"),
    "more entries than came": (with_word(RUN, 4, 30), 0, 50, "bytes arrived"),
    "fewer entries than came": (with_word(RUN, 4, 2), 0, 50, "bytes arrived"),
    "more entries than there are": (with_word(RUN, 4, 51), 0, 50, "announces 51 entries, allowed are 0 to 50"),
    "cut off": (RUN[:-8], 0, 50, "but the header announces"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_malformed_runs_are_refused(name: str) -> None:
    message, low, high, sentence = BAD_RUNS[name]
    with pytest.raises(MessageError, match=sentence):
        unpack(message, EXPECTED, low, high, source=1)
    assert unpack(RUN, EXPECTED, 15, 30, source=1).vector.span == (20, 30)


GOOD = Codec(indices="gaps").pack(vector([10, 11, 30], [1.0, 2.0, 3.0]), EXPECTED, 0).message
LENGTH = GOOD.numel()
BAD = {
    "too short": (GOOD[:7], "7 bytes are not whole words of 8"),
    "not whole words": (GOOD[:-4], f"{LENGTH - 4} bytes are not whole words of 8"),
    "cut off": (GOOD[:-8], f"{LENGTH - 8} bytes arrived, but the header announces {LENGTH}"),
    "too long": (torch.cat([GOOD, GOOD[:8]]), f"{LENGTH + 8} bytes arrived, but the header announces {LENGTH}"),
    "not ours": (with_word(GOOD, 0, 12345), "unknown header 0x3039"),
    "negative count": (with_word(GOOD, 4, -3), "the header announces -3 entries"),
    "huge count": (with_word(GOOD, 4, 1 << 60), "entries, allowed are 0 to 50"),
    "unknown index code": (with_word(GOOD, 5, 9), "unknown index code 0x9"),
    "no gap width": (with_word(GOOD, 5, 4), "unknown index code 0x4"),
    "huge gap width": (with_word(GOOD, 5, 4 | 60 << 8 | 60 << 16), "unknown index code"),
    "more wide gaps than entries": (with_word(GOOD, 5, 4 | 5 << 8 | 5 << 16 | 4 << 24), "unknown index code"),
    "bitmap beyond the range": (with_word(GOOD, 5, 2 | 1000 << 8), "unknown index code"),
    "blocks beyond the range": (with_word(GOOD, 5, 3 | 1 << 50), "unknown index code"),
    "negative index code": (with_word(GOOD, 5, -5), "unknown index code"),
    "unknown value code": (with_word(GOOD, 6, 200), "unknown value code 0xc8"),
    "value code with a width it has not": (with_word(GOOD, 6, 3 | 5 << 8), "unknown value code"),
    "no width": (with_word(GOOD, 6, 1), "unknown value code 0x1"),
    "huge note": (with_word(GOOD, 7, 1 << 60), "a note of 1152921504606846976 numbers"),
    "negative note": (with_word(GOOD, 7, -1), "a note of -1 numbers"),
    "region elsewhere": (with_word(GOOD, 3, 60), "its indices begin at 60"),
    "no end": (with_word(GOOD, LENGTH // 8 - 1, 1), "it ends with 0x1, not with the end mark"),
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
    with pytest.raises(MismatchError, match="the wire version must be the same .* 11 on rank 3 and 4 here"):
        unpack(with_word(GOOD, 0, int(GOOD[:8].view(torch.int64)) + (7 << 16)), EXPECTED, 0, 50, source=3)
    with pytest.raises(MismatchError, match="the dtype must be .* torch.float32 on rank 3 and torch.float64 here"):
        unpack(GOOD, Expected(0, 50, 5, torch.float64, CPU), 0, 50, source=3)


@pytest.mark.parametrize("indices", [[50, 51, 52], [-1, 3, 4], [5, 5, 6], [9, 8, 20], [2**31 - 1, 0, 1]])
def test_plain_indices_out_of_range_or_order_are_refused(indices: list[int]) -> None:
    plain, words = Plain(3, 4), np.zeros(3, np.uint64)
    plain.write(np.array(indices, np.int32), 0, words)
    assert not plain.read(words, 0, 50, np.empty(3, np.int32))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (Gaps(2, GapPlan(8, 8, 0)), [0xFF, 0]),  # a wide gap that is not there
        (Gaps(2, GapPlan(4, 8, 1)), [0x0, 0x5, 0]),  # a wide gap that nobody refers to
        (Gaps(2, GapPlan(8, 8, 0)), [0x31, 0]),  # index 49 is the last that is allowed; then 50 follows
        (Gaps(2, GapPlan(4, 40, 1)), [0xF, (1 << 40) - 1, 0]),  # far beyond
        (Bitmap(50), [0b1, 0]),  # one bit where two are announced
        (Bitmap(50), [0b111, 0]),  # three
        (Bitmap(50), [1 << 50 | 1, 0]),  # one beyond the range
        (Blocks(2, 50), [3, 0x0002_0001, 0]),  # three in a block where two are announced
        (Blocks(2, 50), [1, 0x0002_0001, 0]),  # only one
        (Blocks(2, 50), [2, 0x0001_0001, 0]),  # the same twice
        (Blocks(2, 50), [2, 0x0032_0001, 0]),  # index 50
        (Run(49), [0]),  # 49 and 50
    ],
)
def test_codes_that_make_no_sense_are_refused(code: IndexCode, words: list[int]) -> None:
    assert not code.read(np.array(words, np.uint64), 0, 50, np.empty(2, np.int32))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 2), unique=True, min_size=1, max_size=60),
    st.integers(0, 10**6),
    st.sampled_from([2**31 - 1, 2**33]),
    st.sampled_from(["auto", "plain", "gaps"]),  # the others take room for the whole span
)
def test_indices_come_back(drawn: list[int], low: int, numel: int, name: str) -> None:
    dtype = np.int32 if numel < 2**31 else np.int64
    indices = np.array(sorted(i for i in drawn if i >= low), dtype=dtype)
    code = INDEX_CODES[name](indices, low)
    words = np.zeros(code.num_words + 1, np.uint64)
    code.write(indices, low, words)
    assert words[-1] == 0
    if name == "auto":
        assert code.num_words <= (indices.size * indices.itemsize + 7) // 8
    again = index_codes.from_word(code.word, indices.size, indices.itemsize, numel - low)
    assert again == code
    read = np.empty_like(indices)
    assert again.read(words, low, numel, read)
    assert (read == indices).all()


@pytest.mark.parametrize("name", INDEX_CODES)
@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 200_000), min_size=1, max_size=300), st.integers(0, 5))
def test_near_indices_come_back_in_every_code(name: str, drawn: set[int], low: int) -> None:
    indices = np.array(sorted(i + low for i in drawn), dtype=np.int32)
    code = INDEX_CODES[name](indices, low)
    words = np.zeros(code.num_words + 1, np.uint64)
    code.write(indices, low, words)
    read = np.empty_like(indices)
    assert code.read(words, low, 200_010, read)
    assert (read == indices).all()


@pytest.mark.parametrize("density", [0.001, 0.01, 0.02, 0.1, 0.3, 0.6])
def test_indices_cost_little_more_than_their_entropy(density: float) -> None:
    numel = 1_000_000
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(numel, generator=generator) < density
    stretches = (torch.rand(numel // 1000, generator=generator) < min(1.0, 4 * density)).repeat_interleave(1000)
    clustered = stretches & (torch.rand(numel, generator=generator) < max(0.25, density))
    for chosen in (uniform, clustered):
        indices = chosen.nonzero().flatten().int().numpy()
        share = indices.size / numel
        entropy_bits = -numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
        assert 64 * INDEX_CODES["auto"](indices, 0).num_words <= 1.25 * entropy_bits


def test_indices_must_lie_in_the_receivers_own_region() -> None:
    with pytest.raises(MessageError, match=r"its indices are not strictly increasing in \[0, 20\)"):
        unpack(GOOD, EXPECTED, 0, 20, source=1)
    crowded = Codec().pack(vector(list(range(20, 30)), [1.0] * 10), EXPECTED, 20).message
    with pytest.raises(MessageError, match=r"in \[20, 25\)"):
        unpack(crowded, EXPECTED, 10, 25, source=1)


def check_vector_or_error(message: Tensor) -> None:
    """Whatever arrives, the result is well formed or a typed error: nothing else, and no memory touched."""
    try:
        arrived = unpack(message, EXPECTED, 0, 50, source=1).vector
    except (MessageError, MismatchError):
        return
    SparseVector(arrived.indices, arrived.values, 50)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=160), st.booleans())
def test_any_bytes_are_a_vector_or_an_error(noise: bytes, keep_header: bool) -> None:
    junk = torch.tensor(list(noise), dtype=torch.uint8)
    check_vector_or_error(torch.cat([GOOD[:40], junk]) if keep_header else junk)


SAMPLES = [
    Codec(name, code).pack(vector([1, 4, 9, 16, 25, 49], [1.0, -2.0, 3.0, 4.5, -5.0, 6.0]), EXPECTED, 0).message
    for name in VALUE_CODES
    for code in INDEX_CODES
] + [Codec(name).pack(SparseVector.run(torch.arange(-5.0, 6.0), 9, 50), EXPECTED, 5).message for name in VALUE_CODES]


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(SAMPLES), st.integers(0, 1 << 16), st.integers(0, 255))
def test_one_changed_byte_is_a_vector_or_an_error(sample: Tensor, position: int, value: int) -> None:
    message = sample.clone()
    message[position % message.numel()] = value
    check_vector_or_error(message)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SAMPLES), st.integers(0, 7), st.integers(-(2**63), 2**63 - 1))
def test_one_changed_header_word_is_a_vector_or_an_error(sample: Tensor, position: int, value: int) -> None:
    check_vector_or_error(with_word(sample, position, value))


def test_a_message_at_an_odd_address_is_read_all_the_same() -> None:
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), GOOD])[3:]
    assert unpack(shifted, EXPECTED, 0, 50, source=1).vector.indices.tolist() == [10, 11, 30]


def test_blocks_that_overlap_are_refused() -> None:
    def rank(comm: Comm) -> None:
        start = 10 - 5 * comm.rank
        block = vector([start, start + 2], [1.0, 1.0])
        Channel(comm, block, 5, Codec()).gather_blocks(block)

    with pytest.raises(MessageError, match="the block of rank 1 begins at index 5, but earlier blocks end at index 12"):
        run_ranks(2, rank)


def test_several_vectors_in_one_message_must_add_up() -> None:
    block = vector([1, 2], [1.0, 1.0])
    channels: dict[int, Channel] = {}

    def rank(comm: Comm) -> None:
        channels[comm.rank] = channel = Channel(comm, block, 5, Codec())
        arrived = channel.swap_wrapped([channel.wrap(block)] * 2, 1 - comm.rank, 1 - comm.rank)
        assert all(torch.equal(wrapped.vector.to_dense(), block.to_dense()) for wrapped in arrived)

    run_ranks(2, rank)
    for junk in (torch.empty(0, dtype=torch.uint8), torch.zeros(17, dtype=torch.uint8), torch.full((40,), 255).byte()):
        with pytest.raises(MessageError, match=f"{junk.numel()} bytes are not 2 messages"):
            channels[0]._parted(junk, 2, source=1)
