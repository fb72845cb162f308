"""Weights alone: GPTQ, AWQ, packed int4, nvfp4 and mxfp8, from config.json as tools write it."""

from __future__ import annotations

import functools

from tunedgemm.device import device_of_text
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.workload.models import Formats, layers_of_model, shapes_of_model, with_shapes
from tunedgemm.workload.models.engines import as_run
from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.packed import WHOLE
from tunedgemm.workload.models.quantisers import quantisation_of
from tunedgemm.workload.models.rules import WIDE, Names

GPTQ = {
    "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False, "quant_method": "gptq", "checkpoint_format": "gptq",
    "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.1}, "true_sequential": True, "tokenizer": None,
}  # fmt: skip
AWQ = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm", "zero_point": True,
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "actorder": None, "dynamic": False}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}


def compressed(weights, packing="pack-quantized", inputs=None, **group):
    """As compressed-tensors writes it."""
    own = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, **group}
    return {"quant_method": "compressed-tensors", "format": packing, "ignore": ["lm_head"], "config_groups": {"group_0": own}}


def modelopt(algorithm, **more):
    """As ModelOpt writes it."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": {"name": "modelopt"}, **more}


EIGHT = "GPTQ's weights of 8 bits by groups of 128"


def known(scheme, reason):
    """Return the scheme if its format has a record, else the reason why there is none."""
    return scheme if scheme.partition("/")[0] in FORMATS else reason


#: what config.json says -> format and group, or a part of the reason why there is none
STATED = [
    (GPTQ, "gptq_int4/128"),
    ({**GPTQ, "group_size": 32, "sym": False}, "gptq_int4_zp/32"),
    ({**GPTQ, "desc_act": True}, "gptq_int4_order/128"),
    ({**GPTQ, "desc_act": True, "sym": False, "group_size": 64}, "gptq_int4_zp_order/64"),
    ({**GPTQ, "desc_act": True, "group_size": -1}, "gptq_int4/0"),
    ({**GPTQ, "checkpoint_format": "gptq_v2"}, "gptq_int4/128"),
    (
        {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False},
        known("gptq_int4_zp_v2/128", "with zero points of gptq_v2 (those of checkpoint_format gptq work)"),
    ),
    (
        {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False, "desc_act": True},
        known("gptq_int4_zp_v2_order/128", "with zero points of gptq_v2 (those of checkpoint_format gptq work)"),
    ),
    ({**GPTQ, "bits": 8}, known("gptq_int8/128", EIGHT)),
    ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "group_size": -1}, known("gptq_int8/0", EIGHT.replace("128", "-1"))),
    ({**GPTQ, "bits": 8, "desc_act": True}, known("gptq_int8_order/128", EIGHT)),
    ({**GPTQ, "bits": 8, "sym": False}, "GPTQ's weights of 8 bits with zero points by groups of 128"),
    ({**GPTQ, "format": "marlin"}, "in another order"),
    ({**GPTQ, "is_marlin_format": True}, "in another order"),
    ({**GPTQ, "pack_dtype": "int16"}, "another dtype"),
    *(({**GPTQ, "bits": bits}, f"GPTQ's weights of {bits} bits by groups of 128; 4 by 32, 64, 128 or -1 works") for bits in (2, 3)),
    ({**GPTQ, "group_size": 256}, "4 bits by groups of 256; 4 by 32"),
    ({**GPTQ, "group_size": [128]}, "by groups of [128]"),
    *(({**GPTQ, field: None}, f"GPTQ without {field}") for field in ("bits", "group_size", "desc_act", "sym")),
    ({**GPTQ, "act_bits": 8}, "'act_bits', which may decide"),
    ({**GPTQ, "dynamic": "-:.*down_proj"}, "GPTQ with a 'dynamic' that is no object (got '-:.*down_proj')"),
    ({**GPTQ, "dynamic": {".*": "8"}}, "GPTQ with changes that are no object (got '8')"),
    ({**GPTQ, "dynamic": {"-:.*": "8"}}, ""),
    *(
        ({**GPTQ, "modules_in_block_to_quantize": blocks}, "'modules_in_block_to_quantize' that is no list of names")
        for blocks in ("mlp.down_proj", [["mlp.down_proj"], 1], {"mlp.down_proj": 1})
    ),
    (AWQ, "awq_int4/128"),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, "awq_int4/64"),
    ({**AWQ, "group_size": -1}, "awq_int4/0"),
    ({**AWQ, "bits": 8}, "AWQ's weights of 8 bits"),
    ({**AWQ, "version": "gemv"}, "AWQ of version gemv with zero_point True; gemm with zero points works"),
    ({**AWQ, "zero_point": False}, "gemm with zero points works"),
    ({**AWQ, "backend": "llm-awq"}, "gemm with zero points works"),
    (compressed(INT4), "ct_int4/128"),
    (compressed({**INT4, "symmetric": False, "group_size": 64, "actorder": "static"}), "ct_int4_zp/64"),
    (compressed({**INT4, "strategy": "channel", "group_size": None}), "ct_int4/0"),
    (compressed({**INT4, "strategy": "channel", "group_size": -1}, "mixed-precision", format="pack-quantized"), "ct_int4/0"),
    (compressed({**INT4, "actorder": "group"}), "groups in the order 'group' (static works)"),
    (compressed({**INT4, "group_size": 48}), "packed int4 weights scaled by group48 with activations of 16 bits; packed int4 by row or"),
    (compressed({**INT4, "num_bits": 8}), known("ct_int8/128", "packed int8 weights scaled by group128")),
    (compressed(INT4, "int-quantized"), "no op has int4 weights scaled by group128"),
    (compressed(INT4, "marlin-24"), "no op has int4 weights scaled by group128"),
    (compressed(NVFP4, "nvfp4-pack-quantized"), "nvfp4/16"),
    (compressed(NVFP4, "nvfp4-pack-quantized", {**NVFP4, "dynamic": "local"}), "nvfp4"),
    (compressed({**NVFP4, "group_size": 32}, "nvfp4-pack-quantized"), "tensor_group of 32"),
    (compressed(MXFP4, "mxfp4-pack-quantized"), "mxfp4/32"),
    (compressed({**MXFP4, "scale_dtype": None}, "mxfp4-pack-quantized"), "mxfp4/32"),
    (compressed({**MXFP4, "scale_dtype": "torch.float8_e4m3fn"}), "fp4 weights scaled by group32 with scales of torch.float8_e4m3fn"),
    (compressed({**MXFP4, "scale_dtype": "torch.float16"}, inputs=MXFP4), "with scales of torch.float16"),
    (compressed(INT4, inputs={**INT4, "num_bits": 8, "strategy": "token"}), "vLLM runs it by Humming, or by other kernels on activations"),
    (compressed(MXFP8, "mxfp8-quantized"), "mxfp8/32"),
    (compressed(MXFP8, "mxfp8-quantized", {**MXFP8, "dynamic": True}), "mxfp8"),
    (modelopt("NVFP4", group_size=16), "nvfp4"),
    (modelopt("w4a16_nvfp4"), "nvfp4/16"),
    (modelopt("W4A16_NVFP4", group_size=32), "modelopt's W4A16_NVFP4 by groups of 32; 16 works"),
    (modelopt("MXFP8", quant_method="modelopt_mxfp8"), "mxfp8"),
    ({"quant_method": "mxfp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": None}, "mxfp8"),
]


def verdict_on(stated, name, kind="linear", **more):
    return quantisation_of({"quantization_config": stated}).of(Layer(name, kind, 256, 256, **more), Names((name,)))


def test_what_a_checkpoint_says(faults_of):
    """A checkpoint gives a format and a group, else the reason and what would work."""

    def check(stated, expected):
        verdict = verdict_on(stated, "model.layers.0.mlp.down_proj")

        assert verdict.scheme == expected if not verdict.refused else expected in verdict.refused

    assert not faults_of(check, STATED)


def test_single_layers(faults_of):
    """Rules of single layers decide in their order; the LM head is quantised where that is stated."""
    listed = {"lm_head": {"quant_algo": "W4A16_NVFP4"}, "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
    rules = {"-:.*self_attn.*": {}, "+:.*\\.1\\..*": {"bits": 8}, ".*down_proj": {"group_size": 32, "sym": False}, "lm_head": {"mse": 1}}
    own = {**compressed(INT4)["config_groups"]["group_0"], "targets": ["re:.*lm_head", "re:.*mlp.*"]}

    def check(stated, name, expected):
        verdict = verdict_on(stated, name, "head" if name == "lm_head" else "linear")

        assert verdict.scheme == expected if not verdict.refused else expected in verdict.refused

    assert not faults_of(
        check,
        [
            ({**GPTQ, "dynamic": rules}, "model.layers.1.self_attn.q_proj", ""),
            ({**GPTQ, "dynamic": rules}, "model.layers.1.mlp.down_proj", known("gptq_int8/128", "8 bits")),
            ({**GPTQ, "dynamic": rules}, "model.layers.0.mlp.down_proj", "gptq_int4_zp/32"),
            ({**GPTQ, "dynamic": rules}, "model.layers.0.mlp.up_proj", "gptq_int4/128"),
            ({**GPTQ, "dynamic": {".*": {"adapter": 1}}}, "model.layers.0.mlp.up_proj", "'adapter'"),
            ({**GPTQ, "dynamic": rules}, "lm_head", ""),
            ({**GPTQ, "dynamic": rules, "lm_head": True}, "lm_head", "gptq_int4/128"),
            ({**GPTQ, "act_bits": 8, "lm_head": True}, "lm_head", "'act_bits'"),
            ({**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"]]}, "model.layers.0.mlp.up_proj", "gptq_int4/128"),
            ({**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"]], "lm_head": True}, "lm_head", ""),
            ({**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"]], "dynamic": rules}, "model.layers.0.mlp.down_proj", "may disagree"),
            ({**AWQ, "lm_head": True}, "lm_head", "awq_int4/128"),
            (AWQ, "lm_head", ""),
            ({**AWQ, "modules_to_not_convert": ["self_attn"]}, "model.layers.1.self_attn.q_proj", ""),
            (modelopt("MIXED_PRECISION", quantized_layers=listed, ignore=[]), "lm_head", "nvfp4/16"),
            (modelopt("MIXED_PRECISION", quantized_layers=listed), "model.layers.0.mlp.up_proj", "fp8_tensor"),
            (modelopt("", quantization={"quant_algo": "W4A16_NVFP4", "exclude_modules": ["*.mlp.*"]}), "model.layers.0.mlp.up_proj", ""),
            ({**compressed(INT4), "config_groups": {"a": own}, "ignore": []}, "lm_head", "ct_int4/128"),
            ({**compressed(INT4), "config_groups": {"a": own}, "ignore": []}, "model.layers.0.self_attn.q_proj", ""),
        ],
    )


def test_an_encoder_of_images_is_not_guessed():
    """GPTQ and AWQ quantise the text; without a list of layers their files do not say what else."""
    tower = functools.partial(verdict_on, name="visual.fc1", tower=True)

    assert "does not say whether" in tower(GPTQ).refused and "does not say whether" in tower(AWQ).refused
    assert tower({**AWQ, "modules_to_not_convert": ["visual"]}) == WIDE
    assert tower({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}) == WIDE
    assert tower(compressed(INT4)).scheme == "ct_int4/128"


def formats_of(model):
    """Last word of a layer's name -> format, group, N and K."""
    named = [(name.rpartition(".")[2], row.shape) for row in model.by_op.get("a16wn", ()) for name in row.layer.split()]
    return {name: (shape["w_format"], shape["w_group"], shape.n, shape.k) for name, shape in named}


