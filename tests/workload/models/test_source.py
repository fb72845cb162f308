"""A model's folder: each fault is one line with a remedy."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from tunedgemm.workload.models import layers_of_model
from tunedgemm.workload.models.source import ModelSource, build, config_of, with_quantisation

#: a whole config.json of a small model
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip


def read(folder: Path) -> ModelSource:
    """Build the model of a folder in this process."""
    return build(folder, config_of(folder))


def test_a_config_that_is_not_a_models(tmp_path, one_line, faults_of):
    """No JSON, no object, no architecture, an unknown one."""

    def check(text, says):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))

        assert says in one_line(lambda: read(tmp_path))

    assert not faults_of(
        check,
        [
            ("{", "config.json: not JSON: "),
            ("", "config.json: not JSON: "),
            ("\xff", "config.json: not JSON: "),
            ("[1]", "config.json: must hold a JSON object (got list)"),
            ("{}", "lacks the field 'model_type', which names the architecture"),
            ('{"model_type": ["llama"]}', "lacks the field 'model_type'"),
            ('{"model_type": "zzz"}', "does not know the architecture 'zzz'; install a newer one, or capture its shapes while it runs"),
        ],
    )


def test_fields_that_make_no_model(folder, one_line, faults_of):
    """Missing fields are named, as are sizes that no model has or that contradict each other."""

    def check(changes, says):
        start = time.perf_counter()

        assert says in one_line(lambda: read(folder(LLAMA, **changes)))

        assert time.perf_counter() - start < 30

    assert not faults_of(
        check,
        [
            ({"hidden_size": ...}, "lacks hidden_size, which decide shapes"),
            ({"intermediate_size": ..., "vocab_size": ...}, "lacks intermediate_size, vocab_size, which decide shapes"),
            ({"hidden_size": "big"}, "transformers rejects it: Validation error for field 'hidden_size'"),
            ({"hidden_size": -64}, "hidden_size must be at least 1 (got -64)"),
            ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1 (got 0)"),
            ({"hidden_size": 65}, "transformers rejects it: "),
            ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (4)"),
            ({"hidden_size": 2**50}, "transformers cannot build this model: "),
            ({"dtype": "float99"}, "dtype must be a dtype of torch (got 'float99')"),
            ({"dtype": "load"}, "dtype must be a dtype of torch (got 'load')"),
            ({"torch_dtype": ["bfloat16"]}, "torch_dtype must be a dtype of torch (got ['bfloat16'])"),
            ({"dtype": "int8"}, "transformers cannot build this model: "),
            ({"architectures": ["GPT2LMHeadModel"]}, "transformers cannot build this model: "),
        ],
    )


@pytest.mark.parametrize("error", [RuntimeError("std::bad_alloc"), SystemError("Linear returned NULL without setting an exception")])
def test_memory_that_runs_out_blames_no_model(folder, monkeypatch, error):
    """Errors of C++ and of CPython without memory are a MemoryError, which names the limit."""

    def construct(*_, **__):
        raise error

    monkeypatch.setattr("transformers.LlamaForCausalLM._from_config", construct)
    with pytest.raises(MemoryError):
        read(folder(LLAMA, architectures=["LlamaForCausalLM"]))


def test_fields_are_known_by_either_name(folder, one_line):
    """Both `num_experts` of files and `num_local_experts` of the class are known; errors use the latter."""
    moe = folder("qwen3-moe")

    assert read(moe).settings.num_experts_per_tok == 4
    assert "lacks n_embd, n_head" in one_line(lambda: read(folder("gpt2", n_embd=..., n_head=...)))


def test_a_missing_class_is_chosen_by_type(folder, faults_of):
    """`architectures` may be missing, unknown, or no class of models."""

    def check(architectures):
        assert type(read(folder(LLAMA, architectures=architectures)).module).__name__ == "LlamaForCausalLM"

    assert not faults_of(check, [["NoSuchClass"], ["pipeline"], None, ...])


def test_no_folder(tmp_path, one_line):
    """Neither a folder, nor one without config.json, nor another file is a model."""
    (tmp_path / "file.txt").write_text("{}")

    assert str(tmp_path / "none") in one_line(lambda: read(tmp_path / "none"))
    assert "config.json" in one_line(lambda: read(tmp_path))
    assert "name the folder that holds its config.json" in one_line(lambda: read(tmp_path / "file.txt"))


def test_a_folder_by_a_link_or_its_file(folder, tmp_path):
    """A folder that is linked to, and config.json itself, are the model."""
    place = folder(LLAMA)
    (tmp_path / "link").symlink_to(place)

    assert read(tmp_path / "link").settings.hidden_size == read(place / "config.json").settings.hidden_size == 64


def test_nothing_is_allocated(folder):
    """A model of 10^15 parameters is read on the meta device."""
    source = read(folder(LLAMA, hidden_size=2**20, intermediate_size=2**28, num_hidden_layers=2))

    assert {parameter.device.type for parameter in source.module.parameters()} == {"meta"}


def test_a_part_may_rely_on_defaults(folder, configs):
    """Fields that a part of a model omits take transformers' defaults, which a note lists."""
    vision = {name: value for name, value in configs["qwen2.5-vl"]["vision_config"].items() if name != "intermediate_size"}

    notes = read(folder("qwen2.5-vl", vision_config=vision)).notes
    assert any(
        note.startswith("config.json leaves fields of vision_config to transformers' defaults: intermediate_size=") for note in notes
    )


