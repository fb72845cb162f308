"""QuACK absent, broken, of another version; what its import changes; and the installed one, if any."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm_quack import Quack, library, quack

SHAPE, H200 = Shape("a16w16", 16, 1280, 8192), Device("sm_90", 132, "nvidia-h200")
#: Nothing is launched there: QuACK does not load.
PRESENT = Device("sm_90", 132, "nvidia-h200", index=0)
FAKE = Path(__file__).parent / "installed" / "fake_quack" / "gemm.py"
PACKAGES = library._PACKAGES

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a QuACK made of texts; forget all about it afterwards.

    Only *tried* installations are loaded in a child process first.
    """
    mine = {name: module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES}

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]
        library.installation.cache_clear()
        library.import_fault.cache_clear()
        library._loaded.cache_clear()
        importlib.invalidate_caches()

    def write(version: str = "0.6.5", *, gemm: str = FAKE.read_text(), tvm_ffi: str = "def convert(x): pass", tried: bool = False) -> Path:
        for name, number in (("quack-kernels", version), ("nvidia-cutlass-dsl", "4.8.1")):
            folder = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        texts = {"quack/__init__": "", "quack/cache": "CACHE_DIR = None\nCACHE_ENABLED = True", "quack/gemm": gemm}
        for stem, text in {**texts, "cutlass/__init__": "", "tvm_ffi/__init__": tvm_ffi}.items():
            (tmp_path / stem).parent.mkdir(exist_ok=True)
            (tmp_path / f"{stem}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        if not tried:
            monkeypatch.setattr(library, "load_fault", lambda *_: "")
        forget()
        return tmp_path

    forget()
    yield write
    forget()
    sys.modules.update(mine)


def refusal(backend: Quack = quack) -> str:
    """Return why QuACK cannot be used: from `supports` for a present device, else from the import."""
    if answer := backend.refusal(SHAPE, PRESENT):
        return str(answer)
    with pytest.raises(PluginError) as caught:
        backend.hooks.load()
    return str(caught.value)


def test_absent(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    """`supports` names the package to install; `bind` says the same, and the version is empty."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert refusal() == "quack-kernels: not installed; pip install quack-kernels 'nvidia-cutlass-dsl[cu13]'"
    assert str(quack.bind(Solution("quack", "any"), SHAPE, H200)) == refusal()
    assert quack.library_version(H200) == ""
    assert quack.details(H200) == (refusal(),)


def test_other_versions(install: Install) -> None:
    """A version without launch plans is refused by `supports`, from the metadata alone."""
    install("0.6.0", gemm="raise AssertionError('imported')")
    assert refusal().startswith("quack-kernels: needs 0.6.2 or later (got 0.6.0)")
    assert "quack" not in sys.modules


def test_metadata_without_its_package(install: Install) -> None:
    """An interrupted uninstallation leaves metadata: a reason, not an ImportError."""
    folder = install()
    (folder / "quack/__init__.py").unlink()
    for path in [*(folder / "quack").iterdir()]:
        path.unlink()
    (folder / "quack").rmdir()
    library.installation.cache_clear()
    if importlib.util.find_spec("quack") is None:
        assert refusal() == "quack-kernels 0.6.5: its package 'quack' is not importable; install it again"


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ({"gemm": "raise OSError('_cutlass_ir.so: file too short')"}, "does not load: OSError: _cutlass_ir.so: file too short"),
        ({"gemm": "import os; os.abort()"}, "does not load: loading it ends the process by SIGABRT"),
        ({"gemm": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"}, "does not load: loading it ends the process by SIGSEGV"),
        ({"tvm_ffi": "def convert(x): raise ImportError('undefined symbol: _ZN3c10')"}, "ImportError: undefined symbol: _ZN3c10"),
    ],
    ids=["truncated", "aborts", "faults", "torch-abi"],
)
def test_broken(install: Install, texts: dict[str, str], reason: str) -> None:
    """The process survives any import: `supports` of a present device and `bind` have the reason."""
    install(**texts, tried=True)
    assert reason in refusal()
    assert reason in str(quack.bind(Solution("quack", "tile128x128_cluster2x1"), SHAPE, PRESENT))
    assert quack.refusal(SHAPE, H200) is None


@pytest.mark.parametrize(
    ("gemm", "lacks"),
    [
        (FAKE.read_text().replace("rowvec_bias", "row_bias"), "rowvec_bias, rowvec_bias"),
        ("def gemm(): pass", "module 'quack.gemm' has no attribute 'run_gemm_plan'"),
    ],
    ids=["renamed-argument", "no-plans"],
)
def test_a_version_with_other_functions(install: Install, gemm: str, lacks: str) -> None:
    """A later version without what a launch passes is refused by name."""
    install("0.7.0", gemm=gemm)
    assert f"quack 0.7.0 cutlass-dsl 4.8.1: not a version that this plugin knows: lacks {lacks}" in refusal()


def test_a_repaired_installation_is_tried_again(install: Install) -> None:
    """The answer is remembered by the files: another file is another question."""
    folder = install(gemm="import os; os.abort()", tried=True)
    assert "SIGABRT" in refusal()
    (folder / "quack" / "gemm.py").write_text(FAKE.read_text())
    (folder / "quack" / "__init__.py").write_text("# repaired")
    library.import_fault.cache_clear()
    assert quack.refusal(SHAPE, PRESENT) is None


def test_kernels_go_to_our_folder(install: Install, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep kernels in a private folder, and the excepthook and variables of the process at import."""
    before, folder = sys.excepthook, library.kernel_folder()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    changes = "sys.excepthook = print\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = '/tmp'\n"
    install(gemm=f"{FAKE.read_text()}\nimport os, sys\n{changes}")
    quack.hooks.load()
    assert folder == library.kernel_folder() == str(cache / "quack") == sys.modules["quack.cache"].CACHE_DIR
    assert (cache / "quack").stat().st_mode & 0o777 == 0o700
    assert sys.excepthook is before
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_users_folder_stays(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """QUACK_CACHE_DIR, and a QuACK that the process has imported before, keep their cache."""
    install()
    monkeypatch.setenv("QUACK_CACHE_DIR", "/mine")
    quack.hooks.load()
    settings = importlib.import_module("quack.cache")
    assert settings.CACHE_DIR is None
    monkeypatch.delenv("QUACK_CACHE_DIR")
    library._loaded.cache_clear()
    quack.hooks.load()
    assert settings.CACHE_DIR is None
    assert library.kernel_folder() == "QuACK's default"  # what was prepared in ours is not there


def test_an_untrusted_cache_is_off(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our folder cannot be private, compiled kernels stay in memory."""

    def refuse(name: str) -> Path:
        raise OSError(name)

    install()
    monkeypatch.setattr(library, "private_folder", refuse)
    quack.hooks.load()
    assert sys.modules["quack.cache"].CACHE_ENABLED is False


@pytest.fixture
def installed() -> ModuleType:
    """Return the installed ``quack.gemm``; skip without one."""
    if fault := library.installation().fault:
        pytest.skip(fault)
    library.load()
    return sys.modules["quack.gemm"]


def test_the_fake_has_the_installed_signatures(installed: ModuleType, fake: ModuleType) -> None:
    """Names, kinds and defaults of the arguments are those of the installed QuACK."""
    for name in ("gemm", "run_gemm_plan"):
        real, faked = (inspect.signature(getattr(module, name)).parameters for module in (installed, fake))
        assert [(p.name, p.kind, p.default) for p in faked.values()] == [(p.name, p.kind, p.default) for p in real.values()]


@pytest.mark.parametrize("fields", [{}, {"epilogue": "bias", "bias_dtype": "fp32", "outdtype": "fp32"}], ids=["plain", "bias"])
def test_the_installed_one_compiles_without_a_device(installed: ModuleType, cache: Path, fields: dict[str, str]) -> None:
    """`prepare` leaves an object file in our cache, or finds one there."""
    import attrs

    for name, splits in (("tile128x192_cluster2x1_pingpong", 0), ("tile64x16_cluster2x1_swap", 4)):
        quack.prepare(Solution("quack", name, splits), attrs.evolve(SHAPE, **fields), H200)
    assert list((cache / "quack").glob("*/*.o"))
