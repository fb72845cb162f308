"""benchmarks/shapes.csv keeps what its README promises."""

import csv
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_untuned
from tunedgemm.table.folders import named_file

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "shapes.csv"
MODELS = ROOT.parent / "shared" / "models"

MS = {1, 16, 64, 256, 1024, 4096}
DECODE_MS = {1, 2, 4, 8, 16, 32, 48, 64}

#: (N, K) for which figures of another tuner at M = 1 are known
PUBLISHED = {
    (1280, 8192), (2112, 7168), (8192, 1024), (7168, 2048), (5120, 5120), (24576, 1536),
    (8192, 3584), (7168, 8192), (10240, 8192), (8192, 28672), (57344, 8192),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def pairs(rows, subset):
    """(N, K) of every row in a subset, and the values of M of each."""
    found = {}
    for row in rows:
        if subset in row["subsets"].split(";"):
            found.setdefault((int(row["N"]), int(row["K"])), set()).add(int(row["M"]))
    return found


def test_columns(rows):
    """The columns are the seven that every benchmark reads."""
    assert list(rows[0]) == ["model", "tp", "layer", "N", "K", "M", "subsets"]


def test_rows_are_unique(rows):
    """No (model, tp, layer, M) stands there twice, and every row belongs to a subset."""
    keys = Counter((row["model"], row["tp"], row["layer"], row["M"]) for row in rows)

    assert max(keys.values()) == 1
    assert all(row["subsets"] for row in rows)


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("short", ["dsv3", "llama8b", "llama70b", "qwen32b"])
def test_every_model_has_every_m(rows, short, tp):
    """Each of the four models at TP 1 and 8 has all its products at all six values of M."""
    found = pairs(rows, f"{short}-tp{tp}")

    assert len(found) >= 5
    assert set(map(frozenset, found.values())) == {frozenset(MS)}


def test_llama70b_tp8(rows):
    """One rank of llama-3.3-70b at TP 8 has the products that engines run."""
    found = {row["layer"]: (int(row["N"]), int(row["K"])) for row in rows if "llama70b-tp8" in row["subsets"].split(";")}

    assert found == {
        "qkv_proj": (1280, 8192),
        "o_proj": (8192, 1024),
        "gate_up_proj": (7168, 8192),
        "down_proj": (8192, 3584),
        "lm_head": (16032, 8192),
    }


@pytest.mark.parametrize(
    ("tp", "layer", "size"),
    [
        (8, "fused_qkv_a_proj", (2112, 7168)),
        (8, "router_gate", (256, 7168)),
        (8, "q_b_proj", (3072, 1536)),
        (8, "kv_b_proj", (4096, 512)),
        (1, "o_proj", (7168, 16384)),
        (1, "shared_gate_up_proj", (4096, 7168)),
        (8, "lm_head", (16160, 7168)),
    ],
)
def test_deepseek(rows, tp, layer, size):
    """DeepSeek's projections into the latent space and its router are whole on every rank, the others are cut."""
    found = {(int(r["N"]), int(r["K"])) for r in rows if (r["model"], r["tp"], r["layer"]) == ("deepseek-v3", str(tp), layer)}

    assert found == {size}


def test_decode(rows):
    """The subset `decode` has 24 pairs of N and K at eight values of M, the published ones among them."""
    found = pairs(rows, "decode")

    assert len(found) == 24
    assert found.keys() >= PUBLISHED
    assert set(map(frozenset, found.values())) == {frozenset(DECODE_MS)}
    assert sum("decode" in row["subsets"].split(";") for row in rows) == 24 * 8


def test_layers_leaves_out_the_vocabulary(rows):
    """The subset `layers` is what a model repeats, so lm_head is not in it."""
    named = {row["layer"] for row in rows if "layers" in row["subsets"].split(";")}

    assert "lm_head" not in named
    assert {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} <= named


@pytest.mark.skipif(not MODELS.is_dir(), reason="the models' config.json files are not here")
def test_made_again(tmp_path):
    """make_shapes.py makes the committed file again, byte for byte."""
    output = tmp_path / "shapes.csv"

    subprocess.run([sys.executable, ROOT / "benchmarks" / "make_shapes.py", "--models", MODELS, "-o", output], check=True)

    assert output.read_bytes() == TABLE.read_bytes()


def test_missing_models_are_named(tmp_path):
    """Without a config.json the script says which one it misses and writes nothing."""
    output = tmp_path / "shapes.csv"

    answer = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "make_shapes.py", "--models", tmp_path, "-o", output], capture_output=True, text=True
    )

    assert answer.returncode == 1
    assert "llama-3.1-8b/config.json" in answer.stderr
    assert not output.exists()


#: subset without its tp -> the shipped lists that have its products, each with its op
SHIPPED = {
    "llama70b": {"llama70B_untuned_gemm.csv": "a16w16"},
    "llama8b": {"llama8B_untuned_gemm.csv": "a16w16"},
    "qwen32b": {"qwen32B_untuned_gemm.csv": "a16w16"},
    "dsv3": {"dsv3_bf16_untuned_gemm.csv": "a16w16", "dsv3_a8w8_blockscale_untuned_gemm.csv": "a8w8_blockscale"},
}


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("model", SHIPPED)
def test_the_shipped_model_shapes_have_those_of_the_benchmarks(model: str, tp: int, tmp_path: Path) -> None:
    """``tunedgemm tune -i llama70B_untuned_gemm.csv`` tunes what the benchmarks measure."""
    fresh = tmp_path / "fresh.csv"
    subprocess.run([sys.executable, ROOT / "benchmarks" / "untuned.py", f"{model}-tp{tp}", fresh], check=True)

    def sizes(file: Path, op: str) -> set[tuple[int, int, int]]:
        return {(row.shape.m, row.shape.n, row.shape.k) for row in read_untuned(file, op_named(op))}

    shipped = set().union(*(sizes(named_file(name), op) for name, op in SHIPPED[model].items()))
    wanted = sizes(fresh, "a16w16")

    assert len(wanted) >= 24
    assert wanted <= shipped
