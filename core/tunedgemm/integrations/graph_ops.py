"""The ops in compiled graphs: ``torch.ops.tunedgemm.<op>`` stands for each call of an op's functions, and `tunedgemm.call`.

The public functions are traced as they are; the hot functions inside them, which read addresses, have what stands here in their place.
That holds for the default instance: those of a `TunedGemm` of one's own run between two graphs.

An op takes the op's operands, absent ones None; then ``otype``; ``weight_layout``, the layout of what lies in shuffled weights, which
arrive as plain tensors; and ``fields``, the other arguments of `Dispatcher.call` as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.dispatch.calls import Call
from tunedgemm.dispatch.hot import Place, hot_functions, in_graph, on_hot
from tunedgemm.dispatch.serving import Serving
from tunedgemm.dispatch.tuned_gemm import call, tgemm
from tunedgemm.errors import OperandError
from tunedgemm.integrations.dynamo import teach
from tunedgemm.integrations.torch_compile import opaque, plain, unseen
from tunedgemm.ops import DEFAULT_OP, op_named
from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled
from tunedgemm.ops.op import Op

_LAST = ("otype", "weight_layout", "fields")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_linear = torch._C._nn.linear


_defined: dict[str, Any] = {}


def graph_op(name: str) -> Any:
    """``torch.ops.tunedgemm.<name>``, defined at its first use.

    Raises:
        UnknownOpError: no such op.
    """
    if name not in _defined:
        _defined[name] = _define(op_named(name))
    return _defined[name]


def _define(op: Op) -> Any:
    name = op.name
    names = (*(operand.rstrip("?") for operand in op.operands), *_LAST)
    operands = (f"Tensor? {one[:-1]}=None" if one.endswith("?") else f"Tensor {one}" for one in op.operands)
    schema = f'{name}({", ".join(operands)}, ScalarType? otype=None, str weight_layout="row", str fields="") -> Tensor'

    def run(*arguments: Any, otype: torch.dtype | None = None, weight_layout: str = "row", fields: str = "", **named: Any) -> torch.Tensor:
        if named or len(arguments) > len(op.operands):  # operands by name, or the others by place: torch leaves out what has its default
            given = {"otype": otype, "weight_layout": weight_layout, "fields": fields} | dict(zip(names, arguments, strict=False)) | named
            arguments = tuple(given.get(one) for one in names[: -len(_LAST)])
            otype, weight_layout, fields = (given[one] for one in _LAST)
        if weight_layout != "row":
            matrices = {place for place, one in enumerate(arguments) if one is not None and _is_matrix(op, place)}
            arguments = tuple(as_shuffled(one, weight_layout) if place in matrices else one for place, one in enumerate(arguments))
        arguments = tuple(plain(one) for one in arguments)
        return tgemm.of(name).call(*arguments, otype=otype, **(json.loads(fields) if fields else {})).contiguous()

    def fake(*arguments: Any, **named: Any) -> torch.Tensor:
        given = dict(zip(names, arguments, strict=False)) | named
        return op.fake(*(given.get(one) for one in names[: -len(_LAST)]), otype=given.get("otype"))

    return opaque(schema, run=run, fake=fake)


def _known(name: str) -> bool:
    """Have an op defined."""
    return graph_op(name) is not None


def _is_matrix(op: Op, place: int) -> bool:
    """Whether an operand is a weight proper, not a scale or a bias."""
    return place in op.weights and not any(word in op.operands[place] for word in ("scale", "bias"))


def _encoded(names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """Fields as text: members of enumerations as their numbers, which the ops take for them."""
    fields = dict(zip(names, values, strict=True))
    return json.dumps(fields, default=lambda value: int(getattr(value, "value", value)), sort_keys=True)


# Asked of Python itself while a graph is traced, as `unseen` is.
_encoded._dynamo_marked_constant = True  # type: ignore[attr-defined]
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _stands_for(op: Any, operands: tuple[Any, ...], otype: torch.dtype | None, fields: dict[str, Any], differentiable: bool) -> Any:
    """What a call is in a graph that is being traced.

    Torch's own product, for a16w16 without scales, where a gradient is needed or an export or a transform looks into the graph. Where
    another call needs a gradient the graph ends, and the function itself runs, or says that there is none.
    """
    gradient = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    layout = "row"
    plain: list[Any] = []
    for operand in operands:
        if isinstance(operand, ShuffledWeight):
            if layout not in ("row", operand.layout_name):
                raise OperandError(f"weights of layouts {layout} and {operand.layout_name} do not go together")
            layout = operand.layout_name
            plain.append(operand._plain)
        else:
            plain.append(operand)
    torchs = differentiable and layout == "row" and plain[0].dtype in _FLOATS and all(scale is None for scale in plain[3:])
    if torchs and (gradient or unseen()):
        return _torchs(plain[0], plain[1], plain[2] if len(plain) > 2 else None, otype)
    if gradient:
        torch._dynamo.graph_break(msg="an op of tunedgemm in a graph gives no gradient; call it under torch.no_grad()")
    told = _encoded(tuple(fields), tuple(fields.values())) if fields else ""
    return op(*plain, otype=otype, weight_layout=layout, fields=told)


def _torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, otype: torch.dtype | None) -> torch.Tensor:
    """a16w16 in torch's own functions, in the wider dtype where two meet, for the sake of their gradients."""
    out = x.dtype if otype is None else otype
    wide = x.dtype if out == x.dtype else torch.promote_types(x.dtype, out)
    return _linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(out)


def _traced_by(name: str, place: Place) -> Callable[..., Any]:
    op, differentiable = graph_op(name), name == DEFAULT_OP

    def traced(*arguments: Any, **named: Any) -> Any:
        operands, otype, fields = place(*arguments, **named)
        return _stands_for(op, operands, otype, fields, differentiable)

    return traced


def _traced_call(op: str, *operands: Any, otype: torch.dtype | None = None, **fields: Any) -> Any:
    """`tunedgemm.call` in a graph that is being traced."""
    assert _known(op)
    return _stands_for(getattr(torch.ops.tunedgemm, op).default, operands, otype, fields, op == DEFAULT_OP)


def _in_graph(dispatcher: Serving, otype: torch.dtype | None, fields: dict[str, Any]) -> Call | None:
    """What stands for a call of the default instance where a graph is made by running it, as torch.export does it without strict."""
    if not any(dispatcher is known for known in tgemm.dispatchers):
        return None
    op = dispatcher.op.name
    return lambda *operands: _stands_for(graph_op(op), operands, otype, fields, op == DEFAULT_OP)


def _tell(inner: Callable[..., Any], dispatcher: Serving, place: Place) -> None:
    if any(dispatcher is known for known in tgemm.dispatchers):  # what the compiler is taught lives for ever
        teach(inner, _traced_by(dispatcher.op.name, place))


for _inner, (_dispatcher, _place) in list(hot_functions.items()):
    _tell(_inner, _dispatcher, _place)
on_hot.append(_tell)
in_graph.append(_in_graph)
teach(call, _traced_call)
