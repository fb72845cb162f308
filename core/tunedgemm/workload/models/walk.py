"""Walk: convert the modules of any model to unsplit, unfused layers.

Linear modules of torch and transformers are recognised by class, experts by their weights, stacked
or separate. Any other module with a two-dimensional weight is run once on the meta device to find
its GEMMs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

import attrs

from tunedgemm.dtype import short_dtype
from tunedgemm.errors import UserError
from tunedgemm.workload.models.layer import Experts, Layer
from tunedgemm.workload.models.names import Namer
from tunedgemm.workload.models.roles import chooses_experts, role_of
from tunedgemm.workload.models.rules import WIDE, Names
from tunedgemm.workload.models.source import number_of

if TYPE_CHECKING:
    import torch

    from tunedgemm.workload.models.scheme import Quantisation
    from tunedgemm.workload.models.source import ModelSource

#: transformers' names of the number of experts per token
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "top_k", "moe_top_k")
#: transformers' names of the activation
_ACT = ("hidden_act", "hidden_activation", "activation_function")
#: configurations' names of activations -> fmoe's
_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "swiglu": "swiglu"}
#: last words of the linear layers of one expert, where each expert has separate modules: gate, up
#: and down
_OF_AN_EXPERT = ({"w1", "w2", "w3"}, {"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"}, {"wi", "wo"}, {"fc1", "fc2"})
#: Granite's names of the modules that hold one product of all experts each
_SIDES = ("input_linear", "output_linear")
_DOWN = ("w2", "down_proj", "wo", "fc2")

#: Parts of the names of weights that are not multiplied, but looked up or added.
_NO_PRODUCT = ("embed", "pos_", "position", "token", "bias", "a_log")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def layers(source: ModelSource, quantisation: Quantisation, weights: Collection[str] = ()) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return the layers of a model with counts, in module order, and notes on other weights.

    Args:
        quantisation: says which modules are quantised; modules with one generic name may differ.
        weights: names of the checkpoint's weights; may be unknown.
    """
    counts: dict[Layer, int] = {}
    left: dict[type, dict[str, None]] = {}
    head = cast("Any", source.module).get_output_embeddings()
    text = _of_text(source)
    taken: tuple[torch.nn.Module, ...] = ()
    seen, namer = set[str](), Namer(source.module, weights)
    for name, module in source.module.named_modules():
        if any(module is part for part in taken):
            continue
        bank = _bank(source, name, module)
        if bank is not None:
            taken = _sides(module) or tuple(module.modules())
        own = (bank,) if bank is not None else tuple(_of_module(source, name, module, module is head))
        names = _names(namer, name, module, bank)
        seen.update(names.own, names.fused, *names.parts)
        for layer in own:
            beside = bool(text) and module is not head and module not in text
            placed = attrs.evolve(layer, tower=beside)
            tied = module is head and module.weight is cast("Any", source.module).get_input_embeddings().weight
            verdict = WIDE if tied else quantisation.of(placed, names)  # engines do not quantise embeddings
            placed = attrs.evolve(placed, **attrs.asdict(verdict))
            counts[placed] = counts.get(placed, 0) + 1
        if not own:
            kind = type(module) if _is_convolution(module) else object
            left.setdefault(kind, {}).update(dict.fromkeys(_unknown(name, module)))
    return tuple(attrs.evolve(layer, count=count) for layer, count in counts.items()), (
        *quantisation.unmatched(seen),
        *_notes(left),
    )


def _names(namer: Namer, name: str, module: torch.nn.Module, bank: Layer | None) -> Names:
    if bank is not None and bank.experts is not None:
        return namer.of_experts(name, module, bank.experts.count)
    return namer.of(name, module) if next(module.parameters(recurse=False), None) is not None else Names((name,))


def _of_text(source: ModelSource) -> set[torch.nn.Module]:
    """Return the modules of the text part, where the model has others, too; else none."""
    kind = type(source.settings)
    if kind is type(getattr(source.module, "config", None)):
        return set()
    parts = (part for part in source.module.modules() if type(getattr(part, "config", None)) is kind)
    return {module for part in parts for module in part.modules()}


def generic(name: str) -> str:
    """Return a module's name with ``*`` for the numbers of layers."""
    return _NUMBER.sub("*", name)


