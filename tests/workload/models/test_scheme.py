"""Quantised checkpoints: the op of each layer, from published blocks of config.json."""

from __future__ import annotations

import re

import attrs
import torch
from tunedgemm.dtype import torch_dtype
from tunedgemm.workload.models import Formats, shapes_of_model
from tunedgemm.workload.models.layer import Experts, Layer
from tunedgemm.workload.models.listing import left_out, listed
from tunedgemm.workload.models.quantisers import _FORMATS, quantisation_of
from tunedgemm.workload.models.rules import WIDE, Names
from tunedgemm.workload.models.scheme import SCHEMES, WEIGHTS_ALONE, Quantisation

DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float", "observer": None}


def compressed(weights, inputs, **more):
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}, "input_activations": inputs}
    whole = {"config_groups": {"group_0": group}, "format": "any", "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {**whole, "quant_method": "compressed-tensors", "quantization_status": "compressed", **more}


def quark(weight, inputs, **more):
    """As AMD Quark writes it."""
    whole = {"bias": None, "input_tensors": inputs, "output_tensors": None, "target_device": None, "weight": weight}
    export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
    return {"exclude": ["lm_head"], "global_quant_config": whole, "export": export, "quant_method": "quark", **more}


FP4 = {
    "ch_axis": -1,
    "dtype": "fp4",
    "group_size": 32,
    "is_dynamic": False,
    "qscheme": "per_group",
    "scale_format": "e8m0",
    "symmetric": None,
}
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

#: what config.json says -> the scheme, or a part of the reason why there is none
STATED = {
    "DeepSeek-V3": (DEEPSEEK, "fp8_block"),
    "fp8, static": ({"activation_scheme": "static", "quant_method": "fp8"}, "fp8_tensor"),
    "FBGEMM": ({"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"}, "fp8_row"),
    "fp8, channel": (compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, DYNAMIC), "fp8_row"),
    "fp8, tensor": (compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}, {**DYNAMIC, "strategy": "tensor"}), "fp8_tensor"),
    "fp8, block": (
        compressed(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            {**DYNAMIC, "strategy": "group", "group_size": 128},
        ),
        "fp8_block",
    ),
    "int8": (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {**DYNAMIC, "type": "int"}), "int8_row"),
    "int4, weights alone": (
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None, format="pack-quantized"),
        "ct_int4/128",
    ),
    "int8, packed": (
        compressed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, None, format="pack-quantized"),
        "asymmetric packed int8 weights scaled by row with activations of 16 bits; packed int4 by row or groups of 32, 64 or 128 works",
    ),
    "int8, weights alone": (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, None), "int8_channel/0"),
    "int4, fp8 activations": (
        compressed({"num_bits": 4, "type": "int", "strategy": "group"}, DYNAMIC),
        "int4 weights scaled by group with fp8",
    ),
    "int8, tensor": (compressed({"num_bits": 8, "type": "int", "strategy": "tensor"}, {**DYNAMIC, "type": "int"}), "scaled by tensor"),
    "mxfp4, llm-compressor": (
        compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, {**DYNAMIC, "num_bits": 4, "group_size": 32}),
        "mxfp4",
    ),
    "nvfp4, llm-compressor": (
        compressed(
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            {**DYNAMIC, "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        ),
        "nvfp4",
    ),
    "Quark's mxfp4": (quark(FP4, {**FP4, "is_dynamic": True}), "mxfp4"),
    "Quark's fp4 with scales of another dtype": (quark({**FP4, "scale_format": "float32"}, None), "group32 with scales of another dtype"),
    "Quark's fp8": (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}), "fp8_tensor"),
    "Quark's fp8, channel": (quark({"dtype": "fp8_e4m3", "qscheme": "per_channel"}, {"dtype": "fp8_e4m3"}), "fp8_row"),
    "Quark's mxfp4, weights alone": (quark(FP4, None), "mxfp4/32"),
    "mxfp4, weights alone": (compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None), "mxfp4/32"),
    "nvfp4, weights alone": (
        compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, None),
        "nvfp4/16",
    ),
    "Quark, weights alone": (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, None), "fp8_tensor/0"),
    "ModelOpt's FP8": ({"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}, "fp8_tensor"),
    "ModelOpt's NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4"),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, "awq_int4/128"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "GPTQ without sym"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "quant_method 'bitsandbytes'"),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        "mxfp4/32",
    ),
    "other blocks": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8 in blocks of 64x64"),
    "unknown": ({"quant_method": "new"}, "quant_method 'new'"),
    "nothing said": ({}, "quant_method ''"),
    "malformed blocks": ({"quant_method": "fp8", "weight_block_size": 3, "modules_to_not_convert": 5}, "fp8 in blocks of 3"),
    "malformed groups": ({"quant_method": "compressed-tensors", "config_groups": [1]}, "compressed-tensors without config_groups"),
    "malformed Quark": ({"quant_method": "quark", "global_quant_config": "all"}, "Quark without a weight format"),
}