def test_without_transformers(folder, one_line, monkeypatch):
    """The error names the package to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)

    says = one_line(lambda: layers_of_model(folder(LLAMA)))

    assert says == "shapes from models need transformers: pip install 'tunedgemm[models]'"


def stated_in(place: Path, files: dict[str, object]) -> tuple[object, str]:
    """Return the quantisation of a folder with these files next to config.json, and the notes on it."""
    for name, content in files.items():
        (place / name).write_text(content if isinstance(content, str) else json.dumps(content))
    raw, notes = with_quantisation(place, config_of(place))
    return raw.get("quantization_config"), " ".join(notes)


def test_a_quantisation_next_to_config_json(folder, faults_of):
    """The first of three files counts where config.json has none or lacks ModelOpt's layers."""
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    gptq, awq = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, {"w_bit": 4, "q_group_size": 128, "zero_point": True}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    files = {"hf_quant_config.json": modelopt, "quantize_config.json": gptq}

    def check(own, files, method, noted):
        stated, note = stated_in(folder(LLAMA, **own), files)
        assert (stated or {}).get("quant_method") == method and note == noted

    said, by_flag = (
        "the quantisation is read from {}".format,
        "the quantisation is read from {0}, as vLLM does with --quantization {1}".format,
    )
    assert not faults_of(
        check,
        [
            ({}, {}, None, ""),
            ({}, files, "modelopt", said("hf_quant_config.json")),
            ({}, {"quantize_config.json": gptq}, "gptq", by_flag("quantize_config.json", "gptq")),
            ({}, {"quantize_config.json": awq}, "awq", by_flag("quantize_config.json", "awq")),
            ({}, {"quant_config.json": awq}, "awq", by_flag("quant_config.json", "awq")),
            ({"quantization_config": {"quant_method": "fp8"}}, files, "fp8", ""),
            ({"compression_config": {"quant_method": "fp8"}}, files, None, ""),
            ({"quantization_config": mixed}, files, "modelopt", said("hf_quant_config.json")),
            ({"quantization_config": {**mixed, "quantized_layers": {"lm_head": {}}}}, files, "modelopt", ""),
        ],
    )


def test_a_quantisation_that_cannot_be_read(folder, one_line, faults_of):
    """Each fault names the file."""

    def check(text, says):
        assert f"hf_quant_config.json: {says}" in one_line(lambda: stated_in(folder(LLAMA), {"hf_quant_config.json": text}))

    assert not faults_of(check, [("{", "not JSON: "), ("[1]", "must hold a JSON object (got list)"), ("\ud800", "not JSON: ")][:2])
