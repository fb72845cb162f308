"""Names: what checkpoints and vLLM call the modules of transformers, as rules may have any of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tunedgemm.errors import UserError
from tunedgemm.process.files import JSON_MIB, open_regular
from tunedgemm.workload.models.fuse import TOGETHER
from tunedgemm.workload.models.roles import role_of
from tunedgemm.workload.models.rules import INDEX, Names
from tunedgemm.workload.models.source import json_of

if TYPE_CHECKING:
    import torch

#: largest size of a file of weights
_LARGEST_MIB = 1 << 24
#: usual names of the products of one expert
_OF_EXPERT = ("gate_proj", "up_proj", "down_proj")
#: transformers' and vLLM's name of the text part, where a model has other parts
_TEXT, _TEXT_IN_VLLM = "model.language_model.", "language_model.model."


def weights_of(folder: Path) -> frozenset[str]:
    """Return the names of a checkpoint's weights, by its index or the heads of its files; else none.

    Raises:
        UserError: the index cannot be read.
    """
    place = folder if folder.is_dir() else folder.parent
    path = place / INDEX
    if not path.exists():
        heads = [_head_of(file) for file in place.glob("*.safetensors")]
        return frozenset(name for head in heads for name in head) if all(heads) else frozenset()
    weights = json_of(path).get("weight_map")
    if not isinstance(weights, dict):
        raise UserError(f"{path}: lacks the object 'weight_map'; download the file again")
    return frozenset(weights)


def _head_of(path: Path) -> dict[str, Any]:
    """Return the tensors of a file of safetensors by name; none of another, such as Git LFS's pointer."""
    try:
        with open_regular(path, mib=_LARGEST_MIB) as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(size)) if size <= JSON_MIB << 20 else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: each for name, each in head.items() if name != "__metadata__"} if isinstance(head, dict) else {}


class Namer:
    """Finds the names of a model's modules.

    Args:
        model: the model.
        weights: its checkpoint's weights; where empty, transformers' renamings alone name them.
    """

    def __init__(self, model: torch.nn.Module, weights: Collection[str] = ()) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._model = model
        self._in_file = {weight.rpartition(".")[0] for weight in weights}
        backwards = [each.reverse_transform() for each in reversed(get_model_conversion_mapping(cast("Any", model), add_legacy=False))]
        # config.json does not say which of the optional prefixes the checkpoint's names have
        optional = [each for each in backwards if type(each).__name__ == "PrefixChange"]
        self._ways = [[each for each in backwards if each is kept or each not in optional] for kept in (None, *optional)]
        self._has_others = any(name.startswith(_TEXT) for name, _ in model.named_modules())

    def of(self, name: str, module: torch.nn.Module) -> Names:
        """Return the names of a module that holds weights, but no experts."""
        products = self._in_checkpoint(f"{name}.{next(key for key, _ in module.named_parameters(recurse=False))}")
        own = self._all(name, *(products[0] if len(products) == 1 else ()))
        parts = tuple(self._all(name, *product) for product in products[1:] and products)
        above, role = name.rpartition(".")[0], role_of(name)
        for roles, word in TOGETHER.items():
            children = [child for child, _ in self._model.get_submodule(above).named_children() if role_of(f"{above}.{child}") in roles]
            if role in roles and len(children) == len(roles):
                parents = dict.fromkeys(alias.rpartition(".")[0] for alias in own)
                siblings = tuple(f"{parent}.{child}" for parent in parents for child in children)
                return Names(own, parts, fused=tuple(f"{parent}.{word}" for parent in parents), siblings=siblings)
        return Names(own, parts)

    def of_experts(self, name: str, module: torch.nn.Module, count: int) -> Names:
        """Return the names of the experts of a layer, held as one module or as a list of modules."""
        if hasattr(module, "__len__"):
            keys = [f"{name}.{key}" for key, weight in module.named_parameters() if weight.dim() == 2]
            return Names(self._all(name), tuple(self._all(key.rpartition(".")[0], *self._in_checkpoint(key)[0]) for key in keys))
        keys = [f"{name}.{key}" for key, weight in module.named_parameters() if weight.dim() == 3]
        products = [product for key in keys for product in self._in_checkpoint(key)]
        own = self._all(name, *(alias.partition(".*")[0] for product in products for alias in product))
        apart = [product for product in products if "*" in product[0]]
        if not apart or f"{name}.0.{_OF_EXPERT[-1]}" in self._in_file:
            apart = [tuple(f"{alias}.*.{part}" for alias in own) for part in _OF_EXPERT]
        parts = [self._all(*(alias.replace("*", str(index)) for alias in product)) for index in range(count) for product in apart]
        return Names(own, tuple(parts))

    def _in_checkpoint(self, key: str) -> list[tuple[str, ...]]:
        """Return the names of the modules whose weights make up one of transformers, in all ways."""
        return [tuple(each.rpartition(".")[0] for each in same) for same in zip(*(_written(key, way) for way in self._ways), strict=True)]

    def _all(self, name: str, *in_file: str) -> tuple[str, ...]:
        """Return a name of transformers, its equivalents in the checkpoint, if they are there, and vLLM's."""
        known = [each for each in (name, *in_file) if each in self._in_file]
        names = dict.fromkeys((name, *(known or in_file)))
        if self._has_others:
            of_vllm = name.replace(_TEXT, _TEXT_IN_VLLM, 1) if name.startswith(_TEXT) else name.removeprefix("model.")
            names["language_model.lm_head" if name == "lm_head" else of_vllm] = None
        return tuple(names)


def _written(key: str, way: list[Any]) -> list[str]:
    """Return the weights of a checkpoint that make up one of transformers, after one split at most."""
    keys = [key]
    for each in way:
        if hasattr(each, "operations") and len(keys) == 1:
            first, (renamed, _) = each.target_patterns[0], each.rename_source_key(key)
            keys = list(dict.fromkeys(renamed.replace(first, other) for other in each.target_patterns)) if renamed != key else keys
    renamings = [each.rename_source_key for each in way if not hasattr(each, "operations")]
    return [functools.reduce(lambda name, rename: rename(name)[0], renamings, each) for each in keys]
