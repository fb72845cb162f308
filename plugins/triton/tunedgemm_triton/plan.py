"""Plan the launches of one call, in order, and their buffers in a workspace, as data.

The launcher and the tests in Triton's interpreter run the same plans. A plan does not depend on the
values of operands, so a captured call serves any of them.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import scale_order

from tunedgemm_triton.build import TYPES, Constant, Program
from tunedgemm_triton.limits import batches_of
from tunedgemm_triton.names import Gemm, Gemv, KernelConfig, Streamk, Tma, function_of
from tunedgemm_triton.resources import ceil_div, described, grid_of, partial_bytes, promotes, tiles_of

#: Alignment of buffers in the workspace, in bytes.
_ALIGNMENT = 256
#: The largest divisor of N and K that a program of mxfp4 is compiled for. K / 2 bytes are then
#: whole loads of 16 bytes in every row, and its K / 32 scales whole loads of 8.
_MULTIPLE = 256
#: Function to its file in `kernels`, where that has another name.
_MODULES = {"tma": "persistent", "tma_halves": "halves"}
#: Order of x's block scales to the constant SCALE; that of others is the kind of scales.
_SCALES_BY_ORDER = {"m_major": "column", "m_major_padded": "padded"}


@attrs.frozen
class Step:
    """One launch of a plan.

    Attributes:
        program: the compiled function.
        grid: programs along the three axes.
        values: (parameter, value) of each parameter that is not constant, in their order. A value
            is a number, or names an operand, a buffer, ``out`` or ``counters+OFFSET``.
        given: the operand that decides whether the step runs; "" runs it always.
        present: run the step where that operand is passed (True), or where it is not (False).
    """

    program: Program
    grid: tuple[int, int, int]
    values: tuple[tuple[str, int | str], ...]
    given: str = ""
    present: bool = False


@attrs.frozen
class LaunchPlan:
    """Everything of a call but addresses.

    Attributes:
        steps: the launches in order.
        buffers: (offset, bytes) of each buffer in the workspace.
        nbytes: bytes of the workspace.
        counters: arrival counters, which every call finds and leaves zero.
    """

    steps: tuple[Step, ...]
    buffers: dict[str, tuple[int, int]]
    nbytes: int
    counters: int = 0


class PlanBuilder:
    """Collects the steps and buffers of a plan."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.buffers: dict[str, tuple[int, int]] = {}
        self.nbytes = 0
        self.counters = 0

    def buffer(self, name: str, nbytes: int) -> None:
        """Reserve *nbytes* bytes of the workspace."""
        offset = ceil_div(self.nbytes, _ALIGNMENT) * _ALIGNMENT
        self.buffers[name] = (offset, nbytes)
        self.nbytes = offset + max(nbytes, 1)

    def reserve_counters(self, count: int) -> str:
        """Reserve counters for a step; return them as `Step.values` names them."""
        first = self.counters
        self.counters += ceil_div(count, 4) * 4  # addresses are aligned to 16 bytes
        return f"counters+{first}"

    def step(
        self,
        function: str,
        grid: tuple[int, ...],
        values: dict[str, Any],
        constants: dict[str, Constant],
        *,
        multiple: int = _MULTIPLE,
        name: str = "",
        **options: Any,
    ) -> None:
        """Add a launch.

        Args:
            function: as in `Program`.
            grid: programs along up to three axes.
            values: (Triton type, value) of each parameter; an integer stands for ("i32", integer).
            constants: values of the constexpr parameters.
            multiple: the largest divisor of N and K that the program is compiled for.
            name: shown in errors; the function by default.
            options: the compiler's options, and ``given`` and ``present`` of `Step`.
        """
        typed = {key: value if isinstance(value, tuple) else ("i32", value) for key, value in values.items()}
        condition = {key: options.pop(key) for key in ("given", "present") if key in options}
        program = Program(
            function,
            types=tuple((key, kind) for key, (kind, _) in typed.items()),
            constants=tuple(constants.items()),
            multiples=tuple((key, math.gcd(typed[key][1], multiple)) for key in ("N", "K") if key in typed),
            options=tuple({"num_warps": 4, "num_stages": 1, **options}.items()),
            name=name or function,
        )
        ordered = tuple((key, typed[key][1]) for key in program.source.arg_names if key in typed)
        self.steps.append(Step(program, (*grid, *[1] * (3 - len(grid))), ordered, **condition))

    def plan(self) -> LaunchPlan:
        """Return the collected plan."""
        return LaunchPlan(tuple(self.steps), self.buffers, self.nbytes, self.counters)


