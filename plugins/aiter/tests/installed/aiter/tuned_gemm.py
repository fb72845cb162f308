"""Stand for AITER's dispatch of bf16 and fp16: its functions by libtype."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter.host import check, product
from aiter.ops.flydsl.gemm_kernels import get_flydsl_splitk_hgemm_kernel_params


def flydsl_gemm(
    inp: Tensor,
    weights: Tensor,
    solidx: int,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
    bpreshuffle=False,
    config: dict | None = None,
):
    assert scale_a is scale_b is scale_c is None and not bpreshuffle and isinstance(solidx, int)
    assert set(config) == {"libtype", "kernelName", "solidx", "splitK"} and config["libtype"] == "flydsl"
    kernel = get_flydsl_splitk_hgemm_kernel_params(config["kernelName"])
    (m, k), n = inp.shape, weights.shape[0]
    check("inp", inp, (m, k), torch.bfloat16, torch.float16)
    check("weights", weights, (n, k), inp.dtype)
    assert n % kernel["tile_n"] == 0 and k % (kernel["split_k"] * kernel["tile_k"]) == 0
    out = product(inp, weights)
    if bias is not None:
        check("bias", bias, (n,), inp.dtype)
        out += bias.float()
    return out.to(inp.dtype).to(otype or inp.dtype)


def triton_gemm(
    inp: Tensor,
    weights: Tensor,
    solidx: int,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
    bpreshuffle: bool | None = False,
    config: dict | None = None,
):
    assert bias is scale_a is scale_b is scale_c is config is None and not bpreshuffle and isinstance(solidx, int)
    check("inp", inp, tuple(inp.shape), torch.bfloat16, torch.float16)
    check("weights", weights, (len(weights), inp.shape[1]), inp.dtype)
    return product(inp, weights).to(otype)
