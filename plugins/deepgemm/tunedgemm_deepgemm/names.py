"""Map solution names to DeepGEMM's settings and back.

``native`` is the library's own choice. ``n128_s120_pdl_mnk`` restricts it: block N a multiple of
128, 120 SMs, programmatic dependent launch, and M compiled into the kernel in addition to N and K.
Experts have three more. ``m64`` pads each expert's rows to blocks of 64 instead of 128. ``masked``
gives each expert rows for all pairs. ``spill`` leaves rows beyond those of a usual routing to a
kernel of ours. A part that is absent keeps the library's default.
"""

from __future__ import annotations

import functools
import math

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm.tools.tables import KernelName

#: The op of experts.
EXPERTS = "fmoe"
#: Name of the library's own choice.
NATIVE = "native"
#: Largest block N of the library, and its step.
BLOCK_N, STEP = 256, 16
#: Blocks N of more than 128 that the library has with block scales.
_SCALED_WIDE = (144, 160, 192)
#: Rows of a block of experts, and those that the library takes by itself.
EXPERT_ROWS, LIBRARY_ROWS = (16, 32, 64, 128), 128
#: Most memory of the masked layout.
MASKED_BYTES = 256 << 20

#: Form of the parts, each with a leading ``_``, which the first has not in a name.
_PARTS = KernelName("[_masked?masked][_m{rows}][_n{block_n}][_s{sms}][_pdl?pdl][_mnk?mnk][_spill?spill]")


@attrs.frozen(cache_hash=True)
class Kernel:
    """Settings of a solution.

    Attributes:
        block_n: block N is a multiple of it; 0 for the library's choice.
        sms: multiprocessors that the kernel uses; 0 for all.
        pdl: whether the launch may overlap the end of the previous kernel.
        mnk: whether M is a constant of the kernel.
        rows: rows of a block of experts, to which each expert's are padded; 0 for the library's.
        masked: whether each expert has rows for all pairs, of which the kernel reads the used.
        spill: whether rows beyond those of a usual routing are left to a Triton kernel.
    """

    block_n: int = 0
    sms: int = 0
    pdl: bool = False
    mnk: bool = False
    rows: int = 0
    masked: bool = False
    spill: bool = False

    @property
    def name(self) -> str:
        """Return the solution name, ``kernelName`` in a table."""
        return _PARTS.write(self)[1:] or NATIVE

    @property
    def expert_rows(self) -> int:
        """Return the rows of a block of experts."""
        return self.rows or LIBRARY_ROWS


@functools.lru_cache(maxsize=4096)
def parse_name(name: str) -> Kernel:
    """Parse a solution name; the inverse of `Kernel.name`. An empty name is `NATIVE`.

    Raises:
        PluginError: no kernel has that name.
    """
    fields = _PARTS.parse("" if name in ("", NATIVE) else f"_{name}")
    if fields is None:
        raise PluginError(f"deepgemm has no kernel {name!r}; names look like {NATIVE}, {Kernel(128, 120, True, True).name}")
    return Kernel(**fields)


def resolve(solution: Solution, shape: Shape, device: Device) -> Kernel:
    """Return the kernel of a solution.

    Raises:
        PluginError: no kernel has that name, or it cannot serve the shape on the device.
    """
    kernel = parse_name(solution.kernel_name)
    if solution.split_k > 1:
        raise PluginError(f"deepgemm {kernel.name}: splitK must be at most 1 (got {solution.split_k})")
    if reason := unfit(kernel, shape, device):
        raise PluginError(f"deepgemm {kernel.name}: {reason}")
    return kernel


def unfit(kernel: Kernel, shape: Shape, device: Device) -> str:
    """Return why the library cannot launch a kernel for the shape on the device, or an empty text."""
    if reason := _unfit_rows(kernel, shape):
        return reason
    if kernel.sms > device.cu_num:
        return f"SMs must be at most {device.cu_num} (got {kernel.sms})"
    if kernel.block_n and (kernel.block_n % STEP or kernel.block_n > BLOCK_N):
        return f"block N must be a multiple of {STEP} up to {BLOCK_N} (got {kernel.block_n})"
    if (shape.scale == "block" or shape.op == EXPERTS) and kernel.block_n > 128 and kernel.block_n not in _SCALED_WIDE:
        return f"block N with block scales must be at most 128, or one of {', '.join(map(str, _SCALED_WIDE))} (got {kernel.block_n})"
    return ""


def _unfit_rows(kernel: Kernel, shape: Shape) -> str:
    if shape.op != EXPERTS:
        return "rows of experts apply to fmoe" if kernel.rows or kernel.masked or kernel.spill else ""
    if kernel.rows and (kernel.rows not in EXPERT_ROWS or kernel.rows == LIBRARY_ROWS):
        return f"rows of a block of experts must be {', '.join(map(str, EXPERT_ROWS[:-1]))}, or left out (got {kernel.rows})"
    if kernel.masked and kernel.rows:
        return f"the masked layout has blocks of the library's choice (got {kernel.rows} rows)"
    # Operands and outputs of both products.
    if kernel.masked and (needed := int(shape["expert"]) * expert_rows(shape, kernel) * (3 * shape.n + 5 * shape.k)) > MASKED_BYTES:
        return f"the masked layout must need at most {MASKED_BYTES >> 20} MiB (got {needed >> 20})"
    if kernel.spill and kernel.masked:
        return "the masked layout has rows for every routing, and none to spill"
    if kernel.spill and shape.m and usual_rows(shape, kernel) == expert_rows(shape, kernel):
        return "a usual routing needs as many rows as any; leave spill out"
    return ""


def expert_rows(shape: Shape, kernel: Kernel) -> int:
    """Return the most rows that any routing needs: of an expert in the masked layout, else of all.

    The most blocks are needed where as many experts as can be have a pair, and one has the others.
    """
    pairs, size = shape.m * int(shape["topk"]), kernel.expert_rows
    if kernel.masked:
        return -(-pairs // LIBRARY_ROWS) * LIBRARY_ROWS
    hit = min(int(shape["expert"]), pairs)
    return (hit + (pairs - hit) // size) * size


def usual_rows(shape: Shape, kernel: Kernel) -> int:
    """Return the rows that most routings need: a block for each expert, or 5/8 of one as padding.

    With even routing the padding is a block for few pairs an expert, and half a block for many.
    """
    pairs, size = shape.m * int(shape["topk"]), kernel.expert_rows
    hit = min(int(shape["expert"]), pairs)
    blocks = math.ceil(max(1.02 * hit, pairs / size + 0.625 * hit))
    return min(blocks * size, expert_rows(shape, kernel))
