"""Vector instructions that Numba cannot express, written as LLVM vectors.

A scan for large entries is limited by memory only if it compares 32 entries at once and gets one 32-bit mask. A sum
that is not read again soon must be stored past the cache, because otherwise every cache line of the result is first
read from memory. LLVM compiles both to the processor's instructions (AVX2, AVX-512, NEON). Measured, n = 14.7 million,
one thread: sum, comparison and store in one pass take 1.2 times as long as `add_`. Without these instructions it is 2.1
times.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic

LANES = 32
STORE_ALIGNMENT_BYTES = 64  # streaming stores need whole, aligned vectors

_INT32 = ir.IntType(32)

# Numba passes a typing context that callers do not: no signature describes both.
intrinsic: Any = _intrinsic


def _vector_pointer(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    element = context.get_data_type(array_type.dtype)
    return builder.bitcast(builder.gep(data, [start]), ir.VectorType(element, LANES).as_pointer())


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    zeros = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _stream(builder: Any, lanes: Any, pointer: Any) -> None:
    store = builder.store(lanes, pointer, align=STORE_ALIGNMENT_BYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT32, 1)]))


def _magnitude_mask(builder: Any, lanes: Any, floor: Any) -> Any:
    """One bit per lane: not |x| < floor, so that a NaN counts as large and cannot stay in a residual."""
    bits = 32 if isinstance(lanes.type.element, ir.FloatType) else 64
    integers = ir.VectorType(ir.IntType(bits), LANES)
    without_sign = ir.Constant(integers, [(1 << (bits - 1)) - 1] * LANES)
    magnitude = builder.bitcast(builder.and_(builder.bitcast(lanes, integers), without_sign), lanes.type)
    return builder.bitcast(builder.fcmp_unordered(">=", magnitude, _splat(builder, floor)), ir.IntType(LANES))


@intrinsic
def large_lanes(typingctx: Any, x: Any, start: Any, floor: Any) -> Any:
    """A mask of the lanes of `x[start : start + LANES]` whose magnitude is not below `floor`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, signature.args[0], args[0], args[1])
        lanes = builder.load(pointer, align=signature.args[0].dtype.bitwidth // 8)
        return _magnitude_mask(builder, lanes, args[2])

    return types.uint32(x, types.intp, x.dtype), codegen


@intrinsic
def add_lanes(typingctx: Any, a: Any, b: Any, out: Any, start: Any, floor: Any) -> Any:
    """Store `a + b` at `out[start : start + LANES]` past the cache; returns the mask of the sum's large lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        itemsize = signature.args[0].dtype.bitwidth // 8
        pointers = [
            _vector_pointer(context, builder, kind, array, args[3])
            for kind, array in zip(signature.args[:3], args[:3], strict=True)
        ]
        total = builder.fadd(builder.load(pointers[0], align=itemsize), builder.load(pointers[1], align=itemsize))
        _stream(builder, total, pointers[2])
        return _magnitude_mask(builder, total, args[4])

    return types.uint32(a, b, out, types.intp, a.dtype), codegen


@intrinsic
def sign_lanes(typingctx: Any, bits: Any, start: Any) -> Any:
    """A mask of the lanes of `bits[start : start + LANES]`, bit patterns of float32, whose sign is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, signature.args[0], args[0], args[1])
        lanes = builder.load(pointer, align=4)
        zeros = ir.Constant(lanes.type, [0] * LANES)
        return builder.bitcast(builder.icmp_signed("<", lanes, zeros), ir.IntType(LANES))

    return types.uint32(bits, types.intp), codegen


@intrinsic
def choose_lanes(typingctx: Any, out: Any, start: Any, mask: Any, chosen: Any, other: Any) -> Any:
    """Store `chosen` in the lanes of `out[start : start + LANES]` that are set in the mask, `other` in the rest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, signature.args[0], args[0], args[1])
        lanes = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), LANES))
        values = builder.select(lanes, _splat(builder, args[3]), _splat(builder, args[4]))
        builder.store(values, pointer, align=signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.uint32, out.dtype, out.dtype), codegen


@intrinsic
def add_chosen_lanes(typingctx: Any, out: Any, start: Any, mask: Any, chosen: Any, other: Any) -> Any:
    """Add `chosen` to the lanes of `out[start : start + LANES]` that are set in the mask, `other` to the rest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        align = signature.args[0].dtype.bitwidth // 8
        pointer = _vector_pointer(context, builder, signature.args[0], args[0], args[1])
        lanes = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), LANES))
        values = builder.select(lanes, _splat(builder, args[3]), _splat(builder, args[4]))
        builder.store(builder.fadd(builder.load(pointer, align=align), values), pointer, align=align)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.uint32, out.dtype, out.dtype), codegen


@intrinsic
def clear_lanes(typingctx: Any, out: Any, start: Any) -> Any:
    """Store zeros at `out[start : start + LANES]`, in the cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, signature.args[0], args[0], args[1])
        zeros = ir.Constant(pointer.type.pointee, [0.0] * LANES)
        builder.store(zeros, pointer, align=signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(out, types.intp), codegen


@intrinsic
def store_lanes(typingctx: Any, source: Any, first: Any, out: Any, start: Any) -> Any:
    """Store `source[first : first + LANES]` at `out[start : start + LANES]` past the cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, signature.args[0], args[0], args[1])
        lanes = builder.load(pointer, align=signature.args[0].dtype.bitwidth // 8)
        _stream(builder, lanes, _vector_pointer(context, builder, signature.args[2], args[2], args[3]))
        return context.get_dummy_value()

    return types.void(source, types.intp, out, types.intp), codegen


@intrinsic
def lowest_set(typingctx: Any, mask: Any) -> Any:
    """The number of the lowest set bit of a mask of 32 or 64 bits; 32 or 64 if no bit is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lowest = builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))
        return lowest if lowest.type.width == 64 else builder.zext(lowest, ir.IntType(64))

    return types.int64(mask), codegen


@intrinsic
def count_set(typingctx: Any, mask: Any) -> Any:
    """The number of set bits of a mask of 32 or 64 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = builder.ctpop(args[0])
        return count if count.type.width == 64 else builder.zext(count, ir.IntType(64))

    return types.int64(mask), codegen


@intrinsic
def count_leading_zeros(typingctx: Any, word: Any) -> Any:
    """The number of zero bits above the highest set bit of a 64-bit word that is not zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def drain_stores(typingctx: Any) -> Any:
    """Make all streamed stores so far visible to other threads."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
