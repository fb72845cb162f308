"""Check which shapes the instances support, as data; absent devices included."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import scale_order

from tunedgemm_ck.cutlass.cost import ceil_div
from tunedgemm_ck.cutlass.kernels import KERNELS, SM90
from tunedgemm_ck.cutlass.names import CutlassInstance
from tunedgemm_ck.cutlass.resources import accumulators_of, unfit_shared_memory, width_of
from tunedgemm_ck.problem import batches_of

#: Op -> dtypes of the operands and kinds of scales.
_FLOATS, _BYTES, _FP8 = ("bf16", "fp16"), ("int8", "fp8_e4m3fn"), ("fp8_e4m3fn",)
OPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a16w16": (_FLOATS, ("none",)),
    "a8w8": (_BYTES, ("tensor", "row")),
    "a8w8_blockscale": (_FP8, ("block",)),
    "batched_bf16": (_FLOATS, ("none",)),
    "batched_a8w8": (_BYTES, ("row",)),
}
OUTPUTS = ("bf16", "fp16", "fp32")
#: Alignment, in bytes, of TMA addresses and strides, and of vector loads.
ALIGNMENT = 16
#: Maximum bytes of an operand, and so of a TMA stride (CUDA driver API, cuTensorMapEncodeTiled).
MAX_BYTES = 1 << 40
#: Elements of K and rows of the weight that share a scale.
BLOCK = 128
#: Maximum blocks of a grid along its second and third axes, and so products of a batch.
_MAX_BLOCKS = 65535
#: Maximum parts of K, and minimum steps of each: fewer cost less than their partial.
MAX_SPLITS = 32
LEAST_STEPS = 4


def depths_of(dtype: str, gfx: str) -> tuple[int, ...]:
    """Return the bytes along K that a tile may have.

    fp8 has one depth on sm_90. CUTLASS promotes sums out of the tensor core, which keeps fewer bits
    than float32, after whole steps, by default after 4 instructions of 32 bytes of K.
    """
    kernels = KERNELS[gfx][dtype]
    return (128,) if kernels == SM90 and dtype.startswith("fp8") else kernels.depths


def may_be_fast(shape: Shape, gfx: str) -> bool:
    """Return whether sums may stay in the tensor core.

    Those of fp8 on sm_90 may, where rounding the output to bf16 loses more precision than they do.
    """
    return gfx == "sm_90" and shape.dtype.startswith("fp8") and shape.scale != "block" and shape.outdtype == "bf16"


def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why no instance can serve the shape on the architecture, or None."""
    if device.gfx not in KERNELS:
        return f"supported architectures: {', '.join(KERNELS)} (got {device.gfx})"
    return _operands(shape, device.gfx) or _results(shape) or _sizes(shape, device.gfx)


def _operands(shape: Shape, gfx: str) -> str | None:
    dtypes, scales = OPS[shape.op]
    if shape.dtype not in dtypes:
        return f"operands of {shape.op} must be {' or '.join(dtypes)} (got {shape.dtype})"
    if shape.dtype not in KERNELS[gfx]:
        return f"operands on {gfx} must be {', '.join(KERNELS[gfx])} (got {shape.dtype})"
    if shape.scale not in scales:
        return f"scales of {shape.op} must be {' or '.join(scales)} (got {shape.scale})"
    if scale_order(shape) == "m_major" and shape.m % 4:
        return f"M-major scales of x need columns of 16 bytes, which TMA loads: M % 4 = 0, or padding (got M={shape.m})"
    if shape.layout != "row":
        return f"weights must be plain [N, K] (got layout {shape.layout})"
    return None


def _results(shape: Shape) -> str | None:
    if shape.outdtype not in OUTPUTS:
        return f"the output must be {', '.join(OUTPUTS)} (got {shape.outdtype})"
    if shape.bias and shape.bias_dtype not in OUTPUTS:
        return f"the bias must be {', '.join(OUTPUTS)} (got {shape.bias_dtype})"
    if shape.bias and shape.scale == "block":
        return f"{shape.op} has no bias"
    return None


