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
        undefined, first = ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INT32, 0)
        one = builder.insert_element(undefined, args[0], first)
        return builder.shuffle_vector(one, undefined, ir.Constant(_INT32S, [0] * LANES))

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
        (v,) = args
        for half in (8, 4, 2, 1):
            upper = [lane + half if lane < half else 0 for lane in range(LANES)]
            moved = builder.shuffle_vector(
                v, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INT32S, upper)
            )
            v = builder.fadd(v, moved)
        return builder.extract_element(v, ir.Constant(_INT32, 0))

    return types.float32(_vector), generate


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at `address`, which need not exist."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [place], ir.FunctionType(ir.VoidType(), [place, *[_INT32] * 3])
        )
        to_read_often = [ir.Constant(_INT32, flag) for flag in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(args[0], place), *to_read_often])
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
