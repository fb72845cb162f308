"""Tables of installed distributions: found without their code, ranked, and refused by name."""

from __future__ import annotations

import csv
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.analysis.doctor import tables
from tunedgemm.analysis.doctor.finding import Section
from tunedgemm.backends.registry import Registry
from tunedgemm.cli import main
from tunedgemm.device import Device
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.ops import op_named
from tunedgemm.process import plugin_guard
from tunedgemm.process.paths import user_folder
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table import folders
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.distributions import distributions
from tunedgemm.table.folders import named_file
from tunedgemm.table.lookup import Table
from tunedgemm.table.published import Provenance, published_text
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks

OP = op_named("a16w16")
H200 = Device("sm_90", 132, "nvidia-h200")
SHAPE = Shape("a16w16", 1, 64, 128)
NAME = "bf16_tuned_gemm.csv"


def row(kernel: str, **more: object) -> Row:
    fields = {"gfx": "sm_90", "cu_num": 132, "device": "nvidia-h200", "us": 5.0, "solution": Solution("triton", kernel), **more}
    return Row(**{"shape": SHAPE, **fields})


@pytest.fixture
def install(importable: Path) -> Callable[..., Path]:
    """Return a function that installs a distribution whose package fails if it is imported."""

    def install(name: str, *rows: Row, version: str = "1.2", value: str = "") -> Path:
        package = importable / f"{name}_tables"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('imported')\n")
        write_rows(importable / "plain.csv", OP, rows or [row(name)])
        (package / NAME).write_text(published_text(Provenance(OP.name), (importable / "plain.csv").read_text()))
        (info := importable / f"{name}_tables-{version}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-tables\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[tunedgemm.tables]\n{name} = {value or package.name}\n")
        return package

    return install


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of stand-ins for the package's tables."""
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "configs")
    (tmp_path / "configs" / folders.MODELS).mkdir(parents=True)
    return tmp_path / "configs"


def served(layers: dict[str, Path]) -> list[tuple[str, str]]:
    """Return kernel and layer of each row that answers, after writing a row into the files of *layers*."""
    for kernel, path in layers.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, OP, [row(kernel, us=9.0)])
    return [(found.row.solution.kernel_name, found.layer) for found in Table.load(OP).candidates(SHAPE, H200)]


def test_they_rank_below_the_user_and_above_the_package(install, shipped: Path, monkeypatch, tmp_path: Path) -> None:
    """The user's table precedes a distribution's, whatever the times, and that precedes the package's."""
    install("zeta")
    install("acme", version="1.10")
    layers = {"mine": user_folder("TUNEDGEMM_HOME", "config") / NAME, "model": shipped / folders.MODELS / NAME, "package": shipped / NAME}
    lower = [
        ("acme", "distribution acme-tables 1.10"),
        ("zeta", "distribution zeta-tables 1.2"),
        ("model", "shipped"),
        ("package", "shipped"),
    ]
    assert served(layers) == [("mine", "user"), *lower]
    monkeypatch.setenv(OP.columns.variable, str(tmp_path / "named.csv"))
    assert served({"named": tmp_path / "named.csv"}) == [("named", "environment")]
    monkeypatch.setenv(OP.columns.variable, f"{tmp_path / 'named.csv'}{os.pathsep}default")
    assert served({}) == [("named", "environment"), ("mine", "user"), *lower]


def test_no_code_of_theirs_is_imported(install) -> None:
    """Finding, reading and explaining do not import the package, and a bare name finds its file."""
    package = install("acme")
    registry = fake_registry(fake_backend("triton", solutions=("acme",)))
    explanation = Dispatcher(OP, registry=registry).explain(SHAPE, H200)
    assert "acme_tables" not in sys.modules
    assert f"{package / NAME}:5 (distribution acme-tables 1.2), 5.00 us, exact M=1" in str(explanation)
    (package / NAME).rename(package / "mine.csv")
    assert named_file("mine.csv") == package / "mine.csv"


def test_one_that_is_installed_later_is_found(install, importable: Path) -> None:
    """A distribution that arrives or leaves counts from the next look on."""
    assert not distributions()
    package = install("acme")
    assert [found.label for found in distributions()] == ["acme-tables 1.2"]
    shutil.rmtree(package)
    shutil.rmtree(importable / "acme_tables-1.2.dist-info")
    assert not distributions()


def tampered(package: Path) -> str:
    (package / NAME).write_text((package / NAME).read_text().replace("acme", "evil"))
    return "the checksum is not that of its content"


def plain(package: Path) -> str:
    write_rows(package / "plain.csv", OP, [row("evil", us=1.0)])
    (package / NAME).unlink()
    return "not a published table; its author writes one with `tunedgemm table publish`"


def later(package: Path) -> str:
    (package / NAME).write_text((package / NAME).read_text().replace("table: 1", "table: 7"))
    return "published in a later format (got 7; this tunedgemm reads 1)"


