"""Fake of ``quack.gemm`` 0.6.5: the same signatures, on the host, with the checks of the real one.

Those are of `_build_gemm_plan` and of the compiled function's arguments: dtypes, ranks, orders,
strides and addresses in multiples of 16 bytes. It has no defaults that the real one lacks.
"""

from __future__ import annotations

import collections
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_NAMES = ("A", "B", "D")
CacheInfo = collections.namedtuple("CacheInfo", ["hits", "misses", "maxsize", "currsize"])
#: Kernels by what they were compiled for.
_kernels: dict[tuple[Any, ...], str] = {}
_counts = {"hits": 0, "misses": 0}
#: Each launch: the sizes and the configuration.
launches: list[tuple[Any, ...]] = []


class _Plan(NamedTuple):
    kernel: tuple[Any, ...]
    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool
    split_k: int
    dtypes: tuple[torch.dtype, ...]
    majors: tuple[str, ...]
    ndim: int
    biases: tuple[torch.dtype | None, torch.dtype | None]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"fake quack: {what}")


def _compile_gemm(*key: Any) -> str:
    """Compile in two steps, as the real one: count, then fail or store."""
    if key in _kernels:
        _counts["hits"] += 1
        return _kernels[key]
    _counts["misses"] += 1
    if os.environ.get("FAKE_QUACK_FAILS") == "compile":
        raise RuntimeError("DSLRuntimeError: does not lower")
    return _kernels.setdefault(key, "machine code")


_compile_gemm.cache_info = lambda: CacheInfo(_counts["hits"], _counts["misses"], None, len(_kernels))  # type: ignore[attr-defined]


def gemm(  # noqa: PLR0917 - the arguments of quack.gemm.gemm 0.6.5
    A: Tensor,
    B: Tensor,
    D: Tensor,
    C: Tensor | None,
    tile_count_semaphore: Tensor | None,
    tile_M: int,
    tile_N: int,
    cluster_M: int,
    cluster_N: int,
    cluster_K: int = 1,
    tile_K: int | None = None,
    pingpong: bool = False,
    persistent: bool = True,
    is_dynamic_persistent: bool = False,
    max_swizzle_size: int = 8,
    rowvec_bias: Tensor | None = None,
    colvec_bias: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
    batch_idx_permute: Tensor | None = None,
    add_to_output: bool = False,
    rounding_mode: int = 0,
    sr_seed: int | Tensor = 0,
    use_tma_gather: bool = False,
    concat_layout: dict[str, Any] | None = None,
    num_warps: int | None = None,
    SFA: Tensor | None = None,
    SFB: Tensor | None = None,
    bs_format_a: str | None = None,
    bs_format_b: str | None = None,
    split_k: int = 1,
    split_k_mode: int = 0,
    b_kn: bool = False,
    SFD: Tensor | None = None,
    sfd_norm_const: float | Tensor | None = None,
    SFDCol: Tensor | None = None,
    ag_args: Any = None,
) -> _Plan:
    """Check, compile, launch and return the plan."""
    unused = (C, tile_count_semaphore, tile_K, cu_seqlens_m, cu_seqlens_k, A_idx, batch_idx_permute, concat_layout, num_warps)
    others = (SFA, SFB, bs_format_a, bs_format_b, SFD, sfd_norm_const, SFDCol, ag_args)
    _require(all(value is None for value in (*unused, *others)), "only plain products are faked")
    plain = (cluster_K, persistent, is_dynamic_persistent, alpha, beta, add_to_output, rounding_mode, split_k_mode, b_kn)
    _require(plain == (1, True, False, 1.0, 1.0, False, 0, 0, False), f"only plain products are faked (got {plain})")
    wide = 256 if tile_M == 64 else (208 if tile_M == 128 else 128)
    _require(tile_M in ((64, 128, 192) if pingpong else (64, 128, 192, 256, 320)), f"CTA tile shape M (got {tile_M})")
    _require(tile_N % 16 == 0 and 0 < tile_N <= (wide if pingpong else 256), f"CTA tile shape N (got {tile_N})")
    _require(A.ndim == B.ndim == D.ndim == (2 if split_k == 1 else 3), "split_k needs batched operands, others have two dimensions")
    operands, biases = (A, B, D), tuple(None if bias is None else bias.dtype for bias in (rowvec_bias, colvec_bias))
    majors = tuple(_major(operand) for operand in operands)
    dtypes = tuple(operand.dtype for operand in operands)
    kernel = (dtypes, majors, biases, tile_M, tile_N, cluster_M, cluster_N, pingpong, split_k, A.ndim)
    _compile_gemm(*kernel)
    plan = _Plan(kernel, (tile_M, tile_N), (cluster_M, cluster_N), pingpong, split_k, dtypes, majors, A.ndim, biases)
    run_gemm_plan(plan, A, B, D, C, rowvec_bias=rowvec_bias, colvec_bias=colvec_bias)
    return plan


