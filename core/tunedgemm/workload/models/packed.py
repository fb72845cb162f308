"""Packed integers: the schemes that files of GPTQ and AWQ state. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs

from tunedgemm.workload.models.rules import INDEX, WIDE, Rule, Verdict, entries_of, mapping_of, refuse, rules_of, unread_in
from tunedgemm.workload.models.scheme import SCHEMES, Scheme

#: fields that are read, or that decide nothing
GPTQ_FIELDS = {
    "bits", "group_size", "desc_act", "sym", "format", "checkpoint_format", "is_marlin_format", "pack_dtype", "dynamic", "lm_head",
    "modules_in_block_to_quantize", "act_group_aware", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "mse",
    "meta", "quantizer", "dataset", "tokenizer", "backend", "batch_size", "pad_token_id", "model_seqlen", "max_input_length",
    "model_name_or_path", "model_file_base_name", "block_name_to_quantize", "module_name_preceding_first_block",
    "cache_block_outputs", "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16",
}  # fmt: skip
AWQ_FIELDS = {
    "bits", "w_bit", "group_size", "q_group_size", "zero_point", "backend", "lm_head", "do_fuse", "modules_to_fuse",
    "fuse_max_seq_len", "exllama_config",
}  # fmt: skip
#: GPTQ's list of quantised layers
IN_BLOCKS = "modules_in_block_to_quantize"
#: note on a checkpoint whose packed layers are not known
WHOLE = f"all layers count as quantised, as quantization_config lists none; with {INDEX} or the weights next to it packed ones would count"


def of_packed(scheme: Scheme, packed: Collection[str]) -> Scheme:
    """Return the scheme of a checkpoint without a list of layers: what its files hold packed counts."""
    if not packed:
        return scheme if scheme.usual.refused else attrs.evolve(scheme, notes=(*scheme.notes, WHOLE))
    return attrs.evolve(scheme, usual=WIDE, rules=(*scheme.rules, *rules_of(INDEX, packed, scheme.usual, "exact")))


def of_gptq(stated: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a file of GPTQ."""
    usual, rules, blocks = _of_gptq_layer(stated), list[Rule](), stated.get(IN_BLOCKS) or []
    head, dynamic = "usual" if stated.get("lm_head") is True else "", stated.get("dynamic") or {}
    only = [name for entry in blocks for name in entries_of(entry)] if isinstance(blocks, list) else []
    if not isinstance(blocks, list) or not all(map(entries_of, blocks)):
        return Scheme(refuse(f"GPTQ with a '{IN_BLOCKS}' that is no list of names (got {str(blocks)[:40]!r})"), head=head)
    if not isinstance(dynamic, Mapping):
        return Scheme(refuse(f"GPTQ with a 'dynamic' that is no object (got {str(dynamic)[:40]!r})"), head=head)
    for pattern, changes in dynamic.items():  # a regex each, "-:" for layers of 16 bits
        changed = unread_in(mapping_of(changes), GPTQ_FIELDS) or _of_gptq_layer({**stated, **mapping_of(changes)})
        changed = changed if isinstance(changes, Mapping) else refuse(f"GPTQ with changes that are no object (got {str(changes)[:40]!r})")
        changed = Verdict(refused=f"'dynamic' and '{IN_BLOCKS}' may disagree") if only else changed
        rules += rules_of("dynamic", [pattern], WIDE if pattern.startswith("-:") else changed, "regex")
    rules += rules_of(IN_BLOCKS, only, usual, "substring")
    return Scheme(WIDE if only else usual, tuple(rules), head=head)


def _of_gptq_layer(stated: Mapping[str, Any]) -> Verdict:
    missing = [field for field in ("bits", "group_size") if not stated.get(field)]
    if missing := missing + [field for field in ("desc_act", "sym") if not isinstance(stated.get(field), bool)]:
        return refuse(f"GPTQ without {', '.join(missing)}")
    forms = {str(stated.get(field) or "gptq").lower() for field in ("format", "checkpoint_format")}
    if not forms <= {"gptq", "gptq_v2"} or stated.get("is_marlin_format") or stated.get("pack_dtype") not in (None, "int32"):
        return refuse("GPTQ's weights in another order or another dtype; checkpoint_format gptq of int32 works")
    zeros = "" if stated["sym"] else "_zp_v2" if "gptq_v2" in forms else "_zp"
    zeros += "_order" if stated["desc_act"] and stated["group_size"] != -1 else ""  # one group has no order
    return _packed(f"gptq_int{stated['bits']}{zeros}", stated["bits"], stated["group_size"])


def of_awq(stated: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a file of AWQ."""
    bits, group = (stated.get(field, stated.get(other)) for field, other in (("bits", "w_bit"), ("group_size", "q_group_size")))
    version = str(stated.get("version") or "gemm").lower()
    if version != "gemm" or stated.get("backend") == "llm-awq" or stated.get("zero_point") is not True:
        return Scheme(refuse(f"AWQ of version {version} with zero_point {stated.get('zero_point')}; gemm with zero points works"))
    return Scheme(_packed(f"awq_int{bits}", bits, group), head="usual" if stated.get("lm_head") is True else "")


def _packed(w_format: str, bits: Any, group: Any) -> Verdict:
    scheme = f"{w_format}/{0 if group == -1 else group}"
    if scheme in SCHEMES:
        return Verdict(scheme)
    zeros = " with zero points" * ("_zp" in w_format) + " of gptq_v2 (those of checkpoint_format gptq work)" * ("_v2" in w_format)
    whose = f"{w_format.partition('_')[0].upper()}'s weights of {bits} bits{zeros}"
    return refuse(f"{whose} by groups of {group}; 4 by 32, 64, 128 or -1 works")
