"""The shapes of four models against AITER's lists and those that the benchmarks measure."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from tunedgemm.workload.models import layers_of_model

ROOT = Path(__file__).parents[3]
MODELS = ROOT.parent / "shared" / "models"
LISTS = ROOT.parent / "shared" / "aiter" / "configs" / "model_configs"

pytestmark = pytest.mark.skipif(not (MODELS.is_dir() and LISTS.is_dir()), reason="AITER's lists and the models' config.json are not here")

#: model -> AITER's lists of plain products, and the numbers of ranks that they were made for
OF_AITER = {
    "deepseek-v3": (
        (
            "a8w8_blockscale_bpreshuffle_untuned_gemm_dsv3.csv",
            "a8w8_blockscale_untuned_gemm_ds_v3.csv",
            "dsv3_a4w4_blockscale_untuned_gemm.csv",
            "dsv3_bf16_untuned_gemm.csv",
        ),
        (4, 8),
    ),
    "llama-3.3-70b": (("llama70B_untuned_gemm.csv", "llama70B_untuned_gemm_bf16.csv"), (1, 4, 8)),
    "qwen3-32b": (("qwen32B_untuned_gemm.csv", "qwen32B_untuned_gemm_bf16.csv"), (1, 4, 8)),
}

V32 = "DeepSeek-V3.2's indexer, which V3 does not have"
QWEN = "made with heads of 5120 / 64 = 80 columns; config.json says 128"
#: model -> (N, K) -> why AITER lists it and we do not
THEIRS = {
    "deepseek-v3": {
        (128, 7168): f"{V32}: its keys",
        (2240, 7168): f"{V32}: its keys beside fused_qkv_a_proj, 128 + 2112",
        (8192, 1536): f"{V32}: its queries, 64 heads of 128",
        (11264, 1536): f"{V32}: its queries beside q_b_proj of 8 ranks, 8192 + 3072",
        (14336, 1536): f"{V32}: its queries beside q_b_proj of 4 ranks, 8192 + 6144",
    },
    "llama-3.3-70b": {(192, 1024): "8192 without its first digit: the one M that 8192 x 1024 lacks"},
    "qwen3-32b": {
        (800, 5120): f"an eighth of qkv_proj; {QWEN}",
        (200, 5120): f"an eighth of qkv_proj of 4 ranks; {QWEN}",
        (100, 5120): f"an eighth of qkv_proj of 8 ranks; {QWEN}",
        (5120, 1280): f"o_proj of 4 ranks; {QWEN}",
        (5120, 640): f"o_proj of 8 ranks; {QWEN}",
        (5120, 5120): f"o_proj; {QWEN}",
    },
}  # fmt: skip
HEAD = "AITER's lists have no lm_head here"
#: model -> (last words of the name, ranks) -> why we list it and AITER does not
OURS = {
    "deepseek-v3": {
        ("shared_experts.gate_up_proj", 4): "the shared expert counts among the routed ones (--fuse-shared-experts)",
        ("shared_experts.down_proj", 4): "the shared expert counts among the routed ones",
        ("shared_experts.down_proj", 8): "the shared expert counts among the routed ones",
        ("lm_head", 4): HEAD,
    },
    "llama-3.3-70b": {("lm_head", 1): HEAD, ("lm_head", 4): HEAD, ("lm_head", 8): HEAD},
    "qwen3-32b": {
        **{("lm_head", tp): HEAD for tp in (1, 4, 8)},
        **{(f"self_attn.{name}", tp): QWEN for tp in (1, 4, 8) for name in ("qkv_proj", "o_proj")},
    },
}  # fmt: skip


def sizes(name):
    """(N, K) of one of AITER's lists, and at how many M."""
    found = {}
    with (LISTS / name).open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((int(row["N"]), int(row["K"])), set()).add(int(row["M"]))
    return found


def theirs(model):
    return {pair for name in OF_AITER[model][0] for pair in sizes(name)}


