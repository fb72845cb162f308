"""Walk: the modules of a model, whatever its architecture, as layers of full size, unfused.

Modules of torch and transformers that multiply by a weight are known by their class. Experts are known by their weights, one
for all of them or one for each. Any other module with a weight of two dimensions is run once, without memory, to see what it
multiplies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import attrs

from tunedgemm.dtype import short_dtype
from tunedgemm.errors import UserError
from tunedgemm.models.layer import Experts, Layer
from tunedgemm.models.roles import role_of

if TYPE_CHECKING:
    import torch

    from tunedgemm.models.source import Source

#: transformers' names of the number of experts that a token goes to
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "top_k", "moe_top_k")
#: activations as configurations spell them -> as fmoe does
_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "swiglu": "swiglu"}
#: last words of the linear layers of one expert, where each has modules of its own: gate, up and down
_OF_AN_EXPERT = ({"w1", "w2", "w3"}, {"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"}, {"wi", "wo"}, {"fc1", "fc2"})
_DOWN = ("w2", "down_proj", "wo", "fc2")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def layers(source: Source) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """The layers of a model in the order of its modules, equal ones counted; and notes on weights that are none."""
    found: dict[Layer, int] = {}
    notes: dict[str, None] = {}
    head = cast("Any", source.module).get_output_embeddings()
    taken: tuple[torch.nn.Module, ...] = ()
    for name, module in source.module.named_modules():
        if any(module is part for part in taken):
            continue
        bank = _bank(source, name, module)
        if bank is not None:
            taken = tuple(module.modules())
        for layer in (bank,) if bank is not None else _of_module(source, name, module, module is head):
            found[layer] = found.get(layer, 0) + 1
        if bank is None and (note := _unknown(name, module)):
            notes[note] = None
    return tuple(attrs.evolve(layer, count=count) for layer, count in found.items()), tuple(notes)


def generic(name: str) -> str:
    """A module's name with ``*`` for the numbers of layers."""
    return _NUMBER.sub("*", name)


def _of_module(source: Source, name: str, module: torch.nn.Module, is_head: bool) -> Iterator[Layer]:
    """The products of one module, its children's left out."""
    import torch

    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or isinstance(module, torch.nn.Embedding):
        return
    dtype = short_dtype(weight.dtype)
    if isinstance(module, torch.nn.Linear) or _is_conv1d(module):
        n, k = weight.shape if isinstance(module, torch.nn.Linear) else weight.shape[::-1]
        bias = getattr(module, "bias", None) is not None
        layer = Layer(generic(name), "head" if is_head else "linear", n, k, bias=bias, dtype=dtype, role=role_of(name))
        yield layer if is_head else _with_heads(layer, source.module.get_submodule(name.rpartition(".")[0]))
        return
    seen = _seen(module, weight)
    if seen is not None:
        yield Layer(generic(name), "router", weight.shape[0], weight.shape[1], bias=seen[1], dtype=seen[0])


def _with_heads(layer: Layer, attention: torch.nn.Module) -> Layer:
    """The layer with the width of a head, as the attention that it stands in tells it."""
    width = _number(attention, "head_dim", "attention_head_size")
    nope, value = _number(attention, "qk_nope_head_dim"), _number(attention, "v_head_dim")
    latent = {"q": _number(attention, "qk_head_dim"), "q_b": _number(attention, "qk_head_dim"), "kv_b": nope + value, "o": value}
    unit = latent.get(layer.role, 0) if nope and value else width
    size = layer.k if layer.role == "o" else layer.n
    if layer.role not in ("q", "k", "v", "qkv", "q_b", "kv_b", "o") or not unit or size % unit:
        return layer
    heads = size // unit
    if layer.role in ("k", "v"):
        return attrs.evolve(layer, unit=unit, kv_units=heads, kv_heads=heads)
    if layer.role != "qkv":
        return attrs.evolve(layer, unit=unit)
    told = _number(attention, "num_key_value_heads", "num_kv_heads") or _number(getattr(attention, "config", None), "num_key_value_heads")
    queries = _number(attention, "num_heads", "num_attention_heads") or _number(getattr(attention, "config", None), "num_attention_heads")
    kv_heads = told if told and queries + 2 * told == heads else heads // 3
    return attrs.evolve(layer, unit=unit, kv_units=2 * kv_heads, kv_heads=kv_heads)