EXPERTS = Layer("model.layers.*.mlp.experts", "experts", 256, 128, experts=Experts(4, 2))


def of_experts(quantisation: Quantisation):
    own = "model.layers.0.mlp.experts"
    parts = tuple((f"{own}.{expert}.{part}",) for expert in range(4) for part in ("gate_proj", "up_proj", "down_proj"))
    return quantisation.of(EXPERTS, Names((own,), parts))


def of_linear(quantisation: Quantisation, name: str = "model.layers.0.self_attn.q_proj"):
    return quantisation.of(Layer(name, "linear", 256, 128), Names((name,)))


def test_a_group_with_an_unread_field_is_left_out(faults_of):
    """Quantised outputs, biases and unknown fields of a group leave its layers out by the field's name."""
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group, config = compressed(fp8, DYNAMIC)["config_groups"]["group_0"], quark(FP4, FP4)["global_quant_config"]

    def check(field):
        for stated in (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {**group, field: {"num_bits": 8}}}},
            quark(FP4, FP4, global_quant_config={**config, field: {"dtype": "fp8_e4m3"}}),
            quark(FP4, FP4, layer_quant_config={"*": {**config, field: {"dtype": "fp8_e4m3"}}}),
        ):
            assert repr(field) in of_linear(quantisation_of({"quantization_config": stated})).refused

    assert not faults_of(check, ("output_activations", "output_tensors", "bias", "second_weights"))


def test_what_a_checkpoint_says(faults_of):
    """A checkpoint gives a scheme where an op multiplies so, else the reason, and never a guess."""

    def check(name):
        stated, expected = STATED[name]
        verdict = of_experts(quantisation_of({"quantization_config": stated} if stated else {"quantization_config": {"bits": 3}}))

        assert verdict.scheme == expected if not verdict.refused else expected in verdict.refused
        assert bool(verdict.scheme) != bool(verdict.refused)

    assert not faults_of(check, STATED)


def test_layers_left_alone(faults_of):
    """Whole names, with a number or without, parts of them, patterns of a shell or after "re:"."""

    def check(pattern, left):
        quantisation = quantisation_of({"quantization_config": {**DEEPSEEK, "modules_to_not_convert": [pattern]}})

        layer = Layer("model.layers.*.mlp.down_proj", "linear", 8, 8)
        assert (quantisation.of(layer, Names(("model.layers.0.mlp.down_proj",))) == WIDE) is left

    assert not faults_of(
        check,
        [
            ("lm_head", False),
            ("model.layers.0.mlp.down_proj", True),
            ("model.layers.*.mlp.down_proj", True),
            ("down_proj", True),
            ("mlp", True),
            ("model.layers.0.mlp", True),
            ("proj", False),
            ("up_proj", False),
            ("re:.*down_proj$", True),
            ("re:.*mlp\\..*", True),
            ("re:.*self_attn.*", False),
            ("re:(", False),
            ("*down_proj", True),
            ("model.layers.[0-9].mlp.*", True),
            ("model.layers.1.mlp.down_proj", False),
            ("model.layers.10", False),
            ("re:model.layers.[1-9].*", False),
        ],
    )


def test_routers_and_the_head_stay_wide():
    """Routers and head stay in 16 bits whatever the list has; some methods quantise only routed experts."""
    block, mxfp4 = (quantisation_of({"quantization_config": stated}) for stated in (DEEPSEEK, {"quant_method": "mxfp4"}))

    assert all(block.of(Layer("mlp.gate", kind, 8, 8), Names(("mlp.gate",))) == WIDE for kind in ("router", "head"))
    assert (of_experts(block).scheme, of_experts(mxfp4).scheme) == ("fp8_block", "mxfp4/32")
    assert of_linear(mxfp4) == WIDE


