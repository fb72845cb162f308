"""JSON files at run time: which one answers, what a broken one does, and when a new one is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import tunedgemm
import tunedgemm_triton
from tunedgemm.plugin import Device, Shape, Solution, UserError
from tunedgemm.tools.tables import ops
from tunedgemm_triton import heuristic, launch
from tunedgemm_triton.families import family_of
from tunedgemm_triton.jsonfiles import files
from tunedgemm_triton.jsonfiles.dialect import OURS, TAGS, sizes_of
from tunedgemm_triton.jsonfiles.files import Name

H200, MI300X = Device("sm_90", 132, "nvidia-h200"), Device("gfx942", 304)
SHAPE = Shape("a16w16", 100, 4096, 1024)
WEIGHT = (("N", 4096), ("K", 1024))


def _entry(block_n: int) -> dict[str, object]:
    return {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}


def _kernel(block_n: int) -> str:
    return f"gemm_r1_m64n{block_n}k64_g8_w4s3"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's folder of JSON files, the only one."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "home" / "triton" / "gemm"


def _put(folder: Path, name: Name | str, block_n: int, key: str = "any") -> None:
    path = folder / (name if isinstance(name, str) else name.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: _entry(block_n)}))


def _chosen(shape: Shape = SHAPE, device: Device = H200) -> str:
    solution = tunedgemm_triton.triton.heuristic_fallback(shape, device)
    return solution.kernel_name if solution else ""


def test_names_both_ways() -> None:
    """A name survives its text, flat and nested."""
    for name in (Name("gfx942", "GEMM-A8W8"), Name("sm_90", "BATCHED_GEMM-A16W16", (("B", 16), *WEIGHT)), Name("gfx950", "GEMM-X", WEIGHT)):
        assert files.name_of(Path(name.text)) == name
        assert files.name_of(Path("configs") / name.nested) == name
    assert files.name_of(Path("notes.json")) is None
    assert files.name_of(Path("GEMM-A8W8-N=1-K=2.json")) is None


def test_the_weights_file_replaces_the_default_whole(home: Path) -> None:
    """A weight's file inherits no bucket: where it has none, nothing answers."""
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    assert _chosen() == _kernel(32)
    _put(home, Name("sm_90", "GEMM-A16W16", WEIGHT), 64, key="M_LEQ_64")
    assert _chosen(attrs.evolve(SHAPE, m=64)) == _kernel(64)
    assert _chosen() == ""
    assert _chosen(attrs.evolve(SHAPE, n=2048)) == _kernel(32)


def test_folders_in_their_order(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first folder with a file answers: named ones, the user's, the shipped one."""
    _put(files.SHIPPED, Name("sm_90", "GEMM-A16W16", WEIGHT), 16)
    assert _chosen() == _kernel(16)
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    assert _chosen() == _kernel(32)
    named = [tmp_path / "empty", tmp_path / "aiter"]
    monkeypatch.setenv(files.VARIABLE, os.pathsep.join(map(str, named)))
    assert _chosen() == _kernel(32)
    _put(named[1], "gemm/sm_90-GEMM-A16W16.json", 64)
    assert _chosen() == _kernel(64)
    _put(named[1], "sm_90/triton/gemm/gemm_a16w16/DEFAULT.json", 128)
    assert _chosen() == _kernel(128)
    _put(named[1], "sm_90/triton/gemm/gemm_a16w16/GEMM-A16W16-N=4096-K=1024.json", 256)
    assert _chosen() == _kernel(256)


def test_another_architecture_is_never_used(home: Path) -> None:
    """Files of another architecture answer no call."""
    _put(home, Name("gfx950", "GEMM-A16W16"), 32)
    _put(home, Name("gfx950", "GEMM-A16W16", WEIGHT), 32)
    assert _chosen() == ""
    assert _chosen(device=MI300X) == ""


def test_a_batch_of_that_size_goes_before_any(home: Path) -> None:
    """A file for B, N and K goes before one for N and K."""
    batched = Shape("batched_bf16", 100, 4096, 1024, extra={"B": 8})
    _put(home, Name("sm_90", TAGS["batched_bf16"], WEIGHT), 32)
    assert _chosen(batched) == _kernel(32)
    _put(home, Name("sm_90", TAGS["batched_bf16"], sizes_of(batched)), 64)
    assert _chosen(batched) == _kernel(64)


def test_every_op_has_separate_files(home: Path) -> None:
    """No two ops read the same file, and a file's tag determines its op."""
    shapes = [next((shape for shape in ops()[op].examples if shape.m), SHAPE) for op in OURS.ops]
    names = {OURS.tag_of(shape): shape.op for shape in shapes}
    assert len(names) == len(OURS.ops)
    assert all(OURS.tags[tag] == op for tag, op in names.items())


def test_auto_means_the_choice(home: Path) -> None:
    """``auto``, AITER's other names and none run the choice of a file; without a file the first guess."""
    auto = Solution("triton", "auto")
    guess = heuristic.resolve(auto, SHAPE, H200)
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    assert heuristic.resolve(auto, SHAPE, H200).kernel_name == _kernel(32) != guess.kernel_name
    for alias in ("triton", "gluon", ""):
        assert heuristic.resolve(Solution("triton", alias), SHAPE, H200).kernel_name == _kernel(32)
        assert tunedgemm_triton.triton.lacks(Solution("triton", alias), SHAPE, H200) == ""
    assert next(iter(tunedgemm_triton.triton.solutions(SHAPE, H200))).kernel_name == _kernel(32)
    mx = Shape("a4w4_blockscale", 100, 4096, 1024, "fp4x2", "bf16", scale="block")
    _put(home, Name("sm_90", "GEMM-AFP4WFP4"), 32)
    kernel, split = launch.parse_solution(family_of(mx.op), auto, mx, H200)
    assert (kernel.block_m, kernel.block_n, split) == (64, 32, 1)


def test_a_changed_file_is_read_anew(home: Path) -> None:
    """A change is seen even with the same length and time; a removed file answers no more."""
    path = home / Name("sm_90", "GEMM-A16W16").text
    files.write(path, {"any": _entry(32)})
    assert _chosen() == _kernel(32)
    state = path.stat()
    files.write(path, {"any": _entry(64)})
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    assert _chosen() == _kernel(64)
    path.unlink()
    assert _chosen() == ""


def test_explain_shows_the_choice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untuned call of a described device would get the choice."""
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    monkeypatch.setenv("TUNEDGEMM_FALLBACK", "triton")
    tunedgemm.reload()
    answer = tunedgemm.explain(attrs.evolve(SHAPE, k=1008), device=H200)
    assert (answer.libtype, answer.offer.solution.kernel_name, answer.offer.origin) == ("triton", _kernel(32), "heuristic")
    assert f"heuristic of triton; {home / 'sm_90-GEMM-A16W16.json'}: any: triton:{_kernel(32)}" in str(answer)
    monkeypatch.undo()
    tunedgemm.reload()


def test_explain_names_the_file_and_the_bucket_of_a_row(home: Path, tmp_path: Path) -> None:
    """A row ``auto``, or without a name, shows the file and the bucket, else the first listed kernel."""
    table = tmp_path / "short.csv"
    table.write_text("M,N,K,lib,kernel_name,tflops\n100,4096,1024,triton,auto,9\n100,4096,2048,triton,,9\n")
    gemm = tunedgemm.TunedGemm()
    gemm.load_config(table)
    for line, shape in ((2, SHAPE), (3, attrs.evolve(SHAPE, k=2048))):
        (home / "sm_90-GEMM-A16W16.json").unlink(missing_ok=True)
        first = next(iter(tunedgemm_triton.triton.solutions(shape, H200)))
        assert f"no JSON file has a bucket for it; the first listed: {first}" in str(gemm.dispatcher.explain(shape, H200))
        _put(home, Name("sm_90", "GEMM-A16W16"), 32, key="M_LEQ_128")
        explained = str(gemm.dispatcher.explain(shape, H200))
        assert f"short.csv:{line}" in explained
        assert f"{home / 'sm_90-GEMM-A16W16.json'}: M_LEQ_128: triton:{_kernel(32)}" in explained


BROKEN = [
    ("{", "invalid JSON"),
    ("", "invalid JSON"),
    ("[1]", "must be an object of buckets"),
    ("{}", "must be an object of buckets"),
    ('{"any": 3}', "'any' must be an object"),
    ('{"any": {}}', "'any' must be an object"),
    ('{"any": {"kpack": ' + "[" * 500 + "]" * 500 + "}}", "'kpack' must be a number, a text or null"),
    ('{"any": {"a": 1}, "any": {"a": 2}}', "duplicate key 'any'"),
    ('{"any": {"BLOCK_SIZE_M": 64}}', "BLOCK_SIZE_N is missing"),
    ('{"any": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "speed": 9}}', "have no parameter 'speed'"),
]


def test_a_broken_file_answers_no_call(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the file once, and the call goes to the next backend; `choice_of` raises."""
    home.mkdir(parents=True)
    path = home / Name("sm_90", "GEMM-A16W16").text
    for text, message in BROKEN:
        path.write_text(text)
        caplog.clear()
        heuristic.warn_once.cache_clear()
        assert [_chosen(), _chosen()] == ["", ""]
        assert [str(path) in record.message for record in caplog.records] == [True]
        with pytest.raises(UserError, match=message):
            heuristic.choice_of(OURS, SHAPE, H200)


def test_an_unsigned_file_answers_no_call(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where signatures are required, the user's file serves once it is signed; commands read it before."""
    minisign = pytest.importorskip("minisign")
    pair = minisign.KeyPair.generate()
    (tmp_path / "keys").write_bytes(bytes(pair.public_key) + b"\n")
    _put(home, Name("sm_90", "GEMM-A16W16"), 32)
    monkeypatch.setenv("TUNEDGEMM_REQUIRE_SIGNED", "1")
    monkeypatch.setenv("TUNEDGEMM_TRUSTED_KEYS", str(tmp_path / "keys"))
    path = home / Name("sm_90", "GEMM-A16W16").text
    with pytest.raises(UserError, match=r"GEMM-A16W16.json: unsigned"):
        heuristic.choice_of(OURS, SHAPE, H200)
    assert _chosen() == "" and files.read(path)
    pair.secret_key.sign_file(path, prehash=True, drop_signature=True)
    assert _chosen() == _kernel(32)


def test_a_link_that_changes_spares_no_signature(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that leads to a shipped file when it is judged cannot lead to another when it is read."""
    name, link, real = Name("sm_90", "GEMM-A16W16"), home / "link.json", files.read_regular
    for folder, block_n in (("shipped", 32), ("other", 64)):
        _put(tmp_path / folder, name, block_n)
    home.mkdir(parents=True)
    link.symlink_to(tmp_path / "shipped" / name.text)

    def swapped(path: Path, mib: int) -> bytes:
        link.unlink()
        link.symlink_to(tmp_path / "other" / name.text)
        return real(path, mib)

    monkeypatch.setattr(files, "read_regular", swapped)
    monkeypatch.setenv("TUNEDGEMM_REQUIRE_SIGNED", "1")
    assert files.read(link, serving=True)["any"]["BLOCK_SIZE_N"] == 32


def test_files_are_written_whole(tmp_path: Path) -> None:
    """Writing leaves no temporary file; an impossible folder is an error with its name."""
    files.write(tmp_path / "new" / "a.json", {"any": _entry(32)})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written.*--save-path"):
        files.write(tmp_path / "file" / "a.json", {"any": _entry(32)})


def test_a_folder_that_cannot_be_listed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's folders of processes vanish while they are searched."""
    for name in ("a", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.json").write_text("{}")
    real = os.scandir

    def scandir(path: str | os.PathLike[str] = ".") -> Any:
        if Path(path).name == "gone":
            raise OSError(22, "Invalid argument", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert list(files.listed(tmp_path)) == [tmp_path / "a" / "x.json"]
