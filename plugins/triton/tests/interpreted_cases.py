"""Child with TRITON_INTERPRET=1: run launch plans on CPU tensors and print their worst errors as
JSON.

It reads a JSON list of cases: kernel name, split_k, and a ``shape`` as a dict or ``op`` and
``example`` for one of the op's examples. Optional changes: ``gfx`` and ``multiprocessors`` of the
device, and ``m`` another number of rows; ``record`` adds fields that make a weight-only format of
another. For fmoe ``skewed`` (some experts get all tokens, some none), ``static`` (pass per_Tensor
its scales), ``sort`` (run and check only the sort).
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import attrs
import numpy as np
import torch
from triton.language import constexpr
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor
from tunedgemm.plugin import Device, Shape
from tunedgemm.testing.launching import plain_weight
from tunedgemm.tools.launching import FORMATS, torch_dtype
from tunedgemm.tools.tables import ops
from tunedgemm_triton.families import family_of
from tunedgemm_triton.limits import batches_of
from tunedgemm_triton.plan import LaunchPlan, Step

#: Triton type -> torch dtype of the bytes.
_VIEWS = {"u8": torch.uint8, "i8": torch.int8, "i32": torch.int32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_VIEWS |= {"fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz}
#: Largest error of a dense kernel: a few roundings to the output, and for fp32 of the sums.
_BOUNDS = {"bf16": 2.0**-8, "fp16": 2.0**-9, "fp32": 2.0**-12}
_patch_lang_core, _create_splat = interpreter._patch_lang_core, interpreter.InterpreterBuilder.create_splat
_to_tensor = TritonSemantic.to_tensor


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert with torch, which rounds to nearest; Triton's interpreter truncates."""
    del rounding
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"i{source.primitive_bitwidth // 8}"))
    converted = bits.view(_VIEWS[source.name]).to(torch.float32).to(_VIEWS[target.name])
    width = target.primitive_bitwidth // 8
    return converted.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[width]).numpy().view(f"u{width}")


def _patch_language(language: Any, scope: Any) -> None:
    """Patch the language as the interpreter does, and add the type fp8_e4m3fnuz, which it lacks."""
    _patch_lang_core(language, scope)
    others = language.dtype.to_ir
    fnuz = lambda kind, builder: builder.get_fp8e4b8_ty() if kind.name == "fp8e4b8" else others(kind, builder)  # noqa: E731
    scope.set_attr(language.dtype, "to_ir", fnuz)


def _splat(builder: Any, kind: Any, value: Any) -> Any:
    """Fill a block with a scalar, and keep booleans; Triton's interpreter makes integers of them,
    which its loads refuse as a mask since 3.9.
    """
    block = _create_splat(builder, kind, value)
    block.data = block.data.astype(value.data.dtype)
    return block


def _unwrapped(semantic: Any, value: Any, check_type: bool = True) -> Any:
    """Return a tensor; a global constant times a tensor is a constexpr of a tensor in the
    interpreter, which Triton refuses since 3.7.
    """
    return _to_tensor(semantic, value.value if isinstance(value, constexpr) else value, check_type)


interpreter._convert_float, interpreter._patch_lang_core = _convert_float, _patch_language
interpreter.InterpreterBuilder.create_splat, TritonSemantic.to_tensor = _splat, _unwrapped


def _operands(shape: Shape, case: dict[str, Any]) -> tuple[Any, ...]:
    operands = list(ops()[shape.op].make_inputs(shape, torch.device("cpu"), 1))
    if case.get("skewed"):  # the last experts have no tokens, two ids are of no expert
        operands[4] = torch.arange(int(shape["topk"]), dtype=torch.int32).repeat(shape.m, 1)
        operands[4][-1, -1] = int(shape["expert"]) + 3
        operands[4][0, 0] = -1
        operands[3][-1, -1] = operands[3][0, 0] = torch.nan
    if shape.op == "a16wn" and operands[4:] and operands[4] is not None:  # groups of unequal sizes, as a shard of K has
        operands[4] //= 2
    if case.get("static"):
        operands += [torch.tensor([0.02]), torch.tensor([0.05])]
    return tuple(operands)