def by_layer(model, **asked):
    """The op and the row of each layer's shape at M = 4."""
    rows = [(op, row) for op, rows in model.by_op.items() for row in rows]
    return {name.rpartition(".")[2]: (op, row.shape) for op, row in rows for name in row.layer.split()}


def test_deepseek_v3(folder):
    """Quantised layers have blocks of 128, experts per_1x128; router, head and kv_b's halves bf16."""
    model = shapes_of_model(folder("deepseek-v3", quantization_config=DEEPSEEK), 1, (4,))
    ops = {name: op for name, (op, _) in by_layer(model).items()}

    assert {name for name, op in ops.items() if op == "a8w8_blockscale"} == {
        "fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_up_proj", "down_proj",
    }  # fmt: skip
    assert (ops["gate"], ops["lm_head"], ops["w_uk"], ops["w_uv"], ops["experts"]) == (
        "a16w16",
        "a16w16",
        "batched_bf16",
        "batched_bf16",
        "fmoe",
    )
    fmoe = model.by_op["fmoe"][0].shape
    assert (dict(fmoe.extra)["q_dtype_w"], dict(fmoe.extra)["q_type"]) == ("fp8_e4m3fn", "per_1x128")
    assert {row.shape.dtype for row in model.by_op["a16w16"]} == {"bf16"}
    assert model.notes == ()


def test_the_op_of_a_scheme(folder, faults_of):
    """Each scheme maps to its op in the requested number format; the head is unchanged."""

    def check(name, formats, op, dtype):
        found = by_layer(shapes_of_model(folder("llama-3.1-8b", quantization_config=STATED[name][0]), 1, (4,), formats=formats))

        assert found["qkv_proj"][0] == op
        assert dtype == found["qkv_proj"][1].dtype
        assert (found["lm_head"][0], found["lm_head"][1].dtype) == ("a16w16", "bf16")

    assert not faults_of(
        check,
        [
            ("fp8, channel", Formats(), "a8w8", "fp8_e4m3fn"),
            ("fp8, channel", Formats(fp8="fp8_e4m3fnuz", preshuffle=True), "a8w8_bpreshuffle", "fp8_e4m3fnuz"),
            ("int8", Formats(), "a8w8", "int8"),
            ("fp8, tensor", Formats(), "a16w16", "fp8_e4m3fn"),
            ("fp8, block", Formats(preshuffle=True), "a8w8_blockscale_bpreshuffle", "fp8_e4m3fn"),
            ("Quark's mxfp4", Formats(), "a4w4_blockscale", "fp4x2"),
            ("Quark's mxfp4, weights alone", Formats(), "a16w4_blockscale", "bf16"),
            ("mxfp4, weights alone", Formats(preshuffle=True), "a16w4_blockscale", "bf16"),
            ("Quark, weights alone", Formats(preshuffle=True), "a16wn", "bf16"),
        ],
    )


def test_layers_without_an_op_are_named(folder, faults_of):
    """The quantised layers are missing from the list and stand in a note; the others are there."""

    def check(name, model):
        shapes = shapes_of_model(folder(model, quantization_config=STATED[name][0]), 1, (4,))
        kept = set(by_layer(shapes))

        (note,) = [note for note in shapes.notes if note.startswith("left out, as no ")]
        assert "model.layers.*.mlp.down_proj" in note and kept == {"lm_head"}

    assert not faults_of(check, [("int8, packed", "llama-3.1-8b"), ("GPTQ", "qwen2")])


def test_a_list_of_some_layers_leaves_them_wide(folder):
    """Layers of the list stay in bf16, as attention in many mxfp4 checkpoints; others do not."""
    stated = {**STATED["Quark's mxfp4"][0], "exclude": ["model.layers.0.self_attn.q_proj", "re:model.layers.*self_attn.*", "lm_head"]}
    found = by_layer(shapes_of_model(folder("llama-3.1-8b", quantization_config=stated), 1, (4,)))

    assert {name: op for name, (op, _) in found.items()} == {
        "qkv_proj": "a16w16", "o_proj": "a16w16", "gate_up_proj": "a4w4_blockscale", "down_proj": "a4w4_blockscale", "lm_head": "a16w16",
    }  # fmt: skip


