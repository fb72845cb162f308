"""Quantisers: parse ``quantization_config`` of ``config.json`` to schemes. Torch-free.

Supported are transformers' fp8, FBGEMM, compressed-tensors, Quark, ModelOpt, GPTQ, AWQ, mxfp8 and
gpt-oss's MXFP4. Others are rejected.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.workload.models.packed import AWQ_FIELDS, GPTQ_FIELDS, IN_BLOCKS, of_awq, of_gptq, of_packed
from tunedgemm.workload.models.rules import WIDE, Rule, Verdict, entries_of, mapping_of, refuse, rules_of, unread_in
from tunedgemm.workload.models.scheme import Quantisation, Scheme, is_text, stated_parts

#: Keys under which quantisers list skipped layers.
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules", "llm_int8_skip_modules")
#: Parts of ModelOpt's models that vLLM never quantises.
_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")
#: Keys of any quantiser that do not affect the dtypes of GEMMs.
_HARMLESS = {
    "quant_method", "version", "producer", "quantization_status", "global_compression_ratio", "run_compressed", "dequantize",
    "kv_cache_scheme", "kv_cache_dtype", "kv_cache_quant_algo", "kv_cache_quant_config", "kv_cache_group", "kv_cache_post_rope",
    "softmax_quant_spec", *_IGNORED,
}  # fmt: skip
#: keys of each method that its reader reads, or that decide nothing in it
_KEYS = {
    "fp8": {"fmt", "activation_scheme", "weight_block_size", "scale_fmt", "expert_dtype"},
    "fbgemm_fp8": {"activation_scale_ub"},
    "mxfp4": set(),
    "compressed-tensors": {"config_groups", "format", "sparsity_config"},
    "quark": {"global_quant_config", "layer_quant_config", "layer_type_quant_config", "export", "algo_config", "quant_mode"},
    "modelopt": {"quant_algo", "quantized_layers", "quantization", "config_groups", "group_size"},
    "mxfp8": {"fmt", "activation_scheme", "weight_block_size", "scale_fmt"},
    "gptq": GPTQ_FIELDS,
    "awq": AWQ_FIELDS,
}  # fmt: skip
#: method -> how its engine matches skipped layers; others match whole words
_MATCHES = {"awq": "of layers", "gptq": "of layers", "compressed-tensors": "exact", "quark": "glob", "modelopt": "substring or glob"}
#: keys of one group of layers that its reader reads, in compressed-tensors and in Quark
_OF_GROUP, _OF_CONFIG = {"weights", "input_activations", "targets", "format"}, {"weight", "input_tensors", "target_device"}
#: (weights, their scales, activations, their scales) -> scheme; activations "" have 16 bits
_FORMATS = {
    ("fp8", "tensor", "fp8", "tensor"): "fp8_tensor",
    ("fp8", "row", "fp8", "row"): "fp8_row",
    ("fp8", "block", "fp8", "group128"): "fp8_block",
    ("int8", "row", "int8", "row"): "int8_row",
    ("fp4", "group32", "fp4", "group32"): "mxfp4",
    ("fp4", "group32", "fp8", "group32"): "mxfp4_fp8",
    ("fp8", "group32", "fp8", "group32"): "mxfp8",
    ("fp4", "tensor_group", "fp4", "tensor_group"): "nvfp4",
    ("fp4", "group32", "", ""): "mxfp4/32",
    ("fp4", "tensor_group", "", ""): "nvfp4/16",
    ("int4", "group32", "", ""): "int4/32",
    ("int8", "row", "", ""): "int8_channel/0",
    ("fp8", "block", "", ""): "fp8_block/128",
    ("fp8", "row", "", ""): "fp8_channel/0",
    ("fp8", "tensor", "", ""): "fp8_tensor/0",
    ("fp8", "group32", "", ""): "mxfp8/32",
    **{
        (
            f"{'' if form.zeros is None else 'asymmetric '}packed int{form.bits}",
            f"group{group}" if group else "row",
            "",
            "",
        ): f"{name}/{group}"
        for name, form in FORMATS.items()
        if name.startswith("ct_int")
        for group in form.groups
    },
}
#: A quantiser's scale granularity -> ours.
_BY = {"tensor": "tensor", "per_tensor": "tensor", "channel": "row", "per_channel": "row", "token": "row", "per_token": "row"}
#: ModelOpt's algorithms
_ALGORITHMS = {
    "FP8": "fp8_tensor", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_row", "MXFP8": "mxfp8", "W4A8_MXFP4_FP8": "mxfp4_fp8",
    "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4/16",
}  # fmt: skip
#: words for the dtype of experts
_EXPERTS = {"fp4": "mxfp4_fp8", "mxfp4": "mxfp4_fp8", "fp8": "", "float8_e4m3fn": ""}
_OF_16_BITS = ("bf16", "bfloat16", "fp16", "float16")
#: what a text that decides a dtype mentions
_DECIDES = re.compile(
    r"dtype|bits|precision|quant|format|fmt|scheme|algo|type|layer|module|group|block|scale|(?:fp|int|nf|float)\d|mx|e\dm\d", re.I
)
#: fields of config.json that state a number format, those that are read or concern no weights, and
#: formats of fewer than 16 bits
_STATES = re.compile(r"dtype|quant|precision|(?:^|_)(?:fp8|fp4|int8|int4)(?:_|$)")
_READ = {"dtype", "torch_dtype", "expert_dtype", "kv_cache_dtype", "quantization_config", "compression_config", "_pre_quantization_dtype"}
_PARTS = re.compile(r"(?<![^_])(?:attn|attention|mlp|moe|ffn|experts?|shared|indexer|vision|head|linear)(?![^_])")
_NARROW = re.compile(r"(?:fp|int|nf|float|mxfp|nvfp|uint)[468](?![0-9])|e\dm\d", re.I)


def quantisation_of(raw: Mapping[str, Any], weights: Collection[str] = ()) -> Quantisation:
    """Return the quantisation in ``config.json``, for each part of the model.

    Args:
        weights: the checkpoint's; they say what GPTQ and AWQ quantised without a list.
    """
    packed = [name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")]
    stated = dict(stated_parts(raw))
    # without a quantisation of the whole, experts may still name their dtype
    whole = _scheme_of(stated[""], raw, packed) if "" in stated else Scheme(experts=_experts({}, raw, WIDE))
    text, others, top = whole, whole, mapping_of(stated.get(""))
    if top.get("quant_method") in ("gptq", "awq") and whole.usual != WIDE and not any(map(top.get, _IGNORED)):
        others = attrs.evolve(whole, usual=Verdict(refused="quantization_config does not say whether they are quantised"))
    for path, own in stated.items():
        if is_text(path) and "" in stated:  # vLLM reads that of the whole alone
            differs = (f"{path} has another quantisation than the whole model, whose counts, as in vLLM",) if own != stated[""] else ()
            text = attrs.evolve(text, notes=(*text.notes, *differs))
        elif is_text(path):
            text = _scheme_of(own, {**raw, **functools.reduce(operator.getitem, path.split("."), raw)}, packed)
        elif path:
            others = Scheme(Verdict(refused=f"{path} has a quantisation apart from the text's, which is not read"))
    if text is not whole and "" not in stated and others is whole:
        others = Scheme()
    return Quantisation(_with_fields(text, raw), others)


def _with_fields(scheme: Scheme, raw: Mapping[str, Any]) -> Scheme:
    """Leave out layers whose dtype an unknown field of the file may decide."""
    rules = []
    for part in (raw, *(raw[name] for name in raw if is_text(name) and isinstance(raw[name], Mapping))):
        for field, value in part.items():
            if field in _READ or not _STATES.search(field.lower()) or not value or isinstance(value, bool):
                continue
            if isinstance(value, Mapping) or _NARROW.search(str(value)):
                refused = f"config.json has {field!r}, which may decide their dtype and is not read"
                rules += rules_of("", [f"*{'*'.join(_PARTS.findall(field))}*"], Verdict(refused=refused), "glob")
    return attrs.evolve(scheme, rules=(*rules, *scheme.rules))


def _scheme_of(stated: Any, raw: Mapping[str, Any], packed: Collection[str] = ()) -> Scheme:
    """Return the scheme of one statement; *raw* holds the fields next to it."""
    if not isinstance(stated, Mapping):
        return Scheme(refuse(f"a quantization_config that is no object (got {str(stated)[:40]!r})"))
    written = "modelopt" if mapping_of(stated.get("producer")).get("name") == "modelopt" else ""
    method = str(stated.get("quant_method", written)).lower().replace("_", "-").replace("fbgemm-fp8", "fbgemm_fp8")
    method = "modelopt" if method.startswith("modelopt") else method
    stated = {**stated, **mapping_of(stated.get("quantization"))} if method == "modelopt" else stated
    reader = _READERS.get(method)
    scheme = Scheme(Verdict(refused=f"no list has the products of quant_method {method!r}")) if reader is None else reader(stated)
    lists = () if method == "gptq" and packed else _IGNORED  # vLLM's GPTQ reads the file, and no such list
    if method in ("gptq", "awq") and not any(map(stated.get, (*lists, IN_BLOCKS))):
        scheme = of_packed(scheme, packed)
    ignored = [rule for key in lists for rule in rules_of(key, entries_of(stated.get(key)), WIDE, _MATCHES.get(method, "words"))]
    scheme = attrs.evolve(scheme, rules=(*ignored, *scheme.rules))
    if reader is None:
        return scheme
    if (experts := _experts(stated, raw, scheme.usual)) is not None:
        scheme = attrs.evolve(scheme, experts=experts)
    unread = [key for key, value in stated.items() if key not in {*_HARMLESS, *_KEYS[method]} and value]
    return _without(scheme, {key: stated[key] for key in unread})


def _without(scheme: Scheme, unread: Mapping[str, Any]) -> Scheme:
    """Leave out the quantised layers where an unread field may decide a dtype; else note the field."""
    notes = *scheme.notes, *(f"quantization_config has {key!r}, which is not read" for key in unread)
    deciding = [key for key, value in unread.items() if _DECIDES.search(f"{key} {json.dumps(value, default=str)}")]
    if not deciding:
        return attrs.evolve(scheme, notes=notes)
    verdict = Verdict(refused=f"quantization_config has {', '.join(map(repr, deciding))}, which may decide their dtype and is not read")
    kept = tuple(rule for rule in scheme.rules if rule.verdict == WIDE)
    return Scheme(verdict, kept, head=scheme.head, notes=notes)


def _experts(stated: Mapping[str, Any], raw: Mapping[str, Any], usual: Verdict) -> Verdict | None:
    """Return what ``expert_dtype`` says of routed experts; None where it says nothing else than of others."""
    word = str(stated.get("expert_dtype") or raw.get("expert_dtype") or "").lower().removeprefix("torch.")
    if not word or (_EXPERTS.get(word) == "" and usual.scheme.startswith("fp8")):
        return None
    if word in _OF_16_BITS:
        return WIDE
    if _EXPERTS.get(word) and usual.scheme.startswith("fp8"):
        return Verdict(_EXPERTS[word])
    return Verdict(refused=f"expert_dtype is {word!r}, and the dtype of their activations is not stated")


def _of_fp8(stated: Mapping[str, Any]) -> Scheme:
    block, fmt, inputs = stated.get("weight_block_size"), str(stated.get("fmt") or "e4m3"), stated.get("activation_scheme")
    sizes = "x".join(map(str, block)) if isinstance(block, list) else block
    if fmt.lower() not in ("e4m3", "float8_e4m3fn", "e4m3fn"):
        return Scheme(refuse(f"fp8 of {fmt}"))
    if inputs not in (None, "dynamic", "static"):
        return Scheme(refuse(f"fp8 weights with activations of scheme {inputs!r}"))
    if block and block not in ([128, 128], [1, 32]):
        return Scheme(refuse(f"fp8 in blocks of {sizes}; the block-scale op has 128x128"))
    return Scheme(Verdict("mxfp8" if block == [1, 32] else "fp8_block" if block else "fp8_tensor"))


def _of_compressed(stated: Mapping[str, Any]) -> Scheme:
    groups = mapping_of(stated.get("config_groups"))
    if not groups:
        return Scheme() if stated.get("kv_cache_scheme") else Scheme(refuse("compressed-tensors without config_groups"))
    sparse = mapping_of(stated.get("sparsity_config")).get("format", "dense")
    if sparse != "dense":
        return Scheme(refuse(f"sparse weights of format {sparse!r}"))
    usual: dict[Verdict, None] = {}
    rules: list[Rule] = []
    for group in groups.values():
        verdict = _of_group(group, stated.get("format"))
        targets = entries_of(mapping_of(group).get("targets")) or ("Linear",)
        names = tuple(target for target in targets if target.startswith("re:") or not target[:1].isupper())
        rules += rules_of("targets", names, verdict, "exact")
        classes = [target for target in targets if target not in names]
        if any(target != "Linear" for target in classes) and verdict != WIDE:
            verdict = Verdict(refused=f"quantization_config names them by their class alone ({', '.join(classes)})")
        usual |= {verdict: None} if classes and verdict != WIDE else {}
    if len(usual) > 1:
        kinds = ", ".join(sorted(each.refused or each.scheme for each in usual))
        return Scheme(Verdict(refused=f"groups of the same layers have different schemes ({kinds})"))
    notes = (
        () if not usual or "lm_head" in json.dumps(stated, default=str) else ("lm_head has 16 bits: vLLM's head is not of class Linear",)
    )
    return Scheme(next(iter(usual), WIDE), tuple(rules), head="named", notes=notes)


def _of_group(group: Any, packing: Any) -> Verdict:
    if not isinstance(group, Mapping):
        return refuse(f"a group of compressed-tensors by name alone (got {str(group)[:40]!r})")
    if unread := unread_in(group, _OF_GROUP):
        return unread
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return refuse("quantised activations with unquantised weights") if inputs else WIDE
    dtype, by = _of_tensors(weights)
    packed = "packed int" if (group.get("format") or packing) == "pack-quantized" else "int"
    return _pair((dtype.replace("int", packed), by), _of_tensors(inputs) if isinstance(inputs, Mapping) else ("", ""))


def _of_tensors(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Return dtype and scales of a group's weights or activations as compressed-tensors spells them."""
    kind, bits = spec.get("type"), spec.get("num_bits")
    dtype = f"{'fp' if kind == 'float' else kind}{bits}"
    dtype = f"asymmetric {dtype}" if spec.get("symmetric") is False else dtype
    if spec.get("actorder") not in (None, False, "static", "weight"):
        return dtype, f"groups in the order {spec['actorder']!r} (static works)"
    if spec.get("strategy") == "block":
        block = spec.get("block_structure")
        sizes = "x".join(map(str, block)) if isinstance(block, list) else str(block)
        return dtype, "block" if sizes == "128x128" else f"block of {sizes}"
    size = spec.get("group_size")
    if spec.get("strategy") == "tensor_group":
        return dtype, "tensor_group" if size == 16 else f"tensor_group of {size}"
    if size and size > 0:
        scales = str(spec.get("scale_dtype") or ("uint8" if dtype == "fp4" else "an unknown dtype"))  # the older tools' of fp4
        is_mx = dtype not in ("fp4", "fp8") or size != 32 or scales.removeprefix("torch.") in ("uint8", "float8_e8m0fnu")
        return dtype, f"group{size}" if is_mx else f"group32 with scales of {scales}"
    return dtype, _BY.get(str(spec.get("strategy")), str(spec.get("strategy")))


