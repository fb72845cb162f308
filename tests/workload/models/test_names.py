"""Checkpoints whose names of modules differ from transformers'; folders are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tunedgemm.workload.models.architecture import describe
from tunedgemm.workload.models.packed import WHOLE
from tunedgemm.workload.models.source import config_of

FP8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}}}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
#: published files of config.json
REAL = Path(__file__).parents[4] / "shared" / "models"
#: text parts and towers of two families as their files, transformers and vLLM name them
QWEN = (("model", "model.language_model", "language_model.model"), ("visual", "model.visual"))
LLAVA = (("language_model.model", "model.language_model"), ("vision_tower.vision_model", "model.vision_tower", "vision_tower"))


@pytest.fixture
def described(folder):
    """Return generic name -> scheme or reason of each layer of a made checkpoint, and its notes."""

    def schemes_of(model, stated, weights=None, **changes):
        place = folder(model, quantization_config=stated, **changes)
        if weights is not None:
            (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, "one")}))
        found = describe(str(place), config_of(place))
        schemes = {}
        for layer in found["layers"]:
            schemes.setdefault(layer["name"], set()).add(layer["refused"] or layer["scheme"])
        return schemes, tuple(note for note in found["notes"] if note != WHOLE)

    return schemes_of


def test_either_name_of_a_language_model(described, faults_of):
    """Rules may have the file's, transformers' or vLLM's name; nothing is noted then."""

    def check(model, of_text, of_tower):
        ignore = [f"{of_text}.layers.0.mlp.down_proj", f"re:^{of_tower}\\.", "re:.*lm_head"]
        schemes, notes = described(model, {**FP8, "ignore": ignore})
        down = "model.language_model.layers.*.mlp.down_proj"
        assert schemes[down] == {"", "fp8_row"} and schemes["model.language_model.layers.*.mlp.up_proj"] == {"fp8_row"}
        assert {scheme for name, of in schemes.items() if of_tower.split(".")[-1] in name for scheme in of} <= {""}
        assert not [note for note in notes if "no module" in note]

    pairs = [
        (model, text, tower) for model, (texts, towers) in (("qwen2.5-vl", QWEN), ("llava", LLAVA)) for text in texts for tower in towers
    ]
    assert not faults_of(check, pairs)


def test_the_index_decides_between_names(described):
    """Where the file has no module of a name that it might have, a rule of that name matches nothing."""
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layers = [f"layers.{layer}.{part}" for layer in (0, 1) for part in (*parts, "input_layernorm", "post_attention_layernorm")]
    weights = [f"model.language_model.{name}.weight" for name in (*layers, "norm", "embed_tokens")]
    stated = {**FP8, "ignore": ["re:^model\\.layers", "lm_head"]}
    down = "model.language_model.layers.*.mlp.down_proj"

    assert described("qwen2.5-vl", stated)[0][down] == {""}
    schemes, notes = described("qwen2.5-vl", stated, weights)
    assert schemes[down] == {"fp8_row"}
    assert "no module matches these entries of 'ignore': re:^model\\.layers" in notes


def test_a_thinker(described, configs):
    """Omni models' files put everything under `thinker`."""
    text = {**configs["qwen2.5-vl"]["text_config"], "model_type": "qwen2_5_omni_text", "rope_scaling": None}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    audio = {
        "num_mel_bins": 16,
        "d_model": 64,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "output_dim": 128,
    }
    omni = {
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"], "model_type": "qwen2_5_omni_thinker", "dtype": "bfloat16",
        "text_config": text, "audio_config": audio,
        "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128},
    }  # fmt: skip
    ignore = ["re:thinker\\.(visual|audio_tower)", "thinker.model.layers.0.self_attn.o_proj", "thinker.lm_head"]
    schemes, notes = described(omni, {**FP8, "ignore": ignore})

    assert schemes["model.language_model.layers.*.self_attn.o_proj"] == {"", "fp8_row"}
    assert schemes["model.visual.blocks.*.attn.proj"] == schemes["model.audio_tower.layers.*.fc1"] == {""}
    assert not [note for note in notes if "no module" in note]


