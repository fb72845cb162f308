"""The unfused list equals the products of a forward pass with real numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tunedgemm.workload.models import layers_of_model
from tunedgemm.workload.models.layer import Experts
from tunedgemm.workload.models.scheme import Quantisation
from tunedgemm.workload.models.source import ModelSource
from tunedgemm.workload.models.walk import layers

ROOT = Path(__file__).parents[3]
MODELS = ROOT.parent / "shared" / "models"
TINY = sorted(json.loads((Path(__file__).parent / "configs.json").read_text()))

#: model -> how its encoder of images runs
IMAGES = {
    "qwen2.5-vl": lambda model: model.model.visual(torch.ones(16, 1176, dtype=torch.bfloat16), grid_thw=torch.tensor([[1, 4, 4]])),
    "llava": lambda model: model.model.get_image_features(pixel_values=torch.ones(1, 3, 28, 28, dtype=torch.bfloat16)),
}


def test_the_listed_products_are_those_that_run(folder, real, faults_of):
    """Names, sizes, dtypes, biases and counts of listed and executed products agree, experts included."""

    def check(model):
        place = folder(model)
        products, _ = real.ran(place, also=IMAGES.get(model))

        assert products.calls
        assert real.disagreements(products, layers_of_model(place, fuse=False).layers, real.TOKENS) == []

    assert not faults_of(check, TINY)


def test_the_check_sees_a_wrong_list(folder, real):
    """The check detects a missing layer, a wrong width, dtype or number of experts per token."""
    place = folder("deepseek-v3")
    products, _ = real.ran(place)
    found = layers_of_model(place, fuse=False).layers
    bank = next(layer for layer in found if layer.experts)
    wrong = {
        "missing": found[1:],
        "width": (*found[:-1], real.attrs.evolve(found[-1], k=found[-1].k + 1)),
        "dtype": (*found[:-1], real.attrs.evolve(found[-1], dtype="fp32")),
        "topk": tuple(
            layer if layer is not bank else real.attrs.evolve(bank, experts=real.attrs.evolve(bank.experts, topk=5)) for layer in found
        ),
    }

    assert {name for name, listed in wrong.items() if real.disagreements(products, listed, real.TOKENS)} == set(wrong)


@pytest.mark.slow
@pytest.mark.skipif(not MODELS.is_dir(), reason="the models' config.json are not here")
@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3.1-8b", "llama-3.3-70b", "qwen3-32b"])
def test_full_width(model):
    """The four models at their real width, few layers deep, agree, in a process with up to 8 GB."""
    script = ROOT / "benchmarks" / "model_shapes.py"
    done = subprocess.run([sys.executable, script, "--one", MODELS / model], capture_output=True, text=True, check=True, timeout=600)
    row = json.loads(done.stdout.splitlines()[-1])

    assert row["wrong"] == []
    assert row["kinds"] == (15 if model == "deepseek-v3" else 8)


def walked(module, **settings):
    """Return the layers and notes of a module of torch."""
    module.get_output_embeddings = lambda: None
    return layers(ModelSource(Path("here"), {}, module.to("meta"), SimpleNamespace(**settings)), Quantisation())


class Expert(torch.nn.Module):
    """One expert as transformers 4 has it."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            down = name in ("down_proj", "w2")
            setattr(self, name, torch.nn.Linear(*((24, 16) if down else (16, 24)), bias=False))


def holding(**parts):
    module = torch.nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def test_experts_in_a_list_are_one_bank(faults_of):
    """Experts that are separate modules, as in transformers 4, are one layer of experts."""

    def check(names, gated):
        block = holding(gate=torch.nn.Linear(16, 4), experts=torch.nn.ModuleList(Expert(names) for _ in range(4)))
        found, notes = walked(holding(mlp=block), num_experts_per_tok=2, hidden_act="silu")

        bank = next(layer for layer in found if layer.kind == "experts")
        assert (bank.n, bank.k, bank.experts) == (16, 24, Experts(4, 2, "silu", gated))
        assert [layer.kind for layer in found] == ["router", "experts"]
        assert notes == ()

    assert not faults_of(
        check, [(("gate_proj", "up_proj", "down_proj"), True), (("w1", "w2", "w3"), True), (("up_proj", "down_proj"), False)]
    )


def test_banks_know_their_sides_by_their_sizes(faults_of):
    """Weights of all experts may have either layout, with or without a gate."""

    def check(up, down, gated):
        bank = holding()
        bank.up_proj = torch.nn.Parameter(torch.empty(up))
        bank.down_proj = torch.nn.Parameter(torch.empty(down))
        (found,), _ = walked(holding(experts=bank), num_experts_per_tok=2, hidden_act="gelu")

        assert (found.n, found.k, found.experts) == (16, next((size for size in down[1:] if size != 16), 16), Experts(4, 2, "gelu", gated))

    assert not faults_of(
        check,
        [
            ((4, 48, 16), (4, 16, 24), True),
            ((4, 16, 48), (4, 24, 16), True),
            ((4, 24, 16), (4, 16, 24), False),
            ((4, 16, 32), (4, 16, 16), True),
            ((4, 8, 16), (4, 16, 4), True),
            ((4, 16, 8), (4, 4, 16), True),
        ],
    )


def test_experts_in_two_modules_leave_their_router():
    """In Granite's layout, a module per side of all experts, the router is a separate product."""
    sides = {"input_linear": holding(), "output_linear": holding()}
    sides["input_linear"].weight = torch.nn.Parameter(torch.empty(4, 48, 16))
    sides["output_linear"].weight = torch.nn.Parameter(torch.empty(4, 16, 24))
    block = holding(**sides, router=holding(layer=torch.nn.Linear(16, 4, bias=False)))
    (bank, router), notes = walked(holding(mlp=block), num_experts_per_tok=2, activation_function="silu")

    assert (bank.kind, bank.n, bank.k, bank.experts, bank.bias) == ("experts", 16, 24, Experts(4, 2), False)
    assert (router.kind, router.n, router.k, notes) == ("router", 4, 16, ())


def test_weights_of_unknown_use_are_named():
    """Neither listed nor forgotten: a weight whose module cannot be run alone is in the notes."""
    odd = holding()
    odd.fn = torch.nn.Parameter(torch.empty(24, 64))
    odd.position_table = torch.nn.Parameter(torch.empty(24, 64))
    found, notes = walked(holding(layers=torch.nn.ModuleList([holding(odd=odd)])))

    assert found == ()
    assert notes == ("left out, as the use of these weights is unknown: layers.*.odd.fn [24, 64]",)


class Router(torch.nn.Module):
    """Wants more than the activations."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 16))

    def forward(self, x, correction):
        scores = torch.nn.functional.linear(x.float(), self.weight.float())
        return scores + correction


def test_a_router_runs_with_its_experts():
    """A module's further inputs are looked for in its parent; its dtype is the one that it multiplies in."""
    block = holding(gate=Router().bfloat16())
    block.register_buffer("correction", torch.zeros(8))
    (found,), _ = walked(block)

    assert (found.kind, found.n, found.k, found.dtype) == ("router", 8, 16, "fp32")


def test_a_missing_number_of_experts_is_named(one_line):
    """Without the number of experts per token the model is refused."""
    experts = torch.nn.ModuleList(Expert(("w1", "w2", "w3")) for _ in range(4))

    assert "lacks the number of experts per token; add num_experts_per_tok" in one_line(lambda: walked(holding(experts=experts)))
