"""LaunchArguments: what a config's kernel is told to compute a shape: its arguments but for addresses, grid, scratch memory."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Unsupported

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.matrix import multiplies
from tunedgemm_asm.ptx.names import COLUMNS, ELEMENT_BYTES, LINE, SCALE_BLOCK, KernelConfig, step_of
from tunedgemm_asm.ptx.promotion import scales_by_block
from tunedgemm_asm.ptx.resources import OTHER_REGISTERS
from tunedgemm_asm.ptx.shares import Shares, shares_of
from tunedgemm_asm.ptx.tensormap import ALIGNED

#: Parts of K at most, and counters of a launch.
MOST_SPLITS, MOST_COUNTERS = 16, 1 << 15
#: Rows and elements along K of an operand, and elements of an output's row: numbers have 32 bits, coordinates a sign.
MOST_SIZE = (1 << 31) - 1
#: Scales of x by block, which are counted with 32 bits.
MOST_SCALES = (1 << 32) - 1
#: Ops whose scales of x by block lie block of K by block of K.
TRANSPOSED = ("a8w8_blockscale_bpreshuffle",)
#: Items of a launch, or steps of all tiles where they are shared: what is numbered beyond the last must not wrap around, with so many
#: steps of a tile at most.
MOST_ITEMS, MOST_STEPS = 1 << 30, 1 << 16


def units_of(config: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Clusters along a, and tiles along b."""
    rows_a, rows_b = rows_of(config, shape)
    return ceil_div(rows_a, config.tile_a * config.cluster), ceil_div(rows_b, config.tile_b)


def tiles_of(config: KernelConfig, shape: Shape) -> int:
    """Tiles, those of a cluster beyond the operand, too."""
    units_a, tiles_b = units_of(config, shape)
    return units_a * config.cluster * tiles_b


