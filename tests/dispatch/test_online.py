"""Online tuning: an untuned shape is tuned at its first call, once per machine, and every call is
served."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from tunedgemm.device import device_of
from tunedgemm.dispatch.online import MOST_M, Online
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, error_ratio
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 4, 32, 64, "fp32")
LINEAR = torch.nn.functional.linear
#: Tunes with the backend of `notes` alone; what it needs here is a tenth of that.
ONLINE = Settings(online=True, online_libtype="notes", online_seconds=120.0)

#: A workload of one call that waits for both processes; it prints the solution and the imported
#: modules.
WORKLOAD = """
import sys, time
from pathlib import Path
import torch, tunedgemm
here = Path(sys.argv[1])
(here / sys.argv[2]).touch()
while not all((here / name).exists() for name in ("one", "two")):
    time.sleep(0.01)
x, weight = torch.ones(4, 64), torch.ones(32, 64)
assert (tunedgemm.gemm_a16w16(x, weight) == 64).all()
print(tunedgemm.explain(x, weight).offer.solution, sorted({"tunedgemm.tuner", "pandas", "pebble"} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of these tests are on the CPU, so that is the default device of questions, too."""
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.current_device", lambda: device_of(-1))


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point to a user folder that cannot be created, so that each attempt to tune warns."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "file" / "home"))


def operands(m: int = 4, n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, 64), torch.randn(n, 64)


def put(path: Path, shape: Shape, solution: Solution) -> None:
    """A tuned file with one row for the CPU."""
    here = device_of(-1)
    path.parent.mkdir(exist_ok=True)
    write_rows(path, OP, [Row(shape=shape, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=solution, us=1.0)])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_an_untuned_shape_is_tuned_at_its_first_call_and_served_by_its_row(notes: Path, home: Path) -> None:
    """One tuner run writes the winner to the op's table;
    this call and later ones run it, also in captures."""
    gemm, (x, weight) = TunedGemm(settings=evolve(ONLINE, capture=True)), operands()

    out = gemm.gemm_a16w16(x, weight)
    again = gemm.gemm_a16w16(x[None], weight)  # another key of the same shape

    torch.testing.assert_close(out, LINEAR(x, weight))
    torch.testing.assert_close(again, LINEAR(x, weight)[None])
    [row] = read_rows(home / "bf16_tuned_gemm.csv", OP)[0]
    assert (row.shape, str(row.solution)) == (SHAPE, "notes:linear_v1")
    found = gemm.dispatcher.explain(SHAPE, device_of(-1))
    assert found.tuned and str(found.offer.solution) == "notes:linear_v1"
    assert notes.read_text() == "tuned with []\n"
    gemm.dispatcher._capture.flush()
    assert [(one.shape, one.count) for one in read_untuned(home / "bf16_untuned_gemm.csv", OP)] == [(SHAPE, 2)]
    assert not list(home.glob("*online*"))


@pytest.mark.slow
def test_two_processes_at_once_tune_once(notes: Path, home: Path, tmp_path: Path) -> None:
    """Of two processes one tunes while the other waits;
    both run the row, and the tuner never tunes online."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HIP_ONLINE_TUNING": "1",
        "TUNEDGEMM_ONLINE_LIBTYPE": "notes", "TUNEDGEMM_ONLINE_SECONDS": "120", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    started = [
        subprocess.Popen([sys.executable, "-c", WORKLOAD, tmp_path, name], env=environment, stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]

    said = [process.communicate(timeout=300)[0].strip() for process in started]

    assert said == ["notes:linear_v1 []"] * 2
    assert notes.read_text() == "tuned with []\n"
    runs = [json.loads(line)["kind"] for line in (home / "bf16_tuned_gemm.trials.jsonl").read_text().splitlines()].count("run")
    assert runs == 1


@pytest.mark.nightly
def test_aiters_variable_tunes_fmoe_into_the_table_of_its_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER_ONLINE_TUNE writes a row of fmoe to the first file of the op's variable,
    and none of a16w16."""
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(tmp_path / "moe.csv"))
    settings = Settings.from_environment({"AITER_ONLINE_TUNE": "1", "TUNEDGEMM_ONLINE_LIBTYPE": "torch", "TUNEDGEMM_ONLINE_SECONDS": "120"})
    moe, shape = op_named("fmoe"), shapes_of("fmoe")[0]
    gemm, given = TunedGemm(settings=settings), moe.make_inputs(shape, torch.device("cpu"), 0)

    out = gemm.call("fmoe", *given, otype=torch_dtype(shape.outdtype), **moe.fields(shape))
    gemm.gemm_a16w16(*operands())

    assert error_ratio(out, moe.reference(shape, given), moe.tolerance(shape)) <= MAX_ERROR_RATIO
    assert [row.shape for row in read_rows(tmp_path / "moe.csv", moe)[0]] == [shape]
    assert gemm.of("fmoe").explain(shape, device_of(-1)).tuned
    assert not (tmp_path / "home" / "bf16_tuned_gemm.csv").exists()


@pytest.mark.slow
def test_a_failed_tune_is_one_warning_and_not_repeated(
    notes: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed tune serves the call untuned,
    warns once with the fate of the solutions, and is not repeated."""
    monkeypatch.setenv("NOTES_KIND", "wrong")
    gemm, (x, weight) = TunedGemm(fake_registry(), settings=ONLINE), operands()

    out = [gemm.gemm_a16w16(x, weight), gemm.gemm_a16w16(x[None], weight)[0]]

    torch.testing.assert_close(out, [LINEAR(x, weight)] * 2)
    [warning] = warnings(caplog)
    assert str(SHAPE) in warning and "1 wrong" in warning
    assert notes.read_text() == "tuned with []\n"
    assert not (home / "bf16_tuned_gemm.csv").exists()


@pytest.mark.slow
def test_a_kernel_that_hangs_costs_the_bound_at_most(
    notes: Path, home: Path, descendants: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call is served then, and no process of the tuner is left."""
    monkeypatch.setenv("NOTES_KIND", "hangs")
    gemm, (x, weight) = TunedGemm(fake_registry(), settings=evolve(ONLINE, online_seconds=8.0)), operands()
    started = time.monotonic()

    out = gemm.gemm_a16w16(x, weight)

    assert time.monotonic() - started < 8 + 4
    torch.testing.assert_close(out, LINEAR(x, weight))
    assert len(warnings(caplog)) == 1
    assert descendants() == []


@pytest.mark.parametrize("stores", [False, True], ids=["no row", "a row"])
def test_a_process_that_waited_does_not_tune(stores: bool, home: Path, notes: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It uses the other's row, or runs without one and warns once."""
    gemm, (x, weight) = TunedGemm(fake_registry(fake_backend("turbo", solutions=("a",))), settings=ONLINE), operands()
    held, waits = threading.Event(), threading.Event()

    def other() -> None:
        with Online(OP, ONLINE)._hold_turn(SHAPE, device_of(-1)) as first:
            assert first
            held.set()
            waits.wait(60)
            if stores:
                put(home / "bf16_tuned_gemm.csv", SHAPE, Solution("turbo", "a"))

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(60)
    threading.Timer(0.5, waits.set).start()
    out = gemm.gemm_a16w16(x, weight)
    thread.join()

    torch.testing.assert_close(out, LINEAR(x, weight))
    assert gemm.dispatcher.explain(SHAPE, device_of(-1)).tuned is stores
    assert len(warnings(caplog)) == (not stores)
    assert not notes.exists(), "nobody tuned"
    assert not list(home.glob("*online*"))


def test_no_process_waits_longer_than_the_bound(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lock held by another process delays one call by the bound;
    all calls are served without a row."""
    settings = Settings(online=True, online_seconds=0.5)
    gemm, (x, weight) = TunedGemm(fake_registry(), settings=settings), operands()
    held, done = threading.Event(), threading.Event()

    def other() -> None:
        with Online(OP, settings)._hold_turn(SHAPE, device_of(-1)):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(60)
    out = gemm.gemm_a16w16(x, weight)
    gemm.gemm_a16w16(x[None], weight)
    done.set()
    thread.join()

    torch.testing.assert_close(out, LINEAR(x, weight))
    [warning] = warnings(caplog)
    assert "another process has been tuning it for 0.5 s" in warning


@pytest.mark.usefixtures("no_home")
def test_a_folder_that_cannot_be_written_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """If the folder is read-only, all calls are served and one warning names the remedy."""
    gemm = TunedGemm(fake_registry(), settings=ONLINE)

    for n in (32, 48, 64):
        x, weight = operands(n=n)
        torch.testing.assert_close(gemm.gemm_a16w16(x, weight), LINEAR(x, weight))

    [warning] = warnings(caplog)
    assert "online tuning is off" in warning and "TUNEDGEMM_HOME" in warning


def test_a_broken_table_is_a_warning_and_the_call_is_served(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table that cannot be read is not tuned into."""
    home.mkdir()
    (home / "bf16_tuned_gemm.csv").write_text("no,table\n1,2\n")
    gemm, (x, weight) = TunedGemm(fake_registry(), settings=ONLINE), operands()

    torch.testing.assert_close(gemm.gemm_a16w16(x, weight), LINEAR(x, weight))

    assert [warning for warning in warnings(caplog) if "was not tuned online" in warning and "bf16_tuned_gemm.csv" in warning]


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    ("op", "m", "settings", "tried"),
    [
        ("a16w16", MOST_M, Settings(online=True), True),
        ("a16w16", MOST_M + 1, Settings(online=True), False),
        ("fmoe", MOST_M + 1, Settings(online=True), False),
        ("fmoe", MOST_M + 1, Settings(online_moe=True), True),
    ],
    ids=["512", "513", "fmoe", "fmoe by its own variable"],
)
def test_large_m_is_for_the_variable_of_fmoe_alone(
    op: str, m: int, settings: Settings, tried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """HIP_ONLINE_TUNING acts up to M = 512, as in AITER; AITER_ONLINE_TUNE at any M."""
    assert not Online(op_named(op), settings)(Shape(op, m, 32, 64), device_of(-1))

    assert bool(warnings(caplog)) is tried


def test_the_tuner_is_imported_only_on_request(child: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables a call loads no module for online tuning;
    with them, neither the tuner nor pandas."""
    source = (
        "import sys, torch, tunedgemm\ntunedgemm.gemm_a16w16(torch.ones(0, 64), torch.ones(32, 64))\n"
        "print(sorted({'tunedgemm.dispatch.online', 'tunedgemm.tuner', 'pandas', 'subprocess'} & set(sys.modules) - before))"
    )
    source = f"import sys, torch\nbefore = set(sys.modules)\n{source}"
    assert child(source) == "[]"

    monkeypatch.setenv("HIP_ONLINE_TUNING", "1")
    assert child(source) == "['tunedgemm.dispatch.online']"