def _of_module(source: ModelSource, name: str, module: torch.nn.Module, is_head: bool) -> Iterator[Layer]:
    """Yield the products of one module, without its children's."""
    import torch

    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or isinstance(module, torch.nn.Embedding):
        return
    dtype = short_dtype(weight.dtype)
    parent = source.module.get_submodule(name.rpartition(".")[0])
    if isinstance(module, torch.nn.Linear) or _is_conv1d(module):
        n, k = weight.shape if isinstance(module, torch.nn.Linear) else weight.shape[::-1]
        bias = getattr(module, "bias", None) is not None
        layer = Layer(generic(name), "head" if is_head else "linear", n, k, bias=bias, dtype=dtype, role=role_of(name))
        groups = number_of(module, "n_groups")
        if is_head:
            yield layer
        elif groups > 1 and type(module) is not torch.nn.Linear and n % groups == 0:  # one product per group of inputs
            yield attrs.evolve(layer, kind="batched", n=n // groups, batch=groups)
        elif chooses_experts(name) or (layer.own_name == "gate" and hasattr(parent, "experts")):
            yield attrs.evolve(layer, kind="router", role="")
        else:
            yield _with_heads(layer, parent)
        return
    product = _watched_product(module, weight, parent)
    if product is not None:
        yield Layer(generic(name), "router", weight.shape[0], weight.shape[1], bias=product[1], dtype=product[0])


def _with_heads(layer: Layer, attention: torch.nn.Module) -> Layer:
    """Return the layer with the width of a head, as its attention states it."""
    width = number_of(attention, "head_dim", "attention_head_size")
    nope, value = number_of(attention, "qk_nope_head_dim"), number_of(attention, "v_head_dim")
    latent = {"q": number_of(attention, "qk_head_dim"), "q_b": number_of(attention, "qk_head_dim"), "kv_b": nope + value, "o": value}
    unit = latent.get(layer.role, 0) if nope and value else width
    size = layer.k if layer.role == "o" else layer.n
    if layer.role not in ("q", "k", "v", "qkv", "q_b", "kv_b", "o") or not unit or size % unit:
        return layer
    heads = size // unit
    if layer.role in ("k", "v"):
        return attrs.evolve(layer, unit=unit, kv_units=heads, kv_heads=heads)
    if layer.role != "qkv":
        return attrs.evolve(layer, unit=unit)
    settings = getattr(attention, "config", None)
    stated = number_of(attention, "num_key_value_heads", "num_kv_heads") or number_of(settings, "num_key_value_heads")
    queries = number_of(attention, "num_heads", "num_attention_heads") or number_of(settings, "num_attention_heads")
    kv_heads = stated if stated and queries + 2 * stated == heads else heads // 3
    return attrs.evolve(layer, unit=unit, kv_units=2 * kv_heads, kv_heads=kv_heads)


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Tell whether this is GPT-2's linear layer, whose weight is [K, N]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_convolution(module: torch.nn.Module) -> bool:
    import torch

    return isinstance(module, torch.nn.modules.conv._ConvNd)


def _watched_product(module: torch.nn.Module, weight: torch.Tensor, parent: torch.nn.Module) -> tuple[str, bool] | None:
    """Return the dtype in which a module multiplies by its weight [N, K], and whether it adds a bias.

    Return None where it does not multiply. Arguments other than the activations come from
    attributes of that name of its parent.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    n, k = weight.shape
    products: list[tuple[str, bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operands = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and (k, n) in operands:
                products.append((short_dtype(args[-1].dtype), function.overloadpacket is torch.ops.aten.addmm))
            return function(*args, **(kwargs or {}))

    wanted = list(inspect.signature(module.forward).parameters.values())[1:]
    others = {
        parameter.name: getattr(parent, parameter.name, None)
        for parameter in wanted
        if parameter.default is parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    }
    try:
        with Watch(), torch.no_grad():
            module(torch.empty(2, k, dtype=weight.dtype, device="meta"), **others)
    except Exception:  # its other arguments are unknown; what it multiplied until then counts
        return products[0] if products else None
    return products[0] if products else None


def _bank(source: ModelSource, name: str, module: torch.nn.Module) -> Layer | None:
    """Return all experts of a layer, where this module holds them."""
    weights: dict[str, torch.Tensor] = {key: weight for key, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    if sides := _sides(module):
        weights = dict(zip(_SIDES, (side.weight for side in sides), strict=True))
    down = next((weight for key, weight in weights.items() if key in ("down_proj", "w2", "w2_weight", "output_linear")), None)
    up = next((weight for key, weight in weights.items() if weight is not down), None)
    if down is not None and up is not None:
        transposed = bool(getattr(module, "is_transposed", up.shape[1] == down.shape[2] and up.shape[2] != down.shape[1]))
        width, inner = (down.shape[2], down.shape[1]) if transposed else (down.shape[1], down.shape[2])
        gated = bool(getattr(module, "has_gate", up.shape[2 if transposed else 1] == 2 * inner or len(weights) == 3))
        bias = any("bias" in key for key, _ in module.named_parameters(recurse=False))
        return _experts(source, name, module, (down.shape[0], width, inner, gated, bias, short_dtype(down.dtype)))
    return _bank_of_modules(source, name, module)


def _sides(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return both products of all experts, where each is a module with the weights of all; else none."""
    import torch

    sides = tuple(getattr(module, side, None) for side in _SIDES)
    weights = [weight for side in sides if isinstance(weight := getattr(side, "weight", None), torch.Tensor) and weight.dim() == 3]
    return sides if len(weights) == 2 and weights[0].shape[1] == 2 * weights[1].shape[2] else ()


def _bank_of_modules(source: ModelSource, name: str, module: torch.nn.Module) -> Layer | None:
    """Return all experts of a layer, where this module is the list of their modules."""
    import torch

    children = list(module.children())
    if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) or len(children) < 2 or name.rpartition(".")[2] != "experts":
        return None
    parts = {key: part for key, part in children[0].named_children() if isinstance(part, torch.nn.Linear)}
    if set(parts) not in _OF_AN_EXPERT:
        return None
    down = next(parts[key] for key in _DOWN if key in parts)
    bias = any(part.bias is not None for part in parts.values())
    sizes = (len(children), down.out_features, down.in_features, len(parts) == 3, bias, short_dtype(down.weight.dtype))
    return _experts(source, name, children[0], sizes)