def rows_of(config: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Rows of a and of b."""
    return (shape.n, shape.m) if config.swapped else (shape.m, shape.n)


def part_of(splits: int, shape: Shape) -> int:
    """Steps along K of each part but the last."""
    return ceil_div(steps_of(shape), splits)


def steps_of(shape: Shape) -> int:
    """Stages along K."""
    return ceil_div(shape.k, step_of(shape.dtype))


def unsupported(config: KernelConfig, splits: int, shape: Shape) -> str | None:
    """Why the kernel cannot serve the shape with so many parts of K, or an empty text."""
    steps, (units_a, tiles_b) = steps_of(shape), units_of(config, shape)
    if reason := _unsupported(config, shape):
        return f"{config.name} {reason}"
    if config.stream and (splits > 1 or steps > MOST_STEPS or units_a * tiles_b * steps > MOST_ITEMS):
        most = f"{MOST_ITEMS} at most, of {MOST_STEPS} at most for a tile"
        return f"{config.name} shares {units_a * tiles_b} times {steps} steps along K ({most}) with splitK 1 (got {splits})"
    if not 1 <= splits <= MOST_SPLITS:
        return f"{config.name} cuts K into 1 to {MOST_SPLITS} parts (got {splits})"
    if ceil_div(steps, part_of(splits, shape)) != splits:
        return f"{config.name} does not cut K={shape.k} into {splits} parts of whole steps of {step_of(shape.dtype)}"
    if units_a * tiles_b * splits > MOST_ITEMS:
        return f"{config.name} has {units_a * tiles_b * splits} tiles; there are {MOST_ITEMS} at most"
    if splits > 1 and (counters := slots_of(config, shape)) > MOST_COUNTERS:
        return f"{config.name} has {counters} parts of tiles that meet over parts of K; there are {MOST_COUNTERS} counters"
    return None


def _unsupported(config: KernelConfig, shape: Shape) -> str:
    """What of a shape's dtypes, rows and scales the config is not made for, or an empty text."""
    if config.panels and (shape.outdtype == "fp32" or shape.n % LINE):
        return f"stores outputs of 16 bits, rows at multiples of 16 bytes: N % {LINE} = 0 (N={shape.n}, {shape.outdtype})"
    if config.promoted and not shape.dtype.startswith("fp8"):
        return f"adds accumulators of fp8 products in float32; those of {shape.dtype} are whole"
    if not multiplies(config.portion, shape.dtype):
        return f"has tiles of {config.tile_b} rows, for which there is no instruction of {shape.dtype}"
    return _unsupported_by_block(config) if shape.scale == "block" else ""


def _unsupported_by_block(config: KernelConfig) -> str:
    """Why the config does not take scales by block, or an empty text."""
    if not config.promoted:
        return "does not add up blocks of K with their scales: the name of one that does has _p"
    if not scales_by_block(config):
        return f"has rows of the weight at too many places in blocks of scales: {SCALE_BLOCK} rows share one"
    # Of each row of x in b that is a thread's, a quarter of them, its scale and where that lies.
    held = config.accumulators + config.portion // 2 + config.tile_b // 2 * config.swapped
    if held + OTHER_REGISTERS > config.consumer_registers:
        return f"has {held} accumulators, scales and their places and {OTHER_REGISTERS} others, a thread has {config.consumer_registers} registers"
    return ""


def shared_evenly(config: KernelConfig, shape: Shape, multiprocessors: int) -> Shares:
    """How the clusters that so many multiprocessors hold at a time share the steps of tiles."""
    units_a, tiles_b = units_of(config, shape)
    return shares_of(units_a * tiles_b, steps_of(shape), max(1, multiprocessors * config.resident // config.cluster))


def slots_of(config: KernelConfig, shape: Shape) -> int:
    """Consumers' shares of all tiles, those of a cluster beyond the operand, too."""
    return tiles_of(config, shape) * config.sharing


GFX = "sm_90"

#: What the operands of each op may be, their scales, and the layouts of the weight.
OPS = {
    "a16w16": (("bf16", "fp16"), ("none",), ("row", COLUMNS)),
    "a8w8": (("fp8_e4m3fn", "int8"), ("row", "tensor"), ("row",)),
    "a8w8_bpreshuffle": (("fp8_e4m3fn", "int8"), ("row", "tensor"), (COLUMNS,)),
    "a8w8_blockscale": (("fp8_e4m3fn",), ("block",), ("row",)),
    "a8w8_blockscale_bpreshuffle": (("fp8_e4m3fn",), ("block",), (COLUMNS,)),
}

_OUTPUTS = ("bf16", "fp16", "fp32")


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """Whether the generated kernels take a shape on a device of this architecture, or why not."""
    if shape.op not in OPS:
        return Unsupported(f"on {device.gfx} op {shape.op} is not covered; covered: {', '.join(OPS)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    operands, scales, layouts = OPS[shape.op]
    for what, dtype, taken in (("operands", shape.dtype, operands), ("the output", shape.outdtype, _OUTPUTS)):
        if dtype not in taken:
            return Unsupported(f"{what} may be {' or '.join(taken)}, not {dtype}")
    if shape.bias and shape.bias_dtype not in _OUTPUTS:
        return Unsupported(f"a bias may be {' or '.join(_OUTPUTS)}, not {shape.bias_dtype}")
    if shape.scale not in scales or shape.layout not in layouts:
        taken = f"takes scale {' or '.join(scales)} and weights of layout {' or '.join(layouts)}"
        return Unsupported(f"{taken}, not scale {shape.scale} and layout {shape.layout}")
    if shape.layout == COLUMNS and shape.k % (whole := step_of(shape.dtype)):
        return Unsupported(f"weights of layout {COLUMNS} have whole columns: K % {whole} = 0 (K={shape.k})")
    if shape.k % (whole := ALIGNED // ELEMENT_BYTES[shape.dtype]):
        return Unsupported(f"rows of operands start at multiples of {ALIGNED} bytes for the copy engine: K % {whole} = 0 (K={shape.k})")
    if max(shape.m, shape.n, shape.k) > MOST_SIZE:
        return Unsupported(f"sizes are {MOST_SIZE} at most")
    if shape.scale == "block" and (count := shape.m * steps_of(shape)) > MOST_SCALES:
        return Unsupported(f"x has {count} scales; there are {MOST_SCALES} at most")
    return True
