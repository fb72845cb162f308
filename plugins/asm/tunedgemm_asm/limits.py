"""Check whether the kernels of each argument layout support a shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
from tunedgemm.plugin import Device, Platform, Shape
from tunedgemm.tools.launching import dtype_bits, scale_order

from tunedgemm_asm.abi import ABIS, FP8
from tunedgemm_asm.manifest import KernelConfig

if TYPE_CHECKING:
    from tunedgemm_asm.packs import PackKernel

#: Kernels for an architecture, by name.
Kernels = Mapping[str, "PackKernel"]

#: Counters of a split-K launch, one for each output tile; AITER's launchers have 16 x 64.
COUNTERS = 1024
#: Most workgroups along the second and third grid axis (hipDeviceProp_t::maxGridSize).
MAX_GRID = 65535
#: Most output tiles of the plugin's own kernels, which number them.
MAX_TILES = (1 << 22) - 1
#: Bytes of an operand that 32-bit offsets can address.
MAX_BYTES = 1 << 32


@attrs.frozen
class Rules:
    """Constraints of the launchers of an argument layout.

    Attributes:
        scale: kind of the operands' scales.
        whole_n: divisor of N; 0 means the kernel's tile.
        whole_n_shuffled: divisor of N with a shuffled weight.
        splits: most splits of K.
        meet: how splits meet: ``semaphore`` (split-K kernels have two splits or more) or ``output``
            (added to the output).
        parts: how K is cut. ``counted``: each split has a number of steps; ``aligned``: equal
            splits, rounded up to steps, none empty; ``even``: a power of two that divides K.
        ordered: whether splits are added in a fixed order, which makes the bits reproducible.
        numbered: whether tiles are numbered along grid x, at most `MAX_TILES`.
        wide: whether operands and output may exceed `MAX_BYTES`, because each tile has a 64-bit
            base.
        large_output: whether the output may exceed `MAX_BYTES`.
        scale_order: order of the scales, whatever the weight's layout; "" for the usual one.
    """

    scale: str
    whole_n: int
    whole_n_shuffled: int
    splits: int
    meet: str
    parts: str
    ordered: bool = False
    numbered: bool = False
    wide: bool = False
    large_output: bool = False
    scale_order: str = ""


#: Source: AITER's csrc/py_itfs_cu/asm_gemm_{a16w16,a8w8,a4w4}.cu,
#: asm_a8w8_blockscale_bpreshuffle.cu. Only its fp4 table has rows with outputs above 4 GiB, up to 9
#: GiB, without an error.
RULES = {
    "aiter-bf16gemm": Rules("none", 0, 0, 16, "semaphore", "counted"),
    "aiter-i8gemm": Rules("row", 0, 0, 16, "output", "aligned"),
    "aiter-fp8gemm-blockscale": Rules("block", 0, 0, 16, "output", "aligned"),
    "aiter-f4gemm": Rules("block", 16, 16, 16, "output", "even", large_output=True, scale_order="aiter32x8"),
    "tunedgemm-bf16": Rules("none", 4, 16, 16, "semaphore", "aligned", ordered=True, numbered=True, wide=True),
}
OPS = tuple(dict.fromkeys(op for abi in ABIS.values() for op in abi.ops))
#: gfx942 has no instructions for mxfp4.
_OF_GFX942 = tuple(op for op in OPS if op != "a4w4_blockscale")
_NEEDS = ("AITER or other packs of code objects; for a16w16 also `tunedgemm asm build`",)
#: On ranked ops the first 24 hold 95 % of the winners of AITER's rows, on layers that were not
#: fitted.
PLATFORMS = (
    Platform(("gfx950",), needs=_NEEDS, ops=OPS, ranked=("a4w4_blockscale:256", "a8w8_blockscale_bpreshuffle:256")),
    Platform(("gfx942",), needs=_NEEDS, ops=_OF_GFX942, ranked=("a8w8_blockscale_bpreshuffle:80",)),
)


def ceil_div(size: int, step: int) -> int:
    """Return the number of steps that cover a size."""
    return -(-size // step)


def unserved(shape: Shape, device: Device, kernels: Kernels) -> str | None:
    """Return why none of the *kernels* of the device's architecture takes the shape, or None."""
    reasons: dict[str, str] = {}
    for name, pack_kernel in kernels.items():
        if shape.op in pack_kernel.abi.ops:
            if not (reason := _operands(pack_kernel.kernel, shape) or _dtypes(pack_kernel, shape) or _sizes(pack_kernel.kernel, shape)):
                return None
            reasons.setdefault(reason, name)  # one example kernel for each reason
    if not reasons:
        built = f" or run `tunedgemm asm build --gfx {device.gfx} -o DIR`," if shape.op == "a16w16" else ""
        return f"no pack has kernels of {shape.op} for {device.gfx}: install AITER,{built} and name folders of packs in TUNEDGEMM_ASM_PACKS"
    examples = "; ".join(f"{name} {reason}" for reason, name in sorted(reasons.items())[:3])
    return f"no kernel of {shape.op} supports the shape: {examples}"


