"""Fixtures of launches: both ways to launch, and compiled changes of the extension."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.backends import native

SOURCE = Path(__file__).parents[2] / "core" / "tunedgemm" / "backends" / "native.c"


@pytest.fixture(scope="session")
def c_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Compile a C source into a library and return its path, or skip."""

    def compiled(source: str) -> str:
        if shutil.which("cc") is None:
            pytest.skip("the fake driver requires `cc`")
        path = tmp_path_factory.mktemp("library") / "library.so"
        subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source, text=True, check=True)
        return str(path)

    return compiled


@pytest.fixture(params=["extension", "ctypes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Launch through the C extension, then through ctypes."""
    if request.param == "ctypes":
        monkeypatch.setattr(native, "_extension", None)
    elif native._extension is None:
        pytest.skip("the C extension was not built")
    return request.param


@pytest.fixture
def extension() -> Any:
    """Return the C extension, or skip."""
    if native._extension is None:
        pytest.skip("the C extension was not built")
    return native._extension


@pytest.fixture
def missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """Return the function that lists the changes of the extension's source which a check misses."""
    includes = sysconfig.get_path("include")
    if shutil.which("cc") is None or not Path(includes, "Python.h").is_file():
        pytest.skip("compiling the extension requires `cc` and Python.h")

    def compiled(source: str, folder: Path) -> Any:
        folder.mkdir()
        (folder / "native.c").write_text(source)
        flags = ("-O0", "-w", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030A0000", f"-I{includes}")
        subprocess.run(["cc", *flags, folder / "native.c", "-o", folder / "_native.so"], check=True)
        loader = importlib.machinery.ExtensionFileLoader("tunedgemm.backends._native", str(folder / "_native.so"))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
        loader.exec_module(module)
        return module

    def run(changes: Iterable[tuple[str, str]], faults: Callable[[], object]) -> list[tuple[str, str]]:
        source, unseen = SOURCE.read_text(), []
        for number, (text, other) in enumerate([("", ""), *changes]):
            assert source.count(text) == 1 or not text, f"the text to change must occur once: {text}"
            changed = source.replace(text, other) if text else source
            monkeypatch.setattr(native, "_extension", compiled(changed, tmp_path / str(number)))
            try:
                found = faults()
            except (TypeError, SystemError) as error:
                found = str(error)
            assert text or not found, found
            unseen += [(text, other)] if text and not found else []
        return unseen

    return run