def _pair(weights: tuple[str, str], inputs: tuple[str, str]) -> Verdict:
    """Return the verdict on a format of weights and of activations, "" for scales that are not stated."""
    for (*first, dtype, by), scheme in _FORMATS.items():
        if tuple(first) == weights and dtype == inputs[0] and inputs[1] in (by, ""):
            return Verdict(scheme)
    activations = f"{inputs[0]} activations scaled by {inputs[1]}" if inputs[0] else "activations of 16 bits"
    works = "; packed int4 by row or groups of 32, 64 or 128 works" if "packed" in weights[0] else ""
    works = "; vLLM runs it by Humming, or by other kernels on activations of 16 bits" if works and inputs[0].startswith("int") else works
    return refuse(f"{weights[0]} weights scaled by {weights[1]} with {activations}{works}")


def _of_quark(stated: Mapping[str, Any]) -> Scheme:
    usual = _of_quark_config(stated.get("global_quant_config"))
    by_name = mapping_of(stated.get("layer_quant_config")).items()
    rules = [rule for name, config in by_name for rule in rules_of("layer_quant_config", [name], _of_quark_config(config), "glob")]
    for name, config in mapping_of(stated.get("layer_type_quant_config")).items():
        own = _of_quark_config(config)
        is_linear = name.rpartition(".")[2] == "Linear"
        usual = own if is_linear else usual if own == usual else Verdict(refused=f"layer_type_quant_config names the class {name}")
    return Scheme(usual, tuple(rules))


