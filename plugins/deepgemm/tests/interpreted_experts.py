"""Child with TRITON_INTERPRET=1: run the kernels around products of experts on the host.

It reads a JSON list of cases: ``cells`` of an fmoe row, a ``kernel``, and optionally ``ids``, the
experts of all tokens. It counts the places and groups that differ from torch's. It also prints the
worst row's error of the whole call over the stand-in's products.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from tunedgemm.testing.conformance import Poisoned
from tunedgemm.tools.tables import op_named

sys.path.insert(0, str(Path(__file__).with_name("installed")))

from fake_deepgemm.extension import Extension
from fake_deepgemm.steps import host_steps
from tunedgemm_deepgemm.experts.call import call_of
from tunedgemm_deepgemm.experts.plan import Plan, Step, plan_of
from tunedgemm_deepgemm.experts.steps import function_of, steps_of
from tunedgemm_deepgemm.launch import _product
from tunedgemm_deepgemm.names import parse_name
from tunedgemm_deepgemm.product import apply

CPU = torch.device("cpu")
_VIEWS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert with torch, which rounds to nearest; Triton's interpreter truncates."""
    del rounding
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"i{source.primitive_bitwidth // 8}"))
    converted = bits.view(_VIEWS[source.name]).to(torch.float32).to(_VIEWS[target.name])
    width = target.primitive_bitwidth // 8
    return converted.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[width]).numpy().view(f"u{width}")


_splat = interpreter.InterpreterBuilder.create_splat


def _create_splat(self: Any, kind: Any, value: Any) -> Any:
    """Keep the comparison of scalars a mask: Triton makes integers of it, which 3.9 refuses."""
    handle = _splat(self, kind, value)
    if value.data.dtype == bool:
        handle.data = handle.data.astype(bool)
    return handle


interpreter._convert_float, interpreter.InterpreterBuilder.create_splat = _convert_float, _create_splat


def interpreted(step: Step) -> Any:
    """Return the launch of a step in the interpreter."""
    function = function_of(step.program)
    names = function.arg_names[len(step.program.types) :]
    constants = dict(zip(names, step.program.constants, strict=True))
    return lambda *arguments: function[step.grid](*arguments, **constants)


def misplaced(plan: Plan, ids: torch.Tensor) -> int:
    """Count the places and groups that differ from torch's; an expert's pairs have any order in neither."""
    results = []
    for steps in (steps_of(plan, interpreted), host_steps(plan)):
        places, groups = (torch.full((size,), 12345, dtype=torch.int32) for size in (plan.pairs, plan.groups))
        steps.place(ids, places, groups)
        results.append(torch.cat((places, groups)))
    return int((results[0] != results[1]).sum())


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return what a case shows."""
    op = op_named("fmoe")
    shape, kernel = op.columns.parse(case["cells"]), parse_name(case["kernel"])
    plan = plan_of(shape, kernel)
    if case.get("random_ids"):
        return {"misplaced": misplaced(plan, torch.randint(-2, plan.experts + 2, (shape.m, plan.topk), dtype=torch.int32))}
    operands = list(op.make_inputs(shape, CPU, 1))
    if "ids" in case:
        operands[4] = torch.tensor(case["ids"], dtype=torch.int32)
        operands[3][(operands[4] < 0) | (operands[4] >= plan.experts)] = torch.nan
    library = Extension()
    apply(library, kernel, 132)
    products = [_product(product, getattr(library, product.function), CPU) for product in plan.products]
    with Poisoned() as poisoned:
        out = call_of(shape, plan, steps_of(plan, interpreted), products, CPU)(*operands).double()
    wanted = op.reference(shape, tuple(operands)).double()
    known = wanted.norm(dim=1) > 0
    rows = (out - wanted)[known].norm(dim=1) / wanted[known].norm(dim=1)
    return {
        "misplaced": misplaced(plan, operands[4]),
        "error": max(rows.tolist(), default=0.0),
        "bound": op.tolerance(shape).row_error / 2,
        "overwritten": bool(poisoned.overwritten()),
        "empty": bool((out[~known] == 0).all()),
    }


if __name__ == "__main__":
    torch.manual_seed(3)
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