def test_fused_layers(described):
    """vLLM's qkv_proj and gate_up_proj name their layers, in any way to match."""
    fused = ["qkv_proj", "gate_up_proj"]
    for stated in (
        {**FP8, "ignore": ["lm_head", *(f"re:.*{name}$" for name in fused)]},
        {**AWQ, "modules_to_not_convert": fused},
        {**GPTQ, "dynamic": {f"-:.*\\.{name}": {} for name in fused}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", *(f"model.layers.*.{name}" for name in fused)]},
    ):
        schemes, notes = described("llama-3.1-8b", stated)
        assert {name.rpartition(".")[2]: of == {""} for name, of in schemes.items()} == {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), True), "o_proj": False, "down_proj": False,
        }  # fmt: skip
        assert notes == ()


def test_every_expert_is_asked(described, faults_of):
    """Experts by the file's names; a layer whose experts or products differ is left out with both."""

    def check(model, stated, expected):
        schemes, notes = described(model, stated)
        found = next(of for name, of in schemes.items() if name.endswith("experts"))
        assert found == expected and notes == ()

    w1, down = (f"re:.*experts\\.{part}$" for part in (r"\d+\.w1", r"3\.down_proj"))
    skipped = {**AWQ, "modules_to_not_convert": ["gate", "lm_head"]}
    every = "re:.*block_sparse_moe.experts.*"
    differ = "their products have different quantisations ({})".format
    assert not faults_of(
        check,
        [
            ("mixtral", skipped, {"awq_int4/32"}),
            ("qwen3-moe", skipped, {"awq_int4/32"}),
            ("qwen3-moe", {**AWQ, "modules_to_not_convert": ["layers.0.mlp.experts"]}, {"", "awq_int4/32"}),
            ("mixtral", {**FP8, "ignore": ["lm_head", every]}, {""}),
            ("mixtral", {**FP8, "ignore": ["lm_head", w1]}, {differ("0.w1 of 16 bits, 0.w3 fp8_row")}),
            ("qwen3-moe", {**FP8, "ignore": ["lm_head", down]}, {differ("0.gate_proj fp8_row, 3.down_proj of 16 bits")}),
            ("qwen3-moe", {**GPTQ, "dynamic": {r"-:.*\.15\..*": {}}}, {differ("0.gate_proj gptq_int4/32, 15.gate_proj of 16 bits")}),
            ("qwen3-moe", {**GPTQ, "dynamic": {r"-:model.layers.0.mlp.experts.*": {}}}, {"", "gptq_int4/32"}),
        ],
    )


def test_vllm_never_quantises_some_towers(described):
    """ModelOpt's older files do not list towers that vLLM keeps in 16 bits."""
    schemes, _ = described("llava", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []})

    assert {of for name, of in ((name, *of) for name, of in schemes.items()) if "vision_tower" in name} == {""}
    assert schemes["model.multi_modal_projector.linear_1"] == {"fp8_tensor"}


def test_the_head(described, faults_of):
    """Each method has its rule for the head; one that shares the embedding's weight has 16 bits."""

    def check(stated, model, expected, noted):
        schemes, notes = described(model, stated)
        assert schemes["lm_head"] == {expected} and any("lm_head" in note for note in notes) is noted

    algorithm = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert not faults_of(
        check,
        [
            ({**FP8, "ignore": []}, "llama-3.1-8b", "", True),
            ({**FP8, "ignore": ["lm_head"]}, "llama-3.1-8b", "", False),
            ({**GPTQ, "lm_head": True}, "llama-3.1-8b", "gptq_int4/32", False),
            ({**GPTQ, "lm_head": True}, "llama-3.2-1b", "", False),
            ({**GPTQ, "lm_head": True, "dynamic": {"-:lm_head": {}}}, "llama-3.1-8b", "", False),
            ({**algorithm, "ignore": []}, "llama-3.1-8b", "fp8_tensor", False),
            ({**algorithm, "ignore": []}, "llama-3.2-1b", "", False),
            ({**algorithm, "ignore": ["lm_head"]}, "llama-3.1-8b", "", False),
            ({"quant_method": "fp8"}, "llama-3.1-8b", "", False),
        ],
    )