def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why no kernel can serve the shape on the device, whatever packs exist, or None."""
    if device.gfx not in FP8:
        return f"{device.gfx} is not supported; code objects exist for {' and '.join(FP8)}, generated PTX for sm_90"
    if shape.op not in OPS:
        return f"unsupported op {shape.op}; supported: {', '.join(OPS)}"
    if shape.m == 0:
        return "an empty batch needs no kernel"
    if shape.dtype.startswith("fp8") and shape.dtype != (wanted := FP8[device.gfx]):
        return f"{device.gfx} multiplies {wanted}, not {shape.dtype}"
    return None


def unfit(pack_kernel: PackKernel, splits: int, shape: Shape) -> str | None:
    """Return why a pack's kernel cannot serve a shape with this many splits, or None."""
    return unfit_config(pack_kernel.kernel, splits, shape) or _named(pack_kernel.kernel, _dtypes(pack_kernel, shape))


def unfit_config(kernel: KernelConfig, splits: int, shape: Shape) -> str | None:
    """Return why a kernel of any pack cannot serve a shape with this many splits, or None."""
    return _named(kernel, _operands(kernel, shape) or _sizes(kernel, shape) or _splits(kernel, splits, shape))


def _named(kernel: KernelConfig, reason: str) -> str | None:
    """Return the reason with the kernel's name as its subject, or None."""
    return f"{kernel.name} {reason}" if reason else None


def _dtypes(pack_kernel: PackKernel, shape: Shape) -> str:
    """Return why the pack's descriptor excludes a dtype of the shape, or an empty text."""
    operands = {"x": shape.dtype, "weight": shape.dtype, "out": shape.outdtype} | ({"bias": shape.bias_dtype} if shape.bias else {})
    for operand, dtype in operands.items():
        if dtype not in (said := pack_kernel.dtypes[operand]):
            return f"supports {operand} in {' or '.join(said) or 'no dtype'} (pack {pack_kernel.pack.name}), not {dtype}"
    return ""


def _operands(kernel: KernelConfig, shape: Shape) -> str:
    abi, rules = ABIS[kernel.abi], RULES[kernel.abi]
    if shape.op not in abi.ops:
        return f"computes {' and '.join(abi.ops)}, not {shape.op}"
    if shape.dtype not in abi.dtypes["x"]:
        return f"takes {' or '.join(abi.dtypes['x'])}, not {shape.dtype}"
    outputs = kernel.outputs or abi.dtypes["out"]
    if shape.outdtype not in outputs:
        return f"writes {' or '.join(outputs)}, not {shape.outdtype}"
    if shape.scale != rules.scale:
        return f"takes scales of kind {rules.scale}, not {shape.scale}"
    wanted = abi.layout if kernel.shuffled else "row"
    if shape.layout != wanted:
        return f"reads weights of layout {wanted}, not {shape.layout}"
    if rules.scale_order and scale_order(shape) != rules.scale_order:
        return f"reads scales in the order {rules.scale_order}, not {scale_order(shape)}"
    return _bias(kernel, shape)


