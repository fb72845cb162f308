"""Run as a child with TRITON_INTERPRET=1: launches kernels on CPU tensors and prints their worst errors as JSON.

Reads a JSON list of cases: kernel name, split_k, the shape as a dict, and multiprocessors where they are not four.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools import ops, plain_weight, torch_dtype
from tunedgemm_triton.compile import Build, build_of, constants, function_of, sums_integers
from tunedgemm_triton.fit import grid_of, partial_bytes, tiles_of
from tunedgemm_triton.limits import batches_of
from tunedgemm_triton.names import Gemv, kernel_of


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One launch against float64; also says whether the counters were left zero."""
    shape, device = Shape.from_dict(case["shape"]), Device("sm_90", case.get("multiprocessors", 4))
    op, kernel, split_k = ops()[shape.op], kernel_of(case["kernel"]), case["split_k"]
    operands = op.make_inputs(shape, torch.device("cpu"), 1)
    build = build_of(kernel, split_k, shape, device)
    arguments = _arguments(build, shape, operands)
    # Poison shows elements that nobody stored, and stores past the end.
    stored = batches_of(shape) * shape.m * shape.n
    out = torch.full((stored + 64,), torch.nan, dtype=torch_dtype(shape.outdtype))
    counters = torch.zeros(max(tiles_of(kernel, shape), 1), dtype=torch.int32)
    partial = torch.full((partial_bytes(kernel, split_k, shape, device) // 4 + 1,), torch.nan)
    arguments |= {"out": out, "counters": counters, "partial": partial.view(torch.int32) if sums_integers(build) else partial}
    arguments |= {"M": shape.m, "N": shape.n, "K": shape.k, "B": batches_of(shape)}
    function_of(kernel)[grid_of(kernel, split_k, shape, device)](**arguments, **constants(build, upcast=True))
    expected = op.reference(shape, operands).reshape(-1, shape.n).double()
    rows = (out[:stored].view(-1, shape.n).double() - expected).norm(dim=1) / expected.norm(dim=1)
    return {"error": rows.max().item(), "guarded": bool(out[stored:].isnan().all()), "zeroed": not counters.any().item()}


def _arguments(build: Build, shape: Shape, operands: tuple[Any, ...]) -> dict[str, Any]:
    """The operands by the names of the function's parameters; those that are absent have a place that nobody reads."""
    names = ["x", "weight", *(["x_scale", "w_scale"] if shape.scale != "none" else []), "bias"]
    nothing = torch.full((1,), torch.nan)
    arguments = {"x_scale": nothing, "w_scale": nothing, "bias": nothing, **dict(zip(names, map(plain_weight, operands), strict=False))}
    kernel = build.kernel
    if build.described and not isinstance(kernel, Gemv):
        from triton.tools.tensor_descriptor import TensorDescriptor

        for name, rows in (("x", kernel.block_m), ("weight", kernel.block_n)):
            box = [*[1] * (arguments[name].dim() - 2), rows, kernel.block_k]
            arguments[name] = TensorDescriptor.from_tensor(arguments[name], box)
    return arguments


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