def _sizes(shape: Shape, gfx: str) -> str | None:
    width, written, batches = width_of(shape.dtype), width_of(shape.outdtype), batches_of(shape)
    if shape.k * width % ALIGNMENT:
        return f"rows of the operands must be multiples of {ALIGNMENT} bytes: K of {ALIGNMENT // width} (got K={shape.k})"
    if shape.n * written % ALIGNMENT:
        return f"rows of the output must be multiples of {ALIGNMENT} bytes: N of {ALIGNMENT // written} (got N={shape.n})"
    if shape.scale == "block" and KERNELS[gfx][shape.dtype].whole_blocks and (shape.n % BLOCK or shape.k % BLOCK):
        return f"block scales on {gfx} need N and K of {BLOCK} (got N={shape.n}, K={shape.k})"
    if batches > _MAX_BLOCKS:
        return f"a batch may have at most {_MAX_BLOCKS} products (got B={batches})"
    if batches * max(max(shape.m, shape.n) * shape.k * width, shape.m * shape.n * written) > MAX_BYTES:
        return f"an operand may have at most {MAX_BYTES} bytes"
    return None


def unfit(instance: CutlassInstance, split: int, shape: Shape, device: Device) -> str | None:
    """Return why the instance in *split* parts of K cannot serve the shape, or None; 0 and 1 do not
    split.
    """
    kernels = KERNELS[device.gfx][shape.dtype]
    if lacking := kernels.lack(instance):
        return f"CUTLASS does not have {lacking} on {device.gfx} for {shape.dtype}"
    columns, parts = shape.m if instance.swap else shape.n, batches_of(shape) * max(split, 1)
    whole = instance.scheduler == "single" or kernels.whole_grid
    if whole and max(ceil_div(columns, instance.tile_n), parts) > _MAX_BLOCKS:
        return f"scheduler {instance.scheduler} may have at most {_MAX_BLOCKS} tiles along its columns, and parts of the batch"
    return unfit_parameters(instance, split, shape, device.gfx)


def unfit_parameters(instance: CutlassInstance, split: int, shape: Shape, gfx: str) -> str | None:
    """Return why an instance does not fit dtypes, scales and K of a supported shape, or None."""
    return _depth(instance, split, shape, gfx) or _block_scales(instance, shape) or unfit_shared_memory(instance, shape, gfx)


def _depth(instance: CutlassInstance, split: int, shape: Shape, gfx: str) -> str | None:
    width, allowed = width_of(shape.dtype), depths_of(shape.dtype, gfx)
    if instance.tile_k * width not in allowed:
        return f"tile_k must be {' or '.join(str(size // width) for size in allowed)} for {shape.dtype} (got {instance.tile_k})"
    if instance.fast and not may_be_fast(shape, gfx):
        return "fast sums need fp8 on sm_90 with an output in bf16, without block scales"
    if instance.accumulators > (most := accumulators_of(shape.dtype, instance.fast)):
        return f"{instance.accumulators} accumulators per thread exceed {most}, the maximum of {shape.dtype}"
    if not 0 <= split <= MAX_SPLITS:
        return f"splitK must be in 0..{MAX_SPLITS} (got {split})"
    if split > 1 and instance.scheduler != "streamk":
        return f"splitK needs scheduler streamk (got {instance.scheduler})"
    if split > 1 and shape.k < split * LEAST_STEPS * instance.tile_k:
        return f"{split} parts of K have fewer than {LEAST_STEPS} steps of {instance.tile_k} each (got K={shape.k})"
    return None


def _block_scales(instance: CutlassInstance, shape: Shape) -> str | None:
    """Return why an instance does not fit block scales, or None.

    The main loop with scales takes one block of K per step. Of several blocks of the weight's rows
    it would mask only the first.
    """
    if shape.scale != "block":
        return None
    if instance.schedule in ("plain", "multistage"):
        return f"block scales need schedule cooperative or pingpong (got {instance.schedule})"
    if instance.tile_m * instance.tile_n > BLOCK * BLOCK:
        return f"block scales need tiles of at most {BLOCK} x {BLOCK}, whose sums fit registers"
    along_weight = instance.tile_m if instance.swap else instance.tile_n
    if instance.tile_k != BLOCK or along_weight != BLOCK:
        return f"block scales need tiles of {BLOCK} of K and {BLOCK} rows of the weight"
    return None
