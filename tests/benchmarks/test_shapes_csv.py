"""benchmarks/shapes.csv keeps what its README promises, and shapes.py writes it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.ops import op_named
from tunedgemm.table.folders import named_file
from tunedgemm.table.untuned import read_untuned

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "shapes.csv"
MODELS = ROOT.parent / "shared" / "models"

MS = {1, 16, 64, 256, 1024, 4096}
DECODE_MS = {1, 2, 4, 8, 16, 32, 48, 64}

#: (N, K) for which figures of another tuner at M = 1 are known
PUBLISHED = {
    (1280, 8192), (2112, 7168), (8192, 1024), (7168, 2048), (5120, 5120), (24576, 1536),
    (8192, 3584), (7168, 8192), (10240, 8192), (8192, 28672), (57344, 8192),
}  # fmt: skip


#: subset without its tp -> the shipped lists that have its products, each with its op
SHIPPED = {
    "llama70b": {"llama70B_untuned_gemm.csv": "a16w16"},
    "llama8b": {"llama8B_untuned_gemm.csv": "a16w16"},
    "qwen32b": {"qwen32B_untuned_gemm.csv": "a16w16"},
    "dsv3": {"dsv3_bf16_untuned_gemm.csv": "a16w16", "dsv3_a8w8_blockscale_untuned_gemm.csv": "a8w8_blockscale"},
}

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Read the table."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def script(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/shapes.py."""
    return as_module(ROOT / "benchmarks" / "shapes.py")


def pairs(rows: Rows, subset: str) -> dict[tuple[int, int], set[int]]:
    """Return (N, K) of every row in a subset, and the values of M of each."""
    sizes: dict[tuple[int, int], set[int]] = {}
    for row in rows:
        if subset in row["subsets"].split(";"):
            sizes.setdefault((int(row["N"]), int(row["K"])), set()).add(int(row["M"]))
    return sizes


def test_subsets_have_their_products(rows: Rows) -> None:
    """Each model has all its products at six M; `decode` has 24 pairs at eight M, the published
    ones included; `layers` no lm_head.
    """
    models = {f"{short}-tp{tp}": pairs(rows, f"{short}-tp{tp}") for short in SHIPPED for tp in (1, 8)}
    faults = [subset for subset, found in models.items() if len(found) < 5 or any(ms != MS for ms in found.values())]
    decode, layers = pairs(rows, "decode"), {row["layer"] for row in rows if "layers" in row["subsets"].split(";")}

    assert not faults
    assert len(decode) == 24 and decode.keys() >= PUBLISHED and all(ms == DECODE_MS for ms in decode.values())
    assert sum("decode" in row["subsets"].split(";") for row in rows) == 24 * 8
    assert "lm_head" not in layers and {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} <= layers


@pytest.mark.skipif(not MODELS.is_dir(), reason="the models' config.json files are not here")
def test_made_again(script: ModuleType, tmp_path: Path) -> None:
    """shapes.py makes the committed file again, byte for byte."""
    assert script.main(["--models", str(MODELS), "-o", str(tmp_path)]) == 0
    assert (tmp_path / "shapes.csv").read_bytes() == TABLE.read_bytes()


def test_missing_models_are_named(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a config.json the script names the one it misses and writes nothing."""
    assert script.main(["--models", str(tmp_path), "-o", str(tmp_path)]) == 1
    assert "llama-3.1-8b/config.json" in capsys.readouterr().err
    assert not (tmp_path / "shapes.csv").exists()


def test_the_shipped_model_shapes_have_those_of_the_benchmarks(script: ModuleType, tmp_path: Path) -> None:
    """``tunedgemm tune -i llama70B_untuned_gemm.csv`` tunes what the benchmarks measure."""

    def sizes(file: Path, op: str) -> set[tuple[int, int, int]]:
        return {(row.shape.m, row.shape.n, row.shape.k) for row in read_untuned(file, op_named(op))}

    faults = []
    for model, lists in SHIPPED.items():
        shipped = set().union(*(sizes(named_file(name), op) for name, op in lists.items()))
        for tp in (1, 8):
            assert script.main(["--shapes", f"{model}-tp{tp}", "-o", str(tmp_path)]) == 0
            wanted = sizes(tmp_path / "a16w16-shapes.csv", "a16w16")
            if len(wanted) < 24 or not wanted <= shipped:
                faults.append((model, tp, wanted - shipped))
    assert not faults
