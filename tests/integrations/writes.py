"""Ways to write to the weight of a layer, by the names in docs/models.md."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: Rows of the page's table, by the first cell.
_ROW = re.compile(r"^\| (a new copy|the plain weight|an outdated copy) \| (.*) \|$", re.MULTILINE)
Layer = torch.nn.Linear
Write = Callable[[Layer, torch.Tensor], Any]


def _in_place(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Write:
    """Apply a write to the parameter, without a gradient."""

    def apply(layer: Layer, other: torch.Tensor) -> Any:
        with torch.no_grad():
            return write(layer.weight, other)

    return apply


def _optimiser(name: str, learns: bool = True, compiled: bool = False, **options: Any) -> Write:
    """Step an optimiser; without *learns* the gradient is assigned to a frozen weight."""

    def step(layer: Layer, other: torch.Tensor) -> None:
        layer.weight.requires_grad_(learns)
        layer.weight.grad = other.clone()
        steps = getattr(torch.optim, name)(layer.parameters(), lr=1.0, **options).step
        (torch.compile(steps, backend="eager") if compiled else steps)()
        layer.weight.requires_grad_(False).grad = None

    return step


def _of_alias(layer: Layer, other: torch.Tensor) -> None:
    view = layer.weight.detach()
    view.grad = other.clone()
    torch.optim.SGD([view], lr=1.0, fused=True).step()


def _trained_raw(layer: Layer, other: torch.Tensor) -> None:
    """Train by a kernel that torch does not know, as DeepSpeed's and apex's."""
    layer.weight.requires_grad_()
    _copy_bytes(layer.weight, other)
    layer.weight.requires_grad_(False)


def _copy_bytes(weight: torch.Tensor, other: torch.Tensor) -> None:
    """Write as a kernel does that gets an address."""
    ctypes.memmove(weight.data_ptr(), other.to(weight.dtype).contiguous().data_ptr(), weight.nbytes)


def _assign_twice(layer: Layer, other: torch.Tensor) -> None:
    """Assign memory twice; the second may have the address of the first."""
    layer.weight.data = torch.zeros_like(other)
    layer.weight.data = other.clone()


def _in_inference_mode(layer: Layer, other: torch.Tensor) -> None:
    with torch.inference_mode():
        layer.weight.mul_(0.5)
        layer.weight.data.add_(other)


def _grow(tensor: torch.Tensor, byte: int = 65) -> None:
    """Give the storage another address, and write to it uncounted."""
    storage = tensor.untyped_storage()
    if storage.resizable():  # no array has it
        storage.resize_(2 * storage.nbytes())
    storage.fill_(byte)


def _replace(layer: Layer, other: torch.Tensor) -> None:
    layer.weight = torch.nn.Parameter(other.clone(), requires_grad=False)


def _poke(layer: Layer, other: torch.Tensor) -> None:
    layer._parameters["weight"] = torch.nn.Parameter(other.clone(), requires_grad=False)


def _compiled(layer: Layer, other: torch.Tensor) -> None:
    with torch.no_grad():
        torch.compile(lambda weight, by: weight.mul_(0.5).add_(by), backend="aot_eager")(layer.weight, other)


def _numpy(layer: Layer, _other: torch.Tensor) -> None:
    """Write past torch, in a dtype that numpy has."""
    layer.float()
    layer(torch.ones(128, layer.in_features))
    layer.weight.numpy()[3:5] = 7


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


def _fill(array: Any) -> None:
    array[3:5] = 65


def _swap(layer: Layer, other: torch.Tensor) -> None:
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(other.clone(), requires_grad=False))


def _average(layer: Layer, other: torch.Tensor) -> None:
    """Load an average of two models."""
    model = Layer(layer.in_features, layer.out_features, bias=False, dtype=other.dtype).requires_grad_(False)
    averaged = AveragedModel(model, avg_fn=lambda old, new, _: (old + new) / 2)
    for values in (layer.weight.detach(), other):
        model.weight.copy_(values)
        averaged.update_parameters(model)
    layer.load_state_dict(averaged.module.state_dict())


def _from_vector(layer: Layer, other: torch.Tensor) -> torch.Tensor:
    vector = other.reshape(-1).clone()
    torch.nn.utils.vector_to_parameters(vector, layer.parameters())
    return vector


def _flat(layer: Layer, other: torch.Tensor) -> torch.Tensor:
    """Let a flat buffer have the weight, and write to it."""
    flat = torch.empty(2 * other.numel(), dtype=other.dtype, device=other.device)
    layer.weight.data = flat[: other.numel()].view_as(other)
    flat.copy_(other.reshape(-1).repeat(2))
    return flat


def _set(layer: Layer, other: torch.Tensor) -> torch.Tensor:
    """Give the weight memory of another tensor, which writes to it after the next call."""
    kept = other.clone()
    layer.weight.set_(kept)
    layer(other.new_ones(128, layer.in_features))
    return kept.fill_(3)


def _tied(layer: Layer, other: torch.Tensor) -> Layer:
    tied = Layer(layer.in_features, layer.out_features, bias=False, dtype=other.dtype).requires_grad_(False)
    tied.weight.data = layer.weight.data
    tied.weight.copy_(other)
    return tied


def _lora(layer: Layer, other: torch.Tensor) -> None:
    layer.weight.data += other[:, :4] @ other[:4]


def _orthogonal(layer: Layer, other: torch.Tensor) -> None:
    """Compute the weight by a parametrisation, then bake it in."""

    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    layer.weight.copy_(other)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    layer.weight.requires_grad_(False)


def _kept_array(layer: Layer, other: torch.Tensor) -> Any:
    """Write to an array of the weight after the next call."""
    array = _bytes(layer.weight.detach())
    layer(other.new_ones(128, layer.in_features))
    _fill(array)
    return array


def _after_call(alias: Callable[[torch.Tensor], torch.Tensor], write: Callable[[torch.Tensor], Any]) -> Write:
    """Write to an alias of the weight after another call."""

    def late(layer: Layer, other: torch.Tensor) -> torch.Tensor:
        kept = alias(layer.weight)
        layer(other.new_ones(128, layer.in_features))
        write(kept)
        return kept

    return late


def _uncounted_copy(weight: torch.Tensor, other: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
        weight.copy_(other)


def _fused_kernel(weight: torch.Tensor, other: torch.Tensor) -> None:
    """Call the kernel of a fused optimiser without the optimiser."""
    first, second, step = ([tensor] for tensor in (torch.zeros_like(other), torch.zeros_like(other), torch.ones((), device=other.device)))
    rest = {"lr": 1.0, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    torch._fused_adam_([weight], [other], first, second, [], step, **rest)


@functools.cache
def _library() -> Any:
    library = torch.library.Library("tunedgemm_tests_writes", "DEF")
    library.define("copy(Tensor(a!) weight, Tensor other) -> ()")
    library.impl("copy", _copy_bytes, "CPU")
    _library.kept = library  # type: ignore[attr-defined]
    return torch.ops.tunedgemm_tests_writes


#: Writes by functions of a layer and other values [N, K]. Whatever they return lives on.
WRITES: dict[str, Write] = {
    "load_state_dict": lambda layer, other: layer.load_state_dict({"weight": other}),
    "load_state_dict(assign=True)": lambda layer, other: layer.load_state_dict({"weight": other.clone()}, assign=True),
    "copy_": lambda layer, other: layer.weight.copy_(other),
    "add_": _in_place(lambda weight, other: weight.add_(other)),
    "out=": lambda layer, other: torch.add(other, other, out=layer.weight),
    "_foreach_copy_": _in_place(lambda weight, other: torch._foreach_copy_([weight], [other])),
    "_foreach_mul_": _in_place(lambda weight, _: torch._foreach_mul_([weight], 0.5)),
    "writes to a view": lambda layer, _: layer.weight[3:5].fill_(7),
    "detach().copy_": lambda layer, other: layer.weight.detach().copy_(other),
    "data +=": _lora,
    "data.copy_": lambda layer, other: layer.weight.data.copy_(other),
    "data.view": lambda layer, _: layer.weight.data.view(-1)[5:900].fill_(3),
    "state_dict()[name].copy_": lambda layer, other: layer.state_dict()["weight"].copy_(other),
    "state_dict()[name].data.copy_": lambda layer, other: layer.state_dict()["weight"].data.copy_(other),
    "data =": lambda layer, other: setattr(layer.weight, "data", other.clone()),
    "data = twice": _assign_twice,
    "set_": lambda layer, other: layer.weight.set_(other.clone()),
    "inference_mode": _in_inference_mode,
    "SGD": _optimiser("SGD"),
    "SGD(foreach=True)": _optimiser("SGD", foreach=True),
    **{f"{name}(fused=True)": _optimiser(name, fused=True) for name in ("Adam", "AdamW", "SGD", "Adagrad")},
    "Adam(fused=True) of a frozen weight": _optimiser("Adam", learns=False, fused=True),
    "a compiled Adam": _optimiser("Adam", compiled=True),
    "a compiled Adam(fused=True)": _optimiser("Adam", learns=False, compiled=True, fused=True),
    "SGD(fused=True) of detach()": _of_alias,
    "kernels that train it": _trained_raw,
    "untyped_storage().copy_": lambda layer, other: layer.weight.untyped_storage().copy_(other.clone().untyped_storage()),
    "a resized storage": lambda layer, other: _grow(layer.weight.detach(), int(other[0, 0].abs()) + 60),
    "a resized storage of a view that is kept": _after_call(lambda weight: weight.detach(), _grow),
    "another parameter": _replace,
    "another parameter in _parameters": _poke,
    "swap_tensors": _swap,
    "a compiled function": _compiled,
    "an average of swa_utils": _average,
    "a parametrisation that was removed": _orthogonal,
    "half": lambda layer, _: layer.half(),
    "to(dtype)": lambda layer, _: layer.to(torch.float32),
    "numpy()": _numpy,
    "from_dlpack(weight)": lambda layer, other: torch.from_dlpack(layer.weight).copy_(other),
    "data.numpy()": lambda layer, _: _fill(_bytes(layer.weight.data)),
    "detach().numpy()": lambda layer, _: _fill(_bytes(layer.weight.detach())),
    "from_dlpack(weight.detach())": lambda layer, other: torch.from_dlpack(layer.weight.detach()).copy_(other),
    "vector_to_parameters": _from_vector,
    "a flat buffer": _flat,
    "set_ of a kept tensor": _set,
    "a tied weight": _tied,
    "share_memory_": lambda layer, other: (layer.weight.share_memory_(), layer.weight.copy_(other)),
    "an array of detach()": _kept_array,
    "an address": _in_place(_copy_bytes),
    "data of a view": lambda layer, _: layer.weight.view(-1).data.fill_(3),
    "data of a view that is kept": _after_call(lambda weight: weight.detach(), lambda kept: kept.data.fill_(3)),
    "numpy() of a view that is kept": _after_call(lambda weight: weight.view(-1), lambda kept: _fill(_bytes(kept))),
    "from_dlpack of a view": lambda layer, _: torch.from_dlpack(layer.weight.view(-1)).fill_(3),
    "unsafe_split": lambda layer, _: torch.unsafe_split(layer.weight, 32)[0].fill_(3),
    "_unsafe_preserve_version_counter": _in_place(_uncounted_copy),
    "_fused_adam_ of a frozen weight": _in_place(_fused_kernel),
    "an operation of torch.library.Library": _in_place(lambda weight, other: _library().copy(weight, other)),
}

#: Writes that need the memory of the host.
ON_CPU = {
    "numpy()", "from_dlpack(weight)", "data.numpy()", "detach().numpy()", "from_dlpack(weight.detach())", "share_memory_",
    "an array of detach()", "an address", "kernels that train it", "numpy() of a view that is kept", "a tied weight",
    "from_dlpack of a view", "an average of swa_utils", "an operation of torch.library.Library",
}  # fmt: skip


@functools.cache
def answers() -> Mapping[str, str]:
    """Read what the next call takes after each write, by name, from the page."""
    return {name.strip("` "): answer for answer, names in _ROW.findall(PAGE.read_text()) for name in names.split(";")}


def is_unseen(name: str) -> bool:
    """Return whether the page lists a write as one that needs `refresh`."""
    return answers().get(name) == "an outdated copy"
