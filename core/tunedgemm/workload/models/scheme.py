"""Scheme: the quantisation that a checkpoint states for its layers; torch-free.

Read from ``quantization_config`` of ``config.json``, in the spellings of transformers' fp8, FBGEMM,
compressed-tensors, Quark, ModelOpt and the MXFP4 of gpt-oss.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import attrs

from tunedgemm.workload.models.layer import Layer

#: schemes of weights and activations -> their description
SCHEMES = {
    "fp8_block": "fp8, weights by blocks of 128x128, activations by 1x128",
    "fp8_row": "fp8, weights by row, activations by token",
    "fp8_tensor": "fp8, one scale for each operand",
    "int8_row": "int8, weights by row, activations by token",
    "mxfp4": "mxfp4, both by groups of 32",
    "mxfp4_weight": "weights in mxfp4 by groups of 32, activations of 16 bits",
}
#: the scheme of a layer whose quantisation no op has
REFUSED = "refused"
#: the keys under which quantisers list the layers that they skip
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules")


@attrs.frozen
class Scheme:
    """The quantisation of a checkpoint's layers.

    Attributes:
        name: one of `SCHEMES`, "" where layers are not quantised.
        refused: why no op has the products of the quantised layers, or "".
        ignored: names of layers that are not quantised, as the checkpoint spells them: whole names,
            parts of them, patterns.
        experts_only: whether only routed experts are.
        text_only: whether only the text part is, and not, say, an encoder of images.
    """

    name: str = ""
    refused: str = ""
    ignored: tuple[str, ...] = ()
    experts_only: bool = False
    text_only: bool = False

    def covers(self, layer: Layer, name: str) -> bool:
        """Tell whether the module of this full name is quantised.

        Engines do not quantise routers and the LM head.
        """
        if not (self.name or self.refused) or layer.kind in ("router", "head", "batched"):
            return False
        if (self.experts_only and layer.kind != "experts") or (self.text_only and layer.tower):
            return False
        return not any(_matches(pattern, name) for pattern in self.ignored)


def _matches(pattern: str, name: str) -> bool:
    """Tell whether a list's entry matches the module of this full name: whole, by words or as a pattern."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    words, own = pattern.strip("*.").split("."), name.split(".")
    starts = range(len(own) + 1 - len(words))
    return fnmatch.fnmatchcase(name, pattern) or any(all(map(fnmatch.fnmatchcase, own[start:], words)) for start in starts)


def scheme_of(raw: Mapping[str, Any]) -> Scheme:
    """Return the scheme that ``config.json`` states; an unknown one is refused, never guessed."""
    stated = _stated(raw)
    text = _stated(_mapping(raw.get("text_config")))
    text_only = not isinstance(stated, Mapping) and isinstance(text, Mapping)
    stated = text if text_only else stated
    if not isinstance(stated, Mapping):
        return Scheme()
    method = str(stated.get("quant_method", "")).lower()
    ignored = tuple(entry for key in _IGNORED for entry in _entries(stated.get(key)))
    name, refused = _judge(method, stated)
    return Scheme(name, refused, ignored, experts_only=method == "mxfp4", text_only=text_only)


def _stated(raw: Mapping[str, Any]) -> Any:
    return raw.get("quantization_config") or raw.get("compression_config")


def _entries(value: Any) -> tuple[str, ...]:
    """Return the names of a list, or a single name; none of anything else."""
    return (value,) if isinstance(value, str) else tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _judge(method: str, stated: Mapping[str, Any]) -> tuple[str, str]:
    if method == "fp8":
        block = stated.get("weight_block_size")
        if block and block != [128, 128]:
            sizes = "x".join(map(str, block)) if isinstance(block, list) else block
            return "", f"fp8 in blocks of {sizes}; the block-scale op has 128x128"
        return ("fp8_block" if block else "fp8_tensor"), ""
    if method == "fbgemm_fp8":
        return "fp8_row", ""
    if method in ("compressed-tensors", "compressed_tensors"):
        groups = [group for group in _mapping(stated.get("config_groups")).values() if isinstance(group, Mapping)]
        return _merge_schemes([_of_group(group.get("weights"), group.get("input_activations")) for group in groups])
    if method == "quark":
        whole = _mapping(stated.get("global_quant_config"))
        return _of_quark(whole.get("weight"), whole.get("input_tensors"))
    if method == "modelopt":
        kind = str(stated.get("quant_algo", "")).upper()
        return ("fp8_tensor", "") if kind == "FP8" else ("", f"modelopt's {kind or 'unnamed algorithm'}")
    if method == "mxfp4":
        return "", "mxfp4 weights with activations of 16 bits"
    return "", f"quant_method {method!r}: weight-only, or in a format that no op multiplies"


def _merge_schemes(schemes: list[tuple[str, str]]) -> tuple[str, str]:
    """Merge the schemes of several groups of layers; differing groups are refused."""
    if not schemes:
        return "", "compressed-tensors without config_groups"
    return (
        schemes[0]
        if len(set(schemes)) == 1
        else ("", f"groups of layers with different schemes: {', '.join(sorted({a or b for a, b in schemes}))}")
    )


def _of_group(weights: Any, inputs: Any) -> tuple[str, str]:
    if not isinstance(weights, Mapping):
        return "", "quantised activations with unquantised weights"
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if not inputs and (bits, kind, weights.get("group_size")) == (4, "float", 32):
        return "mxfp4_weight", ""
    if not isinstance(inputs, Mapping) or inputs.get("num_bits") != bits:
        return "", f"weights of {bits} bits with wider activations"
    by = {"tensor": "tensor", "channel": "row", "block": "block"}.get(str(strategy), "")
    if (bits, kind) == (8, "float") and by:
        return f"fp8_{by}", ""
    if (bits, kind, by) == (8, "int", "row"):
        return "int8_row", ""
    if (bits, kind, weights.get("group_size")) == (4, "float", 32):
        return "mxfp4", ""
    return "", f"{kind} weights of {bits} bits, scaled by {strategy}"


def _of_quark(weight: Any, inputs: Any) -> tuple[str, str]:
    weight = weight[0] if isinstance(weight, list) and weight else weight
    if not isinstance(weight, Mapping):
        return "", "Quark without a weight format"
    dtype, by = str(weight.get("dtype", "")), str(weight.get("qscheme", ""))
    if not inputs:
        fp4 = dtype == "fp4" and weight.get("group_size") == 32
        return ("mxfp4_weight", "") if fp4 else ("", "weight-only Quark")
    if dtype.startswith("fp8"):
        name = {"per_tensor": "fp8_tensor", "per_channel": "fp8_row"}.get(by, "")
        return (name, "") if name else ("", f"Quark's {dtype} scaled {by}")
    if dtype == "int8" and by == "per_channel":
        return "int8_row", ""
    if dtype == "fp4" and weight.get("group_size") == 32:
        return "mxfp4", ""
    return "", f"Quark's {dtype} scaled {by}"
