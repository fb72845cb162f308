"""The fused mixture of experts: its parameters and their name, what it takes, and which of it is worth timing.

``moe_r1_m64g8_n128k64w8s4_n128k64w8s4``: revision, pairs of a block and blocks side by side, then for each of the two stages tile of N
(of the gate as of what it multiplies), tile of K, warps and stages. Flags: ``t`` transposed products, ``a`` a block for each pair and no
sorting, ``d`` mxfp4 decoded to bf16 in the kernel. `Solution.split_k` is the number of parts of K in the first stage.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import ClassVar

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import dtype_bits

from tunedgemm_triton.fit import ceil_div
from tunedgemm_triton.limits import ARCHITECTURES, FP8, MAX_GRID_YZ, MAX_TILES, answer
from tunedgemm_triton.mx import decodes
from tunedgemm_triton.names import power, within
from tunedgemm_triton.spaces import beside

OP = "fmoe"

#: Raise it whenever a source of `kernels` that `moe_plan` names changes what a name means or how quick it is.
REVISION = 1

LIBTYPE = "triton"

#: Most solutions of one shape.
MOST = 48

#: Pairs up to which a block for each of them is tried: beyond, tokens share experts, whose weights would be read again.
MOST_ALONE = 32

#: Experts that the sort counts in one program.
MAX_EXPERTS = 2048

SPLITS = (1, 2, 3, 4, 6, 8)

#: What the shape calls a kind of quantisation -> what the kernel does with scales.
SCALES = {"No": "none", "per_Tensor": "tensor", "per_Token": "row", "per_1x128": "block", "per_1x32": "mx"}

_EXAMPLE = "moe_r1_m64g8_n128k64w8s4_n128k64w8s4"
_STAGE = r"_n(\d+)k(\d+)w(\d+)s(\d+)"
_NAME = re.compile(rf"moe_r(\d+)_m(\d+)g(\d+){_STAGE}{_STAGE}((?:_t)?)((?:_a)?)((?:_d)?)")


@attrs.frozen(cache_hash=True)
class Tile:
    """The tile of one stage: rows of the weight, elements of K, warps, depth of the pipeline."""

    family: ClassVar[str] = "moe"
    block_n: int = power(16, 256)
    block_k: int = power(32, 512)
    warps: int = power(1, 16)
    stages: int = within(1, 8)


@attrs.frozen(cache_hash=True)
class Moe:
    """What a fused mixture of experts is made of.

    Attributes:
        block_m: pairs of a block, which are of one expert.
        group_m: blocks side by side, which share weights in L2.
        first, second: the tiles of gate and up, and of down.
        swap: transposed products, so that the long side of the matrix instruction lies along the weight.
        alone: a block for each pair; nothing is sorted, and the second stage adds up by itself.
        decode: mxfp4 becomes bf16 in the kernel, instead of by the compiler.
    """

    family: ClassVar[str] = "moe"
    block_m: int = power(16, 256)
    group_m: int = power(1, 64)
    first: Tile
    second: Tile
    swap: bool = False
    alone: bool = False
    decode: bool = False

    @property
    def name(self) -> str:
        """The text of ``kernelName``."""
        stages = "".join(f"_n{tile.block_n}k{tile.block_k}w{tile.warps}s{tile.stages}" for tile in (self.first, self.second))
        return f"moe_r{REVISION}_m{self.block_m}g{self.group_m}{stages}{'_t' * self.swap}{'_a' * self.alone}{'_d' * self.decode}"


@functools.lru_cache(maxsize=4096)
def kernel_of(name: str) -> Moe:
    """The parameters behind a kernel name.

    Raises:
        PluginError: no fused mixture of experts of this revision has that name; the message says why.
    """
    found = _NAME.fullmatch(name)
    if not found:
        raise PluginError(f"triton has no fused mixture of experts {name!r}; names look like {_EXAMPLE}")
    revision, block_m, group_m, *sizes = map(int, found.groups()[:-3])
    if revision != REVISION:
        raise PluginError(f"triton kernel {name!r} is of revision {revision}; this version has {REVISION}: tune again")
    return Moe(block_m, group_m, Tile(*sizes[:4]), Tile(*sizes[4:]), *map(bool, found.groups()[-3:]))


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """True, or why the fused mixture of experts does not take the shape on the architecture."""
    return answer(shape, device, _operands)


def _operands(shape: Shape, device: Device) -> str:
    kind, wanted = str(shape["q_dtype_w"]), ARCHITECTURES[device.gfx].fp8
    if kind in FP8 and kind != wanted:
        return f"{device.gfx} multiplies {wanted or 'no fp8'}, not {kind}"
    if int(shape["expert"]) > MAX_EXPERTS:
        return f"{MAX_EXPERTS} experts are sorted at most (expert={shape['expert']})"
    return ""


def pairs_of(shape: Shape) -> int:
    """(token, expert) pairs."""
    return shape.m * int(shape["topk"])


def blocks_of(kernel: Moe, shape: Shape) -> int:
    """Blocks of pairs at most, whatever the routing: each expert that is hit may have one that is not full."""
    pairs = pairs_of(shape)
    hit = min(pairs, int(shape["expert"]))
    return pairs if kernel.alone else hit + (pairs - hit) // kernel.block_m


def tiles_of(kernel: Moe, shape: Shape) -> tuple[int, int]:
    """Output tiles of both stages at most."""
    blocks = blocks_of(kernel, shape)
    return blocks * ceil_div(shape.k, kernel.first.block_n), blocks * ceil_div(shape.n, kernel.second.block_n)


def counters_of_stages(kernel: Moe, split_k: int, shape: Shape) -> tuple[int, int]:
    """Counters that the first stage's split and the second stage's sum need."""
    first = tiles_of(kernel, shape)[0] if split_k > 1 else 0
    return first, shape.m * ceil_div(shape.n, kernel.second.block_n) if kernel.alone else 0


def shared_bytes(kernel: Moe, shape: Shape, gfx: str) -> int:
    """Estimate of the shared memory of the larger stage; `bind` checks the real figure.

    A buffer for each step of the pipeline, on AMD one fewer; mxfp4 as `mx.shared_bytes` says.
    """
    width, halves, amd = dtype_bits(str(shape["q_dtype_w"])), 2 if shape["g1u1"] else 1, gfx.startswith("gfx")

    def needed(tile: Tile, high: int) -> int:
        elements = (kernel.block_m + high) * tile.block_k
        packed = (max(tile.stages - 1, 1) if amd else tile.stages) * elements * width // 8
        decoded = elements if width == 4 and gfx not in ("gfx950", "sm_100") else 0
        return max(packed, decoded) if amd else packed + decoded

    return max(needed(kernel.first, halves * kernel.first.block_n), needed(kernel.second, kernel.second.block_n))


def refusal(kernel: Moe, split_k: int, shape: Shape, device: Device) -> str:
    """Why the kernel cannot serve the shape on the device, or an empty text."""
    scale = SCALES[str(shape["q_type"])]
    if kernel.decode and scale != "mx":
        return f"{kernel.name} decodes mxfp4; the weights are {shape['q_dtype_w']}"
    if scale == "mx":
        if not kernel.decode and False not in decodes(device.gfx):
            return f"Triton 3.6 takes no scaled products apart on {device.gfx}; a kernel with _d does"
        if min(kernel.first.block_k, kernel.second.block_k) < 64:
            return "products of mxfp4 take 64 elements of K or more at a time"
    if scale == "block" and max(kernel.first.block_k, kernel.second.block_k) > 128:
        return "128 elements of K share a scale: a step cannot be longer"
    if split_k > ceil_div(shape.n, kernel.first.block_k):
        return f"model_dim {shape.n} has fewer than splitK={split_k} steps of {kernel.first.block_k}"
    if kernel.alone and pairs_of(shape) > MAX_GRID_YZ:
        return f"a block for each of {pairs_of(shape)} pairs is too many"
    counted = sum(ceil_div(count, 4) * 4 for count in counters_of_stages(kernel, split_k, shape))
    return f"a launch counts at most {MAX_TILES} tiles (this shape has {counted})" if counted > MAX_TILES else ""


#: Few pairs: block_n and block_k (in bytes of the weight), warps, stages of both stages; whether transposed, which on Hopper needs 64 rows
#: of the weight for its warpgroup instructions.
_FEW = (
    ((64, 256, 8, 3), (128, 128, 8, 3), True), ((64, 128, 4, 5), (128, 128, 4, 3), True), ((128, 128, 8, 4), (64, 256, 4, 4), True),
    ((64, 128, 4, 4), (64, 256, 4, 3), True), ((64, 256, 4, 3), (64, 256, 4, 3), True), ((64, 128, 4, 4), (64, 128, 4, 4), True),
    ((64, 512, 4, 2), (64, 256, 4, 3), True), ((64, 128, 4, 3), (64, 128, 4, 3), True),
    ((32, 128, 2, 4), (64, 128, 4, 4), False), ((32, 256, 4, 4), (64, 256, 4, 3), False), ((64, 128, 4, 3), (64, 128, 4, 4), False),
    ((32, 256, 4, 3), (32, 256, 4, 3), False), ((16, 256, 2, 4), (32, 256, 2, 4), False),
)  # fmt: skip

#: Many pairs: block_m, then as above.
_MANY = (
    (128, (128, 128, 8, 4), (256, 128, 8, 3)), (64, (128, 128, 4, 4), (256, 128, 4, 4)), (64, (128, 128, 8, 4), (256, 128, 8, 4)),
    (32, (128, 256, 8, 3), (256, 128, 8, 3)), (32, (64, 256, 4, 3), (256, 128, 4, 4)), (32, (128, 128, 4, 4), (256, 128, 8, 3)),
    (128, (64, 128, 8, 4), (128, 128, 8, 3)), (64, (64, 128, 4, 4), (128, 128, 4, 4)), (64, (128, 128, 8, 4), (128, 128, 8, 4)),
    (128, (64, 128, 4, 3), (128, 128, 4, 3)), (64, (128, 128, 8, 4), (256, 64, 8, 4)), (32, (64, 128, 4, 4), (128, 128, 4, 4)),
    (16, (64, 256, 8, 3), (128, 128, 8, 3)), (16, (64, 256, 4, 3), (64, 256, 4, 3)),
)  # fmt: skip

_LADDERS = {
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (32, 64, 128, 256, 512),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5, 6, 7, 8),
}


def enumerate_solutions(shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, each once, at most `MOST`, those that cannot fit left out, best guesses first."""
    if isinstance(supports(shape, device), Unsupported):
        return
    found = 0
    for kernel, split in dict.fromkeys(_candidates(shape, device)):
        if found < MOST and fits(kernel, split, shape, device):
            found += 1
            yield Solution(LIBTYPE, kernel.name, split if split > 1 else 0)