def test_a_list_of_some_layers_alone_splits_their_count(folder):
    """A list that names one layer of two: its products stand at both ops, each once."""
    stated = {**STATED["fp8, channel"][0], "ignore": ["lm_head", "re:model.layers.0.*"]}
    model = shapes_of_model(folder("llama-3.1-8b", quantization_config=stated), 1, (4,))

    counts = {op: {row.layer.rpartition(".")[2]: row.count for row in rows} for op, rows in model.by_op.items()}
    assert counts["a8w8"] == {"qkv_proj": 1, "o_proj": 1, "gate_up_proj": 1, "down_proj": 1}
    assert counts["a16w16"] == {**counts["a8w8"], "lm_head": 1}


def test_the_text_alone_is_quantised(folder, configs):
    """A scheme of the text part alone leaves the image encoder unquantised."""
    text = {**configs["qwen2.5-vl"]["text_config"], "quantization_config": STATED["fp8, channel"][0]}
    model = shapes_of_model(folder("qwen2.5-vl", text_config=text), 1, (4,))

    assert {name for row in model.by_op["a8w8"] for name in row.layer.split()} == {
        f"model.language_model.layers.*.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert any("model.visual" in row.layer for row in model.by_op["a16w16"])


def test_two_quantisations_of_the_text():
    """As in vLLM that of the whole model counts; a note says where the text states another."""
    inside = {**DEEPSEEK, "modules_to_not_convert": ["lm_head"]}
    for own, notes in ((DEEPSEEK, ()), (inside, ("text_config has another quantisation than the whole model, whose counts, as in vLLM",))):
        found = quantisation_of({"quantization_config": DEEPSEEK, "text_config": {"quantization_config": own}})
        assert of_linear(found).scheme == "fp8_block" and found.notes == notes
    int4 = STATED["AWQ"][0]
    both = {"quantization_config": DEEPSEEK, "text_config": {"quantization_config": int4}}
    assert of_linear(quantisation_of(both)).scheme == "fp8_block"


def test_a_dtype_of_experts_is_theirs_alone(folder, faults_of):
    """Read at the top and in quantization_config; an unknown word leaves the experts out."""

    def check(word, inside, scheme):
        stated = {**DEEPSEEK, **({"expert_dtype": word} if inside else {})}
        found = quantisation_of({"quantization_config": stated, **({} if inside else {"expert_dtype": word})})
        verdict = of_experts(found)
        assert of_linear(found).scheme == "fp8_block"
        assert verdict.scheme == scheme if scheme is not None else "expert_dtype" in verdict.refused

    words = [("fp4", "mxfp4_fp8"), ("mxfp4", "mxfp4_fp8"), ("fp8", "fp8_block"), ("bf16", ""), ("int4", None), ("nvfp4", None)]
    assert not faults_of(check, [(word, inside, scheme) for word, scheme in words for inside in (True, False)])
    model = shapes_of_model(folder("deepseek-v3", quantization_config=DEEPSEEK, expert_dtype="fp4"), 1, (4,))
    extra = dict(model.by_op["fmoe"][0].shape.extra)
    assert (extra["q_dtype_a"], extra["q_dtype_w"], extra["q_type"]) == ("fp8_e4m3fn", "fp4x2", "per_1x32")


def test_a_field_that_is_not_read_costs_its_layers(faults_of):
    """A field that may decide a dtype leaves out the quantised layers; another is a note."""

    def check(method, field, value, decides):
        stated = {**STATED[method][0], field: value}
        found = quantisation_of({"quantization_config": stated})
        said = " ".join([*found.notes, of_linear(found).refused])
        assert repr(field) in said
        assert bool(of_linear(found).refused) is decides

    fields = [
        ("attn_dtype", "int4", True), ("moe_bits", 4, True), ("overrides", {"model.layers.0": "fp4"}, False),
        ("override", {"experts": {"num_bits": 4}}, True), ("rotation", "hadamard", False), ("mx_group", 32, True),
    ]  # fmt: skip
    methods = ("DeepSeek-V3", "fp8, channel", "Quark's mxfp4", "ModelOpt's FP8")
    assert not faults_of(check, [(method, *case) for method in methods for case in fields if case[0] != "overrides"])


def test_parts_with_their_own_quantisation(faults_of):
    """Each layer has the scheme of its name, class and part, or is left out."""
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": fp8, "input_activations": DYNAMIC}
    other = {"targets": ["re:.*self_attn.*"], "weights": int4, "input_activations": None}
    mixed = {"quant_method": "compressed-tensors", "config_groups": {"a": group, "b": other}}
    named = {"quant_method": "compressed-tensors", "config_groups": {"a": {**group, "targets": ["Qwen3MoeMLP"]}}}
    layers = {"*self_attn*": quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "fp8_e4m3"})["global_quant_config"]}
    listed = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}

    def check(stated, attention, experts):
        found = quantisation_of(stated if "text_config" in stated else {"quantization_config": stated})
        for verdict, expected in ((of_linear(found), attention), (of_experts(found), experts)):
            assert verdict.scheme == expected if not verdict.refused else expected is None

    assert not faults_of(
        check,
        [
            (mixed, None, "fp8_row"),
            (named, None, None),
            ({**mixed, "config_groups": {"a": group, "b": {**other, "targets": ["Linear"]}}}, None, None),
            (quark(FP4, FP4, layer_quant_config=layers), "fp8_tensor", "mxfp4"),
            ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}, "fp8_tensor", ""),
            ({"quant_method": "modelopt", "quant_algo": "", "kv_cache_quant_algo": "FP8"}, "", ""),
            ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, "", ""),
            ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*self_attn.*": {}}}, "", None),
            ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}, None, ""),
            ({"text_config": {"quantization_config": DEEPSEEK}, "vision_config": {"quantization_config": {"quant_method": "awq"}}},
             "fp8_block", "fp8_block"),
            ({**DEEPSEEK, "modules_to_not_convert": ["re:.*up_proj"]}, "fp8_block", None),
        ],
    )  # fmt: skip
    tower = Layer("visual.fc1", "linear", 8, 8, tower=True)
    two = {"text_config": {"quantization_config": DEEPSEEK}, "vision_config": {"quantization_config": DEEPSEEK}}
    assert "vision_config" in quantisation_of(two).of(tower, Names((tower.name,))).refused
    assert quantisation_of({"text_config": {"quantization_config": DEEPSEEK}}).of(tower, Names((tower.name,))) == WIDE


