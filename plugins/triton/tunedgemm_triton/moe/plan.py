"""Plan a fused mixture of experts: sort, quantise, first stage, quantise, second stage, sum.

A plan does not depend on the routing: grids cover the most blocks that any routing makes. Buffers:
q1 and q2 with s1 and s2 are the quantised inputs of the stages and their scales, middle is [pairs,
inter_dim], parts [pairs, model_dim]; `kernels` describes order, owners, used, counts and tops.
"""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import dtype_bits

from tunedgemm_triton.build import TYPES, Constant
from tunedgemm_triton.moe.names import Moe
from tunedgemm_triton.moe.resources import blocks_of, counters_of_stages, pairs_of, scale_of, tiles_of
from tunedgemm_triton.plan import LaunchPlan, PlanBuilder, shuffled_rows
from tunedgemm_triton.resources import ceil_div

#: Pairs that one program of the sort reads.
_CHUNKS = (256, 1024, 4096)
#: Programs that search the largest magnitude of a tensor.
_TOPS = 256
#: Elements of a row that one program quantises or sums at a time.
_BLOCK = 1024
#: Largest value of each dtype of quantised values.
_LIMITS = {"int8": 127.0, "fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0}


class _MoePlanBuilder(PlanBuilder):
    """Collects the steps of a fused mixture of experts for one shape."""

    def __init__(self, kernel: Moe, split_k: int, shape: Shape) -> None:
        super().__init__()
        self.kernel, self.split_k, self.shape = kernel, split_k, shape
        self.scale = scale_of(shape)
        self.experts, self.topk, self.pairs = int(shape["expert"]), int(shape["topk"]), pairs_of(shape)
        self.blocks = blocks_of(kernel, shape)

    def sort(self) -> None:
        """Add the sort of pairs by expert."""
        chunk = next((size for size in _CHUNKS if size >= self.pairs), _CHUNKS[-1])
        segments, padded = ceil_div(self.pairs, chunk), max(64, 1 << (self.experts - 1).bit_length())
        self.buffer("order", 4 * self.blocks * self.kernel.block_m)
        self.buffer("owners", 4 * self.blocks)
        self.buffer("used", 4)
        self.buffer("counts", 4 * segments * padded)
        common = {"ids": ("*i32", "topk_ids"), "counts": ("*i32", "counts"), "pairs": self.pairs, "experts": self.experts}
        if segments > 1:
            self.step("moe_sort.moe_count", (segments,), common, {"CHUNK": chunk, "EXPERTS": padded})
        outputs = {name: ("*i32", name) for name in ("order", "owners", "used")}
        constants = {"CHUNK": chunk, "EXPERTS": padded, "BLOCK_M": self.kernel.block_m, "ONE_SEGMENT": segments == 1}
        self.step("moe_sort.moe_sort", (self.experts, segments), {**common, **outputs}, constants)

    def quantise(self, source: str, number: int, rows: int, width: int) -> tuple[str, str]:
        """Add the quantisation of the input of stage *number*, [rows, width]; return the names of
        values and scales.
        """
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
        """Add the grouped product of stage *number*."""
        shape, kernel, first = self.shape, self.kernel, number == 1
        tile, joined = (kernel.first if first else kernel.second), kernel.alone and not first
        split_k = self.split_k if first else 1
        n, k = (shape.k, shape.n) if first else (shape.n, shape.k)
        kind = "u8" if self.scale == "mx" else TYPES[str(shape["q_dtype_w"])]
        scales = "*u8" if self.scale == "mx" else "*fp32"
        weight_scale = f"w{number}_scale" if self.scale != "none" else source[1]
        counters = counters_of_stages(kernel, self.split_k, shape)[number - 1]
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
            "counters": ("*i32", self.reserve_counters(counters)),
            "pairs": self.pairs, "experts": self.experts, "blocks": self.blocks, "N": n, "K": k,
        }  # fmt: skip
        constants: dict[str, Constant] = {
            "BLOCK_M": kernel.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": kernel.group_m, "SWAP": kernel.swap,
            "TOPK": self.topk, "BY_TOKEN": first, "GATED": first and bool(shape["g1u1"]), "ACT": str(shape["act"]) if first else "",
            "WEIGHTED": bool(shape["doweight_stage1"]) == first, "SCALE": self.scale, "SHUFFLED": shuffled_rows(shape.layout),
            "ALONE": kernel.alone, "JOINED": joined, "DECODE": kernel.decode, "SPLIT_K": split_k, "EVEN_N": n % tile.block_n == 0,
            "EVEN_K": k % tile.block_k == 0,
            "PROMOTE": 0, "UPCAST": False,
        }  # fmt: skip
        tiles = self.blocks * ceil_div(n, tile.block_n)
        self.step("moe.moe", (tiles, split_k), values, constants, num_warps=tile.warps, num_stages=tile.stages)

    def join(self) -> None:
        """Add the sum over the pairs of a token."""
        shape = self.shape
        values = {
            "parts": (f"*{TYPES[shape.dtype]}", "parts"), "ids": ("*i32", "topk_ids"), "out": (f"*{TYPES[shape.outdtype]}", "out"),
            "experts": self.experts, "N": shape.n,
        }  # fmt: skip
        self.step("moe_sort.moe_join", (shape.m, ceil_div(shape.n, _BLOCK)), values, {"TOPK": self.topk, "BLOCK_N": _BLOCK})


def plan_of(kernel: Moe, split_k: int, shape: Shape, device: Device) -> LaunchPlan:
    """Return the launches for exactly this shape; needs no device."""
    del device
    builder, width = _MoePlanBuilder(kernel, split_k, shape), dtype_bits(shape.dtype) // 8
    if not kernel.alone:
        builder.sort()
    source = builder.quantise("hidden", 1, shape.m, shape.n)
    builder.buffer("middle", builder.pairs * shape.k * width)
    builder.stage(1, source, "middle")
    source = builder.quantise("middle", 2, builder.pairs, shape.k)
    if kernel.alone:
        builder.stage(2, source, "out")
    else:
        builder.buffer("parts", builder.pairs * shape.n * width)
        builder.stage(2, source, "parts")
        builder.join()
    return builder.plan()