def _experts(source: ModelSource, name: str, module: torch.nn.Module, sizes: tuple[int, int, int, bool, bool, str]) -> Layer:
    count, width, inner, gated, bias, dtype = sizes
    topk = number_of(source.settings, *_TOPK)
    if not topk:
        raise UserError(f"{source.folder}/config.json: lacks the number of experts per token; add {_TOPK[0]}")
    spelled = next(filter(None, (getattr(source.settings, key, None) for key in _ACT)), "")
    act = "swiglu" if hasattr(module, "alpha") and hasattr(module, "limit") else _ACTS.get(str(spelled), "")
    experts = Experts(count, min(topk, count), act, gated)
    return Layer(generic(name), "experts", width, inner, bias=bias, dtype=dtype, experts=experts)


def _unknown(name: str, module: torch.nn.Module) -> Iterator[str]:
    """Yield the weights of a module that may multiply something unknown: no embeddings, no vectors."""
    import torch

    if isinstance(module, torch.nn.Embedding):
        return
    for key, weight in module.named_parameters(recurse=False):
        full_name = f"{generic(name)}.{key}".lstrip(".")
        sizes = [size for size in weight.shape if size > 1]
        if _is_convolution(module) and key == "weight":
            yield generic(name)
        elif (
            len(sizes) >= 2 and weight.shape[0] > 1 and not any(word in ".".join(full_name.split(".")[-2:]).lower() for word in _NO_PRODUCT)
        ):
            yield f"{full_name} {list(weight.shape)}"


def _notes(left: dict[type, dict[str, None]]) -> tuple[str, ...]:
    """Return a note on weights of unknown use, and one on convolutions."""
    unknown = left.pop(object, {})
    convolutions = dict.fromkeys(name for names in left.values() for name in names)
    notes = []
    if unknown:
        notes.append(f"left out, as the use of these weights is unknown: {', '.join(unknown)}")
    if convolutions:
        notes.append(f"left out, as no op has convolutions: {', '.join(convolutions)}")
    return tuple(notes)