def unknown_op(package: Path) -> str:
    (package / NAME).write_text(published_text(Provenance("relu16"), "M,N,K\n"))
    return "a table of an unknown op (got 'relu16')"


def removed(package: Path) -> str:
    shutil.rmtree(package)
    return "which has no folder here"


def empty(package: Path) -> str:
    (package / NAME).unlink()
    return "no table in"


@pytest.mark.parametrize("spoil", [tampered, plain, later, unknown_op, removed, empty])
def test_a_bad_table_is_named_and_serves_nothing(install, spoil, caplog: pytest.LogCaptureFixture) -> None:
    """A warning and the doctor name the file or distribution with the remedy, and other tables serve."""
    fault = spoil(install("acme"))
    install("sound")
    with caplog.at_level(logging.WARNING):
        assert [found.row.solution.kernel_name for found in Table.load(OP).candidates(SHAPE, H200)] == ["sound"]
    assert fault in caplog.text
    (found,) = [str(problem) for problem in tables.tables(Registry(), H200).faults if "acme" in str(problem) and not problem.harmless]
    assert fault in found and "; " in found


def doctor(registry: Registry, device: Device = H200) -> Section:
    return tables.tables(registry, device)


def test_the_doctor_names_layer_and_use(install) -> None:
    """The doctor shows the layer, and notes rows for other devices, versions and backends."""
    rows = [row("k"), row("k", shape=attrs.evolve(SHAPE, m=2), solution=Solution("cutlass", "c"))]
    install("acme", *rows, row("k", shape=attrs.evolve(SHAPE, m=3), libver="triton 2"))
    registry = fake_registry(with_hooks(fake_backend("triton"), library_version=lambda: "triton 3"))
    section = doctor(registry)
    (fact,) = [fact for fact in section.facts if "acme_tables" in str(fact.value)]
    assert (fact.more["layer"], fact.more["rows_here"], fact.more["stale"], fact.more["unserved"]) == (
        "distribution acme-tables 1.2",
        3,
        1,
        1,
    )
    notes = [str(fault) for fault in section.faults if "acme_tables" in str(fault) and fault.harmless]
    assert len(notes) == 2 and "(got triton 2, now triton 3); `tunedgemm tune --op a16w16 -i " in notes[0]
    assert "1 row of cutlass that never serve" in notes[1] and "install cutlass" in notes[1]
    (other,) = [str(fault) for fault in doctor(registry, Device("gfx942", 304)).faults if "acme_tables" in str(fault)]
    assert "no row for gfx942, 304 CUs (got rows for sm_90/132)" in other and "install tables of this device" in other


def test_the_strict_check_names_a_device_and_a_backend_that_are_missing(install, capsys, monkeypatch) -> None:
    """`table check` of a sound published table notes rows that cannot serve here, and exits 0."""
    from tunedgemm.cli.table import check

    package = install("acme", row("k", libver="1"), row("c", shape=attrs.evolve(SHAPE, m=2), solution=Solution("cutlass", "c")))
    monkeypatch.setattr(check, "Registry", lambda: fake_registry(with_hooks(fake_backend("triton"), library_version=lambda: "2")))
    assert main(["table", "check", str(package / NAME)]) == 0
    shown = capsys.readouterr().out
    assert "published, and the checksum is right" in shown and "pip install tunedgemm[cutlass]" in shown
    assert "1 row, the first in line 5, saw another version" in shown and "triton: tuned with 1, now 2" in shown
    here = check.current_device()
    assert f"no row for this device, {here}; rows are for sm_90/132; to tune its shapes here, run `tunedgemm tune --op a16w16" in shown


@pytest.mark.timing
def test_a_first_call_takes_few_milliseconds_more(install) -> None:
    """A distribution's 3,000 rows add at most three times what csv takes to read them.

    That is about 9 ms of the processor. The time of other processes does not count.
    """

    def first_call() -> None:
        plugin_guard._installed.cache_clear()
        found.append(next(iter(Table.load(OP).candidates(attrs.evolve(SHAPE, m=7), H200)), None))

    def csv_alone() -> None:
        with (package / NAME).open() as lines:
            assert sum(1 for _ in csv.DictReader(lines)) > len(sizes)

    def least_of(function: Callable[[], None]) -> float:
        taken = []
        for _ in range(7):
            start = time.process_time()
            function()
            taken.append(time.process_time() - start)
        return min(taken)

    found: list[Any] = []
    without = least_of(first_call)
    sizes = [(m, n, k) for n in (64, 1280, 2560, 7168, 8192) for k in (128, 8192) for m in range(1, 301)]
    package = install("acme", *(row(f"k{m % 64}", shape=Shape("a16w16", m, n, k)) for m, n, k in sizes))
    added, alone = least_of(first_call) - without, least_of(csv_alone)
    assert found[-1].row.solution.kernel_name == "k7"
    assert added < 3 * alone, (without, added, alone)
