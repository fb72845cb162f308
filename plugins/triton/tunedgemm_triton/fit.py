"""Fit: how a kernel lies on a shape and a device: its grid, its memory, and why it cannot serve."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape

from tunedgemm_triton.limits import ARCHITECTURES, FP8, MAX_GRID_YZ, MAX_PARTIAL_BYTES, MAX_TILES, OPS, batches_of, width_of
from tunedgemm_triton.names import Gemm, Gemv, Kernel, Streamk, Tma


def ceil_div(size: int, step: int) -> int:
    """Steps that cover a size."""
    return -(-size // step)


def rows_of(kernel: Kernel) -> int:
    """Rows of activations of one tile."""
    return kernel.rows if isinstance(kernel, Gemv) else kernel.block_m


def step_of(kernel: Kernel) -> int:
    """Elements of K that one trip of the loop takes."""
    return kernel.block_k * kernel.unroll if isinstance(kernel, Gemv) else kernel.block_k


def tiles_of(kernel: Kernel, shape: Shape) -> int:
    """Output tiles of the shape, those of all products of a batch."""
    return batches_of(shape) * ceil_div(shape.m, rows_of(kernel)) * ceil_div(shape.n, kernel.block_n)


def grid_of(kernel: Kernel, split_k: int, shape: Shape, device: Device) -> tuple[int, int, int]:
    """Programs along the three axes."""
    if isinstance(kernel, Gemv):
        return ceil_div(shape.n, kernel.block_n), split_k, ceil_div(shape.m, kernel.rows) * batches_of(shape)
    if isinstance(kernel, Tma):
        return min(tiles_of(kernel, shape) * split_k, device.cu_num * _resident(kernel, shape, device)), 1, 1
    if isinstance(kernel, Streamk):
        steps = tiles_of(kernel, shape) * ceil_div(shape.k, kernel.block_k)
        return min(steps, device.cu_num * _resident(kernel, shape, device)), 1, 1
    return tiles_of(kernel, shape) // batches_of(shape), split_k, batches_of(shape)


def _resident(kernel: Kernel, shape: Shape, device: Device) -> int:
    """Programs of a kernel fed by tensor descriptors that a multiprocessor holds, two at most: one multiplies while the other waits."""
    # Three groups of warps leave no registers for a second program.
    if not described(kernel, shape, device.gfx) or (isinstance(kernel, Tma) and kernel.specialize):
        return 1
    return min(max(ARCHITECTURES[device.gfx].shared_bytes // shared_bytes(kernel, shape, device.gfx), 1), 2)


def described(kernel: Kernel, shape: Shape, gfx: str) -> bool:
    """Whether the kernel is fed by tensor descriptors, whose rows are multiples of 16 bytes."""
    possible = ARCHITECTURES[gfx].tma and shape.k * width_of(shape.dtype) % 16 == 0
    return isinstance(kernel, Tma) or (isinstance(kernel, Streamk) and possible)


def partial_bytes(kernel: Kernel, split_k: int, shape: Shape, device: Device) -> int:
    """Bytes of partial tiles, of 4 bytes an element, that programs keep for each other."""
    if isinstance(kernel, Streamk):
        return 8 * grid_of(kernel, split_k, shape, device)[0] * kernel.block_m * kernel.block_n
    if split_k == 1:
        return 0
    rows = 1 << (rows_of(kernel) - 1).bit_length()
    return 4 * split_k * tiles_of(kernel, shape) * rows * kernel.block_n


def promotes(kernel: Kernel, shape: Shape, gfx: str) -> int:
    """Elements of K after which sums of fp8 products leave the matrix unit for float32; 0 where they need not.

    Hopper's wgmma adds fp8 products up in less than float32 (13 bits behind the point). That is lost in a bf16 output; for
    others every 128 products are added in float32. Scales of blocks do so anyway.
    """
    fp8 = shape.dtype in FP8 and ARCHITECTURES[gfx].matrix == "wgmma" and not isinstance(kernel, Gemv)
    return min(kernel.block_k, 128) if fp8 and shape.scale != "block" and shape.outdtype != "bf16" else 0


def shared_bytes(kernel: Kernel, shape: Shape, gfx: str) -> int:
    """Estimate of the shared memory that Triton 3.6 allots; `bind` checks the real figure.

    The loop's buffers: one a stage where the matrix instruction reads shared memory, else one fewer. A specialised
    or flattened loop cannot lend them to the output tile, which takes about a byte an element (at least 16 KiB), two after
    scales of blocks, and of fp32 two or, with eight warps, four.
    """
    width = width_of(shape.dtype)
    if isinstance(kernel, Gemv):
        return 0 if kernel.stages == 1 else width * kernel.stages * (kernel.rows + kernel.block_n) * kernel.block_k
    buffer = width * (kernel.block_m + kernel.block_n) * kernel.block_k
    if described(kernel, shape, gfx):
        each = kernel.warps // 2 if shape.outdtype == "fp32" else 2 if shape.scale == "block" else 1
        return kernel.stages * buffer + max(kernel.block_m * kernel.block_n * each, 16 << 10) + 256
    side = kernel.block_n if isinstance(kernel, Gemm) and kernel.swap else kernel.block_m
    from_shared = ARCHITECTURES[gfx].matrix in ("wgmma", "tcgen05") and side >= 64 and kernel.warps >= 4
    return max(kernel.stages - (not from_shared), 1) * buffer


def registers(kernel: Kernel, shape: Shape, gfx: str) -> int:
    """32-bit registers a thread for the float32 sums, twice where they are promoted, and for what is loaded at a time."""
    threads = kernel.warps * ARCHITECTURES[gfx].warp_size
    if isinstance(kernel, Gemv):
        loads = kernel.block_k * width_of(shape.dtype)
        if shape.dtype in FP8 and ARCHITECTURES[gfx].matrix == "wmma":
            # Triton 3.6 widens fp8 by arithmetic on RDNA: beside registers that takes the compiler minutes for hundreds of elements.
            return 2 * (kernel.rows + kernel.block_n) * loads * kernel.unroll // threads
        return (kernel.rows * kernel.block_n * loads // 16 + (kernel.rows + kernel.block_n) * loads * kernel.unroll // 4) // threads
    # Two of three warp groups hold sums where warps are specialised.
    groups = 2 if isinstance(kernel, Tma) and kernel.specialize else 1
    sums = 2 if shape.scale == "block" or promotes(kernel, shape, gfx) else 1
    tile, width, matrix = (kernel.block_m + kernel.block_n) * kernel.block_k, width_of(shape.dtype), ARCHITECTURES[gfx].matrix
    # Rows that are not aligned are loaded by elements, about two registers each. On AMD tiles come through registers, and on RDNA
    # the matrix instructions of a whole step have theirs at a time.
    loads = 2 * tile if shape.k * width % 4 else tile * width // 4 * {"mfma": 1, "wmma": 2}.get(matrix, 0)
    return (sums * kernel.block_m * kernel.block_n + loads) // (threads * groups)


def register_limit(kernel: Kernel, gfx: str) -> int:
    """How many of `registers` leave enough for addresses and operands: what compiles without many spills."""
    if isinstance(kernel, Gemv):
        return 200
    matrix, waves = ARCHITECTURES[gfx].matrix, kernel.waves if isinstance(kernel, Gemm) else 0
    if isinstance(kernel, Streamk):  # keeps the addresses of two loops and of partial sums
        return 96 if matrix in ("mfma", "wmma") else 128
    # A SIMD has 512 registers for each lane on CDNA, 1536 on RDNA, which its waves share.
    share = {"mfma": 512, "wmma": 1536}.get(matrix, 0) // max(waves, 1)
    return {"mfma": min(168, share * 9 // 16), "wmma": min(144, share * 9 // 16)}.get(matrix, 160)


def refusal(kernel: Kernel, split_k: int, shape: Shape, device: Device) -> str:
    """Why the kernel cannot serve the shape on the device, or an empty text."""
    reason = _unfit(kernel, shape) or _descriptors(kernel, split_k, shape, device)
    if reason:
        return reason
    if isinstance(kernel, Gemm) and (reason := _without_effect(kernel, device)):
        return reason
    tiles = tiles_of(kernel, shape)
    if isinstance(kernel, Streamk):
        if split_k > 1:
            return "streamk shares tiles by itself; splitK must be 0"
        tiles = min(tiles, 9 * grid_of(kernel, split_k, shape, device)[0] // 8)  # those that are shared
    if (split_k > 1 or isinstance(kernel, Streamk)) and tiles > MAX_TILES:
        return f"split-K counts at most {MAX_TILES} tiles (this shape has {tiles})"
    if split_k > ceil_div(shape.k, step_of(kernel)):
        return f"K={shape.k} has fewer than splitK={split_k} steps of {step_of(kernel)}"
    if (nbytes := partial_bytes(kernel, split_k, shape, device)) > MAX_PARTIAL_BYTES:
        return f"{kernel.name} with splitK={split_k} keeps {nbytes} bytes of partial sums; {MAX_PARTIAL_BYTES} are the most"
    groups = grid_of(kernel, split_k, shape, device)[2]
    return "" if groups <= MAX_GRID_YZ else f"M={shape.m} makes {groups} groups of rows; a grid ends at {MAX_GRID_YZ}"


def _unfit(kernel: Kernel, shape: Shape) -> str:
    """Why no build of the kernel can compute the op with such operands, or an empty text."""
    taken = OPS[shape.op]
    if kernel.family not in taken.families:
        return f"{kernel.family} does not serve {shape.op}; {', '.join(taken.families)} do"
    if shape.layout != "row" and not isinstance(kernel, Gemm):
        return f"{kernel.family} reads plain weights only, not layout {shape.layout}"
    if shape.scale == "block" and kernel.block_k > 128 and not isinstance(kernel, Gemv):
        return f"a step of {kernel.block_k} along K would take scales of several blocks of 128"
    if width_of(shape.dtype) == 1 and kernel.block_k < 32:
        return f"matrix instructions of {shape.dtype} take 32 elements along K (got {kernel.block_k})"
    return ""


def packs(gfx: str) -> bool:
    """Whether k-pack changes the code: Triton 3.6 packs K by itself on gfx950, and only matrix cores have it."""
    return gfx in ("gfx90a", "gfx942")


def _without_effect(kernel: Gemm, device: Device) -> str:
    """Why an option makes no other kernel than its default, or an empty text."""
    if device.kind != "amd" and (kernel.nonkdim or kernel.kpack > 1 or kernel.waves or kernel.stream):
        return f"{kernel.name} uses options of AMD's compiler"
    if device.kind == "amd" and kernel.kpack > 1 and not packs(device.gfx):
        return f"{device.gfx} packs K by itself: kpack 2 is the same kernel as kpack 1"
    if kernel.nonkdim and ARCHITECTURES[device.gfx].matrix != "mfma":
        return f"{device.gfx} has matrix instructions of one size"
    return ""


def _descriptors(kernel: Kernel, split_k: int, shape: Shape, device: Device) -> str:
    """Why a kernel fed by tensor descriptors cannot serve, or an empty text."""
    if not isinstance(kernel, Tma):
        return ""
    architecture, elements = ARCHITECTURES[device.gfx], 16 // width_of(shape.dtype)
    if not architecture.tma:
        return f"{device.gfx} has no tensor memory accelerator"
    if shape.k % elements:
        return f"tensor descriptors need rows of 16-byte multiples (K={shape.k} is not a multiple of {elements})"
    if kernel.specialize and not architecture.specialize:
        return f"Triton does not specialise warps on {device.gfx}"
    if kernel.specialize and kernel.swap:
        return "warps are specialised for tiles that are not transposed"
    if kernel.specialize and kernel.warps != 4:
        return f"warps are specialised with 4 of them only, not {kernel.warps}"
    if kernel.specialize and split_k > 1:
        return "a kernel with specialised warps does not split K"
    if kernel.specialize and kernel.stages > 4:
        return "Triton 3.6 makes wrong sums with specialised warps and more than 4 stages"
    if kernel.specialize and batches_of(shape) > 1:
        return "Triton 3.6 misplaces addresses that specialised warps share: batches are left to others"
    if kernel.specialize and (kernel.block_m, kernel.block_n) == (64, 256):
        return "Triton 3.6 does not compile a 64x256 tile with specialised warps"
    return ""
