"""Custom ops ``torch.ops.tunedgemm.<op>`` for an op's functions in compiled graphs.

Compilers trace through the public functions, and trace the custom op in place of the hot function,
which reads addresses. This holds for the default instance; functions of another `TunedGemm` break
the graph.

A custom op takes the operands, absent ones as None; ``otype``; ``weight_layout``, the layout of
shuffled weights, which are passed as plain tensors; ``fields``, further arguments of
`Dispatcher.call` as JSON; and ``shuffled_scales``, the positions of shuffled scales, which are
passed as plain tensors, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.traced import Binding, register_graph_ops
from tunedgemm.dispatch.tuned_gemm import call, tgemm
from tunedgemm.errors import OperandError
from tunedgemm.integrations.dynamo import run_untraced, trace_instead
from tunedgemm.integrations.torch_compile import define_op, inside_transform, plain
from tunedgemm.ops import DEFAULT_OP, op_named
from tunedgemm.ops.formats.scales import ShuffledScale, as_shuffled_scale
from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled
from tunedgemm.ops.layout import check_not_transposed
from tunedgemm.ops.op import ArgumentOrder, Function, Op

_LAST = ("otype", "weight_layout", "fields", "shuffled_scales")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_linear, _autocast = torch._C._nn.linear, torch._C._is_any_autocast_enabled

_defined: dict[str, Any] = {}


def graph_op(name: str) -> Any:
    """Return ``torch.ops.tunedgemm.<name>``, defined at its first use.

    Raises:
        UnknownOpError: no such op.
    """
    if name not in _defined:
        _defined[name] = _define(op_named(name))
    return _defined[name]


def _define(op: Op) -> Any:
    name = op.name
    names = (*(operand.rstrip("?") for operand in op.operands), *_LAST)
    operands = (f"Tensor? {operand[:-1]}=None" if operand.endswith("?") else f"Tensor {operand}" for operand in op.operands)
    last = 'ScalarType? otype=None, str weight_layout="row", str fields="", int[] shuffled_scales=[]'
    schema = f"{name}({', '.join(operands)}, {last}) -> Tensor"

    def run(
        *arguments: Any,
        otype: torch.dtype | None = None,
        weight_layout: str = "row",
        fields: str = "",
        shuffled_scales: Sequence[int] = (),
        **named: Any,
    ) -> torch.Tensor:
        if named or len(arguments) > len(op.operands):  # operands by name, or the others by position: torch leaves out defaults
            values: dict[str, Any] = dict(zip(_LAST, (otype, weight_layout, fields, shuffled_scales), strict=True))
            values |= dict(zip(names, arguments, strict=False)) | named
            arguments = tuple(map(values.get, names[: -len(_LAST)]))
            otype, weight_layout, fields, shuffled_scales = (values[name] for name in _LAST)
        if weight_layout != "row":
            arguments = tuple(
                operand if operand is None or index not in op.matrices else as_shuffled(operand, weight_layout)
                for index, operand in enumerate(arguments)
            )
        if shuffled_scales:
            arguments = tuple(as_shuffled_scale(each) if index in shuffled_scales else each for index, each in enumerate(arguments))
        arguments = tuple(map(plain, arguments))
        return tgemm.of(name).call(*arguments, otype=otype, **(json.loads(fields) if fields else {})).contiguous()

    def fake(*arguments: Any, **named: Any) -> torch.Tensor:
        values = dict(zip(names, arguments, strict=False)) | named
        return op.fake(*map(values.get, names[: -len(_LAST)]), otype=values.get("otype"))

    return define_op(schema, run=run, fake=fake)


def _is_defined(name: str) -> bool:
    """Define an op."""
    return graph_op(name) is not None


def _encode_fields(names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """Encode fields as JSON, with enum members as their numbers, which ops accept."""
    fields = dict(zip(names, values, strict=True))
    return json.dumps(fields, default=lambda value: int(getattr(value, "value", value)), sort_keys=True)


# Called by Python itself while a graph is traced, as `inside_transform` is.
_encode_fields._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_defined._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _stand_in(op: Any, operands: tuple[Any, ...], otype: torch.dtype | None, fields: Mapping[str, Any], differentiable: bool) -> Any:
    """Return the traced result of a call: the custom op's node, or torch's operations.

    For a16w16 without scales, torch's operations replace calls that need a gradient, and all calls
    under export and transforms. For other ops a needed gradient breaks the graph.
    """
    gradient = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    layout = "row"
    plain: list[Any] = []
    shuffled_scales = [index for index, operand in enumerate(operands) if isinstance(operand, ShuffledScale)]
    for operand in operands:
        if isinstance(operand, ShuffledWeight):
            if layout not in ("row", operand.layout_name):
                raise OperandError(f"weights of layouts {layout} and {operand.layout_name} do not go together")
            layout = operand.layout_name
            plain.append(operand._plain)
        else:
            plain.append(operand.kept_plain if isinstance(operand, ShuffledScale) else operand)
    torch_fits = differentiable and layout == "row" and plain[0].dtype in _FLOATS and all(scale is None for scale in plain[3:])
    if torch_fits and (gradient or inside_transform()):
        return torch_fallback(plain[0], plain[1], plain[2] if len(plain) > 2 else None, otype)
    if gradient:
        torch._dynamo.graph_break(msg="an op of tunedgemm in a graph has no gradient; call it under torch.no_grad()")
    encoded = _encode_fields(tuple(fields), tuple(fields.values())) if fields else ""
    return op(*plain, otype=otype, weight_layout=layout, fields=encoded, shuffled_scales=shuffled_scales)


def torch_fallback(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, otype: torch.dtype | None) -> torch.Tensor:
    """Compute a16w16 by torch's differentiable functions, in the wider dtype of the operands."""
    out = x.dtype if otype is None else otype
    wide = x.dtype if out == x.dtype else torch.promote_types(x.dtype, out)
    if _autocast():
        with torch.autocast(x.device.type, enabled=False):
            return _linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(out)
    return _linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(out)