def test_fused_layers_have_the_format(folder):
    """QKV, gate and up are one product in their format; a rank's rows keep it."""
    place = folder("llama-3.1-8b", hidden_size=256, intermediate_size=512, head_dim=..., quantization_config={**GPTQ, "lm_head": True})
    model = shapes_of_model(place, 2, (4,))

    assert {name: found[:2] for name, found in formats_of(model).items()} == {
        name: ("gptq_int4", 0 if name == "o_proj" else 128) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
    }  # K of o_proj is one group
    assert formats_of(model)["gate_up_proj"][2:] == (512, 256) and model.notes == (WHOLE,)


def test_a_rank_that_splits_a_group(folder):
    """K inside a group is named and not listed; act-order keeps all scales, so groups are smaller."""
    sizes = {"hidden_size": 512, "intermediate_size": 768, "head_dim": ...}
    found = shapes_of_model(folder("llama-3.1-8b", **sizes, quantization_config=GPTQ), 4, (4,))
    assert "model.layers.*.mlp.down_proj: K 192 is not a multiple of the block 128: engines refuse this or pad" in found.notes
    assert "down_proj" not in formats_of(found) and formats_of(found)["o_proj"][1] == 0

    found = shapes_of_model(folder("llama-3.1-8b", **sizes, quantization_config={**GPTQ, "desc_act": True}), 4, (4,))
    assert formats_of(found)["down_proj"] == ("gptq_int4_order", 32, 512, 192)
    split = "K is split and has act-order: a rank keeps the scales of all groups, as if of groups of 32"
    assert found.notes == (WHOLE, *(f"model.layers.*.{name}: {split}" for name in ("self_attn.o_proj", "mlp.down_proj")))


