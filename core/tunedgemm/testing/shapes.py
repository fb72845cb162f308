"""Shapes and devices of the conformance suite: layers of real models, and awkward sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape

#: Devices that need not be present: `supports` and `enumerate_solutions` answer for each.
DEVICES = (
    Device("gfx942", 304, "amd-instinct-mi300x"),
    Device("gfx950", 256, "amd-instinct-mi355x"),
    Device("sm_90", 132, "nvidia-h200"),
    Device("cpu-avx512", 16),
)

#: (M, N, K), then the fields that differ from the op's plain shape
_SIZES: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((1, 1280, 8192), {}),  # Llama 3 70B, qkv, tensor parallel 8: decoding one token
    ((127, 512, 512), {}),  # a prime M
    ((16, 256, 392), {}),  # K: a multiple of 8 and of no tile
    ((5, 96, 99), {}),  # an odd K: rows that are not 16-byte aligned
    ((32, 16, 2048), {}),  # the narrowest N
    ((33, 130, 72), {}),  # ragged in all three
    ((64, 1152, 896), {"epilogue": "bias"}),  # Qwen 2.5 0.5B, qkv with bias
    ((3, 160, 256), {"epilogue": "bias", "bias_dtype": "fp32"}),
    ((8, 256, 7168), {"outdtype": "fp32"}),  # DeepSeek V3, router
    ((24, 320, 640), {"dtype": "fp16", "outdtype": "fp16"}),
    ((0, 256, 512), {}),  # an empty batch
    ((0, 256, 512), {"epilogue": "bias"}),
)  # fmt: skip

#: Sizes that a CPU, or an interpreter of kernels on one, would take long over.
_LARGE: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((1024, 4096, 4096), {}),  # Llama 3 8B, output projection, prefill
    ((4099, 2048, 1408), {}),  # a prime M beyond one wave of tiles
)


def shapes_of(op_name: str, large: bool = False) -> tuple[Shape, ...]:
    """Return the conformance shapes of an op: its examples, else those here that its table can express.

    Args:
        op_name: the name of a registered op; raises UnknownOpError for another.
        large: whether to add sizes meant for a GPU.
    """
    op = op_named(op_name)
    if op.examples or op.large:
        return tuple(dict.fromkeys((*op.examples, *op.large) if large else op.examples))
    return tuple(dict.fromkeys(_expressible(op, (*_SIZES, *_LARGE) if large else _SIZES)))


def _expressible(op: Op, sizes: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...]) -> Iterator[Shape]:
    for (m, n, k), fields in sizes:
        try:
            plain = op.columns.parse({"M": str(m), "N": str(n), "K": str(k)})
            shape = attrs.evolve(plain, **fields)
            stored = op.columns.parse(op.columns.format(shape))
        except UserError:  # the op restricts its sizes, or needs columns beyond these
            continue
        if attrs.evolve(stored, bias_dtype=shape.bias_dtype) == shape:
            yield shape
