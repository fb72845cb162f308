"""Stand for AITER's list of FlyDSL's bf16 and fp16 kernels."""

from __future__ import annotations

import itertools
import re

_NAME = re.compile(
    r"flydsl_gemm(\d+)_a(bf16|f16)_w\2_(?:bf16|f16)_t(\d+)x(\d+)x(\d+)_split_k(\d+)_block_m_warp\d+_block_n_warp\d+_block_k_warp\d+_\w+_gfx950"
)


def get_flydsl_splitk_hgemm_kernel_params(name: str) -> dict | None:
    found = _NAME.fullmatch(name)
    return dict(zip(("tile_m", "tile_n", "tile_k", "split_k"), map(int, found.groups()[2:]), strict=True)) if found else None


def get_flydsl_splitk_hgemm_kernels(
    dtype: str,
    out_dtype: str,
    *,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
) -> dict[str, dict]:
    assert dtype == out_dtype and dtype in ("bf16", "f16") and None not in (m, n, k)
    kernels = {}
    for tile_m, tile_n, tile_k, split in itertools.product((16, 128), (16, 64, 128), (32, 64), (1, 2)):
        if n % tile_n == 0 and k % (split * tile_k) == 0:
            name = f"flydsl_gemm2_a{dtype}_w{dtype}_{dtype}_t{tile_m}x{tile_n}x{tile_k}_split_k{split}_block_m_warp1_block_n_warp1"
            name += "_block_k_warp1_async_copyTrue_b_to_ldsTrue_b_preshuffleFalse_c_to_ldsFalse_gfx950"
            kernels[name] = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "split_k": split}
    return kernels
