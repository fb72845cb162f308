"""Scheme: the quantisation of each layer, from ``config.json``. Torch-free.

Layers whose dtype an unknown field may decide are left out by name, not guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs

from tunedgemm.ops.weight_formats import FORMATS, WeightFormat
from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.rules import WIDE, Names, Rule, Verdict

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
WEIGHTS_ALONE = {"nvfp4": "nvfp4/16", "mxfp8": "mxfp8/32", "mxfp4": "mxfp4/32"}


@attrs.frozen
class Scheme:
    """The quantisation of a part of a model.

    Attributes:
        usual: the verdict on layers that no rule matches.
        rules: rules in order; the first that matches a layer decides.
        experts: the verdict on routed experts that no rule matches, if it differs.
        head: whether engines quantise the LM head: "" never, "named" by a rule, "usual" as others.
        notes: sentences on unknown fields.
    """

    usual: Verdict = WIDE
    rules: tuple[Rule, ...] = ()
    experts: Verdict | None = None
    head: str = ""
    notes: tuple[str, ...] = ()

    def of(self, layer: Layer, names: Names) -> Verdict:
        """Return the verdict on the module of these names; engines do not quantise routers."""
        if layer.kind in ("router", "batched") or (layer.kind == "head" and not self.head):
            return WIDE
        usual = self.experts if self.experts is not None and layer.kind == "experts" else self.usual
        usual = WIDE if layer.kind == "head" and self.head == "named" else usual
        last = next((at for at, rule in enumerate(self.rules) if rule.decides(names)), len(self.rules))
        usual = self.rules[last].verdict if last < len(self.rules) else usual
        verdicts = [next((rule.verdict for rule in self.rules[:last] if rule.matches(part)), usual) for part in names.parts or ((),)]
        if len({*verdicts}) == 1:
            return verdicts[0]
        first = {verdict: names.parts[verdicts.index(verdict)][0].split(".")[-2:] for verdict in dict.fromkeys(verdicts)}
        kinds = (f"{'.'.join(part)} {verdict.scheme or verdict.refused or 'of 16 bits'}" for verdict, part in first.items())
        return Verdict(refused=f"their products have different quantisations ({', '.join(kinds)})")


@attrs.frozen
class Quantisation:
    """The quantisation of a whole model: of its text part, and of others, such as an encoder of images."""

    text: Scheme = Scheme()
    others: Scheme = Scheme()

    def of(self, layer: Layer, names: Names) -> Verdict:
        """Return the verdict on the module of these names."""
        return (self.others if layer.tower else self.text).of(layer, names)

    def unmatched(self, names: Collection[str]) -> tuple[str, ...]:
        """Return a note on each list with entries that match none of the names of a whole model."""
        missed: dict[str, list[str]] = {}
        for rule in {*self.text.rules, *self.others.rules}:
            missed.setdefault(rule.field, []).extend(rule.unmatched(names) if rule.field else ())
        shown = {field: f"{', '.join(sorted(entries)[:3])}{', …' * (len(entries) > 3)}" for field, entries in missed.items() if entries}
        return tuple(f"no module matches these entries of {field!r}: {entries}" for field, entries in sorted(shown.items()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the sentences of all parts, each once."""
        return tuple(dict.fromkeys((*self.text.notes, *self.others.notes)))


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