def test_fields_of_config_json_that_state_a_format(faults_of):
    """One that is not read leaves out the layers of its part, else all; wide and known ones cost nothing."""

    def check(field, value, attention, experts):
        found = quantisation_of({field: value})
        assert (bool(of_linear(found).refused), bool(of_experts(found).refused)) == (attention, experts)

    assert not faults_of(
        check,
        [
            ("quantization", {"bits": 4, "group_size": 64}, True, True),
            ("attn_dtype", "fp8", True, False),
            ("weight_precision", "int8", True, True),
            ("experts_quant", "mxfp4", False, True),
            ("mamba_ssm_dtype", "float32", False, False),
            ("kv_cache_dtype", "fp8", False, False),
            ("torch_dtype", "bfloat16", False, False),
            ("quantization_config", "fp8", True, True),
        ],
    )


def test_reasons_and_schemes_agree_with_the_ops(faults_of):
    """A scheme is listed as a shape that its op's operands make, or no op's examples have it."""
    from tunedgemm.ops import ops

    linear = {(op.weight_dtype(shape), shape.dtype, shape.scale) for op in ops().values() if op.name != "fmoe" for shape in op.examples}

    def check(scheme):
        for layer in (Layer("a.o", "linear", 256, 256, scheme=scheme), attrs.evolve(EXPERTS, k=256, scheme=scheme)):
            if why := left_out(layer):
                weights = {"int4": "int4", "int8": "int8", "mxfp4": "fp4x2"}.get(re.split("[_/]", scheme)[0], "fp8_e4m3fn")
                inputs = "bf16" if "/" in scheme else "fp8_e4m3fn"
                assert SCHEMES[scheme] in why
                assert layer.experts or scheme in WEIGHTS_ALONE or not any(pair[:2] == (weights, inputs) for pair in linear)
                continue
            by_op, notes = listed([layer], (4,), Formats())
            assert not notes
            ((name, (row,)),) = by_op.items()
            op = ops()[name]
            operands = op.make_inputs(row.shape, torch.device("cpu"), 0)
            assert op.shape_of(*operands, otype=torch_dtype(row.shape.outdtype), **op.fields(row.shape)) == row.shape

    assert {*_FORMATS.values(), *(scheme for scheme in SCHEMES if scheme.startswith(("gptq", "awq", "ct_int8")))} == {*SCHEMES}
    assert not faults_of(check, SCHEMES)
