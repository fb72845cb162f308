"""Stand for AITER's opus kernels of bf16."""

from __future__ import annotations

import torch

from aiter.host import check, product

#: Numbers that the build has, and those among them that split K.
BUILT, SPLITS = (4, 9, 200, 204), (200, 204)
#: Numbers and splits of the calls.
calls: list[tuple[int, int]] = []


def opus_gemm_a16w16_tune(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    Y: torch.Tensor,
    bias=None,
    kernelId: int = 0,
    splitK: int = 0,
) -> torch.Tensor:
    (_, m, k), n = XQ.shape, WQ.shape[1]
    check("XQ", XQ, (1, m, k), torch.bfloat16)
    check("WQ", WQ, (1, n, k), torch.bfloat16)
    check("Y", Y, (1, m, n), torch.bfloat16, torch.float32)
    assert bias is None and (splitK == 0 or kernelId in SPLITS)
    if kernelId not in BUILT:
        raise RuntimeError(f"Kernel id {kernelId} not found in a16w16 tune lookup table")
    calls.append((kernelId, splitK))
    Y[0] = product(XQ[0], WQ[0])
    return Y
