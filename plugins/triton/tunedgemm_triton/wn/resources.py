"""Check which formats and sizes products of weight-only formats take, and what fits."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, WeightFormat, format_of

from tunedgemm_triton.mx.resources import unfit_split
from tunedgemm_triton.resources import ceil_div, has_idle_part
from tunedgemm_triton.wn.names import Wn

#: Codes of an element, whose positions fit a constant; bits of one that is the last of a bf16.
_MOST_CODES, _MOST_BITS = 8, 7
#: Matrix instructions that read shared memory while a program goes on.
_ASYNCHRONOUS = ("wgmma", "tcgen05")
#: Values of e2m1 without a sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unsupported_operands(shape: Shape, device: Device) -> str | None:
    """Return why no kernel decodes the format on the architecture, or None."""
    form, architecture = format_of(shape), ARCHITECTURES[device.gfx]
    if form.has_index:
        return f"{form.name} has scales in the order of an index, which no kernel follows; use a format without act-order"
    if not _is_joined(form) or not kind_of(form):
        return f"{form.name}: an element must have 1, 2, 4 or {_MOST_CODES} codes, in the order of joined halves, of integers or e2m1"
    if architecture.matrix == "wmma":
        return f"kernels that decode the weight are made for the registers of NVIDIA and CDNA, not of {device.gfx}"
    if "fp8_e4m3fn" in (*form.dtypes, *form.scale) and not architecture.fp8:
        return f"{device.gfx} has no fp8, so that Triton does not convert e4m3 of {form.name}"
    if shape.layout != "row":
        return f"the weight of {shape.op} must have layout row (got {shape.layout!r})"
    return None


def _is_joined(form: WeightFormat) -> bool:
    """Return whether the kernel's joins give the order of codes: a place is the sum of its bits'."""
    if form.per & (form.per - 1) or form.per > _MOST_CODES:
        return False
    bits = [1 << bit for bit in range(form.per.bit_length() - 1)]
    return all(form.order.index(place) == sum(form.order.index(bit) for bit in bits if place & bit) for place in range(form.per))


def kind_of(form: WeightFormat) -> str:
    """Return how the kernel finds the value of a code: native, e2m1 or integer; "" if it cannot."""
    if not form.values:
        return "native" if form.per == 1 else ""
    if form.values == (*_E2M1, *(-value for value in _E2M1)):
        return "e2m1"
    first = form.values[0]
    is_run = form.values == tuple(first + code for code in range(len(form.values)))
    return "integer" if is_run and first == int(first) and -128 < first <= 0 and form.bits <= _MOST_BITS else ""


def scaled_of(shape: Shape) -> str:
    """Return what the scales multiply: weight where that is exact, sums of a group, or of the row."""
    if not int(shape["w_group"]):
        return "row"
    return "weight" if shape.dtype in format_of(shape).exact else "sums"


def unfit(kernel: Wn, split_k: int, shape: Shape, device: Device) -> str | None:
    """Return why the kernel cannot serve the shape on the device, or None."""
    del device
    group = int(shape["w_group"])
    if scaled_of(shape) == "sums" and group % kernel.block_k:
        return f"a step along K must be a part of a group of {group}, whose sums are scaled (got {kernel.block_k})"
    return unfit_split(kernel, split_k, shape)


def shared_bytes(kernel: Wn, shape: Shape, device: Device) -> int:
    """Estimate the shared memory from what Triton 3.9 allotted; `bind` checks the real figure.

    There is a buffer of the weight and its zero points for each step but one, and the decoded tile.
    So there is of x, or one for each step with asynchronous products. AMD's loop keeps the weight
    in registers, and gfx950 pads x by up to a 32nd. mma reads decoded bytes from registers.
    """
    form, matrix, steps = format_of(shape), ARCHITECTURES[device.gfx].matrix, max(kernel.stages - 1, 1)
    packed = kernel.block_n * (kernel.block_k * form.bits // 8 + (0 if form.zeros is None else 4))
    decoded = 0 if matrix == "mma" and form.per < _MOST_CODES else 2 * kernel.block_n * kernel.block_k
    fp4 = ARCHITECTURES[device.gfx].fp4
    of_x = (kernel.stages if matrix in _ASYNCHRONOUS or fp4 else steps) * 2 * kernel.block_m * kernel.block_k
    if device.kind == "amd":
        return of_x + (of_x // 32 if fp4 else 0) + decoded
    return steps * packed + of_x + decoded


def fits(kernel: Wn, split_k: int, shape: Shape, device: Device) -> bool:
    """Return whether a kernel is possible, fits the shared memory and the registers, and leaves no
    program idle.
    """
    architecture = ARCHITECTURES[device.gfx]
    if unfit(kernel, split_k, shape, device) or shared_bytes(kernel, shape, device) > architecture.shared_bytes:
        return False
    copies = 1 if scaled_of(shape) != "sums" else 2 if architecture.matrix in ("wgmma", "mfma") else 3
    held = kernel.block_m * kernel.block_n * copies + kernel.block_n * kernel.block_k * 3 // 4
    # More than this spills (Triton 3.9). On AMD accumulation registers take some of it.
    limit = 0.75 * architecture.registers if device.kind == "amd" else 192 if architecture.matrix in _ASYNCHRONOUS else 168
    if held // (kernel.warps * architecture.warp_size) > limit:
        return False
    return not has_idle_part(split_k, ceil_div(shape.k, kernel.block_k))