def _bias(kernel: KernelConfig, shape: Shape) -> str:
    if not shape.bias:
        return ""
    abi = ABIS[kernel.abi]
    if not kernel.bias or not abi.dtypes["bias"]:
        return "adds no bias"
    # A kernel that reads two bias dtypes reads that of the output.
    wanted = abi.dtypes["bias"] if len(abi.dtypes["bias"]) == 1 else (shape.outdtype,)
    return "" if shape.bias_dtype in wanted else f"adds a bias in {' or '.join(wanted)}, not {shape.bias_dtype}"


def _sizes(kernel: KernelConfig, shape: Shape) -> str:
    abi, rules = ABIS[kernel.abi], RULES[kernel.abi]
    step = max(abi.sub_k, kernel.sub_k)
    if shape.k % step:
        return f"needs K % {step} = 0 (K={shape.k})"
    whole = (rules.whole_n_shuffled if kernel.shuffled else rules.whole_n) or kernel.tile_n
    if shape.n % whole:
        return f"needs N % {whole} = 0 (N={shape.n})"
    return _bytes(kernel, shape)


def _bytes(kernel: KernelConfig, shape: Shape) -> str:
    """Return why the addressed bytes or the grid are too large, or an empty text."""
    rules = RULES[kernel.abi]
    x, out = dtype_bits(shape.dtype) // (2 if shape.dtype == "fp4x2" else 1), dtype_bits(shape.outdtype)
    # With a base for each tile, 31-bit offsets address a tile.
    most, m, n = (MAX_BYTES // 2, kernel.tile_m, kernel.tile_n) if rules.wide else (MAX_BYTES, shape.m, shape.n)
    written = 0 if rules.large_output else m * shape.n * out
    for name, bits in (("x", m * shape.k * x), ("the weight", n * shape.k * x), ("the output", written)):
        if bits // 8 >= most:
            return f"addresses {bits // 8} bytes of {name}; it must be below {most}"
    tiles_m, tiles_n = ceil_div(shape.m, kernel.tile_m), ceil_div(shape.n, kernel.tile_n)
    tiles, grid = (tiles_m * tiles_n, MAX_TILES) if rules.numbered else (tiles_m, MAX_GRID)
    if tiles > grid:
        return f"has {tiles} tiles along a grid axis; the limit is {grid}"
    return ""


def _splits(kernel: KernelConfig, splits: int, shape: Shape) -> str:
    rules = RULES[kernel.abi]
    if not 1 <= splits <= rules.splits:
        return f"supports 1 to {rules.splits} splits (got {splits})"
    if splits > 1 and not kernel.splits:
        return f"does not split K (got {splits} splits)"
    if rules.meet == "semaphore":
        if splits == 1 and kernel.splits:
            return "needs two splits or more (got 1)"
        tiles = ceil_div(shape.n, kernel.tile_n) * ceil_div(shape.m, kernel.tile_m)
        if splits > 1 and tiles > COUNTERS:
            return f"has {tiles} tiles with split-K; there are {COUNTERS} counters"
    even = splits & (splits - 1) == 0 and shape.k % splits == 0
    fits = even if rules.parts == "even" else parts_of(kernel, splits, shape) == splits
    return "" if fits else f"cannot cut K={shape.k} into {splits} splits of whole steps of {kernel.sub_k}"


def part_of(kernel: KernelConfig, splits: int, shape: Shape) -> int:
    """Return the elements along K of each split but the last, in whole steps."""
    return ceil_div(ceil_div(shape.k, splits), kernel.sub_k) * kernel.sub_k


def parts_of(kernel: KernelConfig, splits: int, shape: Shape) -> int:
    """Return how many of the requested splits have work."""
    if RULES[kernel.abi].parts == "counted":
        return min(splits, shape.k // kernel.sub_k)
    return ceil_div(shape.k, part_of(kernel, splits, shape))