def run_gemm_plan(
    plan: _Plan,
    A: Tensor,
    B: Tensor,
    D: Tensor,
    C: Tensor | None,
    *,
    tile_count_semaphore: Tensor | None = None,
    rowvec_bias: Tensor | None = None,
    colvec_bias: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    sr_seed: int | Tensor = 0,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
    batch_idx_permute: Tensor | None = None,
    SFA: Tensor | None = None,
    SFB: Tensor | None = None,
    ag_args: Any = None,
    SFD: Tensor | None = None,
    sfd_norm_const: float | Tensor | None = None,
    SFDCol: Tensor | None = None,
) -> None:
    """Check the operands as the compiled function does, and multiply."""
    others = (C, tile_count_semaphore, cu_seqlens_m, cu_seqlens_k, A_idx, batch_idx_permute, SFA, SFB, ag_args, SFD, sfd_norm_const, SFDCol)
    _require(all(value is None for value in others) and (alpha, beta, sr_seed) == (1.0, 1.0, 0), "only plain products are faked")
    if A.device.type == "meta":
        raise RuntimeError("no CUDA-capable device is detected")
    for name, operand, dtype, major in zip(_NAMES, (A, B, D), plan.dtypes, plan.majors, strict=True):
        _require(operand.dtype == dtype and operand.ndim == plan.ndim, f"mismatched tensor {name}: {operand.dtype}, {operand.ndim}-D")
        _require(_major(operand) == major, f"mismatched order of {name}")
        _check_memory(name, operand)
    _require(A.dtype == B.dtype and A.dtype in _FLOATS[:2] and D.dtype in _FLOATS, f"dtypes {plan.dtypes}")
    batch, (m, n) = D.shape[:-2], D.shape[-2:]
    _require(A.shape == (*batch, m, A.shape[-1]) and B.shape == (*batch, n, A.shape[-1]), "shapes do not fit each other")
    _require(min(m, n, A.shape[-1]) > 0, "an empty product")
    total = A.double() @ B.double().mT
    for bias, size, dtype, name in ((rowvec_bias, n, plan.biases[0], "rowvec"), (colvec_bias, m, plan.biases[1], "colvec")):
        _require((bias is None) == (dtype is None), f"the plan was made {'without' if dtype is None else 'with'} {name}_bias")
        if bias is not None:
            _require(
                bias.shape == (1, size) and bias.dtype == dtype and bias.dtype in _FLOATS, f"{name}_bias {tuple(bias.shape)} {bias.dtype}"
            )
            _require(bias.stride() == (size, 1) and bias.data_ptr() % (4 * bias.element_size()) == 0, f"{name}_bias is not aligned")
            total = total + (bias if name == "rowvec" else bias.mT)
    D.copy_(total)
    launches.append((m, n, A.shape[-1], plan))


def _major(operand: Tensor) -> str:
    """Return which of the last two dimensions is contiguous."""
    return "last" if operand.stride(-1) == 1 else "first"


def _check_memory(name: str, operand: Tensor) -> None:
    step = 16 // operand.element_size()
    inner = -1 if _major(operand) == "last" else -2
    strides = [stride for dimension, stride in enumerate(operand.stride(), -operand.ndim) if dimension != inner]
    _require(operand.stride(inner) == 1, f"{name} has no contiguous dimension: {operand.stride()}")
    _require(all(stride % step == 0 for stride in strides), f"{name}: strides {operand.stride()} are not multiples of {step}")
    _require(operand.data_ptr() % 16 == 0, f"{name} is not 16-byte aligned")
