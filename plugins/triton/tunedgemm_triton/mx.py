"""Products of mxfp4 weights: their parameters and name, what they take, which are worth timing, and their plan of one launch.

``mx_r1_m64n128k128_g8_w4s3``: revision, tile (m, n, k), tiles of M side by side, warps and stages. Flags: ``t`` transposed product,
``d`` decoded to bf16 in the kernel instead of by the compiler.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import ClassVar

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported

from tunedgemm_triton.compile import TYPES, shuffled_rows
from tunedgemm_triton.fit import ceil_div
from tunedgemm_triton.limits import ARCHITECTURES, MAX_PARTIAL_BYTES, MAX_TILES, answer
from tunedgemm_triton.names import power, within
from tunedgemm_triton.plan import Maker, Plan
from tunedgemm_triton.spaces import beside

#: Raise it whenever a source of `kernels.mx` changes what a name means or how quick it is.
REVISION = 1

#: Op -> the dtype of its activations.
OPS = {"a4w4_blockscale": "fp4x2", "a16w4_blockscale": "bf16"}

LAYOUTS = ("row", "aiter16x16")

LIBTYPE = "triton"

#: Most solutions of one shape.
MOST = 48

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

_EXAMPLE = "mx_r1_m64n128k128_g8_w4s3"
_NAME = re.compile(r"mx_r(\d+)_m(\d+)n(\d+)k(\d+)_g(\d+)_w(\d+)s(\d+)((?:_t)?)((?:_d)?)")


@attrs.frozen(cache_hash=True)
class Mx:
    """A tile product of mxfp4; *decode* makes bf16 of it in the kernel, *swap* transposes it."""

    family: ClassVar[str] = "mx"
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(64, 1024)
    group_m: int = power(1, 64)
    warps: int = power(1, 16)
    stages: int = within(1, 8)
    swap: bool = False
    decode: bool = False

    @property
    def name(self) -> str:
        """The text of ``kernelName``."""
        tile = f"m{self.block_m}n{self.block_n}k{self.block_k}_g{self.group_m}_w{self.warps}s{self.stages}"
        return f"mx_r{REVISION}_{tile}{'_t' * self.swap}{'_d' * self.decode}"


@functools.lru_cache(maxsize=4096)
def kernel_of(name: str) -> Mx:
    """The parameters behind a kernel name.

    Raises:
        PluginError: no product of mxfp4 of this revision has that name; the message says why.
    """
    found = _NAME.fullmatch(name)
    if not found:
        raise PluginError(f"triton has no product of mxfp4 {name!r}; names look like {_EXAMPLE}")
    revision, *sizes = map(int, found.groups()[:-2])
    if revision != REVISION:
        raise PluginError(f"triton kernel {name!r} is of revision {revision}; this version has {REVISION}: tune again")
    return Mx(*sizes, *map(bool, found.groups()[-2:]))


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """True, or why no product of mxfp4 takes the shape on the architecture."""
    return answer(shape, device, _operands)


def _operands(shape: Shape, device: Device) -> str:
    if shape.dtype != OPS[shape.op]:
        return f"activations of {shape.op} must be {OPS[shape.op]}, which has the range of the scales, not {shape.dtype}"
    if shape.dtype == "bf16" and ARCHITECTURES[device.gfx].matrix == "wmma":
        return f"a kernel that decodes mxfp4 for bf16 activations spills its registers on {device.gfx}"
    if shape.layout not in LAYOUTS:
        return f"the weight of {shape.op} must be of layout {' or '.join(LAYOUTS)}, not {shape.layout!r}"
    return ""


def decodes(gfx: str, dtype: str = "fp4x2") -> tuple[bool, ...]:
    """Whether a kernel may decode mxfp4 itself or leave it to the compiler, by the dtype of the activations, best guess first.

    What Triton 3.6 makes of bf16 by mxfp4 gives wrong numbers on sm_90. gfx950 and sm_100 multiply mxfp4 by mxfp4 as it is. Triton 3.6
    leaves scaled products of CDNA 2 and 3 as they are, and fails; on RDNA what is decoded here spills.
    """
    if dtype == "bf16":
        return (True,)
    if gfx in ("gfx950", "sm_100") or ARCHITECTURES[gfx].matrix == "wmma":
        return (False,)
    return (True,) if ARCHITECTURES[gfx].matrix == "mfma" else (True, False)


def tiles_of(kernel: Mx, shape: Shape) -> int:
    """Output tiles of the shape."""
    return ceil_div(shape.m, kernel.block_m) * ceil_div(shape.n, kernel.block_n)


def partial_bytes(kernel: Mx, split_k: int, shape: Shape) -> int:
    """Bytes of float32 partial tiles that a split product keeps between its programs."""
    return 4 * split_k * tiles_of(kernel, shape) * kernel.block_m * kernel.block_n if split_k > 1 else 0


def refusal(kernel: Mx, split_k: int, shape: Shape, device: Device) -> str:
    """Why the kernel cannot serve the shape on the device, or an empty text."""
    if not kernel.decode and False not in decodes(device.gfx, shape.dtype):
        return f"Triton 3.6 does not multiply {shape.dtype} by mxfp4 on {device.gfx}, or not rightly; a kernel with _d does"
    tiles, steps = tiles_of(kernel, shape), ceil_div(shape.k, kernel.block_k)
    if split_k > 1 and tiles > MAX_TILES:
        return f"split-K counts at most {MAX_TILES} tiles (this shape has {tiles})"
    if split_k > steps:
        return f"K={shape.k} has fewer than splitK={split_k} steps of {kernel.block_k}"
    nbytes = partial_bytes(kernel, split_k, shape)
    return f"splitK={split_k} keeps {nbytes} bytes of partial sums; {MAX_PARTIAL_BYTES} are the most" if nbytes > MAX_PARTIAL_BYTES else ""


def shared_bytes(kernel: Mx, shape: Shape, device: Device) -> int:
    """Estimate of the shared memory, from what Triton 3.6 allotted; `bind` checks the real figure.

    A buffer for each step but one, and the tile in bf16, of even or of odd elements of K; on AMD these share memory.
    """
    bits = kernel.block_m * (4 if shape.dtype == "fp4x2" else 16) + kernel.block_n * 4
    packed = max(kernel.stages - 1, 1) * bits * kernel.block_k // 8
    decoded = 0 if device.gfx in ("gfx950", "sm_100") else (kernel.block_m + kernel.block_n) * kernel.block_k
    return max(packed, decoded) if device.kind == "amd" else packed + decoded


def fits(kernel: Mx, split_k: int, shape: Shape, device: Device) -> bool:
    """Whether a kernel is possible, fits the shared memory and the registers, and leaves no program without work."""
    architecture = ARCHITECTURES[device.gfx]
    if refusal(kernel, split_k, shape, device) or shared_bytes(kernel, shape, device) > architecture.shared_bytes:
        return False
    threads = kernel.warps * architecture.warp_size
    # What is decoded is in registers, even and odd elements of K by turns.
    decoded = (kernel.block_m + kernel.block_n) * kernel.block_k // 2 if kernel.decode else 0
    # On NVIDIA more than this spills (Triton 3.6, sm_90), on AMD accumulation registers take some of it.
    if (kernel.block_m * kernel.block_n + decoded) // threads > (0.75 * architecture.registers if device.kind == "amd" else 128):
        return False
    steps = ceil_div(shape.k, kernel.block_k)
    return (split_k - 1) * ceil_div(steps, split_k) < steps


#: Few rows: block_n, block_k, warps, stages, transposed.
_FEW = (
    (64, 256, 4, 4, True), (64, 512, 4, 3, True), (64, 128, 4, 5, True), (128, 256, 4, 3, True), (64, 256, 8, 4, True),
    (128, 128, 4, 4, True),
    (32, 256, 4, 4, False), (32, 512, 4, 3, False), (64, 256, 4, 4, False), (32, 128, 2, 5, False), (128, 256, 8, 3, False),
)  # fmt: skip

#: Many rows: block_m, block_n, block_k, warps, stages.
_MANY = (
    (128, 128, 128, 8, 3), (128, 128, 128, 4, 3), (64, 128, 128, 4, 4), (64, 128, 256, 8, 3), (128, 256, 128, 8, 3), (128, 128, 256, 8, 3),
    (256, 128, 128, 8, 3), (64, 64, 256, 4, 4), (128, 64, 128, 4, 4), (64, 256, 128, 8, 3), (64, 64, 128, 4, 4), (128, 128, 64, 4, 4),
)  # fmt: skip


def enumerate_solutions(shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, each once, at most `MOST`, those that cannot fit left out, best guesses first."""
    if isinstance(supports(shape, device), Unsupported):
        return
    found = 0
    for kernel, split in dict.fromkeys(_candidates(shape, device)):
        if found < MOST and fits(kernel, split, shape, device):
            found += 1
            yield _solution(kernel, split)


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The neighbours of a solution: one parameter, or splitK, moved one step of its ladder."""
    try:
        kernel, split = kernel_of(solution.kernel_name), max(solution.split_k, 1)
    except PluginError:
        return
    ladders = {
        "block_m": (16, 32, 64, 128, 256), "block_n": (16, 32, 64, 128, 256), "block_k": (64, 128, 256, 512), "group_m": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4, 8), "stages": tuple(range(1, 9)),
    }  # fmt: skip
    near = [(kernel, other) for other in beside(SPLITS, split)]
    if shape.m <= kernel.block_m:  # a group of more tiles along M than there are is the same kernel
        del ladders["group_m"]
    for field, ladder in ladders.items():
        near += [(attrs.evolve(kernel, **{field: value}), split) for value in beside(ladder, getattr(kernel, field))]
    near += [(attrs.evolve(kernel, swap=not kernel.swap), split), (attrs.evolve(kernel, decode=not kernel.decode), split)]
    for changed, factor in near:
        if fits(changed, factor, shape, device):
            yield _solution(changed, factor)


def _solution(kernel: Mx, split: int) -> Solution:
    return Solution(LIBTYPE, kernel.name, split if split > 1 else 0, batch_invariant=True)


def _candidates(shape: Shape, device: Device) -> Iterator[tuple[Mx, int]]:
    amd, covered = device.kind == "amd", max(16, 1 << (shape.m - 1).bit_length())
    for rank in range(3):
        for decode in decodes(device.gfx, shape.dtype):
            for kernel in _kernels(shape, covered, amd=amd, decode=decode):
                splits = _splits(kernel, shape, device)
                if rank < len(splits):
                    yield kernel, splits[rank]


def _kernels(shape: Shape, covered: int, *, amd: bool, decode: bool) -> Iterator[Mx]:
    """The tiles for a class of M. AMD's matrix instruction has no long side to turn, and its loop keeps one tile in LDS."""
    if shape.m <= 64:
        for block_n, block_k, warps, stages, swap in _FEW:
            yield Mx(covered, block_n, block_k, 1, warps, 2 if amd else stages, swap and not amd, decode)
    else:
        for block_m, block_n, block_k, warps, stages in _MANY:
            if block_m <= covered:
                yield Mx(block_m, block_n, block_k, 8, warps, 2 if amd else stages, False, decode)