def test_both_sides_where_an_engine_multiplies_weights_alone(folder, faults_of):
    """Before sm_100 vLLM's nvfp4 and mxfp8 have 16-bit activations; elsewhere they have no op."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": ...}

    def check(stated, engine, device, expected):
        run = functools.partial(as_run, engine, lambda: device_of_text(device))
        found = layers_of_model(folder("llama-3.1-8b", **sizes, quantization_config=stated), as_run=run)
        model = with_shapes(found, (4,), Formats())
        (note,) = model.notes
        assert {pair[0] for pair in formats_of(model).values()} == ({expected} if expected else set())
        start = (
            f"listed with activations of 16 bits, as vllm on {device.partition(':')[0]} runs "
            if expected
            else "left out, as no engine's calls of ours have "
        )
        assert note.startswith(start) and "down_proj" in note
        assert expected or "vLLM runs the weights alone on GPUs before sm_100, listed with --nsets vllm --device sm_90:132" in note

    cases = [
        ("vllm", "sm_90:132", True),
        ("vllm", "sm_90a:132", True),
        ("vllm", "sm_100:148", False),
        ("vllm", "gfx942:304", False),
        ("sglang", "sm_90:132", False),
    ]
    stated = [(modelopt("NVFP4"), "nvfp4"), (modelopt("MXFP8"), "mxfp8")]
    assert not faults_of(check, [(own, *case[:2], form if case[2] else "") for own, form in stated for case in cases])


def test_experts_of_weights_alone_are_named(folder):
    """Experts in a format that fmoe lacks are left out with it; int4 by groups of 32 is listed."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128}
    _, note = shapes_of_model(folder("qwen3-moe", **sizes, quantization_config=GPTQ), 1, (4,)).notes
    assert "no op has experts with weights in gptq_int4 by groups of 128, activations of 16 bits: model.layers.*.mlp.experts" in note

    found = shapes_of_model(folder("qwen3-moe", **sizes, quantization_config=compressed({**INT4, "group_size": 32})), 1, (4,))
    (row,) = found.by_op["fmoe"]
    assert (row.shape["q_dtype_w"], row.shape["q_type"]) == ("int4", "per_1x32")
