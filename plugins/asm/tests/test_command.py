"""Test ``tunedgemm asm``, ``plugins -v``, ``table check`` and ``explain`` on packs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import Device
from tunedgemm_asm import command, packs, sources

HEAD = "knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n"
Write = Callable[..., Path]


@pytest.fixture
def write(objects: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a pack and names its folder in the environment."""

    def write(name: str, kernels: Mapping[str, Mapping[str, Any]], gfx: str = "gfx942", **said: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pack.json").write_text(json.dumps({"abi": "aiter-bf16gemm", "gfx": gfx, "manifest": "m.csv", **said}))
        (folder / "m.csv").write_text(HEAD + "".join(f"{kernel},{kernel}.co,1,96,64,3,1,1,64,1\n" for kernel in kernels))
        for kernel, made in kernels.items():
            (folder / f"{kernel}.co").write_bytes(objects.made([kernel], gfx, **made))
        monkeypatch.setenv(sources.VARIABLE, str(tmp_path))
        packs.reload()
        return folder

    return write


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    (script,) = entry_points(group="console_scripts", name="tunedgemm")
    code = script.load()(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_list_prints_packs_kernels_and_refusals(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """`asm list` shows packs by architecture, and with -v kernels and refusals."""
    folder = write("mine", {"a": {}, "broken": {"kernarg_bytes": 8}})
    write("other", {"b": {}}, gfx="gfx950")
    digest = packs.catalog_of("gfx942").packs[0].sha256

    code, out, _ = run(capsys, "asm", "list")
    assert code == 0
    assert out[:2] == [
        "gfx942: 2 kernels in 1 packs",
        f"  pack mine ({folder}, by TUNEDGEMM_ASM_PACKS): 2 kernels of aiter-bf16gemm, sha256 {digest}",
    ]
    assert out[2] == "gfx950: 1 kernels in 1 packs" and not any("broken" in line for line in out), "code is read with -v alone"
    code, out, _ = run(capsys, "asm", "list", "-v", "--gfx", "gfx942")
    assert code == 0 and "gfx950" not in "".join(out)
    sha256 = packs.catalog_of("gfx942").kernels["a"].checked().sha256[:12]
    marks = "96x64, prefetch 3, shuffled weights, splits K, bias, bf16 fp32, 256 VGPRs, 65536 bytes of LDS"
    assert f"    a: {marks}, sha256 {sha256}" in out
    assert out[-1].startswith(f"refused: pack mine ({folder}): broken.co: arguments take 8 bytes")


def test_list_without_packs_says_how_to_get_some(capsys: pytest.CaptureFixture[str]) -> None:
    """Without packs, `asm list` exits with 0 and says how to get some."""
    code, out, _ = run(capsys, "asm", "list")
    assert code == 0 and out == [packs.NONE]


def test_check_passes_a_good_pack(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """`asm check` exits with 0 on a good pack and prints harmless oddities as notes."""
    folder = write("mine", {"a": {}, "b": {"changes": {".vgpr_spill_count": 4}}})
    (folder / "old.co").write_bytes(b"")
    code, out, _ = run(capsys, "asm", "check", "-v", folder)

    assert code == 0 and out[-1] == f"{folder}: no fault"
    assert f"note: pack mine ({folder}): no usable kernel in old.co" in out
    assert f"note: pack mine ({folder}): b spills 4 registers" in out
    assert any(line.startswith("  a: 96x64") for line in out)


def test_check_names_every_fault(write: Write, capsys: pytest.CaptureFixture[str], failing: Any, tmp_path: Path) -> None:
    """`asm check` exits with 1 and names the pack, the file or kernel, and the reason."""

    def check(spoil: Callable[[Path], Any], fault: str) -> None:
        folder = write(f"mine{len(list(tmp_path.iterdir()))}", {"a": {}, "b": {}})
        assert run(capsys, "asm", "check", folder)[0] == 0
        spoil(folder)
        code, out, _ = run(capsys, "asm", "check", folder)
        assert any(fault in line and str(folder) in line for line in out), out
        assert code == (0 if fault == "it has no kernel" else 1)
        assert (f"{folder}: no fault" in out) == (code == 0)

    cases: list[tuple[Callable[[Path], Any], str]] = [
        (lambda folder: (folder / "a.co").write_bytes((folder / "a.co").read_bytes()[:900]), "a.co: truncated"),
        (lambda folder: (folder / "a.co").write_bytes(b"MZ"), "a.co: not an ELF file"),
        (lambda folder: (folder / "a.co").unlink(), "a: file not found: a.co"),
        (lambda folder: (folder / "a.co").write_bytes((folder / "b.co").read_bytes()), "a.co: no kernel a; kernels: b"),
        (lambda folder: (folder / "m.csv").write_text(HEAD), "it has no kernel"),
        (lambda folder: edit(folder / "m.csv", "\nb,b.co", "\na,b.co"), "a: m.csv: listed 2 times, in lines 2, 3"),
        (lambda folder: edit(folder / "m.csv", "a.co", "../a.co"), "'../a.co' is outside the pack's folder"),
        (lambda folder: edit(folder / "m.csv", ",bias", ",biased"), "unknown columns: biased"),
        (lambda folder: edit(folder / "pack.json", "gfx942", "gfx950"), "a.co: built for gfx942, not gfx950"),
        (
            lambda folder: edit(folder / "pack.json", "aiter-bf16gemm", "tunedgemm-bf16"),
            "arguments take 352 bytes; tunedgemm-bf16 passes 96",
        ),
        (
            lambda folder: edit(folder / "pack.json", "}", ', "sha256": {"c.co": "' + "0" * 64 + '"}}'),
            "sha256 of c.co, which has no usable kernel",
        ),
    ]
    assert not failing(check, cases)


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def test_check_reads_several_folders_together(write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`asm check` reports a kernel given twice for one architecture, and folders without a pack."""
    first, second, third = write("first", {"a": {}}), write("second", {"a": {}}), write("third", {"a": {}}, gfx="gfx950")
    code, out, _ = run(capsys, "asm", "check", first, third)
    assert code == 0
    code, out, _ = run(capsys, "asm", "check", first, second)
    assert code == 1 and f"pack second ({second}): a is already given by first ({first})" in out
    (empty := tmp_path / "none").mkdir()
    code, out, _ = run(capsys, "asm", "check", empty)
    assert code == 1 and "holds no pack" in out[0]
    for absent in (tmp_path / "absent", tmp_path / ("x" * 5000)):
        code, _, err = run(capsys, "asm", "check", absent)
        assert code == 2 and f"folder not found: {absent}" in err


def test_plugins_lists_packs_with_their_hashes(write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`plugins -v` shows the packs of the present device with hashes, and refusals."""
    monkeypatch.setenv("COLUMNS", "400")  # pytest-xdist sets 80, which folds the cell
    folder = write("mine", {"a": {}, "broken": {"workgroup": 64}})
    monkeypatch.setattr("tunedgemm.device.current_device", lambda: Device("gfx942", 304))
    code, out, _ = run(capsys, "plugins", "-v")

    assert code == 0
    digest = packs.catalog_of("gfx942").packs[0].sha256
    assert f"asm: pack mine ({folder}, by TUNEDGEMM_ASM_PACKS): 2 kernels of aiter-bf16gemm, sha256 {digest}" in out
    assert any(line.startswith(f"asm: refused: pack mine ({folder}): broken.co: built for workgroups of 64") for line in out)
    assert any(packs.catalog_of("gfx942").version in line for line in out), "what goes into a table's column libver"


def test_details_need_no_earlier_read_of_packs() -> None:
    """`details` works in a process that has not imported `packs`."""
    code = "from tunedgemm.plugin import Device; from tunedgemm_asm import asm; print(*asm.details(Device('gfx942', 304)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "gfx942" in done.stdout or "no pack" in done.stdout


def test_table_check_notes_rows_without_their_kernel(write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`table check` notes rows whose kernel is missing or of another architecture."""
    write("mine", {"a": {}})
    write("other", {"b": {}}, gfx="gfx950")
    rows = "".join(
        f"{gfx},304,{m},64,128,False,torch.bfloat16,torch.bfloat16,False,True,asm,0,2,9.5,{kernel},0.0,1,1\n"
        for m, (gfx, kernel) in enumerate([("gfx942", "a"), ("gfx942", "b"), ("gfx942", "b"), ("gfx950", "b"), ("gfx950", "c")], 1)
    )
    columns = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
    (path := tmp_path / "bf16_tuned_gemm.csv").write_text(columns + rows)
    code, out, _ = run(capsys, "table", "check", path)

    assert code == 0 and out[0] == f"{path}: 5 rows, no fault"
    assert out[1:-1] == [
        f"note: {path}: 2 rows are misses here, the first in line 3: asm: the packs have b for gfx950, not for gfx942",
        f"note: {path}: one row is a miss here, in line 6: asm: no pack for gfx950 has a kernel c",
    ]
    assert "no row for this device" in out[-1]


def test_build_without_the_generator_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`asm build` needs a distribution of its family, and names the extra that installs it."""
    monkeypatch.setattr(command, "entry_points", lambda **_: ())
    code, _, err = run(capsys, "asm", "build", "--gfx", "gfx942", "-o", tmp_path)
    assert code == 2 and err.count("\n") == 1
    assert "asm build: the generator is not installed (got no tunedgemm-asm-gcn); pip install 'tunedgemm-asm[gcn]'" in err


def test_explain_has_the_reason_against_a_rows_kernel(
    write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain` names the reason why a row's kernel is skipped."""
    write("mine", {"a": {}})
    write("other", {"b": {}}, gfx="gfx950")
    columns = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
    row = "gfx942,304,{},64,128,False,torch.bfloat16,torch.bfloat16,False,True,asm,0,2,9.5,{},0.0,1,1\n"
    (path := tmp_path / "t.csv").write_text(columns + row.format(96, "a") + row.format(64, "b"))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(path))

    code, out, _ = run(capsys, "explain", "96,64,128", "--device", "gfx942:304", "--layout", "aiter16x16")
    assert code == 0 and any("runs asm:a splitK=2" in line for line in out), out
    code, out, _ = run(capsys, "explain", "64,64,128", "--device", "gfx942:304", "--layout", "aiter16x16")
    assert code == 0 and any("not asm:b splitK=2: asm refuses: the packs have b for gfx950, not for gfx942" in line for line in out), out
