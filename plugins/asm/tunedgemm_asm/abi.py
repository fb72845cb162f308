"""Describe the layouts of kernel argument buffers, by name.

Bytes that belong to no field are zero. The sources for AITER's layouts agree: the structs of its
launchers (``csrc/py_itfs_cu/asm_*gemm_*.cu``, ``asm_a8w8_blockscale_bpreshuffle.cu``) and the
``.args`` metadata of its code objects. Every argument has a slot of 16 bytes. A kernel that does
not read the last fields may declare fewer bytes; the launch still passes all of them, as AITER
does.

AITER's bf16 kernels, by their code: the bias is bf16 whatever the output is. With several splits,
the workgroups of the first split zero their output tile and set its semaphore to the number of
splits. All splits wait for that, add their partials by atomics (bf16 pairs or fp32) and decrement
the semaphore, which ends at zero. N has no tail.

``tunedgemm-bf16`` is the layout of `tunedgemm_asm_gcn`. Fields are naturally aligned, strides are
in bytes. ``tiles_m`` is ceil(M / tile_m), ``tiles_n`` is ceil(N / tile_n), and the grid is (tiles_m
* tiles_n, 1, splits). Each split has ``k_part`` elements of K, a multiple of 64; the last may have
fewer. ``workspace`` holds tile_m * tile_n fp32 partials for each split of each tile. ``semaphore``
holds one 32-bit zero for each tile and ends at zero. Only split-K kernels read both.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from types import MappingProxyType

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.launching import ARCHITECTURES, parse_dtype

#: Architectures with kernels of these layouts, those whose mfma multiplies fp8, and its kind.
FP8 = {gfx: each.fp8 for gfx, each in ARCHITECTURES.items() if each.matrix == "mfma" and each.fp8}
#: Kind of a field -> ``struct`` format of its little-endian value.
KINDS = MappingProxyType({"pointer": "<Q", "u32": "<I", "f32": "<f"})
_LEAST = MappingProxyType({"pointer": 0, "u32": 0})
_MOST = MappingProxyType({"pointer": (1 << 64) - 1, "u32": (1 << 32) - 1})


@attrs.frozen
class Field:
    """One kernel argument.

    Attributes:
        name: name of the argument.
        offset: offset of its first byte in the buffer.
        kind: one of `KINDS`.
    """

    name: str
    offset: int = attrs.field(validator=attrs.validators.ge(0))
    kind: str = attrs.field(validator=attrs.validators.in_(KINDS))

    @property
    def bytes(self) -> int:
        """Return the size of the value in bytes."""
        return struct.calcsize(KINDS[self.kind])


@attrs.frozen
class Abi:
    """Layout of an argument buffer, and what all its kernels have in common.

    Attributes:
        name: name of the layout in a pack's descriptor.
        ops: ops that its kernels compute.
        dtypes: supported dtypes of ``x``, ``weight``, ``out`` and ``bias``; empty without that
            operand.
        fields: arguments in the order of their offsets.
        sizes: argument bytes that a code object may declare, ascending; the largest is passed.
        sub_k: granularity of a split along K, in elements, where a manifest has none.
        layout: layout of a shuffled weight.
        threads: threads of a workgroup.
        for_splits: fields that a split-K kernel must read.
        bias: whether its kernels can add a bias, where a manifest does not say.
    """

    name: str
    ops: tuple[str, ...]
    dtypes: Mapping[str, tuple[str, ...]] = attrs.field(converter=MappingProxyType, hash=False)
    fields: tuple[Field, ...]
    sizes: tuple[int, ...]
    sub_k: int
    layout: str
    threads: int = 256
    for_splits: tuple[str, ...] = ()
    bias: bool = False

    def __attrs_post_init__(self) -> None:
        end = 0
        for field in self.fields:
            if field.offset < end or field.offset % field.bytes:
                raise PluginError(f"abi {self.name}: field {field.name} at {field.offset} overlaps the previous field or is unaligned")
            end = field.offset + field.bytes
        if list(self.sizes) != sorted(self.sizes) or end > self.size:
            raise PluginError(f"abi {self.name}: fields end at {end}, beyond {self.sizes} bytes")
        for dtype in (dtype for dtypes in self.dtypes.values() for dtype in dtypes):
            parse_dtype(dtype)

    @property
    def size(self) -> int:
        """Return the number of bytes passed to a kernel."""
        return self.sizes[-1]

    def field(self, name: str) -> Field:
        """Return the field of this name.

        Raises:
            PluginError: the layout has no such field.
        """
        field = self._by_name.get(name)
        if field is None:
            raise PluginError(f"abi {self.name}: no field {name!r}; fields: {', '.join(self._by_name)}")
        return field

    @functools.cached_property
    def _by_name(self) -> Mapping[str, Field]:
        return {field.name: field for field in self.fields}

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """Return the buffer with these values; other fields are 0.

        Raises:
            PluginError: a value has no field, or does not fit it.
        """
        buffer = bytearray(self.size)
        for name, value in values.items():
            field = self.field(name)
            if field.kind != "f32" and not _LEAST[field.kind] <= value <= _MOST[field.kind]:
                raise PluginError(f"abi {self.name}: {name}={value} does not fit its field of {field.bytes * 8} bits")
            struct.pack_into(KINDS[field.kind], buffer, field.offset, value)
        return bytes(buffer)


def _slots(*names: str) -> tuple[Field, ...]:
    """Return fields 16 bytes apart: ``*`` marks pointers and ``%`` floats, others are unsigned."""
    kinds = {"*": "pointer", "%": "f32"}
    return tuple(Field(name.rstrip("*%"), 16 * index, kinds.get(name[-1], "u32")) for index, name in enumerate(names))


def _dtypes(x: str, out: str, bias: str = "") -> Mapping[str, tuple[str, ...]]:
    return {"x": tuple(x.split()), "weight": tuple(x.split()), "out": tuple(out.split()), "bias": tuple(bias.split())}


# Head of AITER's bf16 and fp4 layouts. Only strides *0 are set; those of out and c are equal.
_HEAD = (
    *("out*", "c*", "a*", "b*", "alpha%", "beta%"),
    *("stride_out0", "stride_out1", "stride_c0", "stride_c1", "stride_a0", "stride_a1", "stride_b0", "stride_b1"),
    *("m", "n", "k"),
)
# Head of AITER's int8 and block-scaled fp8 layouts.
_SCALED_HEAD = ("out*", "a*", "b*", "a_scale*", "b_scale*", "bias*", "m", "n", "k", "stride_a", "stride_b", "stride_out", "splits")
# 4-byte numbers of the plugin's own layout.
_OWN_NUMBERS = (
    *("stride_out", "stride_a", "stride_b", "m", "n", "k"),
    *("tiles_m", "tiles_n", "splits", "k_part", "out_is_bf16", "add_bias"),
)

# Strides in bytes. Kernels without split-K declare no semaphore. The bias is always bf16.
BF16GEMM = Abi(
    name="aiter-bf16gemm",
    ops=("a16w16",),
    dtypes=_dtypes("bf16", "bf16 fp32", "bf16"),
    fields=_slots(*_HEAD, "splits", "out_is_bf16", "bias*", "add_bias", "semaphore*"),
    sizes=(336, 352),
    sub_k=64,
    layout="aiter16x16",
    for_splits=("semaphore",),
)
I8GEMM = Abi(
    name="aiter-i8gemm",  # strides: a, b in elements, out in bytes; 112x256 declares three unused pointers
    ops=("a8w8_bpreshuffle",),
    dtypes=_dtypes("int8", "bf16", "fp32"),
    fields=_slots(*_SCALED_HEAD),
    sizes=(208, 256),
    sub_k=128,
    layout="aiter16x16",
    for_splits=("splits",),
    bias=True,
)
F4GEMM = Abi(
    name="aiter-f4gemm",  # strides: operands in 4-bit values, out in elements, scales in bytes; log2_splits only with split-K
    ops=("a4w4_blockscale",),
    dtypes=_dtypes("fp4x2", "bf16"),
    fields=_slots(
        *_HEAD, "a_scale*", "b_scale*", "stride_a_scale0", "stride_a_scale1", "stride_b_scale0", "stride_b_scale1", "log2_splits"
    ),
    sizes=(368, 384),
    sub_k=256,
    layout="aiter16x16",
    for_splits=("log2_splits",),
)
FP8GEMM_BLOCKSCALE = Abi(
    name="aiter-fp8gemm-blockscale",  # strides as for int8; scales of 1x128 and 128x128
    ops=("a8w8_blockscale_bpreshuffle",),
    dtypes=_dtypes("fp8_e4m3fnuz fp8_e4m3fn", "bf16", "fp32"),
    fields=_slots(*_SCALED_HEAD, "scale_m", "scale_n", "scale_k"),
    sizes=(256,),
    sub_k=128,
    layout="aiter16x16",
    for_splits=("splits",),
    bias=True,
)

OWN_BF16 = Abi(
    name="tunedgemm-bf16",
    ops=("a16w16",),
    dtypes=_dtypes("bf16", "bf16 fp32", "bf16 fp32"),
    fields=(
        *(Field(name, 8 * index, "pointer") for index, name in enumerate(("out", "a", "b", "bias", "workspace", "semaphore"))),
        *(Field(name, 0x30 + 4 * index, "u32") for index, name in enumerate(_OWN_NUMBERS)),
    ),
    sizes=(96,),
    sub_k=64,
    layout="aiter16x16",
    for_splits=("workspace", "semaphore"),
)

#: Every layout that can be launched, by name.
ABIS: Mapping[str, Abi] = MappingProxyType({abi.name: abi for abi in (BF16GEMM, I8GEMM, F4GEMM, FP8GEMM_BLOCKSCALE, OWN_BF16)})