def _of_quark_config(config: Any) -> Verdict:
    if not isinstance(config, Mapping):
        return refuse("Quark without a weight format")
    if unread := unread_in(config, _OF_CONFIG):
        return unread
    weight, inputs = _quark_tensors(config.get("weight")), _quark_tensors(config.get("input_tensors"))
    if weight is None:
        return refuse("quantised activations with unquantised weights") if inputs else WIDE
    return _pair(weight, inputs or ("", ""))


def _quark_tensors(spec: Any) -> tuple[str, str] | None:
    """Return dtype and scales as Quark spells them; of two steps of quantisation no op has the product."""
    if isinstance(spec, list):
        if len(spec) > 1:
            return "twice quantised", "two steps"
        spec = spec[0] if spec else None
    if not isinstance(spec, Mapping):
        return None
    dtype = {"fp8_e4m3": "fp8", "fp8": "fp8"}.get(str(spec.get("dtype")), str(spec.get("dtype")))
    by, size = str(spec.get("qscheme", "")), spec.get("group_size")
    if spec.get("symmetric") is False and dtype.startswith("int"):
        return dtype, "with zero points"
    if by == "per_group" or size:
        e8m0 = dtype not in ("fp4", "fp8") or "e8m0" in str(spec.get("scale_format"))
        return dtype, f"group{size}" if e8m0 else f"group{size} with scales of another dtype"
    return dtype, _BY.get(by, by)


