"""Static limits: what an architecture has, as data; answers for devices that are not present."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Unsupported


@attrs.frozen
class Architecture:
    """What the kernels must fit into.

    Attributes:
        shared_bytes: shared memory (LDS) that one block may take.
        wave: threads of a warp or wavefront.
        columns: rows of x that one matrix instruction takes.
        registers: 32-bit registers that one thread may hold; on CDNA vector registers alone.
        register_file: those of a multiprocessor or compute unit, which one block may fill.
        warps: warps that a multiprocessor or compute unit can have at a time.
        cluster: blocks of a cluster at most, 0 where there are none.
        overlaps: whether a kernel may begin while the one before it ends (programmatic dependent launch).
        wgmma: whether it has Hopper's asynchronous matrix instructions.
    """

    shared_bytes: int
    wave: int
    columns: int
    registers: int
    register_file: int
    warps: int
    cluster: int = 0
    overlaps: bool = False
    wgmma: bool = False


def _nvidia(shared: int, warps: int, cluster: int = 0, *, wgmma: bool = False) -> Architecture:
    return Architecture(
        shared << 10,
        wave=32,
        columns=8,
        registers=255,
        register_file=1 << 16,
        warps=warps,
        cluster=cluster,
        overlaps=cluster > 0,
        wgmma=wgmma,
    )


def _cdna(shared: int) -> Architecture:
    return Architecture(shared << 10, wave=64, columns=16, registers=256, register_file=1 << 17, warps=32)


#: CUDA programming guide, table of technical specifications (shared memory per block, opt-in; resident warps;
#: portable size of a cluster); AMD's CDNA 2, 3 and 4
#: ISA guides (LDS per work-group, VGPRs, waves).
ARCHITECTURES = {
    "sm_80": _nvidia(163, 64),
    "sm_86": _nvidia(99, 48),
    "sm_89": _nvidia(99, 48),
    "sm_90": _nvidia(227, 64, cluster=8, wgmma=True),
    "sm_100": _nvidia(227, 64, cluster=8),
    "sm_120": _nvidia(99, 48, cluster=8),
    "gfx90a": _cdna(64),
    "gfx942": _cdna(64),
    "gfx950": _cdna(160),
}

INPUTS = ("bf16", "fp16")
OUTPUTS = ("bf16", "fp16", "fp32")

#: Rows of x at most: beyond, a tile of the weight would be read more than once, and other backends are made for that.
MAX_ROWS = 64
#: Threads of a block at most.
MAX_THREADS = 1024
#: Parts of K at most: more would add up longer than they multiply.
MAX_SPLITS = 64
#: Elements of an operand at most, so that no address computed in 64 bits overflows.
MAX_ELEMENTS = 1 << 40


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """True, or why no kernel here takes the shape on the architecture."""
    if device.kind == "cpu":
        return Unsupported("the kernels are for NVIDIA and AMD GPUs, not for a CPU")
    if device.gfx not in ARCHITECTURES:
        return Unsupported(f"no limits are known for {device.gfx}; known: {', '.join(ARCHITECTURES)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    if shape.m > MAX_ROWS:
        return Unsupported(f"the kernels are for M <= {MAX_ROWS} (M={shape.m})")
    if max(shape.n, shape.m) * shape.k > MAX_ELEMENTS:
        return Unsupported(f"a weight of {shape.n} x {shape.k} elements is too large; {MAX_ELEMENTS} are the most")
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
