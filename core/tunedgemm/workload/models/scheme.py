"""Scheme: the quantisation of each layer, from ``config.json``. Torch-free.

Layers whose dtype an unknown field may decide are left out by name, not guessed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from tunedgemm.ops.weight_formats import FORMATS, WeightFormat
from tunedgemm.workload.models.layer import Layer

#: schemes of weights and activations -> their description; those of weights alone are format/group
SCHEMES = {
    "fp8_block": "fp8, weights by blocks of 128x128, activations by 1x128",
    "fp8_row": "fp8, weights by row, activations by token",
    "fp8_tensor": "fp8, one scale for each operand",
    "int8_row": "int8, weights by row, activations by token",
    "mxfp4": "mxfp4, both by groups of 32",
    "mxfp8": "mxfp8, both by groups of 32",
    "mxfp4_fp8": "weights in mxfp4, activations in fp8, both by groups of 32",
    "nvfp4": "nvfp4, both by groups of 16",
    "int4/32": "weights in int4 by groups of 32, activations of 16 bits",
    **{
        f"{name}/{group}": f"weights in {name} by {f'groups of {group}' if group else 'row'}, activations of 16 bits"
        for name, form in FORMATS.items()
        for group in form.groups
    },
}
#: schemes of both sides -> that of the weights alone, as vLLM runs them on older GPUs
WEIGHTS_ALONE = {"nvfp4": "nvfp4/16", "mxfp8": "mxfp8/32"}
#: products of one expert, by the names of modules below that of the experts
_OF_EXPERTS = ("0.gate_proj", "0.up_proj", "0.down_proj")


@attrs.frozen
class Verdict:
    """The quantisation of one layer.

    Attributes:
        scheme: one of `SCHEMES`; "" for 16 bits.
        refused: why the layer is left out, as the end of "left out, as …"; "" if it is not.
    """

    scheme: str = ""
    refused: str = ""


#: The verdict on a layer that is not quantised.
WIDE = Verdict()


@attrs.frozen
class Rule:
    """The verdict on layers whose names match a list of patterns."""

    patterns: tuple[str, ...]
    verdict: Verdict

    def match(self, layer: Layer, name: str) -> Verdict | None:
        """Return the verdict on the module of this full name; None where no pattern matches it."""
        if any(_matches(pattern, name) for pattern in self.patterns):
            return self.verdict
        if layer.kind != "experts":
            return None
        parts = [any(_matches(pattern, f"{name}.{part}") for pattern in self.patterns) for part in _OF_EXPERTS]
        if all(parts) or not any(parts):
            return self.verdict if all(parts) else None
        return Verdict(refused="the products of one expert have different quantisations")


@attrs.frozen
class Scheme:
    """The quantisation of a part of a model.

    Attributes:
        usual: the verdict on layers that no rule matches.
        rules: rules in order; the first that matches a layer decides.
        experts: the verdict on routed experts that no rule matches, if it differs.
        head: whether the LM head is quantised like other layers.
        notes: sentences on unknown fields.
    """

    usual: Verdict = WIDE
    rules: tuple[Rule, ...] = ()
    experts: Verdict | None = None
    head: bool = False
    notes: tuple[str, ...] = ()

    def of(self, layer: Layer, name: str) -> Verdict:
        """Return the verdict on the module of this full name; engines do not quantise routers."""
        if layer.kind in ("router", "batched") or (layer.kind == "head" and not self.head):
            return WIDE
        for rule in self.rules:
            if (verdict := rule.match(layer, name)) is not None:
                return verdict
        return self.experts if self.experts is not None and layer.kind == "experts" else self.usual


@attrs.frozen
class Quantisation:
    """The quantisation of a whole model: of its text part, and of others, such as an encoder of images."""

    text: Scheme = Scheme()
    others: Scheme = Scheme()

    def of(self, layer: Layer, name: str) -> Verdict:
        """Return the verdict on the module of this full name."""
        return (self.others if layer.tower else self.text).of(layer, name)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the sentences of all parts, each once."""
        return tuple(dict.fromkeys((*self.text.notes, *self.others.notes)))


def _matches(pattern: str, name: str) -> bool:
    """Check whether an entry matches a module's name: entirely, by words or as a pattern."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    words, own = pattern.strip("*.").split("."), name.split(".")
    starts = range(len(own) + 1 - len(words))
    return fnmatch.fnmatchcase(name, pattern) or any(all(map(fnmatch.fnmatchcase, own[start:], words)) for start in starts)


#: fields of a checkpoint's quantisation, next to the parts of the model or in one
_FIELDS = ("quantization_config", "compression_config")
#: names of the text part of a model with several
_TEXT = ("text_config", "language_config", "llm_config", "text_model_config")


def stated_parts(raw: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each part of a file that states a quantisation, and what it states."""
    stated = next((raw[field] for field in _FIELDS if raw.get(field)), None)
    if stated:
        yield path, stated
    for name, part in raw.items():
        if isinstance(part, Mapping) and name not in _FIELDS:
            yield from stated_parts(part, f"{path}.{name}".lstrip("."))


def weight_format(scheme: str) -> tuple[WeightFormat | None, int]:
    """Return format and group of weights alone; (None, 0) for another scheme."""
    name, slash, group = scheme.partition("/")
    return (FORMATS.get(name), int(group)) if slash else (None, 0)


def is_text(path: str) -> bool:
    """Tell whether a part of a file is the text part."""
    return path.rpartition(".")[2] in _TEXT
