"""Static limits: what an architecture has, as data; answers for devices that are not present."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Unsupported


@attrs.frozen
class Architecture:
    """What the kernels must fit into.

    Attributes:
        shared_bytes: shared memory (LDS) that one block may take.
        warp_size: threads of a warp or wavefront.
        registers: 32-bit registers that one thread may hold; on CDNA vector and accumulation registers together.
        matrix: the matrix instruction that a tile of ordinary size uses: mma, wgmma, tcgen05, mfma or wmma.
        tma: whether the tensor memory accelerator loads tiles through descriptors.
        specialize: whether Triton 3.6 gives loads and products to different warps.
    """

    shared_bytes: int
    warp_size: int
    registers: int
    matrix: str
    tma: bool = False
    specialize: bool = False


#: CUDA programming guide, table of technical specifications (shared memory per block, opt-in);
#: AMD's CDNA 3, CDNA 4 and RDNA 3 ISA guides (LDS per work-group).
ARCHITECTURES = {
    "sm_80": Architecture(163 << 10, 32, 255, "mma"),
    "sm_86": Architecture(99 << 10, 32, 255, "mma"),
    "sm_89": Architecture(99 << 10, 32, 255, "mma"),
    "sm_90": Architecture(227 << 10, 32, 255, "wgmma", tma=True, specialize=True),
    "sm_100": Architecture(227 << 10, 32, 255, "tcgen05", tma=True),
    "sm_120": Architecture(99 << 10, 32, 255, "mma", tma=True),
    "gfx90a": Architecture(64 << 10, 64, 512, "mfma"),
    "gfx942": Architecture(64 << 10, 64, 512, "mfma"),
    "gfx950": Architecture(160 << 10, 64, 512, "mfma"),
    "gfx1100": Architecture(64 << 10, 32, 256, "wmma"),
    "gfx1201": Architecture(64 << 10, 32, 256, "wmma"),
}

INPUTS = ("bf16", "fp16")
OUTPUTS = ("bf16", "fp16", "fp32")

#: A grid's second and third axes (split-K, groups of rows) end at 65535.
MAX_GRID_YZ = 65535

#: Tiles that one split-K launch may count.
MAX_TILES = 1024

#: Partial sums of one launch: their offsets are 32-bit, and more would cost more traffic than the split saves.
MAX_PARTIAL_BYTES = 1 << 30


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """True, or why no kernel here takes the shape on the architecture."""
    if device.kind == "cpu":
        return Unsupported("Triton compiles for NVIDIA and AMD GPUs, not for a CPU")
    if device.gfx not in ARCHITECTURES:
        return Unsupported(f"no limits are known for {device.gfx}; known: {', '.join(ARCHITECTURES)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    if shape.dtype not in INPUTS:
        return Unsupported(f"operands must be {' or '.join(INPUTS)}, not {shape.dtype}")
    if shape.outdtype not in OUTPUTS:
        return Unsupported(f"the output must be {', '.join(OUTPUTS)}, not {shape.outdtype}")
    if shape.bias and shape.bias_dtype not in OUTPUTS:
        return Unsupported(f"the bias must be {', '.join(OUTPUTS)}, not {shape.bias_dtype}")
    if shape.scale != "none":
        return Unsupported(f"scaled operands (scale={shape.scale}) are not covered")
    if shape.layout != "row":
        return Unsupported(f"weights must be plain [N, K], not layout {shape.layout!r}")
    return True
