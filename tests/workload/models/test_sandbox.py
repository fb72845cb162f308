"""The sandbox: whatever a config.json says, nothing is fetched, written or run, and limits hold."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tunedgemm.workload.models import layers_of_model, sandbox
from tunedgemm.workload.models.architecture import architecture_of
from tunedgemm.workload.models.confine import Limits

#: a whole config.json of a small model
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip

#: fields that some architecture or other requires
SIZES = {name: value for name, value in LLAMA.items() if name != "model_type"}

#: Fields that make transformers import or fetch, each in every spelling that it reads.
TEMPTING = [
    *({"attn_implementation": name}
      for name in ("someone/kernel", "someone/kernel@main", "flash_attention_2", "paged|flash_attention_3", {"": "someone/kernel"})),
    *({name: "someone/kernel"}
      for name in ("_attn_implementation", "_attn_implementation_internal", "experts_implementation", "_experts_implementation_internal")),
    {"use_kernels": True, "kernel_config": {"RMSNorm": "someone/kernel:RMSNorm"}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"auto_map": {"AutoConfig": "someone/code--configuration.Config", "AutoModelForCausalLM": "modeling.Model"}, "trust_remote_code": True},
    {"_name_or_path": "someone/model", "name_or_path": "someone/model", "_commit_hash": "main"},
    {"tokenizer_class": "someone/Tokenizer", "tokenizer_name": "someone/tokenizer", "adapter_path": "someone/adapter"},
    {"configuration_files": ["config.4.0.0.json"], "gguf_file": "model.gguf", "transformers_weights": "someone/weights"},
]  # fmt: skip


@pytest.fixture
def recording_hub(tmp_path, monkeypatch):
    """Record connections to a hub and imports of a package `kernels`."""
    stub = tmp_path / "stub"
    (stub / "kernels").mkdir(parents=True)
    imported = tmp_path / "imported"
    (stub / "kernels" / "__init__.py").write_text(f"open({str(imported)!r}, 'a').write('kernels\\n')\ndef __getattr__(name): return object")
    (stub / "kernels-0.18.2.dist-info").mkdir()
    (stub / "kernels-0.18.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    monkeypatch.syspath_prepend(stub)
    connections: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)

        def accept():
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                connections.append("connected")
                client.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield lambda: [*connections, *(imported.read_text().split() if imported.exists() else [])]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    sandbox.stop()


def test_nothing_is_fetched_or_imported(folder, recording_hub, faults_of):
    """Fields that choose implementations or code change no layer, and reach neither hub nor kernels."""
    sandbox.stop()  # so that the next server sees the stubs
    vision = json.loads((folder("qwen2.5-vl") / "config.json").read_text())["vision_config"]
    plain, nested = (layers_of_model(folder(model)).layers for model in (LLAMA, "qwen2.5-vl"))

    def check(fields):
        found = layers_of_model(folder(LLAMA, **fields))
        inner = layers_of_model(folder("qwen2.5-vl", vision_config=vision | fields))

        assert found.layers == plain or "quantization_config" in fields
        assert inner.layers == nested or "quantization_config" in fields
        assert recording_hub() == []

    assert not faults_of(check, TEMPTING)


def test_another_models_sizes_are_refused(folder, one_line, recording_hub, faults_of):
    """A backbone that is named, not described, is refused, and asks no hub."""

    def check(fields):
        model = folder({"model_type": "detr"}, **fields)
        assert "backbone names another model (got 'resnet50')" in one_line(lambda: layers_of_model(model))
        assert recording_hub() == []

    named = {"backbone": "resnet50"}
    assert not faults_of(check, [named, named | {"use_timm_backbone": False}, {"backbone_config": {"model_type": "timm_backbone"} | named}])


#: models with a size that explodes, and the limit
EXPLODING = [
    (LLAMA, {"num_labels": 10**8}, "96 MiB"),
    (LLAMA, {"num_hidden_layers": 10**6}, "takes more than"),
    (LLAMA, {"quantization_config": {"quant_method": "fp8", "ignore": ["re:(.+)+$x"]}}, "2 s of processor time"),
]
#: the same of other architectures and parts
EXPLODING_ELSEWHERE = [
    (LLAMA, {"num_hidden_layers": 10**11}),
    ("qwen2.5-vl", {"vision_config": {"depth": 10**6}}),
    ({"model_type": "swin"} | SIZES, {"depths": [10**6, 2, 6, 2], "num_attention_heads": [3, 6, 12, 24]}),
    ({"model_type": "resnet"}, {"depths": [3, 10**6, 6, 3]}),
    ({"model_type": "nllb-moe", "num_experts": 10**7} | SIZES, {}),
]


@pytest.mark.parametrize(
    "cases", [EXPLODING, pytest.param(EXPLODING_ELSEWHERE, marks=pytest.mark.nightly)], ids=["each limit", "elsewhere"]
)
def test_sizes_that_explode(folder, one_line, faults_of, cases):
    """Whatever size explodes, of any architecture, a limit ends the process, and the next model is built."""
    limits = Limits(memory=96 << 20, seconds=2)

    def check(model, changes, limit=""):
        says = one_line(lambda: architecture_of(folder(model, **changes), limits))

        assert limit in says, says
        assert "check the sizes in the file" in says, says

    assert not faults_of(check, cases)
    assert architecture_of(folder(LLAMA)).layers


def test_levels_without_end(folder, one_line, faults_of):
    """A file of too many levels is one line, wherever reading it ends."""

    def check(levels):
        place = folder(LLAMA)
        (place / "config.json").write_text(f'{json.dumps(LLAMA)[:-1]}, "x": {"[" * levels}{"]" * levels}}}')
        says = one_line(lambda: layers_of_model(place))

        assert "nested too deeply" in says, says

    assert not faults_of(check, [800, 990, 5000])


def test_a_server_that_ends(folder):
    """A server that is killed or has gone idle is replaced."""
    layers_of_model(folder(LLAMA))
    process = sandbox._server(os.getpid())._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    assert layers_of_model(folder(LLAMA)).layers


def test_a_server_ends_with_its_process(folder, tmp_path):
    """A parent that is killed leaves no process behind."""
    code = f"""
import os, signal
from pathlib import Path
from tunedgemm.workload.models import layers_of_model, sandbox
layers_of_model(Path({str(folder(LLAMA))!r}))
print(sandbox._server(os.getpid())._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    server = Path(f"/proc/{int(done.stdout)}/cmdline")

    for _ in range(200):
        if not server.exists() or not server.read_bytes():
            return
        time.sleep(0.05)
    raise AssertionError("the server still runs")


def test_python_that_cannot_start(folder, one_line, monkeypatch):
    """An interpreter that is missing is one line."""
    sandbox.stop()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")

    assert "/nonexistent/python" in one_line(lambda: layers_of_model(folder(LLAMA)))