def _argument(kind: str, value: int | str, plan: LaunchPlan, named: dict[str, Any]) -> Any:
    """Return the argument of a parameter; an absent operand is NaN, which shows reads of it."""
    if isinstance(value, int):
        return named["absent"] if kind.startswith("*") else value
    if value.startswith("counters"):
        return named["counters"][int(value.partition("+")[2]) :]
    if value in plan.buffers:
        start, size = plan.buffers[value]
        return named["workspace"][start : start + size].view(_VIEWS[kind[1:]])
    operand = named.get(value, named["absent"])
    if box := re.search(r"\[(.*)\]", kind):
        return TensorDescriptor.from_tensor(operand, [int(size) for size in box[1].split(",")])
    return operand.view(torch.uint8) if kind == "*u8" else operand


def _run_step(step: Step, plan: LaunchPlan, named: dict[str, Any]) -> None:
    types = dict(step.program.types)
    arguments = {name: _argument(types[name], value, plan, named) for name, value in step.values}
    arguments |= {name: name == "UPCAST" or value for name, value in step.program.constants}  # the interpreter's bf16 dot is wrong
    step.program.source[step.grid](**arguments)


def _check_sort(shape: Shape, plan: LaunchPlan, named: dict[str, Any]) -> dict[str, Any]:
    """Count the entries that differ from a stable sort by expert with each expert padded to whole
    blocks.
    """
    ids, buffers = named["topk_ids"].view(-1), (plan.buffers[name] for name in ("order", "owners", "used"))
    order, owners, used = (named["workspace"][start : start + size].view(torch.int32) for start, size in buffers)
    block_m = len(order) // len(owners)
    expected: list[int] = []
    expected_owners: list[int] = []
    for expert in range(int(shape["expert"])):
        pairs = (ids == expert).nonzero().view(-1).tolist()
        blocks = -(-len(pairs) // block_m)
        expected += pairs + [len(ids)] * (blocks * block_m - len(pairs))
        expected_owners += [expert] * blocks
    wrong = int((order[: len(expected)] != torch.tensor(expected)).sum()) + int(used.item() != len(expected_owners))
    wrong += int((owners[: len(expected_owners)] != torch.tensor(expected_owners)).sum())
    return {"error": float(wrong), "bound": 1.0, "empty": True, "guarded": len(expected_owners) <= len(owners), "zeroed": True}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Compare one call with the op's reference, and check the output's end and the counters."""
    if record := case.get("record"):
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name != "like"}
        FORMATS[record["name"]] = attrs.evolve(FORMATS[record["like"]], **fields)
    shape = Shape.from_dict(case["shape"]) if "shape" in case else ops()[case["op"]].examples[case["example"]]
    shape = attrs.evolve(shape, m=case.get("m", shape.m))
    op, family, device = ops()[shape.op], family_of(shape.op), Device(case.get("gfx", "sm_90"), case.get("multiprocessors", 4))
    operands, elements = _operands(shape, case), batches_of(shape) * shape.m * shape.n
    plan = family.plan_of(family.parse_name(case["kernel"]), case["split_k"], shape, device)
    named = {name.removesuffix("?"): plain_weight(value) for name, value in zip(op.operands, operands, strict=False)}
    given = set(named)
    # NaN and huge values show elements that were never stored, and stores past the end.
    out = torch.full((elements + 64,), torch.nan, dtype=torch_dtype(shape.outdtype))
    counters, absent = torch.zeros(plan.counters + 4, dtype=torch.int32), torch.full((1,), torch.nan)
    workspace = torch.full((plan.nbytes,), 0x7F, dtype=torch.uint8)
    named |= {"out": out, "counters": counters, "workspace": workspace, "absent": absent}
    for step in plan.steps:
        if case.get("sort") and not step.program.function.startswith("moe_sort.moe_"):
            return _check_sort(shape, plan, named)
        if not step.given or (step.given in given) is step.present:
            _run_step(step, plan, named)
    expected = op.reference(shape, operands).reshape(-1, shape.n).double()
    got = out[:elements].view(-1, shape.n).double()
    known = expected.norm(dim=1) > 0
    rows = (got - expected)[known].norm(dim=1) / expected[known].norm(dim=1)
    return {
        "error": rows.max().item(),
        "bound": _BOUNDS[shape.outdtype] if "shape" in case else op.tolerance(shape).row_error / 2,
        "empty": bool((got[~known] == 0).all()),
        "guarded": bool(out[elements:].isnan().all()),
        "zeroed": not counters.any().item(),
    }


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
