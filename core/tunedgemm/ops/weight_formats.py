"""Formats of weights as data: one record each, for products with 16-bit activations. No torch.

`tunedgemm.ops.formats.weight_only` decodes and quantises any format from its record.
"""

from __future__ import annotations

import attrs

from tunedgemm.errors import OperandError
from tunedgemm.shape import Shape

#: Names of the fields of `Shape.extra`.
FORMAT, GROUP = "w_format", "w_group"
#: Values of the codes of e2m1.
E2M1 = tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
#: Bits of scales by short dtype, except those in the dtype of the activations.
_SCALE_BITS = {"fp32": 32, "fp8_e4m3fn": 8, "e8m0": 8, "": 16}


@attrs.frozen
class WeightFormat:
    """One format of a weight [N, K].

    An element of the stored tensor holds ``len(order)`` codes. Code *order[j]* of them has the bits
    from ``j * bits``, the lowest first. Wrong orders cannot be detected: any bits are a weight.

    Attributes:
        name: field ``w_format`` of the shape.
        bits: bits of a code.
        dtypes: short dtypes of the stored tensor; bytes may stand for a packed dtype.
        values: value of each code; empty if the stored dtype has the values.
        groups: valid numbers of elements of K that share a scale; 0 for the whole row.
        scale: short dtypes of the scales; empty for that of the activations.
        rows: rows that share a scale; 0 for all.
        order: positions of the codes of one element.
        along: the packed dimension, ``k`` or ``n``.
        is_kn: whether weight, scales and zero points are stored transposed, [K, N] and [groups, N].
        zeros: what is added to a stored zero point, modulo ``2 ** bits``; None for a format without
            zero points. They are packed along N in the same order. GPTQ's are 0 to 15, stored minus
            1: a stored 15 is 0, as GPTQModel and AutoGPTQ's CUDA kernels read it. Kernels of
            exllama and AutoGPTQ's Triton read 16, which no quantiser means. Marlin takes none.
        has_index: whether an index [K] names the group of each element of K.
        has_global: whether a float32 value multiplies the accumulator.
        exact: short dtypes that hold every value times its scale without rounding.
    """

    name: str
    bits: int
    dtypes: tuple[str, ...]
    values: tuple[float, ...] = ()
    groups: tuple[int, ...] = (0,)
    scale: tuple[str, ...] = ()
    rows: int = 1
    order: tuple[int, ...] = (0,)
    along: str = "k"
    is_kn: bool = False
    zeros: int | None = None
    has_index: bool = False
    has_global: bool = False
    exact: tuple[str, ...] = ()

    @property
    def per(self) -> int:
        """Return the codes per stored element."""
        return len(self.order)

    def turned(self, n: int, k: int) -> tuple[int, int]:
        """Return sizes along N and K in the order in which they are stored."""
        return (k, n) if self.is_kn else (n, k)

    def sizes(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """Return N and K of a weight by the sizes of its stored tensor."""
        n, k = self.turned(*stored)
        return (n, k * self.per) if self.along == "k" else (n * self.per, k)

    def scale_sizes(self, n: int, k: int, group: int) -> tuple[int, ...]:
        """Return the sizes of the scales."""
        return self.turned(-(-n // self.rows), k // (group or k)) if self.rows else ()

    def zero_sizes(self, n: int, k: int, group: int) -> tuple[int, int]:
        """Return the sizes of the packed zero points."""
        return self.turned(-(-n // self.per), k // (group or k))

    def stored_bits(self, n: int, k: int, group: int) -> int:
        """Return the bits of the weight, its scales, zero points, index and global scale."""
        groups = k // (group or k)
        scales = (-(-n // self.rows) if self.rows else 1) * groups * _SCALE_BITS[(*self.scale, "")[0]]
        zeros = 0 if self.zeros is None else n * groups * (self.bits if self.dtypes else _SCALE_BITS[""])
        return n * k * self.bits + scales + zeros + 32 * (self.has_index * k + self.has_global)


_INT4 = WeightFormat("gptq_int4", 4, ("int32",), tuple(range(-8, 8)), (32, 64, 128, 0), order=tuple(range(8)), is_kn=True)
_ZP = attrs.evolve(_INT4, name="gptq_int4_zp", values=tuple(range(16)), zeros=1)
_V2 = attrs.evolve(_ZP, name="gptq_int4_zp_v2", zeros=0)
_INT8 = attrs.evolve(_INT4, name="gptq_int8", bits=8, values=tuple(range(-128, 128)), order=tuple(range(4)))
_FP8 = WeightFormat("fp8_channel", 8, ("fp8_e4m3fn",), scale=("fp32",))
_MX = attrs.evolve(_FP8, name="mxfp8", groups=(32,), scale=("e8m0", "uint8"), exact=("bf16",))
_MXFP4 = attrs.evolve(_MX, name="mxfp4", bits=4, dtypes=("fp4x2", "uint8"), values=E2M1, order=(0, 1))

#: Formats by name; a further format is one record.
FORMATS: dict[str, WeightFormat] = {
    each.name: each
    for each in (
        _INT4,
        attrs.evolve(_INT4, name="gptq_int4_order", has_index=True),
        _ZP,
        attrs.evolve(_ZP, name="gptq_int4_zp_order", has_index=True),
        _V2,
        attrs.evolve(_V2, name="gptq_int4_zp_v2_order", has_index=True),
        _INT8,
        attrs.evolve(_INT8, name="gptq_int8_order", has_index=True),
        attrs.evolve(_V2, name="awq_int4", along="n", order=(0, 2, 4, 6, 1, 3, 5, 7)),
        attrs.evolve(_INT4, name="ct_int4", is_kn=False),
        attrs.evolve(_V2, name="ct_int4_zp", is_kn=False),
        attrs.evolve(_INT8, name="ct_int8", is_kn=False),
        WeightFormat("int8_channel", 8, ("int8",), scale=("fp32",)),
        _FP8,
        attrs.evolve(_FP8, name="fp8_tensor", rows=0),
        attrs.evolve(_FP8, name="fp8_block", rows=128, groups=(128,)),
        _MX,
        _MXFP4,
        attrs.evolve(_MXFP4, name="nvfp4", groups=(16,), scale=("fp8_e4m3fn",), has_global=True, exact=("bf16", "fp16")),
    )
}
#: Formats of ops that have one; field `FORMAT` names those of a16wn.
FORMAT_OF_OP = {
    op: FORMATS[name]
    for op, name in {"a16w4_blockscale": "mxfp4", "a4w4_blockscale": "mxfp4", "a8w8_mxfp8": "mxfp8", "a4w4_nvfp4": "nvfp4"}.items()
}


def format_named(name: str) -> WeightFormat:
    """Return the format of a name.

    Raises:
        OperandError: an unknown format.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise OperandError(f"a16wn: unknown w_format (got {name!r}); use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(shape: Shape) -> WeightFormat:
    """Return the format of a shape's weight."""
    return FORMAT_OF_OP.get(shape.op) or FORMATS[str(shape[FORMAT])]


def group_of(shape: Shape) -> int:
    """Return the elements of K that share a scale of a shape's weight; 0 for the whole row."""
    return int(dict(shape.extra).get(GROUP, format_of(shape).groups[0]))
