"""The shipped models and lists of shapes."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.ops import ops
from tunedgemm.table.folders import MODEL_FOLDERS, MODELS, SHIPPED, named_file, table_layers
from tunedgemm.table.untuned import read_untuned
from tunedgemm.workload import models
from tunedgemm.workload.lists import op_of_file
from tunedgemm.workload.models import layers_of_model

LISTS = SHIPPED / MODELS
NAMES = sorted(path.name for path in LISTS.glob("*untuned*.csv"))
#: the commands that write them
COMMANDS = {words[-1]: words for line in re.findall(r"^tunedgemm .*$", (LISTS / "README.md").read_text(), re.MULTILINE)
            for words in [shlex.split(line)]}  # fmt: skip
#: another copy of the sizes of these models, where the tests have one
ELSEWHERE = Path(__file__).parents[3].parent / "shared" / "models"


@pytest.fixture(scope="module", autouse=True)
def models_are_built_once() -> Iterator[None]:
    """Cache the architecture of a model, which takes seconds to build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "architecture_of", functools.cache(models.architecture_of))
        yield


def test_each_list_has_its_command():
    """Every shipped list has a command that regenerates it, and every command a list and a shipped model."""
    assert sorted(COMMANDS) == NAMES
    named = {words[words.index("--model_dir") + 1] for words in COMMANDS.values()}
    assert named < {folder.name for folder in (SHIPPED / MODEL_FOLDERS).iterdir()}


@pytest.mark.nightly
def test_a_list_is_what_its_command_writes(tmp_path, faults_of):
    """Byte by byte."""

    def check(name):
        again = tmp_path / name

        assert main([*COMMANDS[name][1:-1], str(again)]) == 0

        assert again.read_bytes() == (LISTS / name).read_bytes()

    assert not faults_of(check, NAMES)


def test_a_list_is_found_and_read(tmp_path, monkeypatch, faults_of):
    """A bare name finds the list of the right op, with a count and a layer per shape, at all M."""

    def check(name):
        monkeypatch.chdir(tmp_path)
        path = named_file(name)
        op = op_of_file(path)
        rows = read_untuned(path, op)

        words = COMMANDS[name]
        assert path == LISTS / name
        assert op.name == (words[words.index("--op") + 1] if "--op" in words else "a16w16")
        assert len(rows) == len(path.read_text().splitlines()) - 1
        assert all(row.count and row.layer for row in rows)
        assert sorted({row.shape.m for row in rows}) == [2**exponent for exponent in range(15)]

    assert not faults_of(check, NAMES)


def test_no_list_is_read_as_a_table():
    """The tables that dispatch reads are tuned ones."""
    read = {path.name for op in ops().values() for layer in table_layers(op) for path in layer.paths}

    assert {"h100_bf16_tuned_gemm.csv", "h200_bf16_tuned_gemm.csv", "h200_a8w8_tuned_gemm.csv"} <= read
    assert not read & set(NAMES)


def test_a_shipped_list_matches_its_model(faults_of):
    """The sizes written out here give the layers that the model's own file gives."""

    def check(name, other):
        if not (ELSEWHERE / other / "config.json").exists():
            pytest.skip("the model's own config.json is not here")

        for tp, fuse in ((1, False), (8, True)):
            assert layers_of_model(name, tp, fuse=fuse).layers == layers_of_model(ELSEWHERE / other, tp, fuse=fuse).layers

    assert not faults_of(
        check, [("dsv3", "deepseek-v3"), ("llama8B", "llama-3.1-8b"), ("llama70B", "llama-3.3-70b"), ("qwen32B", "qwen3-32b")]
    )


@pytest.mark.parametrize(
    ("name", "billions", "embedding", "layers"),
    [("llama405B", 405.85, (128256, 16384), 126), ("qwen8B", 8.19, (151936, 4096), 36), ("qwen30B-A3B", 30.53, (151936, 2048), 48)],
)
def test_sizes_without_another_copy(name, billions, embedding, layers):
    """The number of weights is that of the models' reports."""
    found = layers_of_model(name).layers

    assert {layer.count for layer in found} == {layers, 1}
    assert round((sum(map(_weights, found)) + embedding[0] * embedding[1]) / 1e9, 2) == billions


def _weights(layer):
    """Count the weights of a product, or of all experts: gate, up and down."""
    return layer.n * layer.k * layer.count * (3 * layer.experts.count if layer.experts else 1)


def test_gpt_oss():
    """Its products are those of attention, router and head, and its experts, which are in mxfp4."""
    model = layers_of_model("gptoss120B")

    assert [(layer.n, layer.k, layer.bias, layer.count, layer.scheme) for layer in model.layers] == [
        (5120, 2880, True, 36, ""), (2880, 4096, True, 36, ""), (128, 2880, True, 36, ""), (2880, 2880, True, 36, "mxfp4/32"),
        (201088, 2880, False, 1, ""),
    ]  # fmt: skip


def test_the_package_stays_small():
    """Tables, lists and models of the package take less than 3 MB."""
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 3_000_000
