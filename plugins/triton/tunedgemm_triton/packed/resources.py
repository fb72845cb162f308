"""Check which packed weights the kernels take, and which kernels fit."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, WeightFormat, format_of

from tunedgemm_triton.limits import MAX_PARTIAL_BYTES, MAX_TILES
from tunedgemm_triton.packed.names import OP, OPS, Mx, Packed, Wn, Wnv
from tunedgemm_triton.resources import ceil_div, has_idle_part

#: Codes of an element, whose positions fit a constant; bits of one that is the last of a bf16.
_MOST_CODES, _MOST_BITS = 8, 7
#: Matrix instructions that read shared memory while a program goes on.
_ASYNCHRONOUS = ("wgmma", "tcgen05")
#: Bytes of a thread's largest load; registers of a thread of `wnv` that leave some for addresses.
_MOST_BYTES, _MOST_REGISTERS = 16, 168
#: Least elements of K that a row of threads takes between scales; they divide every group.
_SPAN = 32
#: Values of e2m1 without a sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unsupported_operands(shape: Shape, device: Device) -> str | None:
    """Return why no kernel takes the packed weight on the architecture, or None."""
    layouts = ("row",) if shape.op == OP else ("row", "aiter16x16")
    if reason := _unsupported_format(shape, device) if shape.op == OP else _unsupported_mxfp4(shape, device):
        return reason
    return None if shape.layout in layouts else f"the weight of {shape.op} must have layout {' or '.join(layouts)} (got {shape.layout!r})"


def _unsupported_mxfp4(shape: Shape, device: Device) -> str | None:
    if shape.dtype != OPS[shape.op]:
        return f"activations of {shape.op} must be {OPS[shape.op]}, which has the range of the scales (got {shape.dtype})"
    if shape.dtype == "bf16" and ARCHITECTURES[device.gfx].matrix == "wmma":
        return f"a kernel that decodes mxfp4 for bf16 activations spills its registers on {device.gfx}"
    return None


def _unsupported_format(shape: Shape, device: Device) -> str | None:
    form, architecture = format_of(shape), ARCHITECTURES[device.gfx]
    if form.has_index and not form.is_kn:
        return f"{form.name}: kernels follow the index of a weight that is stored transposed"
    if not _is_joined(form) or not kind_of(form):
        return f"{form.name}: an element must have 1, 2, 4 or {_MOST_CODES} codes, in the order of joined halves, of integers or e2m1"
    if architecture.matrix == "wmma":
        return f"kernels that decode the weight are made for the registers of NVIDIA and CDNA, not of {device.gfx}"
    if "fp8_e4m3fn" in (*form.dtypes, *form.scale) and not architecture.fp8:
        return f"{device.gfx} has no fp8, so that Triton does not convert e4m3 of {form.name}"
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


def has_index(shape: Shape) -> bool:
    """Return whether an index has the group of each element of K."""
    return shape.op == OP and format_of(shape).has_index


def scaled_of(shape: Shape) -> str:
    """Return what the scales multiply: weight where that is exact, sums of a group or of
    the row,
    or single elements of the weight.
    """
    if shape.op != OP:
        return "weight"
    if has_index(shape):
        return "element"
    if not int(shape["w_group"]):
        return "row"
    return "weight" if shape.dtype in format_of(shape).exact else "sums"


def decodes(gfx: str, dtype: str = "fp4x2") -> tuple[bool, ...]:
    """Return the values of ``decode`` that are possible with activations of a dtype, best guess
    first.

    gfx950 and Blackwell multiply mxfp4 by mxfp4 directly (sm_121 since Triton 3.8). Triton 3.6
    computes wrong numbers for bf16 by mxfp4 on sm_90, and does not lower scaled products on CDNA 2
    and 3. On RDNA decoding in the kernel spills.
    """
    if dtype == "bf16":
        return (True,)
    if ARCHITECTURES[gfx].fp4 or ARCHITECTURES[gfx].matrix == "wmma":
        return (False,)
    return (True,) if ARCHITECTURES[gfx].matrix == "mfma" else (True, False)


def scaled_rows(gfx: str) -> int:
    """Return the multiple of rows that the first operand of mxfp4's instruction has.

    Of other rows, and with fewer than four warps, Triton decodes both operands to bf16.
    """
    return 128 if ARCHITECTURES[gfx].matrix == "tcgen05" else 1


def shares_registers(gfx: str, decode: bool) -> bool:
    """Return whether decoded operands and sums share the registers, as they do with mma."""
    return ARCHITECTURES[gfx].matrix == "mma" and (decode or not ARCHITECTURES[gfx].fp4)


def tiles_of(kernel: Packed, shape: Shape) -> int:
    """Return the number of output tiles."""
    return ceil_div(shape.m, kernel.block_m) * ceil_div(shape.n, kernel.block_n)


def partial_bytes(kernel: Packed, split_k: int, shape: Shape) -> int:
    """Return the bytes of float32 partial tiles that programs of a split product leave for each
    other.
    """
    return 4 * split_k * tiles_of(kernel, shape) * kernel.block_m * kernel.block_n if split_k > 1 else 0


def threads_of(kernel: Wnv, device: Device) -> int:
    """Return the threads of a program."""
    return kernel.warps * ARCHITECTURES[device.gfx].warp_size


def lanes_of(kernel: Wnv, shape: Shape, device: Device) -> int:
    """Return the rows of threads along K: every thread, or those of words of a transposed weight."""
    form = format_of(shape)
    return max(kernel.block_k // _per_k(form), 1) if form.is_kn else threads_of(kernel, device)


def vector_of(kernel: Wnv, shape: Shape, device: Device) -> int:
    """Return the bytes of a row of the weight that a thread reads at a time."""
    return max(kernel.block_k * format_of(shape).bits // 8 // threads_of(kernel, device), 1)


def words_of(kernel: Wnv, shape: Shape, device: Device) -> int:
    """Return the words of a transposed weight that a thread reads at a time; 0 for less than one."""
    form = format_of(shape)
    return lanes_of(kernel, shape, device) * (kernel.block_n * _per_k(form) // form.per) // threads_of(kernel, device)


def span_of(kernel: Wnv, shape: Shape) -> int:
    """Return the elements of K that a row of threads takes between scales."""
    return max(kernel.unroll * _per_k(format_of(shape)), _SPAN)


def step_of(kernel: Packed, shape: Shape) -> int:
    """Return the elements of K of a step of the loop, of which parts of K have whole numbers."""
    if not isinstance(kernel, Wnv):
        return kernel.block_k
    form = format_of(shape)
    return span_of(kernel, shape) * max(kernel.block_k // _per_k(form), 1) if form.is_kn else kernel.block_k * kernel.unroll


def steps_of(kernel: Packed, shape: Shape) -> int:
    """Return the steps along K."""
    return ceil_div(shape.k, step_of(kernel, shape))


def codes_of(kernel: Wnv, shape: Shape, device: Device) -> int:
    """Return the codes that a thread reads at a time."""
    form = format_of(shape)
    return words_of(kernel, shape, device) * form.per if form.is_kn else vector_of(kernel, shape, device) * 8 // form.bits


def flight_bytes(kernel: Packed, shape: Shape, device: Device) -> int:
    """Return the bytes of the weight that a program reads at a time."""
    if not isinstance(kernel, Wnv):
        return max(kernel.stages - 1, 1) * kernel.block_n * kernel.block_k * (4 if shape.op != OP else format_of(shape).bits) // 8
    form = format_of(shape)
    columns = 1 if form.is_kn else kernel.block_n
    return codes_of(kernel, shape, device) * columns * kernel.unroll * threads_of(kernel, device) * form.bits // 8


def _per_k(form: WeightFormat) -> int:
    """Return the codes along K of a stored element."""
    return 1 if form.along == "n" else form.per


def _unfit_vectors(kernel: Wnv, shape: Shape, device: Device) -> str | None:
    """Return why threads cannot share the weight as a kernel on the vector units does, or None."""
    form, group = format_of(shape), int(shape["w_group"])
    if form.is_kn:
        if kind_of(form) != "integer" or form.per != _MOST_CODES:
            return f"{kernel.family} takes {_MOST_CODES} integers in each word of a transposed weight (got {form.name})"
        if kernel.block_k < _per_k(form) or not words_of(kernel, shape, device):
            return f"{kernel.name}: a thread must have a word of {form.per} codes"
        if group % span_of(kernel, shape):
            return f"{kernel.name}: {span_of(kernel, shape)} elements of a thread's reads must divide the group (got {group})"
        return None
    vector, codes = vector_of(kernel, shape, device), 8 // form.bits
    if form.bits not in (4, 8) or form.order != tuple(range(form.per)) or form.per * form.bits not in (8, 32):
        return f"{kernel.family} takes 4 or 8 bits in the order of K (got {form.name})"
    if vector * threads_of(kernel, device) * codes != kernel.block_k or not codes <= vector <= _MOST_BYTES:
        return f"{kernel.name}: a thread must read {codes} to {_MOST_BYTES} bytes of {form.name} at a time"
    if shape.k % (vector * codes) or (group and group % (vector * codes)):
        return f"{kernel.name}: {vector * codes} elements of a thread must divide K and the group (got K={shape.k}, group {group or 'K'})"
    return None


def unfit(kernel: Packed, split_k: int, shape: Shape, device: Device) -> str | None:
    """Return why the kernel cannot serve the shape on the device, or None."""
    if isinstance(kernel, Mx) and not kernel.decode and False not in decodes(device.gfx, shape.dtype):
        return f"Triton 3.6 does not multiply {shape.dtype} by mxfp4 correctly on {device.gfx}; use a kernel with _d"
    if isinstance(kernel, Wnv):
        if reason := _unfit_vectors(kernel, shape, device):
            return reason
    elif scaled_of(shape) == "sums" and int(shape["w_group"]) % kernel.block_k:
        return f"a step along K must be a part of a group of {shape['w_group']}, whose sums are scaled (got {kernel.block_k})"
    tiles, steps = tiles_of(kernel, shape), steps_of(kernel, shape)
    if split_k > 1 and tiles > MAX_TILES:
        return f"split-K counts at most {MAX_TILES} tiles (this shape has {tiles})"
    if split_k > steps:
        return f"K={shape.k} has fewer than splitK={split_k} steps of {step_of(kernel, shape)}"
    nbytes = partial_bytes(kernel, split_k, shape)
    if nbytes > MAX_PARTIAL_BYTES:
        return f"{kernel.name}: partial sums of splitK={split_k} take at most {MAX_PARTIAL_BYTES} bytes (got {nbytes})"
    return None


def shared_bytes(kernel: Packed, shape: Shape, device: Device) -> int:
    """Estimate the shared memory from what Triton 3.6 to 3.9 allotted; `bind` checks the real figure.

    There is a buffer of the packed operands for each step but one, and decoded tiles. AMD's loop
    keeps the weight in registers.
    """
    if isinstance(kernel, Wnv):
        return 4 * kernel.warps * kernel.block_m * kernel.block_n  # sums of warps
    architecture, steps = ARCHITECTURES[device.gfx], max(kernel.stages - 1, 1)
    if isinstance(kernel, Mx):
        bits = kernel.block_m * (4 if shape.dtype == "fp4x2" else 16) + kernel.block_n * 4
        packed = steps * bits * kernel.block_k // 8
        # Even or odd elements of K in bf16; on AMD they share memory with the packed ones.
        decoded = 0 if architecture.fp4 else (kernel.block_m + kernel.block_n) * kernel.block_k
        return max(packed, decoded) if device.kind == "amd" else packed + decoded
    form, matrix, fp4 = format_of(shape), architecture.matrix, architecture.fp4
    packed = steps * kernel.block_n * (kernel.block_k * form.bits // 8 + (0 if form.zeros is None else 4))
    # mma reads decoded bytes from registers.
    decoded = 0 if matrix == "mma" and form.per < _MOST_CODES else 2 * kernel.block_n * kernel.block_k
    # Asynchronous products read one more buffer of x.
    of_x = (kernel.stages if matrix in _ASYNCHRONOUS or fp4 else steps) * 2 * kernel.block_m * kernel.block_k
    if device.kind == "amd":
        return of_x + (of_x // 32 if fp4 else 0) + decoded  # gfx950 pads x by up to a 32nd
    # Zero points of single elements change threads, as words and as codes.
    own = 6 * kernel.block_n * kernel.block_k if scaled_of(shape) == "element" and form.zeros is not None else 0
    return packed + of_x + decoded + own


def fits(kernel: Packed, split_k: int, shape: Shape, device: Device) -> bool:
    """Return whether a kernel is possible, fits the shared memory and the registers, and leaves no
    program idle.
    """
    architecture = ARCHITECTURES[device.gfx]
    if unfit(kernel, split_k, shape, device) or shared_bytes(kernel, shape, device) > architecture.shared_bytes:
        return False
    if isinstance(kernel, Wnv):
        return vector_registers(kernel, shape, device) <= _MOST_REGISTERS and not has_idle_part(split_k, steps_of(kernel, shape))
    held, limit = _held_by_mxfp4(kernel, device.gfx) if isinstance(kernel, Mx) else _held_by_format(kernel, shape, device.gfx)
    # On AMD accumulation registers take some of it.
    if held // (kernel.warps * architecture.warp_size) > (0.75 * architecture.registers if device.kind == "amd" else limit):
        return False
    return not has_idle_part(split_k, steps_of(kernel, shape))


def vector_registers(kernel: Wnv, shape: Shape, device: Device) -> int:
    """Estimate the registers of a thread of `wnv`: sums, x, codes in flight, and decoded ones.

    The compiler finds numbers of zero points and of an index for all reads of a thread (3.9).
    """
    form, rows = format_of(shape), kernel.block_m
    if form.is_kn:
        words, per_n = words_of(kernel, shape, device), form.per // _per_k(form)
        scales = 2 * words * (form.per if has_index(shape) else per_n)
        ahead = max(0 if form.zeros is None or per_n > 1 else 4 * words, form.per if has_index(shape) else 0)
        return 2 * rows * words * per_n + rows * _per_k(form) + words * (kernel.unroll + form.per) + scales + kernel.unroll * ahead
    vector = vector_of(kernel, shape, device)
    codes, columns = vector * 8 // form.bits, kernel.block_n * (1 if form.zeros is None else 3)
    # Codes of several columns are decoded at a time if an element has several.
    decoded = codes * (kernel.block_n // 2 if form.per > 1 else 1)
    return rows * (columns + codes) + decoded + kernel.unroll * kernel.block_n * ceil_div(vector, 4)


def _held_by_mxfp4(kernel: Mx, gfx: str) -> tuple[int, int]:
    """Return the registers of a program, and those of a thread beyond which it spills (Triton 3.6
    to 3.9); too many for a tile that Triton would decode on tcgen05.
    """
    rows, shared = 1 if kernel.decode else scaled_rows(gfx), shares_registers(gfx, kernel.decode)
    if rows > 1 and ((kernel.block_n if kernel.swap else kernel.block_m) % rows or kernel.warps < 4):
        return 1 << 30, 0
    # Even and odd elements of K are decoded in turn.
    decoded = (kernel.block_m + kernel.block_n) * kernel.block_k // 2 if kernel.decode or shared else 0
    return kernel.block_m * kernel.block_n + decoded, 96 if shared else 128


def _held_by_format(kernel: Wn, shape: Shape, gfx: str) -> tuple[int, int]:
    """Return the same for a weight-only format (Triton 3.9)."""
    matrix = ARCHITECTURES[gfx].matrix
    copies = 1 if scaled_of(shape) != "sums" else 2 if matrix in ("wgmma", "mfma") else 3
    # Of a weight whose elements have scales, these and two parts of each are held, too.
    decoded = kernel.block_n * kernel.block_k * (3 if scaled_of(shape) == "element" else 3 / 4)
    held = kernel.block_m * kernel.block_n * copies + int(decoded)
    return held, 192 if matrix in _ASYNCHRONOUS else 168