def ours(model, tp):
    """Last words of the names of plain products of a rank -> (N, K)."""
    found = layers_of_model(MODELS / model, tp).layers
    return {".".join(layer.name.split(".")[-2:]): (layer.n, layer.k) for layer in found if layer.kind in ("linear", "router", "head")}


def test_shapes_that_aiter_lists(faults_of):
    """Each N x K of AITER's is one of a rank's or has a reason above, and each reason is needed."""

    def check(model):
        mine = {pair for tp in OF_AITER[model][1] for pair in ours(model, tp).values()}

        assert theirs(model) - mine == set(THEIRS[model])

    assert not faults_of(check, OF_AITER)


def test_shapes_that_aiter_does_not_list(faults_of):
    """Each product of ours is in AITER's lists or has a reason above, and each reason is needed."""

    def check(model):
        listed = theirs(model)
        missing = {(name, tp) for tp in OF_AITER[model][1] for name, pair in ours(model, tp).items() if pair not in listed}

        assert missing == set(OURS[model])

    assert not faults_of(check, OF_AITER)


def test_the_digit_that_is_missing():
    """Each product of the list has 13 M, except 8192 x 1024 with 12 and 192 x 1024 with the last."""
    found = sizes("llama70B_untuned_gemm_bf16.csv")

    assert found[8192, 1024] | found[192, 1024] == found[1280, 8192]
    assert not found[8192, 1024] & found[192, 1024]


def test_the_indexer_is_that_of_v32(folder):
    """V3's config.json with the fields of V3.2 gives the products that AITER's lists have beyond V3's."""
    raw = json.loads((MODELS / "deepseek-v3" / "config.json").read_text())
    added = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    place = folder({**raw, **added}, model_type="deepseek_v32", architectures=..., quantization_config=..., num_hidden_layers=2)
    found = {layer.own_name: (layer.n, layer.k) for layer in layers_of_model(place, 8).layers if ".indexer." in layer.name}

    assert (found["wq_b"], found["wk"]) == ((8192, 1536), (128, 7168))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a8w8_blockscale_untuned_fmoe_ds_v3.csv", {(7168, 256, 257, 9)}),
        # 32 and 33 experts: a rank's share of expert parallelism over 8, with and without the
        # shared one, which tp does not split
        ("dsv3_fp4_untuned_fmoe.csv", {(7168, 256, 257, 9), (7168, 512, 257, 9), (7168, 2048, 32, 8), (7168, 2048, 33, 8)}),
    ],
)
def test_experts_of_aiter(name, known):
    """257 experts, 9 a token: the shared one counts among the routed ones, at 8 and at 4 ranks."""
    with (LISTS / name).open(newline="") as file:
        listed = {tuple(int(row[column]) for column in ("model_dim", "inter_dim", "expert", "topk")) for row in csv.DictReader(file)}
    mine = set()
    for tp in (4, 8):
        layers = layers_of_model(MODELS / "deepseek-v3", tp, fuse_shared_experts=True).layers
        (bank,) = [layer for layer in layers if layer.experts is not None]
        mine.add((bank.n, bank.k, bank.experts.count, bank.experts.topk))

    assert listed == known
    assert {experts for experts in listed if experts[2] > 33} <= mine


def test_the_benchmarks_measure_these():
    """benchmarks/shapes.csv has, layer by layer, the products of its models' ranks, and no others."""
    names = {
        "router_gate": "mlp.gate",
        "shared_gate_up_proj": "shared_experts.gate_up_proj",
        "shared_down_proj": "shared_experts.down_proj",
    }
    with (ROOT / "benchmarks" / "shapes.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] != "extra"]
    listed = {(row["model"], int(row["tp"]), names.get(row["layer"], row["layer"]), (int(row["N"]), int(row["K"]))) for row in rows}
    known = set(names.values()) | {"lm_head"}
    mine = {
        (model, tp, name if name in known else name.split(".")[-1], pair)
        for model, tp in {(model, tp) for model, tp, _, _ in listed}
        for name, pair in ours(model, tp).items()
    }

    assert listed == mine
