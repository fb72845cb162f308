"""``tunedgemm tune --models``: lists of models, killed and resumed runs, and one table for each op."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.untuned import read_untuned

A16W16, FMOE = op_named("a16w16"), op_named("fmoe")
QUICK = ["--libtype", "torch", "--iters", "3", "--warmup", "1", "--seconds", "0.05", "--cache", "hot", "--device", "cpu"]


@pytest.fixture
def lists(dense: str, experts: str, tmp_path: Path) -> Callable[..., dict[str, dict[tuple[int, ...], int]]]:
    """Return a function that writes the lists of models and returns M, N, K with their counts by op."""

    def lists(models: str, *words: str) -> dict[str, dict[tuple[int, ...], int]]:
        names = models.format(dense=dense, experts=experts)
        folder = tmp_path / f"lists {len(list(tmp_path.iterdir()))}"
        assert main(["shapes", "--models", names, "--nsets", "1,4", *words, "-o", f"{folder}/"]) == 0
        read = {
            op.name: read_untuned(folder / op.columns.untuned_file, op)
            for op in (A16W16, FMOE)
            if (folder / op.columns.untuned_file).exists()
        }
        return {name: {(row.shape.m, row.shape.n, row.shape.k): row.count for row in rows} for name, rows in read.items()}

    return lists


def test_models_add_up_with_their_own_parallelism(lists) -> None:
    """Counts of models add up, those of one model's degrees do not, and a small M has more passes."""
    both = lists("{dense},{experts}")
    dense, experts = lists("{dense}")["a16w16"], lists("{experts}")
    assert both["a16w16"] == Counter(dense) + Counter(experts["a16w16"]) and both["fmoe"] == experts["fmoe"]
    assert dense[1, 512, 128] == 4 * dense[4, 512, 128] == 16
    two = lists("{dense}:1,{dense}:2,{experts}:2", "--tp", "4")
    assert (1, 512, 128) in two["a16w16"] and (1, 256, 128) in two["a16w16"] and {*two["fmoe"]} == {(1, 128, 128), (4, 128, 128)}
    assert lists("{dense}:1,{dense}:1")["a16w16"] == dense


def test_lists_in_a_folder_are_tuned_without_their_models(experts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-i FOLDER` tunes every list in it, and `-o FOLDER/` gets a table for each op."""
    assert main(["shapes", "--models", experts, "--nsets", "1", "--layers", "*.mlp.*", "-o", f"{tmp_path}/lists/"]) == 0
    words = ["tune", "-i", f"{tmp_path}/lists", "-o", f"{tmp_path}/out/", "--budget", "60", *QUICK]
    assert main(words) == 0
    assert "campaign: 0 of 2 shapes are left\n" in capsys.readouterr().out
    assert [len(read_rows(tmp_path / "out" / op.columns.tuned_file, op)[0]) for op in (A16W16, FMOE)] == [1, 1]
    assert main([*words[:3], "-o", f"{tmp_path}/out/", "--op", "a4w4_blockscale"]) == 2
    assert "no list of shapes of a4w4_blockscale" in capsys.readouterr().err


def outcomes(folder: Path) -> Counter[tuple[str, int, int, int]]:
    """Count the outcomes in the logs, by op, M, N and K."""
    found: Counter[tuple[str, int, int, int]] = Counter()
    for log in folder.glob("*.trials.jsonl"):
        for line in log.read_text().splitlines():
            if line.endswith("}") and (fields := json.loads(line))["kind"] == "shape":
                shape = fields["shape"]
                found[shape["op"], shape["m"], shape["n"], shape["k"]] += 1
    return found


@pytest.mark.slow
def test_a_killed_campaign_goes_on_and_does_nothing_twice(dense: str, experts: str, tmp_path: Path) -> None:
    """After SIGKILL, then a budget that ends early, the same command ends with one row for each shape."""
    command = [sys.executable, "-m", "tunedgemm", "tune", "--models", f"{dense}:1,{experts}:1", "--nsets", "1,2", "-o", "out/", *QUICK]
    settings = {"cwd": tmp_path, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--budget", "300"], **settings, start_new_session=True) as child:
        until = time.monotonic() + 120
        while len(outcomes(tmp_path / "out")) < 2 and time.monotonic() < until and child.poll() is None:
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGKILL)
    before = outcomes(tmp_path / "out")
    assert len(before) >= 2

    done = [subprocess.run([*command, "--budget", budget], **settings, check=False, timeout=300) for budget in ("1", "300")]

    assert [run.returncode for run in done] == [0, 0]
    total = int(done[-1].stdout.split("campaign: 0 of ")[1].split()[0])
    assert set(outcomes(tmp_path / "out").values()) == {1} and len(outcomes(tmp_path / "out")) == total > len(before)
    rows = [row for op in (A16W16, FMOE) for row in read_rows(tmp_path / "out" / op.columns.tuned_file, op)[0]]
    assert len({row.key for row in rows}) == len(rows) == total
