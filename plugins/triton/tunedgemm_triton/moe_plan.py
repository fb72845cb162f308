"""What a fused mixture of experts launches, as data: its steps in order, and where in the workspace they leave what.

Both the launcher and the tests in Triton's interpreter run these plans. Nothing in a plan depends on the routing: grids are of the most
there can be. Buffers, by their names: q1 and q2 with s1 and s2 are the quantised inputs of the stages and their scales, middle is
[pairs, inter_dim], parts [pairs, model_dim]; order, owners, used, counts and tops are what `kernels` says.
"""

from __future__ import annotations

import importlib
from typing import Any

import attrs
from tunedgemm.plugin import Shape, dtype_bits

from tunedgemm_triton.compile import TYPES, compile_function, shuffled_rows
from tunedgemm_triton.fit import ceil_div
from tunedgemm_triton.moe import SCALES, Moe, blocks_of, counters_of_stages, pairs_of, tiles_of

#: Pairs that one program of the sort looks at.
_CHUNKS = (256, 1024, 4096)
#: Programs that look for the largest magnitude of a tensor.
_TOPS = 256
#: Elements of a row that one program quantises or adds up at a time.
_BLOCK = 1024
#: The largest value of a dtype that is quantised to.
_LIMITS = {"int8": 127.0, "fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0}
#: Addresses of buffers are multiples of it.
_ALIGNED = 256

Constant = int | float | bool | str


@attrs.frozen(cache_hash=True)
class Program:
    """All that a compile depends on.

    Attributes:
        function: ``file.function`` in `kernels`.
        types: Triton's type of each parameter that is not constant, by its name.
        constants: the values of the others.
        wide: integers that are multiples of 16, which lets loads be 16 bytes wide.
        warps, stages: compiler options.
    """

    function: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    wide: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 1

    @property
    def source(self) -> Any:
        """The Triton function."""
        module, _, name = self.function.partition(".")
        return getattr(importlib.import_module(f"tunedgemm_triton.kernels.{module}"), name)

    def compiled(self, gfx: str) -> Any:
        """Triton's CompiledKernel, from the cache where it is there; raises what `compile_function` does."""
        types, values = dict(self.types), dict(self.constants)
        ordered = {name: "constexpr" if name in values else types[name] for name in self.source.arg_names}
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return compile_function(self.source, ordered, values, set(self.wide), options, (gfx, self.function))


@attrs.frozen
class Step:
    """One launch.

    Attributes:
        program: what is launched.
        grid: programs along the three axes.
        values: what each parameter that is not constant gets, in their order: a number, or the name of an operand, of a buffer or of
            ``counters`` (with ``+`` and a number of them: behind so many).
        given: the operand that decides whether the step is run, "" for always.
        present: whether it is run where that operand is there, or where it is not.
    """

    program: Program
    grid: tuple[int, int, int]
    values: tuple[tuple[str, int | str], ...]
    given: str = ""
    present: bool = False


@attrs.frozen
class Plan:
    """Steps in order, and (offset, bytes) of each buffer in a workspace of *nbytes*."""

    steps: tuple[Step, ...]
    buffers: dict[str, tuple[int, int]]
    nbytes: int


class _Maker:
    """Collects steps and buffers of one shape."""

    def __init__(self, kernel: Moe, split_k: int, shape: Shape) -> None:
        self.kernel, self.split_k, self.shape = kernel, split_k, shape
        self.scale = SCALES[str(shape["q_type"])]
        self.experts, self.topk, self.pairs = int(shape["expert"]), int(shape["topk"]), pairs_of(shape)
        self.blocks = blocks_of(kernel, shape)
        self.steps: list[Step] = []
        self.buffers: dict[str, tuple[int, int]] = {}
        self.nbytes = 0

    def buffer(self, name: str, nbytes: int) -> None:
        """Room for *nbytes* bytes."""
        self.buffers[name] = (self.nbytes, nbytes)
        self.nbytes += ceil_div(max(nbytes, 1), _ALIGNED) * _ALIGNED

    def step(self, function: str, grid: tuple[int, ...], values: dict[str, Any], constants: dict[str, Constant], **options: Any) -> None:
        """Add a launch; *values* gives (type, value) of each parameter, an integer standing for itself."""
        typed = {name: value if isinstance(value, tuple) else ("i32", value) for name, value in values.items()}
        wide = tuple(name for name in ("N", "K") if name in typed and typed[name][1] % 16 == 0)
        types = tuple((name, kind) for name, (kind, _) in typed.items())
        given = {name: options.pop(name) for name in ("given", "present") if name in options}
        program = Program(function, types, tuple(constants.items()), wide, **options)
        values_of = {name: value for name, (_, value) in typed.items()}
        ordered = tuple((name, values_of[name]) for name in program.source.arg_names if name in values_of)
        self.steps.append(Step(program, (*grid, *[1] * (3 - len(grid))), ordered, **given))

    def sort(self) -> None:
        """Pairs by expert."""
        chunk = next((size for size in _CHUNKS if size >= self.pairs), _CHUNKS[-1])
        segments, padded = ceil_div(self.pairs, chunk), max(64, 1 << (self.experts - 1).bit_length())
        self.buffer("order", 4 * self.blocks * self.kernel.block_m)
        self.buffer("owners", 4 * self.blocks)
        self.buffer("used", 4)
        self.buffer("counts", 4 * segments * padded)
        common = {"ids": ("*i32", "topk_ids"), "counts": ("*i32", "counts"), "pairs": self.pairs, "experts": self.experts}
        if segments > 1:
            self.step("moe_sort.moe_count", (segments,), common, {"CHUNK": chunk, "EXPERTS": padded})
        found = {name: ("*i32", name) for name in ("order", "owners", "used")}
        constants = {"CHUNK": chunk, "EXPERTS": padded, "BLOCK_M": self.kernel.block_m, "ONE_SEGMENT": segments == 1}
        self.step("moe_sort.moe_sort", (self.experts, segments), {**common, **found}, constants)

    def quantise(self, source: str, number: int, rows: int, width: int) -> tuple[str, str]:
        """Quantise the input of stage *number*, [rows, width]; the names of its values and of its scales."""
        if self.scale == "none":
            return source, source
        q, scale, kind = f"q{number}", f"s{number}", str(self.shape["q_dtype_a"])
        of_pairs = {"OF_PAIRS": number == 2}
        common = {"x": (f"*{TYPES[self.shape.dtype]}", source), "ids": ("*i32", "topk_ids"), "experts": self.experts, "K": width}
        self.buffer(q, rows * width * dtype_bits(kind) // 8)
        if self.scale == "mx":
            self.buffer(scale, rows * (width // 32))
            values = {**common, "q": ("*u8", q), "scale": ("*u8", scale)}
            self.step("moe_quantise.moe_quantise_mx", (rows, ceil_div(width, _BLOCK)), values, {"BLOCK": _BLOCK, **of_pairs})
            return q, scale
        self.buffer(scale, 4 * {"tensor": 1, "row": rows, "block": rows * ceil_div(width, 128)}[self.scale])
        whole = min(1 << (width - 1).bit_length(), 4 * _BLOCK)
        block = max(whole, 128) if self.scale == "row" else _BLOCK
        tiles = 1 if self.scale == "row" else ceil_div(width, block)
        programs = min(rows, _TOPS)
        values = {**common, "q": (f"*{TYPES[kind]}", q), "scale": ("*fp32", scale), "programs": programs}
        constants = {"LIMIT": _LIMITS[kind], "BLOCK": block, "TOPS": _TOPS, **of_pairs}
        name, grid, given = "moe_quantise.moe_quantise", (rows, tiles), f"a{number}_scale"
        if self.scale != "tensor":
            self.step(name, grid, {**values, "tops": ("*i32", scale)}, {"KIND": self.scale, **constants})
            return q, scale
        tops = f"tops{number}"
        self.buffer(tops, 4 * _TOPS)
        seen = {**common, "tops": ("*i32", tops), "rows": rows}
        self.step("moe_quantise.moe_top", (programs,), seen, {"BLOCK": block, **of_pairs}, given=given)
        self.step(name, grid, {**values, "tops": ("*i32", tops)}, {"KIND": "tensor", **constants}, given=given)
        self.step(name, grid, {**values, "tops": ("*fp32", given)}, {"KIND": "given", **constants}, given=given, present=True)
        return q, scale

    def stage(self, number: int, source: tuple[str, str], out: str) -> None:
        """The grouped product of stage *number*."""
        shape, kernel, first = self.shape, self.kernel, number == 1
        tile, joined = (kernel.first if first else kernel.second), kernel.alone and not first
        split_k = self.split_k if first else 1
        n, k = (shape.k, shape.n) if first else (shape.n, shape.k)
        kind = "u8" if self.scale == "mx" else TYPES[str(shape["q_dtype_w"])]
        scales = "*u8" if self.scale == "mx" else "*fp32"
        weight_scale = f"w{number}_scale" if self.scale != "none" else source[1]
        counted, _ = counters_of_stages(kernel, self.split_k, shape)
        sums = f"partial{number}"
        if split_k > 1:
            halves = 2 if shape["g1u1"] else 1
            self.buffer(sums, 4 * split_k * halves * tiles_of(kernel, shape)[0] * kernel.block_m * tile.block_n)
        if joined:
            self.buffer(sums, 4 * self.pairs * ceil_div(n, tile.block_n) * tile.block_n)
        sorted_in = {name: ("*i32", "topk_ids" if kernel.alone else name) for name in ("order", "owners", "used")}
        values = {
            "x": (f"*{kind}", source[0]), "weight": (f"*{kind}", f"w{number}"), "x_scale": (scales, source[1]),
            "w_scale": (scales, weight_scale), "factors": ("*fp32", "topk_weight"), "ids": ("*i32", "topk_ids"), **sorted_in,
            "out": (f"*{TYPES[shape.outdtype if joined else shape.dtype]}", out),
            "partial": ("*fp32", sums if sums in self.buffers else "topk_weight"),
            "counters": ("*i32", f"counters+{0 if first else ceil_div(counted, 4) * 4}"),
            "pairs": self.pairs, "experts": self.experts, "blocks": self.blocks, "N": n, "K": k,
        }  # fmt: skip
        constants: dict[str, Constant] = {
            "BLOCK_M": kernel.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": kernel.group_m, "SWAP": kernel.swap,
            "TOPK": self.topk, "BY_TOKEN": first, "GATED": first and bool(shape["g1u1"]), "ACT": str(shape["act"]) if first else "",
            "WEIGHTED": bool(shape["doweight_stage1"]) == first, "SCALE": self.scale, "SHUFFLED": shuffled_rows(shape.layout),
            "ALONE": kernel.alone, "JOINED": joined, "DECODE": kernel.decode, "SPLIT_K": split_k, "EVEN_K": k % tile.block_k == 0,
            "PROMOTE": 0, "UPCAST": False,
        }  # fmt: skip
        tiles = self.blocks * ceil_div(n, tile.block_n)
        self.step("moe.moe", (tiles, split_k), values, constants, warps=tile.warps, stages=tile.stages)

    def join(self) -> None:
        """The sum over the pairs of a token."""
        shape = self.shape
        values = {
            "parts": (f"*{TYPES[shape.dtype]}", "parts"), "ids": ("*i32", "topk_ids"), "out": (f"*{TYPES[shape.outdtype]}", "out"),
            "experts": self.experts, "N": shape.n,
        }  # fmt: skip
        self.step("moe_sort.moe_join", (shape.m, ceil_div(shape.n, _BLOCK)), values, {"TOPK": self.topk, "BLOCK_N": _BLOCK})


def plan_of(kernel: Moe, split_k: int, shape: Shape) -> Plan:
    """The launches of a fused mixture of experts for exactly this shape; needs no device."""
    maker, width = _Maker(kernel, split_k, shape), dtype_bits(shape.dtype) // 8
    if not kernel.alone:
        maker.sort()
    source = maker.quantise("hidden", 1, shape.m, shape.n)
    maker.buffer("middle", maker.pairs * shape.k * width)
    maker.stage(1, source, "middle")
    source = maker.quantise("middle", 2, maker.pairs, shape.k)
    if kernel.alone:
        maker.stage(2, source, "out")
    else:
        maker.buffer("parts", maker.pairs * shape.n * width)
        maker.stage(2, source, "parts")
        maker.join()
    return Plan(tuple(maker.steps), maker.buffers, maker.nbytes)