def _traced_by(name: str, arrange: ArgumentOrder) -> Callable[..., Any]:
    op, differentiable, matrices = graph_op(name), name == DEFAULT_OP, op_named(name).matrices

    def traced(*arguments: Any, **named: Any) -> Any:
        operands, otype, fields = arrange(*arguments, **named)
        for index in matrices:
            check_not_transposed(name, operands[index])
        return _stand_in(op, operands, otype, fields, differentiable)

    return traced


def _traced_call(op: str, *operands: Any, otype: torch.dtype | None = None, **fields: Any) -> Any:
    """Replace `tunedgemm.call` under tracing."""
    assert _is_defined(op)
    return _stand_in(getattr(torch.ops.tunedgemm, op).default, operands, otype, fields, op == DEFAULT_OP)


class _OfDefaultInstance:
    """`tunedgemm.dispatch.traced.GraphOps` for the functions of the default instance."""

    def add(self, function: Function, dispatcher: Binding, arrange: ArgumentOrder) -> None:
        """Make compilers trace the custom op of a function, permanently."""
        has_op = any(dispatcher is used for used in tgemm.dispatchers)
        run_untraced(function, breaks_graph=not has_op)
        if has_op:
            trace_instead(function, _traced_by(dispatcher.op.name, arrange))

    def stand_in(self, dispatcher: Binding, call: Call) -> Function | None:
        """Return the custom op of a call under make_fx tracing, as in non-strict torch.export."""
        if not any(dispatcher is used for used in tgemm.dispatchers):
            return None
        name = call.op.name
        return lambda *operands: _stand_in(graph_op(name), operands, call.otype, call.fields, name == DEFAULT_OP)


register_graph_ops(_OfDefaultInstance())
trace_instead(call, _traced_call)
