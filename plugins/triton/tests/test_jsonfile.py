"""JSON files at run time: which one answers, what a broken one does, and when a new one counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs
import pytest
import tunedgemm
import tunedgemm_triton
from tunedgemm.plugin import Device, Shape, Solution, UserError
from tunedgemm.tools import ops
from tunedgemm_triton import heuristic, jsonfile, plan_launch
from tunedgemm_triton.dialect import OURS, TAGS, sizes_of
from tunedgemm_triton.jsonfile import Name
from tunedgemm_triton.planned import PLANNED

H200, MI300X = Device("sm_90", 132, "nvidia-h200"), Device("gfx942", 304)
SHAPE = Shape("a16w16", 100, 4096, 1024)
WEIGHT = (("N", 4096), ("K", 1024))


def _entry(block_n: int) -> dict[str, object]:
    return {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}


def _kernel(block_n: int) -> str:
    return f"gemm_r1_m64n{block_n}k64_g8_w4s3"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of JSON files, with no other."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(jsonfile.VARIABLE, raising=False)
    monkeypatch.setattr(jsonfile, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "home" / "triton" / "gemm"


def _put(folder: Path, name: Name | str, block_n: int, key: str = "any") -> None:
    path = folder / (name if isinstance(name, str) else name.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: _entry(block_n)}))


def _chosen(shape: Shape = SHAPE, device: Device = H200) -> str:
    found = tunedgemm_triton.heuristic_fallback(shape, device)
    return found.kernel_name if found else ""


def test_names_both_ways() -> None:
    """A name as text is read as itself, flat and nested."""
    for name in (Name("gfx942", "GEMM-A8W8"), Name("sm_90", "BATCHED_GEMM-A16W16", (("B", 16), *WEIGHT)), Name("gfx950", "GEMM-X", WEIGHT)):
        assert jsonfile.name_of(Path(name.text)) == name
        assert jsonfile.name_of(Path("configs") / name.nested) == name
    assert jsonfile.name_of(Path("notes.json")) is None
    assert jsonfile.name_of(Path("GEMM-A8W8-N=1-K=2.json")) is None


def test_the_weights_file_replaces_the_default_whole(home: Path) -> None:
    """No bucket is inherited: where the weight's file has none, nothing answers."""
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    assert _chosen() == _kernel(32)
    _put(home, Name("sm_90", "GEMM-A16W16", WEIGHT), 64, key="M_LEQ_64")
    assert _chosen(attrs.evolve(SHAPE, m=64)) == _kernel(64)
    assert _chosen() == ""
    assert _chosen(attrs.evolve(SHAPE, n=2048)) == _kernel(32)


