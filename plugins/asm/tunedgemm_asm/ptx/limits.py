"""Check which shapes the generated kernels support, and count their tiles and steps."""

from __future__ import annotations

from tunedgemm.plugin import Device, Platform, Shape
from tunedgemm.tools.launching import scale_strides

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.matrix import multiplies
from tunedgemm_asm.ptx.names import COLUMNS, ELEMENT_BYTES, LINE, SCALE_BLOCK, KernelConfig, step_of
from tunedgemm_asm.ptx.shares import Shares, shares_of
from tunedgemm_asm.ptx.tensormap import ALIGNED

#: Most splits of K; most counters of a launch.
MOST_SPLITS, MOST_COUNTERS = 16, 1 << 15
#: Most rows and elements along K of an operand, and elements of an output row: coordinates are
#: signed.
MOST_SIZE = (1 << 31) - 1
#: Most block scales of x, which 32 bits count.
MOST_SCALES = (1 << 32) - 1
#: Ops whose block scales of x are transposed: one block of K after the other.
TRANSPOSED = ("a8w8_blockscale_bpreshuffle",)
#: Most items of a launch, or steps of all stream-K tiles, so that numbers past the end do not wrap;
#: most steps of a tile with stream-K.
MOST_ITEMS, MOST_STEPS = 1 << 30, 1 << 16
#: A row after which no tile begins.
_ANYWHERE = (1 << 32) - 1


