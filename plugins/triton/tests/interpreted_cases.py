"""Run as a child with TRITON_INTERPRET=1: launches kernels on CPU tensors and prints their worst errors as JSON.

Reads a JSON list of cases: kernel name, split_k, m, n, k, dtype, outdtype, bias.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tunedgemm.plugin import Device, Shape, ops, torch_dtype
from tunedgemm_triton.compile import build_of, constants, function_of
from tunedgemm_triton.fit import grid_of, partial_bytes, tiles_of
from tunedgemm_triton.names import Tma, kernel_of

DEVICE = Device("sm_90", 4)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One launch against float64; also says whether the counters were left zero."""
    shape = Shape("a16w16", case["m"], case["n"], case["k"], case["dtype"], case["outdtype"], "bias" if case["bias"] else "none")
    kernel, split_k = kernel_of(case["kernel"]), case["split_k"]
    operands = ops()["a16w16"].make_inputs(shape, torch.device("cpu"), 1)
    x, weight, bias = (*operands, None)[:3]
    # Poison shows elements that nobody stored, and stores past the end.
    out = torch.full((shape.m * shape.n + 64,), torch.nan, dtype=torch_dtype(shape.outdtype))
    build = build_of(kernel, split_k, shape, DEVICE)
    arguments: dict[str, Any] = {"x": x, "weight": weight, "bias": x if bias is None else bias, "out": out}
    arguments |= {"M": shape.m, "N": shape.n, "K": shape.k}
    counters = torch.zeros(max(tiles_of(kernel, shape), 1), dtype=torch.int32)
    if isinstance(kernel, Tma):
        from triton.tools.tensor_descriptor import TensorDescriptor

        arguments["x"] = TensorDescriptor.from_tensor(x, [kernel.block_m, kernel.block_k])
        arguments["weight"] = TensorDescriptor.from_tensor(weight, [kernel.block_n, kernel.block_k])
    arguments |= {"partial": torch.full((partial_bytes(kernel, split_k, shape) // 4 + 1,), torch.nan), "counters": counters}
    function_of(kernel)[grid_of(kernel, split_k, shape, DEVICE)](**arguments, **constants(build, upcast=True))
    expected = ops()["a16w16"].reference(shape, operands)
    got = out[: shape.m * shape.n].view(shape.m, shape.n).double()
    rows = (got - expected).norm(dim=1) / expected.norm(dim=1)
    return {"error": rows.max().item(), "guarded": bool(out[shape.m * shape.n :].isnan().all()), "zeroed": not counters.any().item()}


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