def _number(owner: Any, *names: str) -> int:
    """The first of some attributes that is a positive number, else 0."""
    found = (getattr(owner, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether this is GPT-2's linear layer, whose weight is [K, N]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _seen(module: torch.nn.Module, weight: torch.Tensor) -> tuple[str, bool] | None:
    """The dtype in which a module multiplies by its weight [N, K], and whether it adds a bias; None where it does not."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    n, k = weight.shape
    seen: list[tuple[str, bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operands = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and (k, n) in operands:
                seen.append((short_dtype(args[-1].dtype), function.overloadpacket is torch.ops.aten.addmm))
            return function(*args, **(kwargs or {}))

    try:
        with Watch(), torch.no_grad():
            module(torch.empty(2, k, dtype=weight.dtype, device="meta"))
    except Exception:  # what else it wants is not known; what it multiplied until then counts
        return seen[0] if seen else None
    return seen[0] if seen else None


def _bank(source: Source, name: str, module: torch.nn.Module) -> Layer | None:
    """All experts of a layer, where this module holds them."""
    weights = {key: weight for key, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    down = next((weight for key, weight in weights.items() if key in ("down_proj", "w2", "w2_weight")), None)
    up = next((weight for key, weight in weights.items() if weight is not down), None)
    if down is not None and up is not None:
        transposed = bool(getattr(module, "is_transposed", up.shape[1] == down.shape[2] and up.shape[1] != down.shape[1] // 2))
        width, inner = (down.shape[2], down.shape[1]) if transposed else (down.shape[1], down.shape[2])
        gated = bool(getattr(module, "has_gate", max(up.shape[1:]) == 2 * inner or len(weights) == 3))
        bias = any("bias" in key for key, _ in module.named_parameters(recurse=False))
        return _experts(source, name, module, (down.shape[0], width, inner, gated, bias, short_dtype(down.dtype)))
    return _bank_of_modules(source, name, module)


def _bank_of_modules(source: Source, name: str, module: torch.nn.Module) -> Layer | None:
    """All experts of a layer, where each is a module with linear layers of its own and this is their list."""
    import torch

    children = list(module.children())
    if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) or len(children) < 2 or name.rpartition(".")[2] != "experts":
        return None
    parts = {key: part for key, part in children[0].named_children() if isinstance(part, torch.nn.Linear)}
    if set(parts) not in _OF_AN_EXPERT:
        return None
    down = next(parts[key] for key in _DOWN if key in parts)
    bias = any(part.bias is not None for part in parts.values())
    told = (len(children), down.out_features, down.in_features, len(parts) == 3, bias, short_dtype(down.weight.dtype))
    return _experts(source, name, children[0], told)


def _experts(source: Source, name: str, module: torch.nn.Module, told: tuple[int, int, int, bool, bool, str]) -> Layer:
    count, width, inner, gated, bias, dtype = told
    topk = _number(source.settings, *_TOPK)
    if not topk:
        raise UserError(f"{source.folder}/config.json: lacks the number of experts that a token goes to, as {' or '.join(_TOPK[:3])}")
    spelled = getattr(source.settings, "hidden_act", None) or getattr(source.settings, "hidden_activation", None) or ""
    act = "swiglu" if hasattr(module, "alpha") and hasattr(module, "limit") else _ACTS.get(str(spelled), "")
    experts = Experts(count, min(topk, count), act, gated)
    return Layer(generic(name), "experts", width, inner, bias=bias, dtype=dtype, experts=experts)


def _unknown(name: str, module: torch.nn.Module) -> str:
    """A sentence about a weight that multiplies something and is no layer here, or ""."""
    own = {key: weight for key, weight in module.named_parameters(recurse=False) if weight.dim() >= 3}
    if not own:
        return ""
    told = ", ".join(f"{key} {list(weight.shape)}" for key, weight in own.items())
    return f"{generic(name)} ({type(module).__name__}) multiplies by {told}: no op has this product"
