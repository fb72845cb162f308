"""Packs: descriptors, manifests and code objects that were changed cost only themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

packs = pytest.importorskip("tunedgemm_asm.packs")

from tunedgemm.testing.siblings import module_at  # noqa: E402
from tunedgemm_asm import codeobject, manifest  # noqa: E402
from tunedgemm_asm.abi import ABIS  # noqa: E402
from tunedgemm_asm.manifest import PackError  # noqa: E402

OBJECTS = Path(__file__).parents[2] / "plugins" / "asm" / "tests" / "objects"
HEAD = b"knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n"
LINES = HEAD + b"a,a.co,1,96,64,0,0,0,64,1\nb,b.co,1,96,64,1,1,1,64,0 # fast\n"


@pytest.fixture(scope="session")
def code() -> bytes:
    """Return a code object with the kernel ``a``."""
    content: bytes = module_at(OBJECTS).made(["a"])
    return content


@pytest.fixture
def folder(tmp_path: Path, code: bytes) -> Path:
    """Return a pack's folder."""
    said = {"abi": "aiter-bf16gemm", "gfx": "gfx942", "manifest": "m.csv", "name": "mine", "dtypes": {"out": ["bf16"]}, "sha256": {}}
    (tmp_path / "pack.json").write_text(json.dumps(said))
    (tmp_path / "m.csv").write_bytes(LINES)
    (tmp_path / "a.co").write_bytes(code)
    return tmp_path


def _examine(folder: Path) -> None:
    found, problems = packs.in_folder(folder)
    assert all(problem and str(folder) in problem for problem in problems)
    catalog = packs.gathered("gfx942", found, problems)
    assert packs.lines(catalog)
    for kernel in catalog.kernels.values():
        assert kernel.unfit() is None or str(folder) in kernel.unfit()
    assert catalog.version == packs.gathered("gfx942", found, problems).version


@pytest.mark.parametrize("file", ["pack.json", "m.csv", "a.co"])
def test_packs(fuzz: Any, mutations: ModuleType, folder: Path, file: str) -> None:
    """A changed file of a pack is used or refused with folder and reason."""

    def check(content: bytes) -> None:
        (folder / file).write_bytes(content)
        _examine(folder)

    mutate = {"pack.json": mutations.of_json, "m.csv": mutations.of_csv, "a.co": mutations.of_bytes}[file]
    fuzz([(folder / file).read_bytes()], mutate, check)


def test_manifests(fuzz: Any, mutations: ModuleType, corpus: Callable[..., list[bytes]]) -> None:
    """A changed manifest gives kernels within the limits, or a reason for each line."""

    def check(content: bytes) -> None:
        for abi in ABIS.values():
            try:
                listed = manifest.decoded(content, "m.csv", abi)
            except PackError as error:
                assert "m.csv" in str(error), error
                continue
            assert all(len(reason) < 2000 for reason in listed.refused.values())
            for kernel in listed.kernels:
                sizes = (kernel.tile_m, kernel.tile_n, kernel.prefetch, kernel.sub_k)
                assert all(0 <= size <= manifest.MAX_NUMBER for size in sizes)

    fuzz([LINES, *corpus("manifests", "manifests/*.csv")], mutations.of_csv, check)


def test_code_objects(fuzz: Any, mutations: ModuleType, code: bytes) -> None:
    """Changed bytes of a code object give metadata or the plugin's error."""

    def check(content: bytes) -> None:
        try:
            assert codeobject.read(content).kernels is not None
        except PackError as error:
            assert len(str(error)) < 1000

    fuzz([code], mutations.of_bytes, check)