def fits(kernel: Moe, split: int, shape: Shape, device: Device) -> bool:
    """Whether a kernel is possible, fits the shared memory and the registers, and leaves no part of K without work."""
    architecture = ARCHITECTURES[device.gfx]
    if refusal(kernel, split, shape, device) or shared_bytes(kernel, shape, device.gfx) > architecture.shared_bytes:
        return False
    # Products that are scaled step by step have sums of their own.
    fresh = 1 if SCALES[str(shape["q_type"])] == "block" else 0
    counts = ((2 if shape["g1u1"] else 1) + fresh, 1 + fresh)
    sums = [
        count * kernel.block_m * tile.block_n // (tile.warps * architecture.warp_size)
        for count, tile in zip(counts, (kernel.first, kernel.second), strict=True)
    ]
    steps = ceil_div(shape.n, kernel.first.block_k)
    limit = 160 if architecture.matrix != "wmma" else 48 if SCALES[str(shape["q_type"])] == "mx" else 80
    return max(sums) <= limit and (split - 1) * ceil_div(steps, split) < steps


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The neighbours of a solution: one parameter of a stage, the block, or splitK, moved one step."""
    try:
        kernel, split = kernel_of(solution.kernel_name), max(solution.split_k, 1)
    except PluginError:
        return
    near = [(kernel, other) for other in beside(SPLITS, split)]
    for stage in ("first", "second"):
        tile = getattr(kernel, stage)
        for field, ladder in _LADDERS.items():
            for value in beside(ladder, getattr(tile, field)):
                near.append((attrs.evolve(kernel, **{stage: attrs.evolve(tile, **{field: value})}), split))
    near += [(attrs.evolve(kernel, block_m=value), split) for value in beside((16, 32, 64, 128), kernel.block_m) if not kernel.alone]
    near += [(attrs.evolve(kernel, group_m=value), split) for value in beside((1, 2, 4, 8, 16), kernel.group_m)]
    near.append((attrs.evolve(kernel, swap=not kernel.swap), split))
    for changed, factor in near:
        if fits(changed, factor, shape, device):
            yield Solution(LIBTYPE, changed.name, factor if factor > 1 else 0)


def _candidates(shape: Shape, device: Device) -> Iterator[tuple[Moe, int]]:
    """Few pairs are bound by reading weights, so small tiles and a split of K; many by the products."""
    pairs, each = pairs_of(shape), pairs_of(shape) / int(shape["expert"])
    for decode in decodes(device.gfx) if SCALES[str(shape["q_type"])] == "mx" else (False,):
        many = list(_many(each, shape, device, decode)) if each > 4 else []
        if each <= 16:
            block_m = 16 if each <= 8 else 32
            yield from many[:4] if each > 8 else ()
            if pairs <= MOST_ALONE:
                yield from _few(block_m, shape, device, decode=decode, alone=True)
            if shape.m > 1:
                yield from _few(block_m, shape, device, decode=decode, alone=False)
        yield from many


def _many(each: float, shape: Shape, device: Device, decode: bool) -> Iterator[tuple[Moe, int]]:
    """Blocks of about what an expert has, *each*, come first: larger ones are padding. Where it has a few, they share its weights in L2."""
    order = sorted(_MANY, key=lambda tiles: max(0.0, tiles[0] - 2 * each))
    for group in (1, 8) if each <= 64 else (8, 1):
        for block_m, first, second in order:
            yield Moe(block_m, group, _tile(first, shape, device), _tile(second, shape, device), decode=decode), 1


def _few(block_m: int, shape: Shape, device: Device, *, decode: bool, alone: bool) -> Iterator[tuple[Moe, int]]:
    for rank in range(3):
        for first, second, swap in _FEW:
            # AMD's matrix instruction has no long side to turn.
            turned = swap and device.kind != "amd"
            kernel = Moe(block_m, 1, _tile(first, shape, device), _tile(second, shape, device), turned, alone, decode)
            splits = _splits(kernel, shape, device)
            if rank < len(splits):
                yield kernel, splits[rank]


def _splits(kernel: Moe, shape: Shape, device: Device) -> list[int]:
    """Factors worth a try: about a program for each multiprocessor first, then fewer and more."""
    tiles, steps = tiles_of(kernel, shape)[0], ceil_div(shape.n, kernel.first.block_k)
    useful = [split for split in SPLITS if split == 1 or (steps >= 4 * split and tiles * split <= 4 * device.cu_num)]
    # Measured on an H200: of 32 tiles 4 parts win, of 96 tiles 2.
    return sorted(useful, key=lambda split: abs(math.log(tiles * split / (1.15 * device.cu_num))))


def _tile(sizes: tuple[int, int, int, int], shape: Shape, device: Device) -> Tile:
    """A stage's tile, of K in bytes, for the shape's dtype and the architecture."""
    block_n, nbytes, warps, stages = sizes
    bits = dtype_bits(str(shape["q_dtype_w"]))
    if ARCHITECTURES[device.gfx].matrix == "wmma":  # fewer registers
        block_n, nbytes = min(block_n, 128), min(nbytes, 128)
    block_k = max(nbytes * 8 // bits, 64 if bits == 4 else 32)
    if SCALES[str(shape["q_type"])] == "block" and block_k > 128:  # a step has one scale: shorter ones, and more of them on their way
        block_k, stages = 128, min(stages * block_k // 128, 8)
    # AMD's loop keeps one tile in LDS for each stage but one.
    return Tile(block_n, min(block_k, 256), warps, min(stages, 2) if device.kind == "amd" else stages)
