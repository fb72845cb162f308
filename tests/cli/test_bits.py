"""``tunedgemm bits`` and ``table check --bits``: do tables, machines and versions give the same bits?"""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch
import tunedgemm.backends.registry
import tunedgemm.cli.table.check
from tunedgemm.analysis.bit_labels import proved
from tunedgemm.cli import main
from tunedgemm.device import current_device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.table.folders import home_folder
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.tuner.bits import StandardOperands, measure

OP, NAME = op_named("a16w16"), "bf16_tuned_gemm.csv"
OURS, THEIRS = "3f" * 8, "ab" * 8
KERNEL = Solution("turbo", "good")
GROUPS = [Shape("a16w16", 0, n, 128) for n in (32, 64, 96)]


def table(path: Path, labels: dict[Shape, str], solution: Solution | None = None, ms: tuple[int, ...] = (0, 16)) -> str:
    """Write rows of this device with labels; return the path."""
    device, path = current_device(), path / NAME
    path.parent.mkdir(exist_ok=True, parents=True)
    solution = solution or KERNEL
    rows = [
        Row(group.with_m(m), device.gfx, device.cu_num, device.name, solution, us=1.0, bit_class=label)
        for group, label in labels.items()
        for m in ms
    ]
    write_rows(path, OP, rows)
    return str(path)


@pytest.fixture
def label(monkeypatch: pytest.MonkeyPatch) -> str:
    """Install one backend, whose rows do not depend on M; return its label in the first group."""

    def call(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.double() @ weight.double().t()).to(x.dtype)

    backend = fake_backend("turbo", solutions=(KERNEL,), call=call)
    for module in (tunedgemm.backends.registry, tunedgemm.cli.table.check):
        monkeypatch.setattr(module, "Registry", lambda: fake_registry(backend))
    operands = StandardOperands(OP, GROUPS[0], current_device().torch_device)
    return measure(operands, lambda at: backend.bind(KERNEL, at, current_device())).label


def test_two_tables_are_compared_by_their_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each N and K has one class in both, another, or none in one; the exit code tells."""
    first = table(tmp_path / "a", {GROUPS[0]: OURS, GROUPS[1]: OURS})
    second = table(tmp_path / "b", {GROUPS[0]: OURS, GROUPS[1]: THEIRS, GROUPS[2]: OURS})

    assert main(["bits", first, second]) == 1
    text = capsys.readouterr().out
    assert f"different: N=64 K=128 bf16: {OURS} in {first}, {THEIRS} in {second}\n" in text
    assert f"missing: N=96 K=128 bf16: no class in {first}, {OURS} in {second}\n" in text
    assert text.endswith("1 same, 1 different, 1 missing\n") and "N=32" not in text
    assert main(["bits", first, first, "-v"]) == 0
    assert "same: N=32 K=128 bf16" in capsys.readouterr().out
    assert main(["bits", first, second, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"]) == ("tunedgemm.bits", 1)
    assert [(group["shape"]["n"], group["verdict"]) for group in document["groups"]] == [(32, "same"), (64, "different"), (96, "missing")]


def test_tables_without_classes_prove_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tables without a class are no proof of equal bits."""
    plain = table(tmp_path / "a", {GROUPS[0]: ""})

    assert main(["bits", plain, plain]) == 1
    assert main(["bits", "--prove", plain]) == 1
    assert "no row of either table has a bit class" in (text := capsys.readouterr().out)
    assert "`tunedgemm tune --batch-invariant` tunes them" in text


@pytest.mark.parametrize("count", [0, 1, 3])
def test_two_tables_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    """The error names the flag that takes any number."""
    assert main(["bits", *[table(tmp_path / "a", {GROUPS[0]: OURS})] * count]) == 2
    assert f"takes two tables to compare (got {count}); --prove takes any number" in capsys.readouterr().err


def test_kernels_are_proved_on_this_device(tmp_path: Path, capsys: pytest.CaptureFixture[str], label: str) -> None:
    """Labels measured here agree with the table's, or the line is named; the user's are the default."""
    table(home_folder() / "batch_invariant", {GROUPS[0]: label})
    edited = table(tmp_path / "edited", {GROUPS[0]: "0" * 16})

    assert main(["bits", "--prove"]) == 0
    assert capsys.readouterr().out == f"N=32 K=128 bf16: turbo:good: {label}\n"
    assert main(["bits", "--prove", edited]) == 1
    assert f"N=32 K=128 bf16: turbo:good: {label}; {edited}:2 has {'0' * 16}\n" in capsys.readouterr().out
    assert main(["bits", "--prove", edited, "--json"]) == 1
    [kernel] = json.loads(capsys.readouterr().out)["kernels"]
    assert (kernel["label"], kernel["bit_class"], kernel["agrees"], kernel["line"]) == (label, "0" * 16, False, 2)


def test_a_vanished_kernel_has_no_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is that of its backend."""
    gone = table(tmp_path / "gone", {GROUPS[0]: OURS}, Solution("torch", "vanished"))

    assert main(["bits", "--prove", gone]) == 1
    assert "torch:vanished: no bit class: it refuses M = 1: " in capsys.readouterr().out


def test_a_row_for_any_m_alone_is_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str], label: str) -> None:
    """No other row tells the order of scales, and every M that its kernel refuses is a fault."""
    alone = table(tmp_path / "alone", {GROUPS[0]: label}, ms=(0,))
    refusing = with_hooks(
        tunedgemm.backends.registry.Registry().get("turbo"), supports=lambda shape: Unsupported("too many") if shape.m > 999 else None
    )

    assert main(["bits", "--prove", alone]) == 0
    [proof] = proved(read_rows(Path(alone), OP)[0], OP, current_device(), fake_registry(refusing))
    assert not proof.agrees and "it refuses M = 1000: too many" in proof.fault


def test_an_unknown_op_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not an op without classes."""
    assert main(["bits", "--prove", "--op", "a99"]) == 2
    assert "a99" in capsys.readouterr().err


def test_table_check_lists_kernels_with_other_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str], label: str) -> None:
    """Only with --bits, which runs them."""
    right, edited = table(tmp_path / "right", {GROUPS[0]: label}), table(tmp_path / "edited", {GROUPS[0]: "0" * 16})

    assert [main(["table", "check", *words]) for words in ([edited], [right, "--bits"], [edited, "--bits"])] == [0, 0, 1]
    assert f"other bits than those of the row's class: N=32 K=128 bf16: turbo:good: {label}; {edited}:2 has" in capsys.readouterr().out


def test_rows_of_another_architecture_are_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table may have rows of several devices."""
    here = table(tmp_path / "a", {GROUPS[0]: OURS})
    rows = [Row(GROUPS[0], "sm_90" if current_device().gfx != "sm_90" else "sm_100", 132, "", Solution("asm", "k"), us=1.0, bit_class=OURS)]
    write_rows(Path(here), OP, [attrs.evolve(row, line=0) for row in rows])

    assert main(["bits", "--prove", here]) == 1
    assert "has a bit class" in capsys.readouterr().out