def _of_modelopt(stated: Mapping[str, Any]) -> Scheme:
    names: dict[Verdict, list[str]] = {}
    for name, of in mapping_of(stated.get("quantized_layers")).items():
        names.setdefault(_of_algorithm(mapping_of(of).get("quant_algo"), {**stated, **mapping_of(of)}), []).append(name)
    rules = [rule for verdict, entries in names.items() for rule in rules_of("quantized_layers", entries, verdict, "exact")]
    rules += rules_of("", _TOWERS, WIDE, "substring")
    return Scheme(WIDE if names else _of_algorithm(stated.get("quant_algo"), stated), tuple(rules), head="usual")


def _of_algorithm(algorithm: Any, stated: Mapping[str, Any]) -> Verdict:
    word = str(algorithm or "").upper()
    if not word and stated.get("kv_cache_quant_algo"):
        return WIDE
    if "NVFP4" in word and stated.get("group_size") not in (None, 16):
        return refuse(f"modelopt's {word} by groups of {stated['group_size']}; 16 works")
    return Verdict(_ALGORITHMS[word]) if word in _ALGORITHMS else refuse(f"modelopt's {word or 'unnamed algorithm'}")


_READERS = {
    "fp8": _of_fp8,
    "fbgemm_fp8": lambda _: Scheme(Verdict("fp8_row")),
    "compressed-tensors": _of_compressed,
    "quark": _of_quark,
    "modelopt": _of_modelopt,
    "mxfp4": lambda _: Scheme(WIDE, experts=Verdict("mxfp4/32")),
    "mxfp8": lambda stated: _of_fp8({**stated, "weight_block_size": stated.get("weight_block_size") or [1, 32]}),
    "gptq": of_gptq,
    "awq": of_awq,
}
