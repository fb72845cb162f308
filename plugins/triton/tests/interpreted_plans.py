"""Run as a child with TRITON_INTERPRET=1: runs plans on CPU tensors and prints their worst errors as JSON.

Reads a JSON list of cases: op, the place of one of its examples, kernel name, split_k, and changes: ``m`` another number of rows, for
fmoe ``skewed`` whether all tokens go to few experts and some to none, ``static`` whether per_Tensor gets its scales, ``sort`` whether only
the sort is run and looked at.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs
import numpy as np
import torch
from triton.runtime import interpreter
from tunedgemm.plugin import Shape
from tunedgemm.tools import ops, plain_weight, torch_dtype
from tunedgemm_triton.plan import Plan, Step
from tunedgemm_triton.planned import PLANNED

#: What the interpreter takes a type's bytes as.
_VIEWS = {"u8": torch.uint8, "i8": torch.int8, "i32": torch.int32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_VIEWS |= {"fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz}
_patch_lang_core = interpreter._patch_lang_core


def _converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """What Triton's interpreter converts, rounded to nearest by torch: its own conversion truncates."""
    del rounding
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"i{source.primitive_bitwidth // 8}"))
    found = bits.view(_VIEWS[source.name]).to(torch.float32).to(_VIEWS[target.name])
    width = target.primitive_bitwidth // 8
    return found.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[width]).numpy().view(f"u{width}")


def _patched(language: Any, scope: Any) -> None:
    """The interpreter's patch of the language, which leaves out the type of fp8_e4m3fnuz."""
    _patch_lang_core(language, scope)
    others = language.dtype.to_ir
    fnuz = lambda kind, builder: builder.get_fp8e4b8_ty() if kind.name == "fp8e4b8" else others(kind, builder)  # noqa: E731
    scope.set_attr(language.dtype, "to_ir", fnuz)


interpreter._convert_float, interpreter._patch_lang_core = _converted, _patched


def _operands(shape: Shape, case: dict[str, Any]) -> tuple[Any, ...]:
    operands = list(ops()[shape.op].make_inputs(shape, torch.device("cpu"), 1))
    if case.get("skewed"):  # the last experts have no tokens, two ids are no expert's
        operands[4] = torch.arange(int(shape["topk"]), dtype=torch.int32).repeat(shape.m, 1)
        operands[4][-1, -1] = int(shape["expert"]) + 3
        operands[4][0, 0] = -1
        operands[3][-1, -1] = operands[3][0, 0] = torch.nan  # weights of nobody
    if case.get("static"):
        operands += [torch.tensor([0.02]), torch.tensor([0.05])]
    return tuple(operands)


def _arguments(step: Step, plan: Plan, named: dict[str, Any], workspace: Any) -> dict[str, Any]:
    """The values of a step's parameters; what is absent and not read gets the output."""
    types, arguments = dict(step.program.types), dict[str, Any]()
    for name, value in step.values:
        if isinstance(value, int):
            arguments[name] = value
        elif value.startswith("counters"):
            arguments[name] = named["counters"][int(value.partition("+")[2]) :]
        elif value in plan.buffers:
            start, size = plan.buffers[value]
            arguments[name] = workspace[start : start + size].view(_VIEWS[types[name][1:]])
        else:
            found = named.get(value, named["out"])
            arguments[name] = found.view(torch.uint8) if types[name] == "*u8" else found
    return arguments | {name: name == "UPCAST" or value for name, value in step.program.constants}


def _sorted(shape: Shape, plan: Plan, named: dict[str, Any], workspace: Any) -> dict[str, Any]:
    """How many of the sort's entries differ from a stable sort by expert, each expert's padded to whole blocks."""
    ids = named["topk_ids"].view(-1)
    order, owners, used = (
        workspace[start : start + size].view(torch.int32) for start, size in (plan.buffers[name] for name in ("order", "owners", "used"))
    )
    block_m = len(order) // len(owners)
    expected: list[int] = []
    expected_owners: list[int] = []
    for expert in range(int(shape["expert"])):
        places = (ids == expert).nonzero().view(-1).tolist()
        blocks = -(-len(places) // block_m)
        expected += places + [len(ids)] * (blocks * block_m - len(places))
        expected_owners += [expert] * blocks
    wrong = int((order[: len(expected)] != torch.tensor(expected)).sum()) + int(used.item() != len(expected_owners))
    wrong += int((owners[: len(expected_owners)] != torch.tensor(expected_owners)).sum())
    return {"error": float(wrong), "bound": 1.0, "empty": True, "guarded": len(expected_owners) <= len(owners), "zeroed": True}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One call against the op's reference; also says whether the output's end was kept and the counters were left zero."""
    op, family = ops()[case["op"]], PLANNED[case["op"]]
    shape = op.examples[case["example"]]
    shape = attrs.evolve(shape, m=case.get("m", shape.m))
    operands = _operands(shape, case)
    plan = family.plan_of(family.kernel_of(case["kernel"]), case["split_k"], shape)
    named = {name.removesuffix("?"): plain_weight(value) for name, value in zip(op.operands, operands, strict=False)}
    # Poison shows elements that nobody stored, and stores past the end.
    workspace = torch.full((plan.nbytes,), 0x7F, dtype=torch.uint8)
    named["out"] = out = torch.full((shape.m * shape.n + 64,), torch.nan, dtype=torch_dtype(shape.outdtype))
    named["counters"] = torch.zeros(plan.counters + 4, dtype=torch.int32)
    for step in plan.steps:
        if case.get("sort") and not step.program.function.startswith("moe_sort.moe_"):
            return _sorted(shape, plan, named, workspace)
        if not step.given or (step.given in named) is step.present:
            step.program.source[step.grid](**_arguments(step, plan, named, workspace))
    expected = op.reference(shape, operands).double()
    got = out[: shape.m * shape.n].view(shape.m, shape.n).double()
    known = expected.norm(dim=1) > 0
    rows = (got - expected)[known].norm(dim=1) / expected[known].norm(dim=1)
    return {
        "error": rows.max().item(),
        "bound": op.tolerance(shape).row_error,
        "empty": bool((got[~known] == 0).all()),
        "guarded": bool(out[shape.m * shape.n :].isnan().all()),
        "zeroed": not named["counters"].any().item(),
    }


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
