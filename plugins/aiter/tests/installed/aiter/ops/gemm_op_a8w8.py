"""Stand for AITER's 8-bit products by FlyDSL."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from aiter.host import check, product, unshuffled

#: The parts of a name up to the scheduler; the other names are ``flydsl_bpreshuffle_8w_``.
_NAME = re.compile(r"flydsl_bpreshuflle_(\d+)x(\d+)x(\d+)_\w+_\w+_\w+_(\d+)x(\d+)(?:x(\d+))?(?:x(\d+))?(?:_([A-Za-z]\w*))?")


def gemm_a8w8_bpreshuffle_flydsl(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    Out: Tensor,
    config: dict,
) -> Tensor:
    found = _NAME.fullmatch(config["kernelName"])
    (m, k), n = XQ.shape, WQ.shape[0]
    assert found and n % int(found[2]) == 0 and k % int(found[3]) == 0
    check("XQ", XQ, (m, k), torch.float8_e4m3fn, torch.int8)
    check("WQ", WQ, (n, k), XQ.dtype)
    check("x_scale", x_scale, (m, 1), torch.float32)
    check("w_scale", w_scale, (n, 1), torch.float32)
    check("Out", Out, (m, n), torch.bfloat16, torch.float16)
    return Out.copy_(product(XQ, unshuffled(WQ)) * x_scale * w_scale.view(1, -1))
