"""Check whether AITER has kernels of a libtype for a shape on a device."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from tunedgemm.plugin import Device, Platform, Shape
from tunedgemm.tools.launching import parse_dtype

_SHUFFLED = "aiter16x16"


@attrs.frozen
class Limit:
    """What a libtype takes of an op.

    Attributes:
        since: the first version of AITER whose kernels it names.
        gfx: its architectures.
        dtypes, outdtypes: of the operands and the output; ``fp8`` is the architecture's.
        scale, layout: kind of the scales, and layout of the weight.
        bias: whether a bias in the dtype of operands and output is fused.
    """

    since: str
    gfx: tuple[str, ...]
    dtypes: tuple[str, ...]
    outdtypes: tuple[str, ...]
    scale: str = "none"
    layout: str = "row"
    bias: bool = False


_CDNA, _ALL = ("gfx942", "gfx950"), ("gfx942", "gfx950", "gfx1250")
_EXPERTS = ("bf16", "fp16")
#: libtype -> op -> limit; fmoe's is further below.
LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "flydsl": {
        "a16w16": Limit("0.1.16 or newer", _CDNA, ("bf16", "fp16"), ("bf16", "fp16", "fp32"), bias=True),
        "a8w8_bpreshuffle": Limit("0.1.18 or newer", _ALL, ("fp8", "int8"), ("bf16", "fp16"), "row", _SHUFFLED),
        "fmoe": Limit("newer than 0.1.20.post1", _CDNA, _EXPERTS, _EXPERTS),
    },
    "opus": {
        "a16w16": Limit("0.1.16 or newer", _CDNA, ("bf16",), ("bf16", "fp32")),
        "a8w8_blockscale_bpreshuffle": Limit("0.1.18 or newer", ("gfx942",), ("fp8",), ("bf16",), "block", _SHUFFLED),
    },
    "gluon": {
        "a16w16": Limit("0.1.16 or newer", ("gfx1250",), ("bf16", "fp16"), ("bf16", "fp16")),
        "a8w8": Limit("0.1.12 or newer", ("gfx950",), ("fp8", "int8"), ("bf16", "fp16"), "row"),
        "a8w8_blockscale": Limit("0.1.9 or newer", ("gfx950",), ("fp8",), ("bf16", "fp16"), "block"),
    },
    "aiter": {"fmoe": Limit("newer than 0.1.20.post1 (auto: 0.1.5 or newer)", _CDNA, _EXPERTS, _EXPERTS)},
}

#: Rows of other libtypes that a backend runs. AITER's fused MoE has kernels of several libtypes.
#: Its Triton product is a Gluon kernel on gfx1250.
ROWS: Mapping[str, tuple[str, ...]] = {
    "gluon": ("a16w16:triton",),
    "aiter": ("fmoe:asm", "fmoe:asm+ck", "fmoe:asm+flydsl", "fmoe:ck+flydsl", "fmoe:flydsl+ck", "fmoe:flydsl+asm"),
}


def platforms_of(libtype: str) -> tuple[Platform, ...]:
    """Return the architectures of each op of a libtype, and the AITER that it needs."""
    flydsl = ("flydsl",) if libtype == "flydsl" else ()
    return tuple(Platform(limit.gfx, needs=(f"amd-aiter {limit.since}", *flydsl), ops=(op,)) for op, limit in LIMITS[libtype].items())


def unsupported(libtype: str, shape: Shape, device: Device) -> str:
    """Return why AITER has no kernel of the libtype for the shape, or an empty text."""
    limit = LIMITS[libtype][shape.op]
    if device.kind != "amd" or device.gfx not in limit.gfx:
        return f"{libtype}: AITER has kernels of {shape.op} for {', '.join(limit.gfx)} (got {device.gfx})"
    if shape.m == 0:
        return "an empty batch needs no kernel"
    reason = _unfit_experts(shape, device) if shape.op == "fmoe" else _unfit(limit, shape, device)
    return f"{libtype}: {reason}" if reason else ""


def is_aiters_choice(shape: Shape) -> bool:
    """Tell whether AITER's fused_moe quantises the hidden states of a shape to the dtype of the shape."""
    fields = dict(shape.extra)
    if fields["q_type"] == "per_1x32" and fields["act"] not in ("silu", "gelu"):
        return False  # variables and the number of tokens decide
    return str(fields["q_dtype_a"]) == ("bf16" if fields["q_dtype_w"] == "int4" else str(fields["q_dtype_w"]))


def fp8_of(device: Device) -> str:
    """Return the fp8 dtype that AITER means on an architecture."""
    return parse_dtype("fp8", device.gfx)


def _unfit(limit: Limit, shape: Shape, device: Device) -> str:
    """Return why a product is outside a limit."""
    dtypes = tuple(fp8_of(device) if dtype == "fp8" else dtype for dtype in limit.dtypes)
    if shape.dtype not in dtypes:
        return f"dtype must be {' or '.join(dtypes)} (got {shape.dtype})"
    if shape.outdtype not in limit.outdtypes:
        return f"output dtype must be {' or '.join(limit.outdtypes)} (got {shape.outdtype})"
    if shape.scale != limit.scale or shape.layout != limit.layout:
        return f"scales must be {limit.scale} and the weight's layout {limit.layout} (got {shape.scale} and {shape.layout})"
    if shape.dtype in _EXPERTS and shape.outdtype not in (shape.dtype, "fp32"):
        return f"output dtype must be {shape.dtype} or fp32 (got {shape.outdtype})"
    if shape.bias and not (limit.bias and shape.bias_dtype == shape.outdtype == shape.dtype):
        return "fuses a bias in the dtype of operands and output" if limit.bias else "fuses no bias"
    return ""


def _unfit_experts(shape: Shape, device: Device) -> str:
    """Return why fused experts are none that AITER's rows name."""
    fields = dict(shape.extra)
    if shape.layout != _SHUFFLED:
        return f"the weights' layout must be {_SHUFFLED} (got {shape.layout})"
    if shape.outdtype != shape.dtype:
        return f"output dtype must be {shape.dtype} (got {shape.outdtype})"
    other = {name for name in ("options", "gate_mode", "expert_parallel") if fields.get(name)}
    if other:
        return f"takes no {' and no '.join(sorted(other))}"
    if fields["q_type"] == "per_1x32" and fields.get("scale_order", "aiter32x8") != "aiter32x8":
        return "scales must be shuffled"
    weight = str(fields["q_dtype_w"])
    if weight.startswith("fp8") and weight != fp8_of(device):
        return f"weights must be {fp8_of(device)} (got {weight})"
    return ""