def units_of(config: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Return the number of clusters along a and of tiles along b."""
    rows_a, rows_b = rows_of(config, shape)
    return ceil_div(rows_a, config.tile_a * config.cluster), ceil_div(rows_b, config.tile_b)


def tiles_of(config: KernelConfig, shape: Shape) -> int:
    """Return the number of tiles, including those of a cluster outside the operand."""
    units_a, tiles_b = units_of(config, shape)
    return units_a * config.cluster * tiles_b


def rows_of(config: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Return the rows of a and of b."""
    return (shape.n, shape.m) if config.swapped else (shape.m, shape.n)


def boxes_of(config: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Return the rows of a and of b that one TMA load takes, none outside an operand of fewer.

    TMA takes about 12 cycles for a row outside (H100). Loads that a cluster divides stay whole.
    """
    rows_a, rows_b = rows_of(config, shape)
    return min(config.tile_a, rows_a), min(config.box_b, rows_b) if config.cluster == 1 else config.box_b


def last_rows(config: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Return the last rows of a and of b where a tile may begin.

    A tile that would end outside begins sooner: it repeats results of its neighbour, with the same
    bits. Stream-K tiles add their parts in different orders, so they stay; so do tiles that would
    begin inside a scale block of the weight.
    """
    last = [max(0, rows - tile) for rows, tile in zip(rows_of(config, shape), (config.tile_a, config.tile_b), strict=True)]
    of_weight = 0 if config.swapped else 1
    if config.staged and last[of_weight] % config.span:
        last[of_weight] = _ANYWHERE
    return (_ANYWHERE, _ANYWHERE) if config.stream else (last[0], last[1])


def part_of(splits: int, shape: Shape) -> int:
    """Return the steps along K of each split but the last."""
    return ceil_div(steps_of(shape), splits)


def shared_by(config: KernelConfig, splits: int) -> int:
    """Return the CTAs that share the K of a tile."""
    return 1 if config.folded else splits


def steps_of(shape: Shape) -> int:
    """Return the stages along K."""
    return ceil_div(shape.k, step_of(shape.dtype))


def unfit(config: KernelConfig, splits: int, shape: Shape) -> str | None:
    """Return why the kernel cannot serve the shape with this many splits, or None."""
    steps, (units_a, tiles_b) = steps_of(shape), units_of(config, shape)
    if reason := _unfit(config, shape):
        return f"{config.name} {reason}"
    if config.stream and (splits > 1 or steps > MOST_STEPS or units_a * tiles_b * steps > MOST_ITEMS):
        most = f"{MOST_ITEMS} at most, of {MOST_STEPS} at most for a tile"
        return f"{config.name} shares {units_a * tiles_b} times {steps} steps along K ({most}) with splitK 1 (got {splits})"
    if config.folded and splits == 1:
        return f"{config.name} adds parts of K, so it needs splitK 2 or more (got 1)"
    if not 1 <= splits <= MOST_SPLITS:
        return f"{config.name} supports 1 to {MOST_SPLITS} splits (got {splits})"
    if ceil_div(steps, part_of(splits, shape)) != splits:
        return f"{config.name} cannot cut K={shape.k} into {splits} splits of whole steps of {step_of(shape.dtype)}"
    items = units_a * tiles_b * shared_by(config, splits)
    if items > MOST_ITEMS:
        return f"{config.name} has {items} tiles; the limit is {MOST_ITEMS}"
    if shared_by(config, splits) > 1 and (counters := slots_of(config, shape)) > MOST_COUNTERS:
        return f"{config.name} needs {counters} counters; the limit is {MOST_COUNTERS}"
    return None


def _unfit(config: KernelConfig, shape: Shape) -> str:
    """Return which dtype, row or scale of the shape the kernel does not support, or an empty text."""
    if config.panels and (shape.outdtype == "fp32" or shape.n % LINE):
        return f"stores 16-bit outputs with TMA: needs N % {LINE} = 0 (N={shape.n}, {shape.outdtype})"
    if config.folded and ELEMENT_BYTES[shape.dtype] == 1:
        return f"adds parts of K of 16-bit operands only, not {shape.dtype}"
    if config.promoted and not shape.dtype.startswith("fp8"):
        return f"promotes fp8 products only, not {shape.dtype}"
    if not multiplies(config.portion, shape.dtype):
        return f"has tiles of {config.tile_b} rows, which wgmma lacks for {shape.dtype}"
    if config.staged and shape.scale != "block":
        return "has scales in its stages (_s), for block scales only"
    if shape.scale == "block" and not config.staged:
        return "has no scales in its stages, as block scales require; use a kernel with _p and _s, or tune again"
    if shape.scale == "block" and config.swapped and SCALE_BLOCK % config.rows:
        return f"has consumers whose {config.rows} rows of the weight are not in one scale block of {SCALE_BLOCK} rows"
    return ""


def shared_evenly(config: KernelConfig, shape: Shape, multiprocessors: int) -> Shares:
    """Return how the clusters resident on this many multiprocessors share the steps of tiles."""
    units_a, tiles_b = units_of(config, shape)
    return shares_of(units_a * tiles_b, steps_of(shape), max(1, multiprocessors * config.resident // config.cluster))


def slots_of(config: KernelConfig, shape: Shape) -> int:
    """Return the consumers' parts of all tiles, including those of a cluster outside the operand."""
    return tiles_of(config, shape) * config.sharing


GFX = "sm_90"

#: Op -> dtypes of operands, kinds of scales, layouts of the weight.
OPS = {
    "a16w16": (("bf16", "fp16"), ("none",), ("row", COLUMNS)),
    "a8w8": (("fp8_e4m3fn", "int8"), ("row", "tensor"), ("row",)),
    "a8w8_bpreshuffle": (("fp8_e4m3fn", "int8"), ("row", "tensor"), (COLUMNS,)),
    "a8w8_blockscale": (("fp8_e4m3fn",), ("block",), ("row",)),
    "a8w8_blockscale_bpreshuffle": (("fp8_e4m3fn",), ("block",), (COLUMNS,)),
}
PLATFORMS = (Platform((GFX,), ran=("H100", "H200"), ops=tuple(OPS), ranked=("a16w16", "a8w8", "a8w8_blockscale")),)

_OUTPUTS = ("bf16", "fp16", "fp32")


def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why the generated kernels do not support the shape, or None."""
    if shape.op not in OPS:
        return f"{device.gfx}: unsupported op {shape.op}; supported: {', '.join(OPS)}"
    if shape.m == 0:
        return "an empty batch needs no kernel"
    operands, scales, layouts = OPS[shape.op]
    for what, dtype, taken in (("operands", shape.dtype, operands), ("the output", shape.outdtype, _OUTPUTS)):
        if dtype not in taken:
            return f"{what} must be {' or '.join(taken)}, not {dtype}"
    if shape.bias and shape.bias_dtype not in _OUTPUTS:
        return f"a bias must be {' or '.join(_OUTPUTS)}, not {shape.bias_dtype}"
    if shape.scale not in scales or shape.layout not in layouts:
        taken = f"takes scale {' or '.join(scales)} and weights of layout {' or '.join(layouts)}"
        return f"{taken}, not scale {shape.scale} and layout {shape.layout}"
    if shape.layout == COLUMNS and shape.k % (whole := step_of(shape.dtype)):
        return f"layout {COLUMNS} needs K % {whole} = 0 (K={shape.k})"
    if shape.k % (whole := ALIGNED // ELEMENT_BYTES[shape.dtype]):
        return f"TMA needs rows at multiples of {ALIGNED} bytes: K % {whole} = 0 (K={shape.k})"
    if max(shape.m, shape.n, shape.k) > MOST_SIZE:
        return f"sizes must not exceed {MOST_SIZE}"
    if shape.scale == "block" and (count := max(shape.m, scale_strides(shape)[1]) * steps_of(shape)) > MOST_SCALES:
        return f"x has {count} scales; the limit is {MOST_SCALES}"
    return None