def plan_of(kernel: KernelConfig, split_k: int, shape: Shape, device: Device) -> LaunchPlan:
    """Return the one launch of a dense kernel for exactly this shape; needs no device."""
    builder, nbytes = PlanBuilder(), partial_bytes(kernel, split_k, shape, device)
    if nbytes:
        builder.buffer("partial", nbytes)
    function = function_of(kernel)
    dtype, is_scaled = TYPES[shape.dtype], shape.scale != "none"
    types = {"x": f"*{dtype}", "weight": f"*{dtype}"}
    if described(kernel, shape, device.gfx) and not isinstance(kernel, Gemv):
        batch = "1, " * (batches_of(shape) > 1)
        types = {
            "x": types["x"] if function == "tma_halves" else f"tensordesc<{dtype}[{batch}{kernel.block_m}, {kernel.block_k}]>",
            "weight": f"tensordesc<{dtype}[{batch}{kernel.block_n}, {kernel.block_k}]>",
        }
    values: dict[str, Any] = {
        "x": (types["x"], "x"),
        "weight": (types["weight"], "weight"),
        "x_scale": ("*fp32", "x_scale" if is_scaled else 0),
        "w_scale": ("*fp32", "w_scale" if is_scaled else 0),
        "bias": (f"*{TYPES[shape.bias_dtype or shape.outdtype]}", "bias" if shape.bias else 0),
        "out": (f"*{TYPES[shape.outdtype]}", "out"),
        "partial": ("*i32" if shape.dtype == "int8" and not isinstance(kernel, Gemv) else "*fp32", "partial" if nbytes else 0),
        "counters": ("*i32", builder.reserve_counters(tiles_of(kernel, shape)) if nbytes else 0),
        "M": shape.m,
        "N": shape.n,
        "K": shape.k,
        "B": batches_of(shape),
    }
    builder.step(
        f"{_MODULES.get(function, function)}.{function}",
        grid_of(kernel, split_k, shape, device),
        values,
        _constants(kernel, split_k, shape, device.gfx),
        multiple=16,
        name=kernel.name,
        **_options(kernel),
    )
    return builder.plan()


def _constants(kernel: KernelConfig, split_k: int, shape: Shape, gfx: str) -> dict[str, Constant]:
    """Return the values of the function's constexpr parameters."""
    trip = kernel.block_k * kernel.unroll * split_k if isinstance(kernel, Gemv) else kernel.block_k
    even_k = isinstance(kernel, Tma) or shape.k % trip == 0
    common: dict[str, Constant] = {"BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k, "HAS_BIAS": shape.bias}
    if isinstance(kernel, Streamk):
        tile = {"BLOCK_M": kernel.block_m, "GROUP_M": kernel.group_m}
        return {**common, **tile, "DESCRIBED": described(kernel, shape, gfx), "EVEN_K": even_k, "UPCAST": False}
    # The scales of x are transposed in this op.
    order = "m_major" if shape.op == "a8w8_blockscale_bpreshuffle" else scale_order(shape)
    scale = _SCALES_BY_ORDER.get(order, shape.scale)
    common |= {"SPLIT_K": split_k, "SCALE": scale, "BATCHED": batches_of(shape) > 1}
    if isinstance(kernel, Gemv):
        loop: dict[str, Constant] = {"EVEN_K": even_k, "ONE_TRIP": shape.k <= trip, "UNROLL": kernel.unroll, "STAGES": kernel.stages}
        return {**common, **loop, "ROWS": kernel.rows}
    promote = promotes(kernel, shape, gfx)
    common |= {"BLOCK_M": kernel.block_m, "GROUP_M": kernel.group_m, "SWAP": kernel.swap, "PROMOTE": promote, "UPCAST": False}
    if isinstance(kernel, Tma):
        return {**common, "SPECIALIZE": kernel.specialize}
    return {**common, "EVEN_K": even_k, "SHUFFLED": shuffled_rows(shape.layout), "CACHE": ".cg" if kernel.stream else ""}


def shuffled_rows(layout: str) -> int:
    """Return the rows whose packs of 16 bytes are adjacent (``aiter16x16``: 16); 0 for a plain
    layout.
    """
    return 0 if layout == "row" else int(layout.removeprefix("aiter").partition("x")[0])


def _options(kernel: KernelConfig) -> dict[str, int]:
    """Return the compiler's options, without those that are AMD's defaults."""
    options = {"num_warps": kernel.warps, "num_stages": 1 if isinstance(kernel, Gemv) else kernel.stages}
    if isinstance(kernel, Gemm):
        options |= {"matrix_instr_nonkdim": kernel.nonkdim} if kernel.nonkdim else {}
        options |= {"kpack": kernel.kpack} if kernel.kpack > 1 else {}
        options |= {"waves_per_eu": kernel.waves} if kernel.waves else {}
    return options
