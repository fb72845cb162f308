"""Layers of one rank: the split of transformers, and products that neither it nor engines can split."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.workload.models import layers_of_model
from tunedgemm.workload.models.layer import Experts, Layer
from tunedgemm.workload.models.parallel import sharded

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "model_shapes.py"


@pytest.fixture
def splits_as_listed(folder):
    """Return a check that rank 0 of a model split by transformers multiplies what is listed unfused."""
    pytest.importorskip("accelerate", reason="transformers loads no part of a model without it")

    def check(tp, model):
        done = subprocess.run(
            [sys.executable, SCRIPT, "--one", folder(model), "--tp", str(tp)], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout.splitlines()[-1])

        assert row["wrong"] == []
        assert row["kinds"] == (15 if model == "deepseek-v3" else 8)  # the plan of DeepSeek-V3 leaves attention whole

    return check


def test_transformers_splits_tensors_this_way(splits_as_listed):
    """Transformers splits a model over ranks product for product as listed."""
    splits_as_listed(4, "llama-3.1-8b")


@pytest.mark.nightly
def test_transformers_splits_other_models_this_way(splits_as_listed, faults_of):
    """Transformers splits further architectures and numbers of ranks as listed."""
    models = ["deepseek-v3", "llama-3.1-8b", "llama-3.3-70b", "qwen3-32b"]
    assert not faults_of(splits_as_listed, itertools.product([4, 8], models))


def test_transformers_does_not_share_heads(folder, one_line):
    """With more ranks than KV heads, engines copy heads; transformers' plan cannot."""
    place = folder("llama-3.2-1b")
    k = next(layer for layer in layers_of_model(place, 16).layers if layer.name.endswith("qkv_proj"))

    assert k.n == (2 + 1 + 1) * 4
    assert "does not share them among ranks; use one of 1, 2, 4, 8" in one_line(lambda: layers_of_model(place, 16, fuse=False))


def linear(name, n, k, **more):
    return Layer(name, "linear", n, k, **more)


def of_rank(*layers, tp=4, plan=None, engine=True):
    return sharded(layers, tp, plan or {}, engine=engine)


def test_engines_split_by_role(faults_of):
    """Opening layers are split by rows and heads, closing ones by columns, experts by width.

    The vocabulary is padded.
    """

    def check(layer, size):
        (found,), notes = of_rank(layer)

        assert (found.n, found.k) == size
        assert found.bias == layer.bias  # the first rank adds it
        assert notes == ()

    assert not faults_of(
        check,
        [
            (linear("a.q_proj", 64, 32, role="q", unit=8), (16, 32)),
            (linear("a.k_proj", 16, 32, role="k", unit=8, kv_units=2, kv_heads=2), (8, 32)),
            (linear("a.qkv", 96, 32, role="qkv", unit=8, kv_units=4, kv_heads=2), (32, 32)),
            (linear("a.o_proj", 32, 64, role="o", unit=8, bias=True), (32, 16)),
            (linear("a.gate_proj", 64, 32, role="gate"), (16, 32)),
            (linear("a.down_proj", 32, 64, role="down"), (32, 16)),
            (linear("a.q_a_proj", 64, 32, role="q_a"), (64, 32)),
            (Layer("gate", "router", 8, 32), (8, 32)),
            (Layer("lm_head", "head", 1000, 32), (256, 32)),
            (Layer("experts", "experts", 32, 64, experts=Experts(8, 2)), (32, 16)),
        ],
    )


def test_a_plan_decides_where_names_do_not():
    """Engines follow the model's plan for an unknown name; without one the layer is whole, with a note."""
    layer = linear("a.mystery", 64, 32)

    (found,), notes = of_rank(layer, plan={"a.mystery": "colwise"})
    assert (found.n, notes) == (16, ())
    (found,), notes = of_rank(layer)
    assert (found.n, notes) == (64, ("not split over ranks, as their names have no known role: a.mystery",))


def test_a_plan_is_all_that_transformers_splits():
    """Unfused, a layer outside the plan is whole; a model without a plan is split by names."""
    layers = linear("a.q_proj", 64, 32, role="q", unit=8), linear("a.up_proj", 64, 32, role="up")

    found, notes = of_rank(*layers, plan={"a.up_proj": "colwise"}, engine=False)
    assert ([layer.n for layer in found], notes) == ([64, 16], ())
    assert [layer.n for layer in of_rank(*layers, engine=False)[0]] == [16, 16]


def test_what_cannot_be_split(one_line, faults_of):
    """The layer, its number, and the numbers of ranks that would do."""

    def check(layer, says):
        assert one_line(lambda: of_rank(layer)) == says

    assert not faults_of(
        check,
        [
            (linear("a.q_proj", 48, 32, role="q", unit=8), "tp=4 does not divide heads of a.q_proj: 6; use one of 1, 2"),
            (linear("a.o_proj", 32, 48, role="o", unit=8), "tp=4 does not divide heads of a.o_proj: 6; use one of 1, 2"),
            (linear("a.up_proj", 6, 32, role="up"), "tp=4 does not divide rows of a.up_proj: 6; use one of 1, 2"),
            (linear("a.down_proj", 32, 6, role="down"), "tp=4 does not divide columns of a.down_proj: 6; use one of 1, 2"),
            (Layer("e", "experts", 32, 6, experts=Experts(8, 2)), "tp=4 does not divide the width of an expert of e: 6; use one of 1, 2"),
        ],
    )


def test_the_vocabulary_as_transformers_splits_it(one_line):
    """Engines pad it; transformers does not."""
    head = Layer("lm_head", "head", 50257, 32)

    assert of_rank(head)[0][0].n == 50304 // 4
    assert "does not divide the vocabulary of lm_head: 50257; use one of 1" in one_line(lambda: of_rank(head, engine=False))


def test_one_part_that_cannot_be_split_leaves_its_tower_whole():
    """A part other than the text's is split as a whole or not at all."""
    tower = linear("vision.up_proj", 64, 32, role="up", tower=True), linear("vision.q_proj", 24, 32, role="q", unit=8, tower=True)
    found, notes = of_rank(*tower, linear("text.up_proj", 64, 32, role="up"))

    assert [layer.n for layer in found] == [64, 24, 16]
    assert notes == ("left whole on every rank: vision, as tp=4 does not divide heads of vision.q_proj: 3",)
