"""Vectors of 16 float32 numbers inside compiled functions, loaded from weights of any format.

Numba leaves it to the compiler to find vector code in a loop over an array, and what it finds reads
memory at two thirds of the pace. These few operations say it outright; on a machine whose registers
are narrower than 16 numbers the compiler uses several for one. Addresses are integers.

The format of weights travels as an empty array of a type that stands for it (`FORMATS`).
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

# bfloat16 and float16 are no types of Numba's: 16 bits without and with a sign stand for them.
FORMATS = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
}
LANES = 16

_FLOAT, _INT32 = ir.FloatType(), ir.IntType(32)
_FLOATS, _INT32S = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager, kind):  # type: ignore[no-untyped-def]
        super().__init__(manager, kind, _FLOATS)


def _stored_type(kind):  # type: ignore[no-untyped-def]
    """What one number of a format is in memory."""
    if kind == types.float32:
        return _FLOAT
    return ir.HalfType() if kind == types.int16 else ir.IntType(kind.bitwidth)


def _widen(builder, value, kind, floats, int32s, bits16):  # type: ignore[no-untyped-def]
    """A stored number, or 16 of them, as float32."""
    if kind == types.float32:
        return value
    if kind == types.int16:
        return builder.fpext(value, floats)
    if kind == types.uint16:  # bfloat16 is the upper half of a float32
        return builder.bitcast(builder.shl(builder.zext(value, int32s), bits16), floats)
    return builder.sitofp(builder.sext(value, int32s), floats)


def _splat(builder, number):  # type: ignore[no-untyped-def]
    undefined, first = ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INT32, 0)
    one = builder.insert_element(undefined, number, first)
    return builder.shuffle_vector(one, undefined, ir.Constant(_INT32S, [0] * LANES))


def _fold(builder, vector, join):  # type: ignore[no-untyped-def]
    """The 16 numbers joined to one, halves first."""
    for half in (8, 4, 2, 1):
        upper = [lane + half if lane < half else 0 for lane in range(LANES)]
        moved = builder.shuffle_vector(
            vector, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INT32S, upper)
        )
        vector = join(vector, moved)
    return builder.extract_element(vector, ir.Constant(_INT32, 0))


@intrinsic
def size_of(typingctx, like):  # type: ignore[no-untyped-def]
    """Bytes of a number in the format of `like`, a constant in compiled code."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return ir.Constant(ir.IntType(64), like.dtype.bitwidth // 8)

    return types.int64(like), generate


@intrinsic
def load(typingctx, address, like):  # type: ignore[no-untyped-def]
    """The 16 numbers from `address` on, in the format of `like`."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = ir.VectorType(_stored_type(like.dtype), LANES).as_pointer()
        value = builder.load(builder.inttoptr(args[0], place), align=1)
        bits16 = ir.Constant(_INT32S, [16] * LANES)
        return _widen(builder, value, like.dtype, _FLOATS, _INT32S, bits16)

    return _vector(types.int64, like), generate


@intrinsic
def load_one(typingctx, address, like):  # type: ignore[no-untyped-def]
    """The number at `address`, in the format of `like`, as float32."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = _stored_type(like.dtype).as_pointer()
        value = builder.load(builder.inttoptr(args[0], place), align=1)
        return _widen(builder, value, like.dtype, _FLOAT, _INT32, ir.Constant(_INT32, 16))

    return types.float32(types.int64, like), generate


@intrinsic
def load_eight(typingctx, address, step, like):  # type: ignore[no-untyped-def]
    """Eight times 16 numbers, `step` bytes apart, in the format of `like`."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address, step, _ = args
        place, bits16 = ir.VectorType(_stored_type(like.dtype), LANES).as_pointer(), ir.Constant(
            _INT32S, [16] * LANES
        )  # fmt: skip
        vectors = []
        for row in range(8):
            at = builder.add(address, builder.mul(step, ir.Constant(address.type, row)))
            value = builder.load(builder.inttoptr(at, place), align=1)
            vectors.append(_widen(builder, value, like.dtype, _FLOATS, _INT32S, bits16))
        return context.make_tuple(builder, signature.return_type, vectors)

    return types.UniTuple(_vector, 8)(types.int64, types.int64, like), generate


@intrinsic
def splat_eight(typingctx, address):  # type: ignore[no-untyped-def]
    """Eight vectors, of 16 times each of the eight float32 numbers from `address` on."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        vectors = []
        for row in range(8):
            at = builder.add(args[0], ir.Constant(args[0].type, 4 * row))
            number = builder.load(builder.inttoptr(at, _FLOAT.as_pointer()), align=4)
            vectors.append(_splat(builder, number))
        return context.make_tuple(builder, signature.return_type, vectors)

    return types.UniTuple(_vector, 8)(types.int64), generate


