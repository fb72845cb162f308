"""Check which shapes and architectures Composable Kernel's instances support, as data.

They answer for absent devices too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits, scale_order

from tunedgemm_ck.xdl.names import FORMS, WAVE, XdlInstance
from tunedgemm_ck.xdl.resources import lds
from tunedgemm_ck.xdl.template import DEVICE_OPS

_FLOATS = ("bf16", "fp16")
_FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")

#: Dtypes that the matrix cores of an architecture multiply; these instances use mfma.
DTYPES = {
    gfx: (*_FLOATS, "int8", *(dtype for dtype, has in ((each.fp8, each.fp8), ("fp4x2", each.fp4)) if has))
    for gfx, each in ARCHITECTURES.items()
    if each.matrix == "mfma"
}

#: CDNA's buffers count bytes in 32 unsigned bits; CK counts elements in 32 signed bits.
MOST_BYTES, MOST_ELEMENTS = 1 << 32, 1 << 31

#: Ops whose device op counts bytes in 32 signed bits.
FEWER_BYTES = dict.fromkeys(("a16w16", "a8w8", "batched_bf16", "batched_a8w8"), 1 << 31)

#: Tiles of K that a pipeline has in flight; K, or a part of it, must have more. The first pipeline
#: of a plain weight takes any number. The second takes as many as fill a share of memory's
#: bandwidth (`_under_way`).
_STAGES = {1: 0, 3: 2, 4: 3, 5: 3}
_SHUFFLED_STAGES = {1: 2, 2: 3, 3: 2}

#: The largest splitK, a logarithm: AITER's tuner tries no larger one.
MOST_SPLIT = 3

#: Elements of K that share a scale of fp8.
SCALED_K = 128

#: Rows of the weight that layout aiter16x16 interleaves; mxfp4 reads zeros beyond the last.
SHUFFLED_ROWS = 16


@attrs.frozen
class Accepts:
    """Inputs that an op accepts: dtypes of x, kind of scales, layout of the weight, bias."""

    dtypes: tuple[str, ...]
    scale: str
    layout: str
    bias: bool


ACCEPTS = {
    "a16w16": Accepts(_FLOATS, "none", "row", True),
    "a8w8": Accepts(("int8", *_FP8), "row", "row", True),
    "a8w8_bpreshuffle": Accepts(_FP8, "row", "aiter16x16", True),
    "a8w8_blockscale": Accepts(_FP8, "block", "row", False),
    "a8w8_blockscale_bpreshuffle": Accepts(_FP8, "block", "aiter16x16", False),
    "a4w4_blockscale": Accepts(("fp4x2",), "block", "aiter16x16", False),
    "batched_bf16": Accepts(_FLOATS, "none", "row", True),
    "batched_a8w8": Accepts(("int8", *_FP8), "row", "row", True),
}


def none_fits(misfits: Iterable[str | None]) -> str | None:
    """Return why none of some instances fits, as the first of them says; None where one does."""
    first: str | None = None
    for reason in misfits:
        if not reason:
            return None
        first = first or reason
    return f"no instance fits: {first}"


@functools.lru_cache(maxsize=4096)
def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why the op has no instance for dtypes, scales and layout on a device, or None."""
    return not_accepted(shape, device, "ck", ACCEPTS[shape.op])


def not_accepted(shape: Shape, device: Device, libtype: str, accepts: Accepts) -> str | None:
    """Return why a library has no instance for a shape's dtypes, scales, layout or bytes, or None."""
    if device.gfx not in DTYPES:
        return f"{libtype} supports {', '.join(DTYPES)} (got {device.gfx})"
    most = FEWER_BYTES.get(shape.op, MOST_BYTES)
    checks = (
        (shape.dtype in accepts.dtypes, f"operands in {', '.join(accepts.dtypes)} (got {shape.dtype})"),
        (shape.dtype in DTYPES[device.gfx], f"operands in {', '.join(DTYPES[device.gfx])} on {device.gfx} (got {shape.dtype})"),
        (shape.outdtype in _FLOATS, f"an output in {' or '.join(_FLOATS)} (got {shape.outdtype})"),
        (shape.scale == accepts.scale, f"scales of kind {accepts.scale} (got {shape.scale})"),
        (not scale_order(shape).startswith("m_major"), f"scales of x that are row-major (got {scale_order(shape)})"),
        (shape.layout == accepts.layout, f"the weight in layout {accepts.layout} (got {shape.layout})"),
        (accepts.bias or not shape.bias, "no bias"),
        (_bytes(shape) < most, f"operands of less than {most} bytes each (got {_bytes(shape)})"),
        (_elements(shape) < MOST_ELEMENTS, f"operands of less than {MOST_ELEMENTS} elements each (got {_elements(shape)})"),
    )
    return "; ".join(f"{libtype} accepts {wanted}" for right, wanted in checks if not right) or None


