"""Compute a kernel's grid, shared memory, registers and partials, and check whether it fits."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_triton import installed
from tunedgemm_triton.limits import FP8, MAX_GRID_YZ, MAX_PARTIAL_BYTES, MAX_TILES, OPS, batches_of, width_of
from tunedgemm_triton.names import Gemm, Gemv, KernelConfig, Streamk, Tma, function_of


def ceil_div(size: int, step: int) -> int:
    """Return the number of steps that cover a size."""
    return -(-size // step)


def rows_of(kernel: KernelConfig) -> int:
    """Return the rows of activations of one tile."""
    return kernel.rows if isinstance(kernel, Gemv) else kernel.block_m


def step_of(kernel: KernelConfig) -> int:
    """Return the elements of K that one trip of the loop takes."""
    return kernel.block_k * kernel.unroll if isinstance(kernel, Gemv) else kernel.block_k


def tiles_of(kernel: KernelConfig, shape: Shape) -> int:
    """Return the number of output tiles, over all products of a batch."""
    return batches_of(shape) * ceil_div(shape.m, rows_of(kernel)) * ceil_div(shape.n, kernel.block_n)


def has_idle_part(split_k: int, steps: int) -> bool:
    """Return whether the last of *split_k* equal parts of the steps along K is empty."""
    return (split_k - 1) * ceil_div(steps, split_k) >= steps


def grid_of(kernel: KernelConfig, split_k: int, shape: Shape, device: Device) -> tuple[int, int, int]:
    """Return the programs along the three axes."""
    if isinstance(kernel, Gemv):
        return ceil_div(shape.n, kernel.block_n), split_k, ceil_div(shape.m, kernel.rows) * batches_of(shape)
    if isinstance(kernel, Tma):
        return min(tiles_of(kernel, shape) * split_k, device.cu_num * resident(kernel, shape, device)), 1, 1
    if isinstance(kernel, Streamk):
        steps = tiles_of(kernel, shape) * ceil_div(shape.k, kernel.block_k)
        return min(steps, device.cu_num * resident(kernel, shape, device)), 1, 1
    return tiles_of(kernel, shape) // batches_of(shape), split_k, batches_of(shape)


def resident(kernel: KernelConfig, shape: Shape, device: Device) -> int:
    """Return the programs that a multiprocessor holds at a time, if fed by descriptors; at most
    two: one multiplies while one waits.
    """
    # Three groups of warps leave no registers for a second program.
    if not described(kernel, shape, device.gfx) or (isinstance(kernel, Tma) and kernel.specialize):
        return 1
    limits = ARCHITECTURES[device.gfx]
    memory = limits.shared_bytes // shared_bytes(kernel, shape, device.gfx)
    if limits.tensor_columns:
        memory = min(memory, limits.tensor_columns // tensor_columns(kernel, shape))
    return min(max(memory, 1), 2)


def tensor_columns(kernel: Tma | Streamk, shape: Shape) -> int:
    """Return the columns of tensor memory of a program's accumulators at most.

    One accumulator is stored while the products of the next tile add to the other. With block
    scales there is one, which each step empties.
    """
    rows, columns = (kernel.block_n, kernel.block_m) if isinstance(kernel, Tma) and kernel.swap else (kernel.block_m, kernel.block_n)
    return (1 if shape.scale == "block" else 2) * ceil_div(rows, 128) * max(columns, 32)


def is_aligned(shape: Shape) -> bool:
    """Return whether rows of the operands are multiples of 16 bytes, as tensor descriptors need."""
    return shape.k * width_of(shape.dtype) % 16 == 0


def described(kernel: KernelConfig, shape: Shape, gfx: str) -> bool:
    """Return whether tensor descriptors feed the kernel."""
    possible = ARCHITECTURES[gfx].tma and is_aligned(shape) and not installed.descriptor_fault()
    return isinstance(kernel, Tma) or (isinstance(kernel, Streamk) and possible)


def partial_bytes(kernel: KernelConfig, split_k: int, shape: Shape, device: Device) -> int:
    """Return the bytes of partial tiles, 4 an element, that programs leave for each other."""
    if isinstance(kernel, Streamk):  # two slots a program
        return 8 * grid_of(kernel, split_k, shape, device)[0] * kernel.block_m * kernel.block_n
    if split_k == 1:
        return 0
    rows = 1 << (rows_of(kernel) - 1).bit_length()
    return 4 * split_k * tiles_of(kernel, shape) * rows * kernel.block_n


def promotes(kernel: KernelConfig, shape: Shape, gfx: str) -> int:
    """Return the elements of K after which fp8 accumulators leave the matrix unit for float32; 0
    for never.

    Hopper's wgmma adds fp8 products up in less than float32 (13 bits after the point). A bf16
    output hides that; for other outputs every 128 products are added in float32. Block scales do so
    anyway.
    """
    fp8 = shape.dtype in FP8 and ARCHITECTURES[gfx].matrix == "wgmma" and not isinstance(kernel, Gemv)
    return min(kernel.block_k, 128) if fp8 and shape.scale != "block" and shape.outdtype != "bf16" else 0


def shared_bytes(kernel: KernelConfig, shape: Shape, gfx: str) -> int:
    """Estimate the shared memory that Triton allots; `bind` checks the real figure.

    The loop has one buffer a stage where the matrix instruction reads shared memory, else one
    fewer. A specialised or flattened loop cannot lend them to the output tile. That takes about a
    byte an element (at least 16 KiB), two with block scales, and for an fp32 output two or, with
    eight warps, four.
    """
    width = width_of(shape.dtype)
    if isinstance(kernel, Gemv):
        return 0 if kernel.stages == 1 else width * kernel.stages * (kernel.rows + kernel.block_n) * kernel.block_k
    buffer = width * (kernel.block_m + kernel.block_n) * kernel.block_k
    if described(kernel, shape, gfx) and ARCHITECTURES[gfx].matrix == "mma":
        tile = kernel.block_m * kernel.block_n * (2 if shape.outdtype == "fp32" else 1)
        return max(kernel.stages - 1, 1) * buffer + max(tile, 2 << 10) + 256
    if described(kernel, shape, gfx):
        element = kernel.warps // 2 if shape.outdtype == "fp32" else 2 if shape.scale == "block" else 1
        barriers = 512 if function_of(kernel) == "tma_halves" else 256  # and the descriptor that the kernel makes
        return kernel.stages * buffer + max(kernel.block_m * kernel.block_n * element, 16 << 10) + barriers
    side = kernel.block_n if isinstance(kernel, Gemm) and kernel.swap else kernel.block_m
    reads_shared = ARCHITECTURES[gfx].matrix in ("wgmma", "tcgen05") and side >= 64 and kernel.warps >= 4
    return max(kernel.stages - (not reads_shared), 1) * buffer


def registers(kernel: KernelConfig, shape: Shape, gfx: str) -> int:
    """Estimate the 32-bit registers a thread for float32 accumulators, twice where promoted, and
    for loads in flight.
    """
    threads = kernel.warps * ARCHITECTURES[gfx].warp_size
    if isinstance(kernel, Gemv):
        loads = kernel.block_k * width_of(shape.dtype)
        if shape.dtype in FP8 and ARCHITECTURES[gfx].matrix == "wmma":
            # Triton 3.6 widens fp8 by arithmetic on RDNA: in addition to registers that takes
            # the compiler minutes for hundreds of elements.
            return 2 * (kernel.rows + kernel.block_n) * loads * kernel.unroll // threads
        return (kernel.rows * kernel.block_n * loads // 16 + (kernel.rows + kernel.block_n) * loads * kernel.unroll // 4) // threads
    # With specialised warps two of three of Hopper's warp groups hold accumulators.
    groups = 2 if isinstance(kernel, Tma) and kernel.specialize and ARCHITECTURES[gfx].matrix == "wgmma" else 1
    accumulators = 2 if shape.scale == "block" or promotes(kernel, shape, gfx) else 1
    tile, width, matrix = (kernel.block_m + kernel.block_n) * kernel.block_k, width_of(shape.dtype), ARCHITECTURES[gfx].matrix
    # Unaligned rows are loaded by elements, about two registers each. On AMD tiles come through
    # registers, and on RDNA the matrix instructions of a whole step hold theirs at the same time.
    loads = 2 * tile if shape.k * width % 4 else tile * width // 4 * {"mfma": 1, "wmma": 2}.get(matrix, 0)
    return (accumulators * kernel.block_m * kernel.block_n + loads) // (threads * groups)


def register_limit(kernel: KernelConfig, gfx: str) -> int:
    """Return how many of `registers` leave enough for addresses and operands, so that few spill."""
    if isinstance(kernel, Gemv):
        return 200
    matrix, waves = ARCHITECTURES[gfx].matrix, kernel.waves if isinstance(kernel, Gemm) else 0
    if isinstance(kernel, Streamk):  # keeps the addresses of two loops and of partial sums
        return 96 if matrix in ("mfma", "wmma") else 128
    # The waves of a SIMD share 512 registers for each lane on CDNA, 1536 on RDNA.
    share = {"mfma": 512, "wmma": 1536}.get(matrix, 0) // max(waves, 1)
    return {"mfma": min(168, share * 9 // 16), "wmma": min(144, share * 9 // 16)}.get(matrix, 160)


def fits(kernel: KernelConfig, split_k: int, shape: Shape, device: Device) -> bool:
    """Return whether a kernel is possible, fits the shared memory and the registers, and leaves no
    program idle.
    """
    if unfit(kernel, split_k, shape, device) or shared_bytes(kernel, shape, device.gfx) > ARCHITECTURES[device.gfx].shared_bytes:
        return False
    if registers(kernel, shape, device.gfx) > register_limit(kernel, device.gfx):
        return False
    return not has_idle_part(split_k, ceil_div(shape.k, step_of(kernel)))


def unfit(kernel: KernelConfig, split_k: int, shape: Shape, device: Device) -> str | None:
    """Return why the kernel cannot serve the shape on the device, or None."""
    reason = _unfit_operands(kernel, shape) or _unfit_descriptors(kernel, split_k, shape, device) or _unfit_options(kernel, device)
    if reason:
        return reason
    tiles = tiles_of(kernel, shape)
    if isinstance(kernel, Streamk):
        if split_k > 1:
            return f"streamk: splitK must be 0, since it shares tiles itself (got {split_k})"
        tiles = min(tiles, 9 * grid_of(kernel, split_k, shape, device)[0] // 8)  # those that are shared
    if (split_k > 1 or isinstance(kernel, Streamk)) and tiles > MAX_TILES:
        return f"split-K counts at most {MAX_TILES} tiles (this shape has {tiles})"
    if split_k > ceil_div(shape.k, step_of(kernel)):
        return f"K={shape.k} has fewer than splitK={split_k} steps of {step_of(kernel)}"
    if (nbytes := partial_bytes(kernel, split_k, shape, device)) > MAX_PARTIAL_BYTES:
        return f"{kernel.name}: partial sums of splitK={split_k} take at most {MAX_PARTIAL_BYTES} bytes (got {nbytes})"
    groups = grid_of(kernel, split_k, shape, device)[2]
    return f"M={shape.m}: a grid has at most {MAX_GRID_YZ} groups of rows (got {groups})" if groups > MAX_GRID_YZ else None


def _unfit_operands(kernel: KernelConfig, shape: Shape) -> str | None:
    """Return why no build of the kernel can compute the op with such operands, or None."""
    families = OPS[shape.op].families
    if kernel.family not in families:
        return f"{kernel.family} does not serve {shape.op}; {', '.join(families)} do"
    if shape.layout != "row" and not isinstance(kernel, Gemm):
        return f"{kernel.family} reads plain weights only (got layout {shape.layout})"
    if shape.scale == "block" and kernel.block_k > 128 and not isinstance(kernel, Gemv):
        return f"a step along K must stay within one block of scales, 128 (got {kernel.block_k})"
    if width_of(shape.dtype) == 1 and kernel.block_k < 32:
        return f"matrix instructions of {shape.dtype} take at least 32 elements along K (got {kernel.block_k})"
    return None


def packs(gfx: str) -> bool:
    """Return whether k-pack changes the code: only matrix cores have it, and Triton 3.6 packs K
    itself on gfx950.
    """
    return gfx in ("gfx90a", "gfx942")


def _unfit_options(kernel: KernelConfig, device: Device) -> str | None:
    """Return why an option makes the same kernel as its default, or None."""
    if not isinstance(kernel, Gemm):
        return None
    if device.kind != "amd" and (kernel.nonkdim or kernel.kpack > 1 or kernel.waves or kernel.stream):
        return f"{kernel.name} uses options of AMD's compiler"
    if device.kind == "amd" and kernel.kpack > 1 and not packs(device.gfx):
        return f"{device.gfx} packs K itself: kpack 2 is the same kernel as kpack 1"
    if kernel.nonkdim and ARCHITECTURES[device.gfx].matrix != "mfma":
        return f"{device.gfx} has matrix instructions of one size"
    return None


def _unfit_descriptors(kernel: KernelConfig, split_k: int, shape: Shape, device: Device) -> str | None:
    """Return why a kernel fed by tensor descriptors cannot serve, or None."""
    if not isinstance(kernel, Tma):
        return None
    elements = 16 // width_of(shape.dtype)
    if not ARCHITECTURES[device.gfx].tma:
        return f"{device.gfx} has no tensor memory accelerator"
    if fault := installed.descriptor_fault():
        return fault
    if shape.k % elements:
        return f"tensor descriptors need rows of 16-byte multiples: K must be a multiple of {elements} (got {shape.k})"
    return _unfit_specialised(kernel, split_k, shape, device) if kernel.specialize else None


def _unfit_specialised(kernel: Tma, split_k: int, shape: Shape, device: Device) -> str | None:
    """Return why a kernel with specialised warps cannot serve, or None."""
    matrix = ARCHITECTURES[device.gfx].matrix
    if matrix not in ("wgmma", "tcgen05"):
        return f"specialised warps multiply by wgmma or tcgen05 (got {device.gfx})"
    if fault := installed.target_fault(device.gfx, matrix + " by specialised warps"):
        return fault
    if kernel.swap:
        return "specialised warps compute only tiles that are not transposed"
    if split_k > 1:
        return f"specialised warps do not split K (got splitK={split_k})"
    if batches_of(shape) > 1:
        return "Triton 3.6 misplaces addresses that specialised warps share, so batches are left to other kernels"
    return _unfit_warp_groups(kernel) if matrix == "wgmma" else None


def _unfit_warp_groups(kernel: Tma) -> str | None:
    """Return why specialised warps cannot multiply by wgmma, or None."""
    if kernel.warps != 4:
        return f"specialised warps need num_warps 4 (got {kernel.warps})"
    if kernel.stages > 4:
        return f"Triton 3.6 computes wrong sums with specialised warps and more than 4 stages (got {kernel.stages})"
    if (kernel.block_m, kernel.block_n) == (64, 256):
        return "Triton does not compile a 64x256 tile with specialised warps"
    return None
