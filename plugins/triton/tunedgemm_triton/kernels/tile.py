"""Parts of the families on the matrix units: tile order, products, scales, accumulators, fixup and
stores.
"""

# ruff: noqa: PLR0917, SIM102, SIM108 (Triton kernels have many parameters and branch on constexprs)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero, sum_parts


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (tile of M, tile of N) of a program: GROUP_M consecutive tiles of M share the weight
    in L2.
    """
    if GROUP_M == 1:  # one division fewer before the first load
        found = index // tiles_n, index % tiles_n
    else:
        width = GROUP_M * tiles_n
        first_m = (index // width) * GROUP_M
        height = tl.minimum(tiles_m - first_m, GROUP_M)
        found = first_m + (index % width) % height, (index % width) // height
    return found


@triton.jit
def within(row, rows):
    """Return the rows to load; those past the edge wrap to the first ones.

    If they repeated the last row, all tiles of the edge would read it from one slice of L2: an H200
    took 17.5 us for M = 200 where it takes 7.2 for M = 256. A remainder would spread all rows, but
    delay the first load.
    """
    return tl.minimum(tl.where(row < rows, row, row - rows), rows - 1)


@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, dtype: tl.constexpr):
    """Return the zero accumulator of a tile, int32 for products of int8, else float32."""
    rows: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    columns: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    return tl.zeros([rows, columns], tl.int32 if dtype.is_int() else tl.float32)


@triton.jit
def product(a, b, acc, SWAP: tl.constexpr, PROMOTE: tl.constexpr, UPCAST: tl.constexpr):
    """Return acc + a[BLOCK_M, BLOCK_K] @ b[BLOCK_N, BLOCK_K].T, transposed with SWAP.

    Sums of PROMOTE fp8 products are added to *acc* outside the matrix unit; 0 leaves all of them to
    it.
    """
    if UPCAST:
        if not a.dtype.is_int():
            a = a.to(tl.float32)
            b = b.to(tl.float32)
    first = b if SWAP else a
    second = a.T if SWAP else b.T
    if PROMOTE > 0:
        acc = tl.dot(first, second, acc, max_num_imprecise_acc=PROMOTE, out_dtype=acc.dtype)
    else:
        acc = tl.dot(first, second, acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def scale_of_row(row, block, blocks, M, SCALE: tl.constexpr):
    """Return the offset of the scale of a row of x and a block of 128 of K, in the order of SCALE."""
    if SCALE == "column":
        at = block * M + row
    elif SCALE == "padded":
        at = block * (tl.cdiv(M, 4) * 4) + row
    else:
        at = row * blocks + block
    return at


@triton.jit
def block_scales(x_scale, w_scale, m, first_n, block, M, N, K, SCALE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the scales of *block* of 128 of K, of rows of x and of the weight: one number for up to
    128 rows of the weight.

    Scales of x are [M, blocks], or [blocks, M] with SCALE "column", whose rows are padded to a
    multiple of four with "padded". Those of the weight are [blocks of N, blocks].
    """
    blocks = tl.cdiv(K, 128)
    row = within(m, M).to(tl.int64)
    by_m = tl.load(x_scale + scale_of_row(row, block, blocks, M, SCALE))
    if BLOCK_N <= 128:
        # A tile of BLOCK_N rows is within one block of the weight.
        by_n = tl.load(w_scale + (first_n // 128) * blocks + block)
    else:
        n = within(first_n + tl.arange(0, BLOCK_N), N)
        by_n = tl.load(w_scale + (n // 128) * blocks + block)
    return by_m, by_n


@triton.jit
def factors(by_m, by_n, SWAP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the factors of a tile's products; call it after the products, so that these do not
    wait for the loads.
    """
    if BLOCK_N <= 128:
        by_m *= by_n
        found = by_m[None, :] if SWAP else by_m[:, None]
    else:
        found = by_m[None, :] * by_n[:, None] if SWAP else by_m[:, None] * by_n[None, :]
    return found


@triton.jit
def scaled(acc, x_scale, w_scale, m, n, M, N, SCALE: tl.constexpr, SWAP: tl.constexpr):
    """Return sums in float32, times the scales of whole tensors or of rows."""
    acc = acc.to(tl.float32)
    if SCALE == "tensor":
        acc *= tl.load(x_scale) * tl.load(w_scale)
    if SCALE == "row":
        by_m = tl.load(x_scale + tl.minimum(m, M - 1))
        by_n = tl.load(w_scale + tl.minimum(n, N - 1))
        if SWAP:
            acc = acc * by_m[None, :] * by_n[:, None]
        else:
            acc = acc * by_m[:, None] * by_n[None, :]
    return acc


@triton.jit
def store_tile(acc, out, bias, m, n, M, N, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr):
    """Store float32 sums [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] with SWAP, with bias, in the
    output's dtype.
    """
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        acc += added[:, None] if SWAP else added[None, :]
    if SWAP:
        at = m.to(tl.int64)[None, :] * N + n[:, None]
        inside = (m < M)[None, :] & (n < N)[:, None]
    else:
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    acc, x_scale, w_scale, bias, out, partial, counter, part, m, n, M, N,
    SPLIT_K: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Scale and store a tile's sums; with split-K store them to *partial*, and the last program to
    arrive does the rest.
    """
    if SPLIT_K == 1:
        total = scaled(acc, x_scale, w_scale, m, n, M, N, SCALE, SWAP)
        store_tile(total, out, bias, m, n, M, N, HAS_BIAS, SWAP)
    else:
        size = acc.shape[0] * acc.shape[1]
        within = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        tl.store(partial + part * size + within, acc)
        if arrives_last(counter, SPLIT_K):
            leave_zero(counter)
            total = scaled(sum_parts(partial + within, size, SPLIT_K), x_scale, w_scale, m, n, M, N, SCALE, SWAP)
            store_tile(total, out, bias, m, n, M, N, HAS_BIAS, SWAP)
