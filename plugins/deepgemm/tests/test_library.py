"""Find the library and the compiler; load it in a child, then as private copies."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Unsupported
from tunedgemm_deepgemm import deepgemm, library

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
ABSENT = Device("sm_90", 132, "nvidia-h200")
PRESENT, SHAPE = attrs.evolve(ABSENT, index=0), Shape("a16w16", 4, 64, 64)
#: An extension with one setting of the process.
SOURCE = """
#include <Python.h>
static int sms = 0;
static PyObject* set_num_sms(PyObject* self, PyObject* n) { sms = (int)PyLong_AsLong(n); Py_RETURN_NONE; }
static PyObject* get_num_sms(PyObject* self, PyObject* none) { return PyLong_FromLong(sms); }
static PyObject* nothing(PyObject* self, PyObject* arguments) { Py_RETURN_NONE; }
static PyMethodDef methods[] = {
    {"init", nothing, METH_VARARGS, ""}, {"set_num_sms", set_num_sms, METH_O, ""}, {"get_num_sms", get_num_sms, METH_NOARGS, ""},
    {"set_pdl", nothing, METH_VARARGS, ""}, {"set_block_size_multiple_of", nothing, METH_VARARGS, ""},
    {"bf16_gemm_nt", nothing, METH_VARARGS, ""}, {LAST, nothing, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", 0, -1, methods};
PyMODINIT_FUNC PyInit__C(void) { START; return PyModule_Create(&module); }
"""


def write(folder: Path, version: str = "2.5.0", extension: str = f"_C{SUFFIX}", content: bytes = b"broken") -> Path:
    """Write a package with an extension; return the extension."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"raise AssertionError('imported')\n__version__ = '{version}'\n")
    (folder / extension).write_bytes(content)
    return folder / extension


def built(folder: Path, start: str = "", last: str = "fp8_gemm_nt") -> Path:
    """Compile the extension into a package."""
    compiler = shutil.which("cc")
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no C compiler, or no Python.h")
    path = write(folder)
    options = ["-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", f"-DSTART={start}", f'-DLAST="{last}"']
    subprocess.run([compiler, *options, "-x", "c", "-", "-o", str(path)], input=SOURCE.encode(), check=True)
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder where packages are found, before all others."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(library, "find", library.find.__wrapped__)
    monkeypatch.setattr(library, "PLACES", (("deep_gemm", ""), ("vllm", "third_party/deep_gemm")))
    for name in ("deep_gemm", "vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def vllm(site: Path, metadata: bool = True) -> Path:
    """Write a vLLM whose import fails, with a copy of the library."""
    extension = write(site / "vllm" / "third_party" / "deep_gemm")
    (site / "vllm" / "__init__.py").write_text("raise AssertionError('imported')\n")
    if metadata:
        (site / "vllm-0.25.1.dist-info").mkdir()
        (site / "vllm-0.25.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    return extension


def test_the_copy_in_vllm_is_found_without_importing_vllm(site: Path) -> None:
    """Version and owner come from files alone; `deep_gemm` itself comes first."""
    extension = vllm(site)
    found = library.find()
    assert found == library.Installation(extension.parent, extension, "2.5.0", "vllm-0.25.1")
    own = write(site / "deep_gemm", "2.6.1+abc")
    assert library.find() == library.Installation(own.parent, own, "2.6.1+abc")
    assert "vllm" not in sys.modules


def test_a_vllm_without_metadata_has_no_version(site: Path) -> None:
    """A folder of vLLM on the path suffices."""
    vllm(site, metadata=False)
    assert library.find().owner == "vllm"


def test_an_unusable_package_is_passed_over(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension for another Python, or none, is a reason, unless vLLM has one."""
    write(site / "deep_gemm", extension="_C.cpython-27-x86_64-linux-gnu.so")
    places = library.PLACES
    monkeypatch.setattr(library, "PLACES", places[:1])  # the machine may have a vLLM
    with pytest.raises(PluginError, match=r"2\.5\.0: needs _C for Python .*got _C.cpython-27.*install deep_gemm"):
        library.find()
    extension = vllm(site)
    monkeypatch.setattr(library, "PLACES", places)
    assert library.find().extension == extension
    monkeypatch.setattr(library, "PLACES", places[:1])
    (site / "deep_gemm" / "_C.cpython-27-x86_64-linux-gnu.so").unlink()
    with pytest.raises(PluginError, match=r"needs _C for Python .*got none"):
        library.find()


def test_an_old_version_is_passed_over(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions before 2.4 cannot compile without a device; nor does a version without a number count."""
    monkeypatch.setattr(library, "PLACES", library.PLACES[:1])
    for version in ("2.3.0", "unknown"):
        write(site / "deep_gemm", version)
        with pytest.raises(PluginError, match=rf"must be 2.4 or newer \(got {version}\)"):
            library.find()
        shutil.rmtree(site / "deep_gemm")
    write(site / "deep_gemm", "2.10")
    assert library.find().version == "2.10"


def test_an_absent_library_is_a_reason(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`supports`, `bind` and `details` say what to install; described devices need nothing."""
    monkeypatch.setattr(library, "PLACES", (("deep_gemm_that_is_absent", ""),))
    backend = attrs.evolve(deepgemm, hooks=attrs.evolve(deepgemm.hooks, access=attrs.evolve(deepgemm.hooks.access, find=library.find)))
    missing = "deepgemm: deep_gemm not found; install deep_gemm, or a vLLM that has third_party/deep_gemm"
    solution = next(iter(backend.solutions(SHAPE, ABSENT)))
    assert backend.refusal(SHAPE, PRESENT).reason == backend.bind(solution, SHAPE, PRESENT).reason == missing
    assert missing in backend.details(PRESENT)
    assert backend.library_version(PRESENT) == ""
    assert backend.refusal(SHAPE, ABSENT) is None
    assert not backend.lacks(solution, SHAPE, ABSENT)


def test_an_absent_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvcc no shape is supported, because the library runs it even for compiled kernels."""
    extension = write(tmp_path / "deep_gemm")
    for variable in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(library, "SYSTEM_TOOLKIT", tmp_path)
    monkeypatch.setattr(library, "_roots", lambda package: [])
    backend = backend_of(extension)
    backend = attrs.evolve(
        backend, hooks=attrs.evolve(backend.hooks, access=attrs.evolve(backend.hooks.access, toolkit=library.find_toolkit.__wrapped__))
    )
    assert str(backend.refusal(SHAPE, PRESENT)).startswith("deepgemm: nvcc not found")


def test_the_toolkit_of_the_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_HOME names the toolkit; without it nvcc on PATH does."""
    nvccs = [tmp_path / name / "bin" / "nvcc" for name in ("named", "found")]
    for nvcc in nvccs:
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    monkeypatch.setenv("PATH", str(tmp_path / "found" / "bin"))
    assert library.find_toolkit.__wrapped__() == library.Toolkit(nvccs[0])
    monkeypatch.delenv("CUDA_HOME")
    assert library.find_toolkit.__wrapped__().home == tmp_path / "found"


def backend_of(extension: Path) -> Any:
    """Return the backend over an installation, with a compiler that exists."""
    found = library.Installation(extension.parent, extension, "2.5.0")
    access = attrs.evolve(deepgemm.hooks.access, find=lambda: found, toolkit=lambda: library.Toolkit(Path("/bin/sh")))
    return attrs.evolve(deepgemm, hooks=attrs.evolve(deepgemm.hooks, access=access))


@pytest.mark.parametrize(
    ("start", "last", "reason"),
    [
        ("abort()", "fp8_gemm_nt", "SIGABRT"),
        ('PyErr_SetString(PyExc_ImportError, "undefined symbol: _ZN3c10"); return 0', "fp8_gemm_nt", "undefined symbol: _ZN3c10"),
        ("", "fp8_gemm_of_1_0", "it lacks fp8_gemm_nt"),
    ],
)
def test_an_extension_that_does_not_load_is_a_reason(tmp_path: Path, start: str, last: str, reason: str) -> None:
    """One that aborts, one of another torch and one of another version cost no process."""
    backend = backend_of(built(tmp_path / "deep_gemm", start, last))
    answer = backend.refusal(SHAPE, PRESENT)
    assert isinstance(answer, Unsupported)
    assert "does not load" in answer.reason
    assert reason in answer.reason
    assert isinstance(backend.bind(next(iter(backend.solutions(SHAPE, ABSENT))), SHAPE, PRESENT), Unsupported)


def test_copies_have_separate_settings(tmp_path: Path) -> None:
    """A setting of one copy is neither in another nor in the package that a user imports."""
    extension = built(tmp_path / "deep_gemm")
    found = library.Installation(extension.parent, extension, "2.5.0")
    first, second = (library.open_copy(found, library.Toolkit(Path("/bin/sh"))) for _ in range(2))
    spec = importlib.util.spec_from_file_location("_C", extension)
    assert spec is not None
    own = importlib.util.module_from_spec(spec)
    first.set_num_sms(7)
    own.set_num_sms(9)
    assert (first.get_num_sms(), second.get_num_sms(), own.get_num_sms()) == (7, 0, 9)
    assert backend_of(extension).refusal(SHAPE, PRESENT) is None


def test_copies_hold_no_descriptor_open(tmp_path: Path) -> None:
    """A copy and a failed one close their files; one that fails is not taken for a later one."""
    sound, old = built(tmp_path / "sound"), built(tmp_path / "old", last="fp8_gemm_of_1_0")
    damaged = write(tmp_path / "damaged")
    library.load_copy(sound)
    before = sorted(Path("/proc/self/fd").iterdir())
    for extension, fault in ((old, "it lacks fp8_gemm_nt"), (damaged, "file too short|invalid ELF header"), (sound, "")) * 2:
        with pytest.raises(ImportError, match=fault) if fault else contextlib.nullcontext():
            library.load_copy(extension)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_compiling_process_ignores_the_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module there, which may be anyone's, is not imported."""
    (tmp_path / "json.py").write_text("raise SystemExit('stray')")
    monkeypatch.chdir(tmp_path)
    done = library.run_child({}, {}, 60.0)
    assert done.returncode == 1 and done.stderr.strip().endswith("KeyError: 'installation'")