def test_folders_in_their_order(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named folders, the user's, the shipped ones; the first that has any file for the kernel answers as a whole."""
    _put(jsonfile.SHIPPED, Name("sm_90", "GEMM-A16W16", WEIGHT), 16)
    assert _chosen() == _kernel(16)
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    assert _chosen() == _kernel(32)
    named = [tmp_path / "empty", tmp_path / "aiter"]
    monkeypatch.setenv(jsonfile.VARIABLE, os.pathsep.join(map(str, named)))
    assert _chosen() == _kernel(32)
    _put(named[1], "gemm/sm_90-GEMM-A16W16.json", 64)
    assert _chosen() == _kernel(64)
    _put(named[1], "sm_90/triton/gemm/gemm_a16w16/DEFAULT.json", 128)
    assert _chosen() == _kernel(128)
    _put(named[1], "sm_90/triton/gemm/gemm_a16w16/GEMM-A16W16-N=4096-K=1024.json", 256)
    assert _chosen() == _kernel(256)


def test_another_architecture_is_never_used(home: Path) -> None:
    """Neither its default nor its weight's file."""
    _put(home, Name("gfx950", "GEMM-A16W16"), 32)
    _put(home, Name("gfx950", "GEMM-A16W16", WEIGHT), 32)
    assert _chosen() == ""
    assert _chosen(device=MI300X) == ""


def test_a_batch_of_that_size_goes_before_any(home: Path) -> None:
    """B-N-K, then N-K."""
    batched = Shape("batched_bf16", 100, 4096, 1024, extra={"B": 8})
    _put(home, Name("sm_90", TAGS["batched_bf16"], WEIGHT), 32)
    assert _chosen(batched) == _kernel(32)
    _put(home, Name("sm_90", TAGS["batched_bf16"], sizes_of(batched)), 64)
    assert _chosen(batched) == _kernel(64)


def test_every_op_has_files_of_its_own(home: Path) -> None:
    """No two ops read the same file, and each file's name tells its op."""
    shapes = [next((shape for shape in ops()[op].examples if shape.m), SHAPE) for op in OURS.ops]
    names = {OURS.tag_of(shape): shape.op for shape in shapes}
    assert len(names) == len(OURS.ops)
    assert all(OURS.tags[tag] == op for tag, op in names.items())


def test_auto_means_the_choice(home: Path) -> None:
    """The alias, and a row without a kernel's name, run what the file says; without a file the first guess."""
    auto = Solution("triton", "auto")
    guess = heuristic.resolve(auto, SHAPE, H200)
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    assert heuristic.resolve(auto, SHAPE, H200).kernel_name == _kernel(32) != guess.kernel_name
    assert next(iter(tunedgemm_triton.enumerate_solutions(SHAPE, H200))).kernel_name == _kernel(32)
    mx = Shape("a4w4_blockscale", 100, 4096, 1024, "fp4x2", "bf16", scale="block")
    _put(home, Name("sm_90", "GEMM-AFP4WFP4"), 32)
    kernel, split = plan_launch._resolved(PLANNED[mx.op], auto, mx, H200)
    assert (kernel.block_m, kernel.block_n, split) == (64, 32, 1)


def test_a_changed_file_is_read_anew(home: Path) -> None:
    """Also one that is as long as the one before, of the same time, as a quick writer leaves it; and one that has gone is gone."""
    path = home / Name("sm_90", "GEMM-A16W16").text
    jsonfile.write(path, {"any": _entry(32)})
    assert _chosen() == _kernel(32)
    state = path.stat()
    jsonfile.write(path, {"any": _entry(64)})
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    assert _chosen() == _kernel(64)
    path.unlink()
    assert _chosen() == ""


def test_explain_tells_of_the_choice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untuned call of a device that is not even here would get it."""
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    monkeypatch.setenv("TUNEDGEMM_FALLBACK", "triton")
    tunedgemm.reload()
    told = tunedgemm.explain(attrs.evolve(SHAPE, k=1008), device=H200)
    assert (told.libtype, told.offer.solution.kernel_name, told.offer.origin) == ("triton", _kernel(32), "heuristic")
    monkeypatch.undo()
    tunedgemm.reload()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("", "is no JSON"),
        ("[1]", "must be an object of buckets"),
        ("{}", "must be an object of buckets"),
        ('{"any": 3}', "'any' must be an object"),
        ('{"any": {}}', "'any' must be an object"),
        ('{"any": {"a": 1}, "any": {"a": 2}}', "stands there twice"),
        ('{"any": {"BLOCK_SIZE_M": 64}}', "lacks BLOCK_SIZE_N"),
        ('{"any": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "speed": 9}}', "no parameter|has a parameter 'speed'"),
    ],
)
def test_a_broken_file_serves_nobody_and_stops_nothing(home: Path, caplog: pytest.LogCaptureFixture, text: str, said: str) -> None:
    """One line in the log names the file; the call goes to the next backend. Asked for, it is an error."""
    home.mkdir(parents=True)
    path = home / Name("sm_90", "GEMM-A16W16").text
    path.write_text(text)
    heuristic._tell.cache_clear()
    assert [_chosen(), _chosen()] == ["", ""]
    assert [str(path) in record.message for record in caplog.records] == [True]
    with pytest.raises(UserError, match=said):
        heuristic.choice_of(OURS, SHAPE, H200)


def test_files_are_written_whole(tmp_path: Path) -> None:
    """Nothing is left beside the file, and a folder that cannot be made is a mistake that names itself."""
    jsonfile.write(tmp_path / "new" / "a.json", {"any": _entry(32)})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written.*--save-path"):
        jsonfile.write(tmp_path / "file" / "a.json", {"any": _entry(32)})