def _elements(shape: Shape) -> int:
    """Return the elements of the largest operand of one product."""
    return max(shape.m * shape.k, shape.n * shape.k, shape.m * shape.n)


def _bytes(shape: Shape) -> int:
    """Return the bytes of the largest operand of one product."""
    bits = dtype_bits(shape.dtype)
    return max(shape.m * shape.k * bits, shape.n * shape.k * bits, shape.m * shape.n * dtype_bits(shape.outdtype)) // 8


@functools.lru_cache(maxsize=16384)
def unfit_sizes(instance: XdlInstance, split: int, shape: Shape, device: Device) -> str | None:
    """Return why an instance cannot serve a supported shape's sizes by CK's rules, or None."""
    k, deep = shape.k, instance.sides[2]
    vector, store = max(instance.a_k1, instance.b_k1) * deep // instance.k, max(instance.store[:2])
    if k % vector:
        return f"K must be a multiple of {vector}, which a thread loads at a time (got {k})"
    if shape.n % store:
        return f"N must be a multiple of {store}, which a thread stores at a time (got {shape.n})"
    whole = SHUFFLED_ROWS if instance.op == "a4w4_blockscale" else instance.n
    if shape.layout != "row" and (shape.n % whole or k % deep):
        return f"N and K must be multiples of {whole} and {deep}: a shuffled weight is not padded (got {shape.n} and {k})"
    if instance.scale and k % SCALED_K:
        return f"K must be a multiple of {SCALED_K}, which share a scale (got {k})"
    if lds(instance) > ARCHITECTURES[device.gfx].shared_bytes:
        return f"{instance.name}: {lds(instance)} bytes of LDS exceed the {ARCHITECTURES[device.gfx].shared_bytes} of {device.gfx}"
    return _no_split(split, instance, shape, device) or _too_short(split, instance, shape)


def _too_short(split: int, instance: XdlInstance, shape: Shape) -> str | None:
    """Return why K, or a part of it, has too few tiles for the pipeline, or None."""
    parts = 1 << split if DEVICE_OPS[shape.op].split else 1
    deep, stages = instance.sides[2], _under_way(instance)
    steps = -(-shape.k // (deep * parts))
    if steps > stages:
        return None
    return f"K must have more than {stages} tiles of {deep} for pipeline v{instance.pipeline} (got {shape.k} in {parts} parts)"


def _under_way(instance: XdlInstance) -> int:
    """Return the tiles of K that the pipeline of an instance loads ahead."""
    if instance.op == "a8w8_bpreshuffle":
        return _SHUFFLED_STAGES.get(instance.pipeline, 3)
    if instance.pipeline != 2:
        return _STAGES[instance.pipeline]
    # Each compute unit has 32 KiB in flight, shared by blocks of fewer than four waves.
    share = (32 << 10) // max(4 * WAVE // instance.threads, 1)
    return min(max(-(-share // ((instance.m + instance.n) * instance.k * FORMS[instance.op].bits // 8)), 2), 8)


def _no_split(split: int, instance: XdlInstance, shape: Shape, device: Device) -> str | None:
    """Return why K cannot be split into ``1 << split`` parts, or None.

    A device op that ignores splitK takes any.
    """
    if not DEVICE_OPS[shape.op].split or split == 0:
        return None if split >= 0 else f"splitK is a logarithm and must be 0 or more (got {split})"
    if not 0 < split <= MOST_SPLIT:
        return f"splitK is a logarithm and must be 0 to {MOST_SPLIT} (got {split})"
    if shape.bias:
        return "splitK is not supported with a bias, which every part of K would add"
    if shape.outdtype == "bf16" and device.gfx == "gfx90a":
        return "splitK of a bf16 output needs atomic addition of bf16, which gfx90a lacks"
    deep = instance.sides[2]
    if shape.k < deep << split or (instance.scale and shape.k % (SCALED_K << split)):
        return f"K must have {1 << split} parts of at least {deep} (got {shape.k})"
    if shape.dtype == "fp4x2" and shape.k % (deep << split):
        return f"K must be a multiple of {deep << split} (got {shape.k})"
    return None