def _splits(kernel: Mx, shape: Shape, device: Device) -> list[int]:
    """Factors worth a try, those first that leave the fewest multiprocessors idle in their last wave."""
    tiles, steps = tiles_of(kernel, shape), ceil_div(shape.k, kernel.block_k)

    def cost(split: int) -> float:
        waves = tiles * split / device.cu_num
        return math.ceil(waves) / waves + 0.1 * math.ceil(waves) + 0.01 * split

    useful = [split for split in SPLITS if split == 1 or (steps >= 2 * split and tiles * split <= 2 * device.cu_num)]
    return sorted(useful, key=cost)


def plan_of(kernel: Mx, split_k: int, shape: Shape) -> Plan:
    """One launch; needs no device."""
    maker, plain = Maker(), shape.dtype != "fp4x2"
    if split_k > 1:
        maker.buffer("partial", partial_bytes(kernel, split_k, shape))
    values = {
        "x": ("*bf16" if plain else "*u8", "x"), "weight": ("*u8", "weight"), "x_scale": ("*u8", "w_scale" if plain else "x_scale"),
        "w_scale": ("*u8", "w_scale"), "bias": (f"*{TYPES[shape.bias_dtype or shape.outdtype]}", "bias"),
        "out": (f"*{TYPES[shape.outdtype]}", "out"), "partial": ("*fp32", "partial" if split_k > 1 else "out"),
        "counters": ("*i32", maker.counted(tiles_of(kernel, shape) if split_k > 1 else 0)), "M": shape.m, "N": shape.n, "K": shape.k,
    }  # fmt: skip
    constants = {
        "BLOCK_M": kernel.block_m, "BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k, "GROUP_M": kernel.group_m, "SWAP": kernel.swap,
        "DECODE": kernel.decode, "PLAIN": plain, "SHUFFLED": shuffled_rows(shape.layout), "SPLIT_K": split_k,
        "EVEN_K": shape.k % kernel.block_k == 0, "HAS_BIAS": shape.bias, "UPCAST": False,
    }  # fmt: skip
    maker.step("mx.mx", (tiles_of(kernel, shape), split_k), values, constants, warps=kernel.warps, stages=kernel.stages)
    return maker.plan()