def test_entries_that_match_nothing_are_noted(described, faults_of):
    """Each list names its entries without a module; modules without a product count as matched."""

    def check(model, stated, noted):
        assert described(model, stated)[1] == noted

    of = "no module matches these entries of {!r}: {}".format
    assert not faults_of(
        check,
        [
            ("llama-3.1-8b", {**FP8, "ignore": ["lm_head", "model.embed_tokens", "mlp"]}, (of("ignore", "mlp"),)),
            ("llama-3.1-8b", {**AWQ, "modules_to_not_convert": list("tuvwxyzm")}, (of("modules_to_not_convert", "x, z"),)),
            ("llama-3.1-8b", {**AWQ, "modules_to_not_convert": list("1234")}, (of("modules_to_not_convert", "2, 3, 4"),)),
            ("llama-3.1-8b", {**AWQ, "modules_to_not_convert": list("23456")}, (of("modules_to_not_convert", "2, 3, 4, …"),)),
            ("llama-3.1-8b", {**GPTQ, "dynamic": {"-:moe": {}, "+:.*mlp": {}}}, (of("dynamic", "-:moe"),)),
            ("llama-3.1-8b", {**GPTQ, "dynamic": {"+:(": {"bits": 3}}, "lm_head": True}, ()),
        ],
    )


def test_packed_weights_decide_without_a_list(described):
    """As in vLLM, GPTQ and AWQ quantised what the file holds packed; an index without weights is an error."""
    weights = [f"model.layers.{layer}.self_attn.q_proj.{part}" for layer in (0, 1) for part in ("qweight", "scales")]
    for stated in (GPTQ, AWQ):
        schemes, _ = described("qwen2.5-vl", stated, [*weights, "visual.blocks.0.attn.qkv.weight"])
        assert {name for name, of in schemes.items() if of != {""}} == {"model.language_model.layers.*.self_attn.q_proj"}
    _, notes = described("llama-3.1-8b", GPTQ, ["decoder.0.q.qweight"])
    assert notes == ("no module matches these entries of 'model.safetensors.index.json': decoder.0.q",)


def test_files_of_weights_say_what_is_packed(folder, faults_of):
    """Without an index the heads of safetensors files count; else all layers do, with a note."""

    def check(content, stated, packed):
        place = folder("llama-3.1-8b", quantization_config=stated)
        if content is not None:
            (place / "model.safetensors").write_bytes(content)
        found = describe(str(place), config_of(place))
        quantised = {each["name"].rpartition(".")[2] for each in found["layers"] if each["scheme"]}
        assert quantised == packed and (WHOLE in found["notes"]) is (packed == every)

    every = {*(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))}
    names = [f"model.layers.{layer}.mlp.up_proj.{part}" for layer in (0, 1) for part in ("qweight", "scales")]
    head = json.dumps({key: {} for key in (*names, "model.norm.weight", "__metadata__")}).encode()
    whole = len(head).to_bytes(8, "little") + head + bytes(64)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    cases = [(whole, stated, {"up_proj"}) for stated in (GPTQ, AWQ)]
    cases += [(content, GPTQ, every) for content in (None, pointer, b"", whole[:100], b"\xff" * 8)]
    cases.append((None, {**GPTQ, "dynamic": "-:.*"}, set()))
    assert not faults_of(check, cases)


def test_an_unreadable_index(folder, one_line, faults_of):
    """An index of another content is an error with its path, whatever the quantisation."""

    def check(text, says):
        place = folder("llama-3.1-8b", quantization_config=GPTQ)
        (place / "model.safetensors.index.json").write_text(text)
        assert says in one_line(lambda: describe(str(place), config_of(place)))

    says = "model.safetensors.index.json: "
    cases = [("{", f"{says}not JSON"), ("[]", f"{says}must hold a JSON object"), ("{}", f"{says}lacks the object 'weight_map'")]
    assert not faults_of(check, [*cases, ('{"weight_map": [1]}', f"{says}lacks the object 'weight_map'")])


@pytest.mark.skipif(not REAL.is_dir(), reason="the models' config.json are not here")
def test_one_expert_of_a_published_model(described):
    """One of 256 experts leaves out its layer alone; an entry for a layer beyond is noted."""
    raw = json.loads((REAL / "deepseek-v3" / "config.json").read_text())
    ignore = ["lm_head", "re:.*layers\\.7\\.mlp\\.experts\\.255\\.", "model.layers.61.eh_proj"]
    schemes, notes = described(raw, {**FP8, "ignore": ignore})

    differ = "their products have different quantisations (0.gate_proj fp8_row, 255.gate_proj of 16 bits)"
    assert schemes["model.layers.*.mlp.experts"] == {"fp8_row", differ}
    assert notes == ("no module matches these entries of 'ignore': model.layers.61.eh_proj",)