@intrinsic
def weigh_eight(typingctx, numbers, eight):  # type: ignore[no-untyped-def]
    """The sum of eight vectors, each times one of eight others, in order."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        numbers, eight = (cgutils.unpack_tuple(builder, vectors) for vectors in args)
        sum_of = ir.Constant(_FLOATS, [0.0] * LANES)
        for number, vector in zip(numbers, eight, strict=True):
            product = builder.fmul(number, vector, flags=("contract",))
            sum_of = builder.fadd(product, sum_of, flags=("contract",))
        return sum_of

    return _vector(numbers, eight), generate


@intrinsic
def store(typingctx, address, vector):  # type: ignore[no-untyped-def]
    """Write 16 float32 numbers from `address` on."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store(args[1], builder.inttoptr(args[0], _FLOATS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, _vector), generate


@intrinsic
def store_one(typingctx, address, number):  # type: ignore[no-untyped-def]
    """Write one float32 number at `address`."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store(args[1], builder.inttoptr(args[0], _FLOAT.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def splat(typingctx, number):  # type: ignore[no-untyped-def]
    """16 times one number."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _splat(builder, args[0])

    return _vector(types.float32), generate


@intrinsic
def multiply_add(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once where the machine can."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return _vector(_vector, _vector, _vector), generate


@intrinsic
def add(typingctx, a, b):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fadd(args[0], args[1])

    return _vector(_vector, _vector), generate


@intrinsic
def total(typingctx, vector):  # type: ignore[no-untyped-def]
    """The sum of the 16 numbers, halves first."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _fold(builder, args[0], builder.fadd)

    return types.float32(_vector), generate


@intrinsic
def larger(typingctx, a, b):  # type: ignore[no-untyped-def]
    """The larger of each pair of numbers."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return _vector(_vector, _vector), generate


@intrinsic
def where_larger(typingctx, a, b, value):  # type: ignore[no-untyped-def]
    """`value` where a is larger than b, and 0 elsewhere."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], zero)

    return _vector(_vector, _vector, _vector), generate


@intrinsic
def exp_of(typingctx, vector):  # type: ignore[no-untyped-def]
    """exp of 16 numbers, none above 88, to about 1e-7 (Cephes' reduction and series)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        def every(number):  # type: ignore[no-untyped-def]
            return ir.Constant(_FLOATS, [float(np.float32(number))] * LANES)

        def multiply_add(a, b, c):  # type: ignore[no-untyped-def]
            return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

        lowest = every(-87.0)
        x = builder.select(builder.fcmp_ordered(">", args[0], lowest), args[0], lowest)
        # 1.5 * 2 ** 23, added and taken away, rounds to a whole number.
        n = multiply_add(x, every(1.44269504), every(12582912.0))
        n = builder.fsub(n, every(12582912.0))
        r = multiply_add(n, every(-0.693359375), x)
        r = multiply_add(n, every(2.12194440e-4), r)
        p = every(1.9875691500e-4)
        for number in (
            1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
        ):  # fmt: skip
            p = multiply_add(p, r, every(number))
        p = multiply_add(builder.fmul(p, r), r, r)
        p = builder.fadd(p, every(1.0))
        exponent = builder.add(builder.fptosi(n, _INT32S), ir.Constant(_INT32S, [127] * LANES))
        power = builder.shl(exponent, ir.Constant(_INT32S, [23] * LANES))
        return builder.fmul(p, builder.bitcast(power, _FLOATS))

    return _vector(_vector), generate


@intrinsic
def largest(typingctx, vector):  # type: ignore[no-untyped-def]
    """The largest of the 16 numbers."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _fold(builder, args[0], lambda a, b: builder.select(
            builder.fcmp_ordered(">", a, b), a, b
        ))  # fmt: skip

    return types.float32(_vector), generate


@intrinsic(prefer_literal=True)
def multiply_tile(  # type: ignore[no-untyped-def]
    typingctx, rows, vectors, onto, a, a_row, a_next, b, b_next, n, out, out_row
):
    """out (rows, 16 vectors) = a (rows, n) times b (n, 16 vectors), all float32 and by address.

    With `onto` it is added to what is there. `rows` and `vectors` are constants: the sums stay in
    registers, so their product should be at most 24. A row of `a` is `a_row` bytes after the one
    before and its numbers are `a_next` apart; rows of `b` and of `out` are `b_next` and `out_row`
    apart. Sums are taken in the order of n.
    """
    n_rows, n_vectors = rows.literal_value, vectors.literal_value

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        onto, a, a_row, a_next, b, b_next, n, out, out_row = args[2:]
        number, wide = ir.IntType(64), _FLOATS.as_pointer()
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        steps = [builder.mul(a_row, ir.Constant(number, row)) for row in range(n_rows)]
        places = [
            builder.add(out, builder.add(
                builder.mul(out_row, ir.Constant(number, row)), ir.Constant(number, 64 * v)
            ))
            for row in range(n_rows)
            for v in range(n_vectors)
        ]  # fmt: skip
        start = builder.block
        loop = builder.append_basic_block("tile")
        done = builder.append_basic_block("tile.done")
        builder.cbranch(builder.icmp_signed(">", n, ir.Constant(number, 0)), loop, done)

        builder.position_at_end(loop)
        first = (ir.Constant(number, 0), a, b)
        k, at_a, at_b = phis = [builder.phi(number) for _ in first]
        sums = [builder.phi(_FLOATS) for _ in range(n_rows * n_vectors)]
        columns = [
            builder.load(
                builder.inttoptr(builder.add(at_b, ir.Constant(number, 64 * v)), wide), align=4
            )
            for v in range(n_vectors)
        ]
        after = []
        for row in range(n_rows):
            place = builder.inttoptr(builder.add(at_a, steps[row]), _FLOAT.as_pointer())
            weight = _splat(builder, builder.load(place, align=4))
            for v in range(n_vectors):
                product = builder.fmul(weight, columns[v], flags=("contract",))
                sum_of = sums[row * n_vectors + v]
                after.append(builder.fadd(product, sum_of, flags=("contract",)))
        following = [
            builder.add(k, ir.Constant(number, 1)),
            builder.add(at_a, a_next),
            builder.add(at_b, b_next),
        ]
        for phi, begin, value in zip(phis, first, following, strict=True):
            phi.add_incoming(begin, start)
            phi.add_incoming(value, loop)
        for phi, value in zip(sums, after, strict=True):
            phi.add_incoming(zero, start)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following[0], n), loop, done)

        builder.position_at_end(done)
        for i, value in enumerate(after):
            total_of = builder.phi(_FLOATS)
            total_of.add_incoming(zero, start)
            total_of.add_incoming(value, loop)
            after[i] = total_of
        for i, value in enumerate(after):
            place = builder.inttoptr(places[i], wide)
            before = builder.select(onto, builder.load(place, align=4), zero)
            builder.store(builder.fadd(value, before), place, align=4)
        return context.get_dummy_value()

    signature = types.void(rows, vectors, types.boolean, *[types.int64] * 8)
    return signature, generate


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at `address`, which need not exist, in the second cache.

    What is asked for in the first one waits for a place there, and reading waits with it.
    """

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [place], ir.FunctionType(ir.VoidType(), [place, *[_INT32] * 3])
        )
        to_read = [ir.Constant(_INT32, flag) for flag in (0, 2, 1)]
        builder.call(function, [builder.inttoptr(args[0], place), *to_read])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def stay_apart(typingctx):  # type: ignore[no-untyped-def]
    """Keeps the function that calls this out of its callers, which compile much faster so."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def is_scaled(typingctx, like):  # type: ignore[no-untyped-def]
    """Whether numbers of the format of `like` need a scale; known when a function is compiled."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return ir.Constant(ir.IntType(1), int(like.dtype == types.int8))

    return types.boolean(like), generate


@intrinsic
def as_float(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 that has these 32 bits."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def floats_at(typingctx, address):  # type: ignore[no-untyped-def]
    """An address as a pointer to float32, for `numba.carray`."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], _FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate
