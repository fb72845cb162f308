"""Test where packs come from, which kernels may be launched, and that a bad one costs only itself."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm_asm import descriptor, packs, sources
from tunedgemm_asm.manifest import PackError

HEAD = "knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n"
HSA = Path(os.environ.get("AITER_ASM_DIR") or "/nonexistent")

Write = Callable[..., Path]


@pytest.fixture
def write(objects: ModuleType, tmp_path: Path) -> Write:
    """Return a function that writes a pack with descriptor, manifest and code objects."""

    def write(name: str, *kernels: str, gfx: str = "gfx942", said: Mapping[str, Any] | None = None, **made: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        text = {"abi": "aiter-bf16gemm", "gfx": gfx, "manifest": "m.csv", **(said or {})}
        (folder / "pack.json").write_text(json.dumps({key: value for key, value in text.items() if value is not None}))
        (folder / "m.csv").write_text(HEAD + "".join(f"{kernel},{kernel}.co,1,96,64,0,0,0,64,1\n" for kernel in kernels))
        for kernel in kernels:
            (folder / f"{kernel}.co").write_bytes(objects.made([kernel], gfx, **made))
        return folder

    return write


@pytest.fixture
def from_folders(monkeypatch: pytest.MonkeyPatch) -> Callable[..., packs.Catalog]:
    """Return a function that catalogs these folders for an architecture."""

    def found(*folders: Path | str, gfx: str = "gfx942") -> packs.Catalog:
        monkeypatch.setenv(sources.VARIABLE, os.pathsep.join(map(str, folders)))
        packs.reload()
        return packs.catalog_of(gfx)

    return found


def test_a_pack_gives_its_kernels(write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """A pack gives its kernels with bytes, hash and metadata."""
    folder = write("mine", "a", "b")
    found = from_folders(folder)

    assert list(found.kernels) == ["a", "b"] and found.problems == ()
    loaded = found.kernels["a"]
    content = (folder / "a.co").read_bytes()
    assert (loaded.checked().content, loaded.checked().sha256) == (content, hashlib.sha256(content).hexdigest())
    assert loaded.checked().metadata.kernarg_bytes == 352 and loaded.abi.name == "aiter-bf16gemm"
    assert loaded.dtypes["out"] == ("bf16", "fp32") and not loaded.of_aiter
    assert found.missing("a") == "" and packs.catalog_of("gfx942") is found


def test_a_pack_is_for_its_architecture_alone(write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """A kernel of another architecture is missing with that reason."""
    folders = write("old", "a", "both"), write("new", "b", "both", gfx="gfx950")
    found = from_folders(*folders)

    assert list(found.kernels) == ["a", "both"]
    assert found.missing("b") == "the packs have b for gfx950, not for gfx942"
    assert found.missing("c") == "no pack for gfx942 has a kernel c"
    assert packs.catalog_of("gfx90a").missing("a") == "the packs have a for gfx942, not for gfx90a"
    assert from_folders(gfx="gfx90a").missing("a") == "no pack for gfx90a"


def test_a_folder_of_packs_is_searched(write: Write, from_folders: Callable[..., packs.Catalog], tmp_path: Path) -> None:
    """Packs below a folder are found; hidden folders and caches are skipped."""
    write("all/gfx942", "a")
    write("all/gfx950", "b", gfx="gfx950")
    write("all/.hidden", "c")
    write("all/__pycache__", "d")
    found = from_folders(tmp_path / "all")

    assert (list(found.kernels), found.problems) == (["a"], ())
    assert list(packs.catalog_of("gfx950").kernels) == ["b"]


def test_the_earlier_of_two_packs_keeps_a_name(write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """Of two packs with one kernel the earlier has it."""
    first, second = write("first", "a", "b"), write("second", "a", "b", "c")
    found = from_folders(first, second)

    assert {name: loaded.pack.name for name, loaded in found.kernels.items()} == {"a": "first", "b": "first", "c": "second"}
    assert found.problems == (f"pack second ({second}): a and 1 more: already given by first",)
    assert from_folders(first, first).problems == ()


def test_a_pack_that_cannot_be_used_does_not_hide_a_later_one(
    write: Write, from_folders: Callable[..., packs.Catalog], objects: ModuleType
) -> None:
    """An unfit code object gives way to a later pack's."""
    first, second, third = write("first", "a", "b"), write("second", "a", "b"), write("third", "b")
    for folder, kernel in ((first, "a"), (first, "b"), (second, "b"), (third, "b")):
        (folder / f"{kernel}.co").write_bytes(b"MZ" if kernel == "a" else objects.made(["other"]))
    found = from_folders(first, second, third)

    assert {name: loaded.pack.name for name, loaded in found.kernels.items()} == {"a": "second", "b": "first"}
    assert found.kernels["a"].checked().content and found.missing("a") == ""
    assert f"pack first ({first}): a.co: not an ELF file: it begins with 4d5a" in found.problems
    assert found.missing("b") == f"pack first ({first}): b.co: no kernel b; kernels: other"


@pytest.mark.parametrize("kind", ["a link to itself", "no such user", "a long path", "no permission", "a long name"])
def test_an_unreadable_folder_costs_only_itself(kind: str, write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """An inaccessible folder is a problem, and other packs are used."""
    good, bad = write("good", "g"), write("bad", "a", "b")
    place, reason = str(bad), ""
    if kind == "a link to itself":
        (bad / "a.co").unlink()
        (bad / "a.co").symlink_to("a.co")
        reason = "a.co"
    elif kind == "no such user":
        place, reason = "~nosuchuser/x", "TUNEDGEMM_ASM_PACKS: ~nosuchuser/x: "
    elif kind == "a long path":
        place, reason = f"/{'x' * 5000}", "TUNEDGEMM_ASM_PACKS: /xxx"
    elif kind == "a long name":
        (bad / "pack.json").write_text('{"abi": "aiter-bf16gemm", "gfx": "gfx942", "manifest": "' + "x" * 5000 + '"}')
        reason = "File name too long"
    else:
        if os.geteuid() == 0:
            pytest.skip("root may look into every folder")
        bad.chmod(0o600)
        reason = f"{bad}: cannot be searched: "
    try:
        found = from_folders(place, good)
    finally:
        bad.chmod(0o700)

    assert found.kernels["g"].checked().content
    assert any(reason in problem and len(problem) < 1200 for problem in found.problems), found.problems
    assert set(found.kernels) == ({"b", "g"} if kind == "a link to itself" else {"g"})


def test_a_folder_without_a_pack_is_reported(from_folders: Callable[..., packs.Catalog], tmp_path: Path) -> None:
    """A missing or empty folder is a problem."""
    (tmp_path / "empty").mkdir()
    found = from_folders(tmp_path / "absent", "", " ", tmp_path / "empty")

    assert found.problems[0] == f"TUNEDGEMM_ASM_PACKS: folder not found: {tmp_path / 'absent'}"
    assert found.problems[1].startswith(f"{tmp_path / 'empty'} holds no pack") and len(found.problems) == 2
    assert found.kernels == {}


def test_a_bad_descriptor_costs_only_its_pack(write: Write, from_folders: Callable[..., packs.Catalog], failing: Any) -> None:
    """A bad descriptor is refused with folder and reason, and other packs are used."""
    good = write("good", "b")

    def check(said: Mapping[str, Any], reason: str) -> None:
        bad = write(f"bad{len(list(good.parent.iterdir()))}", "a", said=said)
        catalog = from_folders(bad, good)
        (problem,) = catalog.problems
        assert str(bad) in problem and reason in problem
        assert list(catalog.kernels) == ["b"]

    cases: list[tuple[Mapping[str, Any], str]] = [
        ({"abi": None}, "pack.json: abi must be text"),
        ({"abi": "mine"}, "unknown abi 'mine'; known: aiter-bf16gemm, "),
        ({"gfx": "gfx942:xnack+"}, "invalid gfx 'gfx942:xnack+'; expected an architecture"),
        ({"gfx": 942}, "gfx must be text"),
        ({"manifest": "../m.csv"}, "manifest: '../m.csv' is outside the pack's folder"),
        ({"manifest": "n.csv"}, "file not found: n.csv"),
        ({"tile": 1}, "unknown key 'tile'; known: abi, gfx, manifest"),
        ({"of_aiter": True}, "unknown key 'of_aiter'"),
        ({"name": "a\nb"}, "name must be text"),
        ({"dtypes": ["bf16"]}, "dtypes must be an object with some of the keys x, weight, out, bias"),
        ({"dtypes": {"y": "bf16"}}, "dtypes must be an object"),
        ({"dtypes": {"out": "fp16"}}, "dtypes: out 'fp16'; aiter-bf16gemm has bf16 fp32"),
        ({"dtypes": {"out": [{}]}}, "dtypes: out"),
        ({"sha256": {"a.co": "12"}}, "sha256 must be an object of files and 64 hexadecimal digits"),
        ({"sha256": {"../a.co": "0" * 64}}, "sha256: '../a.co' is outside"),
    ]
    assert not failing(check, cases)


def test_a_descriptor_that_is_not_a_json_object_is_refused(write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """A descriptor that is not a JSON object is refused."""
    folder = write("bad", "a")
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (descriptor.MAX_BYTES + 1)):
        (folder / "pack.json").write_bytes(content)
        (problem,) = from_folders(folder).problems
        assert f"pack {folder}: pack.json: " in problem


def test_a_path_that_leads_out_is_refused(write: Write, from_folders: Callable[..., packs.Catalog], tmp_path: Path) -> None:
    """A path out of the folder is refused, by text or by link."""
    folder = write("mine", "a", "b")
    (tmp_path / "outside.co").write_bytes((folder / "a.co").read_bytes())
    (folder / "a.co").unlink()
    (folder / "a.co").symlink_to(tmp_path / "outside.co")
    (folder / "m.csv").write_text((folder / "m.csv").read_text().replace("b.co", "../outside.co"))
    found = from_folders(folder)

    assert found.kernels == {}
    assert "column co_name: '../outside.co' is outside the pack's folder" in found.missing("b")
    assert "a.co is outside the pack's folder" in found.missing("a")


@pytest.mark.parametrize("name", ["m.csv", "pack.json"])
def test_a_packs_files_are_inside_its_folder(name: str, write: Write, from_folders: Callable[..., packs.Catalog], tmp_path: Path) -> None:
    """Links out of the folder and pipes are refused."""
    folder = write("mine", "a")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    (problem,) = from_folders(folder).problems
    assert f"{name} is outside the pack's folder: {tmp_path / name}" in problem

    (folder / name).unlink()
    os.mkfifo(folder / name)
    (problem,) = from_folders(folder).problems
    assert ("file not found: m.csv" if name == "m.csv" else "holds no pack") in problem


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"exported": ["other"]}, "is not exported"),
        ({"kernarg_bytes": 128}, "arguments take 128 bytes"),
        ({"workgroup": 64}, "built for workgroups of 64 threads"),
        ({"target": "gfx950"}, "header and metadata disagree (got gfx942 and"),
        ({"lds_bytes": 1 << 17}, "exceed the 65536 of gfx942"),
    ],
)
def test_a_bad_code_object_is_refused_before_any_launch(
    made: Mapping[str, Any], reason: str, write: Write, from_folders: Callable[..., packs.Catalog], objects: ModuleType
) -> None:
    """An unfit code object is refused with pack, file and reason, each time."""
    folder = write("mine", "a", "b")
    (folder / "a.co").write_bytes(objects.made(["a"], **made))
    found = from_folders(folder)
    assert found.problems == ()
    assert reason in found.missing("a"), "it is read for the answer"

    for _ in range(2):
        with pytest.raises(PackError) as caught:
            found.kernels["a"].checked()
        assert str(caught.value).startswith(f"pack mine ({folder}): a.co: ") and reason in str(caught.value)
    assert found.kernels["b"].checked().content
    assert found.problems == (str(caught.value),) and found.missing("a") == str(caught.value)


@pytest.mark.parametrize("kind", ["truncated", "another architecture", "another symbol", "gone"])
def test_a_replaced_file_is_refused(kind: str, write: Write, from_folders: Callable[..., packs.Catalog], objects: ModuleType) -> None:
    """A file replaced after listing is refused."""
    folder = write("mine", "a")
    content = (folder / "a.co").read_bytes()
    found = from_folders(folder)
    {
        "truncated": lambda: (folder / "a.co").write_bytes(content[: len(content) // 2]),
        "another architecture": lambda: (folder / "a.co").write_bytes(objects.made(["a"], "gfx950")),
        "another symbol": lambda: (folder / "a.co").write_bytes(objects.made(["b"])),
        "gone": (folder / "a.co").unlink,
    }[kind]()
    reasons = {
        "truncated": "truncated",
        "another architecture": "for gfx950",
        "another symbol": "no kernel a; kernels: b",
        "gone": "file not found: a.co",
    }
    with pytest.raises(PackError, match=reasons[kind]):
        found.kernels["a"].checked()


def test_the_hashed_bytes_are_those_that_run(write: Write, from_folders: Callable[..., packs.Catalog], tmp_path: Path) -> None:
    """A file that changed since it was hashed is refused."""
    folder = write("mine", "a", "b")
    found = from_folders(folder)
    assert found.version
    (folder / "a.co").write_bytes((folder / "a.co").read_bytes() + b"\0")
    (folder / "b.co").rename(tmp_path / "b.co")
    (folder / "b.co").symlink_to(tmp_path / "b.co")

    assert found.missing("a") == f"pack mine ({folder}): a.co changed since it was listed"
    assert "b.co is outside the pack's folder" in found.missing("b")
    assert from_folders(folder).missing("a") == "", "it is listed again"


def test_a_file_that_cannot_be_read_is_tried_again(write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """An unreadable file is retried."""
    folder = write("mine", "a")
    found = from_folders(folder)
    content = (folder / "a.co").read_bytes()
    (folder / "a.co").unlink()
    away = found.version
    assert found.missing("a") == f"pack mine ({folder}): file not found: a.co" == found.problems[0]

    (folder / "a.co").write_bytes(content)
    assert found.kernels["a"].checked().content == content and found.problems == ()
    there = found.version
    (folder / "a.co").write_bytes(b"")
    assert len({away, there, from_folders(folder).version}) == 3


def test_a_hash_that_is_promised_is_checked(write: Write, from_folders: Callable[..., packs.Catalog], objects: ModuleType) -> None:
    """A promised hash is checked."""
    content = objects.made(["a"])
    right = write("right", "a", said={"sha256": {"a.co": hashlib.sha256(content).hexdigest()}})
    wrong = write("wrong", "a", said={"sha256": {"a.co": "0" * 64}})

    assert from_folders(right).kernels["a"].checked().content == content
    with pytest.raises(PackError, match=r"sha256 mismatch \(got [0-9a-f]{64}\); pack.json has 0000"):
        from_folders(wrong).kernels["a"].checked()


def test_dtypes_of_a_descriptor_narrow_those_of_the_layout(write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """A descriptor narrows the dtypes of its kernels."""
    folder = write("mine", "a", said={"dtypes": {"out": "fp32", "x": ["bf16"]}})
    found = from_folders(folder)
    assert found.kernels["a"].dtypes["out"] == ("fp32",) and found.kernels["a"].kernel.outputs == ("fp32",)

    (folder / "m.csv").write_text(HEAD.strip() + ",outputs\na,a.co,1,96,64,0,0,0,64,1,bf16\n")
    assert "writes bf16, but its pack declares fp32" in from_folders(folder).missing("a")


def test_the_version_follows_every_byte(write: Write, from_folders: Callable[..., packs.Catalog]) -> None:
    """The version changes with every byte of a pack."""
    folder = write("mine", "a", "b")
    first = from_folders(folder).version
    assert first.startswith("asm ") and len(first) == 16 and from_folders(folder).version == first

    (folder / "a.co").write_bytes((folder / "a.co").read_bytes() + b"\0")
    second = from_folders(folder).version
    (folder / "m.csv").write_text((folder / "m.csv").read_text().replace(",96,", ",80,", 1))
    third = from_folders(folder).version
    (folder / "pack.json").write_text((folder / "pack.json").read_text() + " ")
    fourth = from_folders(folder).version

    assert len({first, second, third, fourth}) == 4
    assert from_folders().version == ""


def test_aiters_own_tree_needs_no_descriptor(
    objects: ModuleType, tmp_path: Path, from_folders: Callable[..., packs.Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AITER's tree is found by its variable and as a named folder."""
    for gfx in ("gfx942", "gfx950"):
        folder = tmp_path / "hsa" / gfx / "fp8gemm_blockscale"
        folder.mkdir(parents=True)
        (folder / "fp8gemm_bf16_blockscale.csv").write_text("tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n32,128,1,1,k,k.co\n")
        (folder / "k.co").write_bytes(objects.made(["k"], gfx, 256))
    (tmp_path / "hsa" / "gfx942" / "fmha").mkdir()  # AITER has many kernels that are no GEMMs

    for place in (tmp_path / "hsa", tmp_path / "hsa" / "gfx942", tmp_path / "hsa" / "gfx942" / "fp8gemm_blockscale"):
        found = from_folders(place)
        assert list(found.kernels) == ["k"] and found.problems == () and found.kernels["k"].checked().content
    monkeypatch.setenv(sources.OF_AITER, str(tmp_path / "hsa") + "/")
    kinds = {gfx: from_folders(gfx=gfx).kernels["k"] for gfx in ("gfx942", "gfx950")}

    assert {gfx: loaded.dtypes["x"] for gfx, loaded in kinds.items()} == {"gfx942": ("fp8_e4m3fnuz",), "gfx950": ("fp8_e4m3fn",)}
    assert all(loaded.of_aiter for loaded in kinds.values())
    assert kinds["gfx950"].pack.source == "AITER_ASM_DIR" and kinds["gfx950"].pack.name == "aiter-gfx950-fp8gemm_blockscale"


def test_shipped_packs_come_last(write: Write, from_folders: Callable[..., packs.Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped packs come after the user's."""
    shipped, named = write("plugin/packs/gfx942", "a", "b"), write("mine", "b")
    monkeypatch.setattr(sources, "__file__", str(shipped.parents[1] / "sources.py"))
    found = from_folders(named)

    assert {name: loaded.pack.source for name, loaded in found.kernels.items()} == {"b": sources.VARIABLE, "a": "tunedgemm-asm"}
    assert found.problems == (f"pack gfx942 ({shipped}): b: already given by mine",)


PROGRAM = """
import sys
from tunedgemm_asm import packs
found = packs.catalog_of("gfx942")
print(sorted((name, loaded.pack.source) for name, loaded in found.kernels.items()))
print([problem for problem in found.problems])
print([name for name in ("example_pack", "bad_pack", "aiter_meta", "torch", "elftools") if name in sys.modules])
"""


def test_installed_packages_are_found_without_importing_them(write: Write, tmp_path: Path) -> None:
    """Installed packages are found without an import, and the working directory is ignored."""
    write("site/example_pack/kernels/gfx942", "theirs")
    write("site/aiter_meta/hsa/gfx942/own", "aiters")
    site = tmp_path / "site"
    for package in ("example_pack", "aiter_meta"):
        (site / package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (info := site / "example_pack-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example-pack\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[tunedgemm.asm_packs]\nexample = example_pack.kernels\nnowhere = example_pack.absent\nno_name = example_pack:kernels/../..\n"
    )
    variables = {key: value for key, value in os.environ.items() if key not in (sources.VARIABLE, sources.OF_AITER)}
    environment = {**variables, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    cwd = tmp_path / "cwd"  # where a folder has a package's name and nothing of it was installed
    write("cwd/example_pack/kernels/gfx942", "trap")
    (cwd / "example_pack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False, cwd=cwd)

    assert done.returncode == 0, done.stderr
    kernels, problems, imported = done.stdout.splitlines()
    assert kernels == "[('aiters', 'AITER (aiter_meta)'), ('theirs', 'example-pack')]"
    assert "entry point nowhere names the package example_pack.absent, which has no folder here" in problems
    assert "'example_pack:kernels/../..' names no package" in problems
    assert imported == "[]"


def test_a_folder_with_aiters_name_is_not_aiter(write: Write, tmp_path: Path) -> None:
    """A folder named like AITER in the working directory is ignored."""
    write("cwd/aiter_meta/hsa/gfx942/own", "trap")
    variables = {key: value for key, value in os.environ.items() if key not in (sources.VARIABLE, sources.OF_AITER)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=variables, check=False, cwd=tmp_path / "cwd")

    assert done.returncode == 0, done.stderr
    assert "trap" not in done.stdout


@pytest.mark.skipif(not HSA.is_dir(), reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
def test_aiters_real_tree_is_found_whole(from_folders: Callable[..., packs.Catalog]) -> None:
    """All 37 and 73 kernels of AITER's tree pass every check."""
    for gfx, count in (("gfx942", 37), ("gfx950", 73)):
        found = from_folders(HSA, gfx=gfx)
        assert len([loaded.checked().content for loaded in found.kernels.values()]) == count and found.problems == ()
