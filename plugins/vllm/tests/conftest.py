"""Fixtures of this plugin: stand-ins of vLLM's wheel, whose library registers operators when loaded."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

INSTALLED = Path(__file__).with_name("installed")
#: Runs Python on load, when the library of vLLM registers its operators.
LIBRARY = """
extern int PyGILState_Ensure(void);
extern void PyGILState_Release(int);
extern int PyRun_SimpleString(const char *);
__attribute__((constructor)) static void load(void) {
    int state = PyGILState_Ensure();
    PyRun_SimpleString(CODE);
    PyGILState_Release(state);
}
"""


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the session's cache, which remembers whether stand-ins load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDGEMM_CACHE", str(tmp_path_factory.getbasetemp() / "artifacts"))
        yield


@pytest.fixture(scope="session")
def compile_library() -> Callable[..., None]:
    """Return a function that compiles a library to a file; it runs Python *code* on load."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")

    def compiled(file: Path, code: str, source: str = LIBRARY) -> None:
        text = '"' + code.replace("\\", "\\\\").replace('"', '\\"') + '"'
        command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(file), f"-DCODE={text}", "-Wl,-z,undefs"]
        subprocess.run(command, input=source, text=True, check=True)

    return compiled


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, compile_library: Callable[..., None]) -> Callable[..., Path]:
    """Return a function that installs a package with a library of operators, and returns its folder.

    Importing the package fails: the backend must not.
    """

    def installed(package: str, version: str, code: str = "", folder: Path | None = None) -> Path:
        site = folder or tmp_path_factory.mktemp("site")
        (site / package).mkdir()
        (site / package / "__init__.py").write_text("raise AssertionError('the package was imported')\n")
        if version:
            metadata = site / f"{package}-{version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        if code:
            compile_library(site / package / "_C_stable_libtorch.abi3.so", code)
        return site

    return installed


@pytest.fixture(scope="session")
def stand_in(wheel: Callable[..., Path]) -> Path:
    """Install the stand-in of the newest vLLM and return the folder, which is on no search path yet."""
    return wheel("vllm_stand_in", "0.33.0", "import vllm_stand_in_operators")


@pytest.fixture
def importable(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in and the backend over it on the search path."""
    monkeypatch.syspath_prepend(INSTALLED)
    monkeypatch.syspath_prepend(stand_in)
