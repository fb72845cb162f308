"""library: an absent, damaged, old or foreign vLLM is a reason, and vLLM itself is never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.plugin import Backend, Device, PluginError, Shape, Solution, Unsupported, device_of
from tunedgemm_vllm import Vllm, library, vllm
from tunedgemm_vllm.library import Vendor

SHAPE = Shape("a8w8", 4, 256, 512, dtype="int8", outdtype="bf16", scale="row")
SOLUTION = Solution("fakevllm", library.PRODUCT)
CPU = device_of(-1)
DEFINE = "import torch; keep = torch.library.Library('{0}', 'FRAGMENT'); torch.{0} = keep; keep.define('{1}')"


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Forget what earlier tests found, as a new process does."""

    def forget() -> None:
        for function in (library.version_of, library.folder_of, library.operators, library.operator):
            function.cache_clear()

    forget()
    yield
    forget()


def over(package: str) -> Backend:
    """Return the backend over a package, in a namespace of its name."""
    hooks = Vllm("fakevllm", Vendor(package, f"{package}_C"))
    return attrs.evolve(vllm, libtype="fakevllm", hooks=hooks, host=Device("sm_90", 132))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, wheel: Callable[..., Path]) -> Callable[..., Backend]:
    """Return a function that installs a package and makes the backend over it, in a namespace of its name."""

    def made(package: str, version: str = "0.25.1", code: str = "", folder: Path | None = None) -> Backend:
        monkeypatch.syspath_prepend(wheel(package, version, code, folder))
        return over(package)

    return made


def reason(backend: Backend) -> str:
    """Return why the backend refuses; `supports`, `lacks` and `bind` say the same."""
    answers = [backend.refusal(SHAPE, CPU), backend.bind(SOLUTION, SHAPE, CPU)]
    assert all(isinstance(answer, Unsupported) for answer in answers)
    assert {str(answer) for answer in answers} == {backend.lacks(SOLUTION, SHAPE, CPU)}
    return str(answers[0])


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name on the search path does not count: ``plugins/vllm`` may be one."""
    (tmp_path / "absent_vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    absent = over("absent_vllm")
    assert reason(absent) == "absent_vllm: not installed; pip install absent_vllm"
    assert absent.library_version(CPU) == ""
    assert absent.details(CPU) == ("no library found",)


def test_a_module_made_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of ``sys.modules`` without a specification counts as not installed."""
    monkeypatch.setitem(sys.modules, "handmade_vllm", type(sys)("handmade_vllm"))
    assert library.folder_of("handmade_vllm") is None


def test_without_a_library(backend: Callable[..., Backend]) -> None:
    """A wheel for CPUs or ROCm has other libraries."""
    assert "empty_vllm: no _C_stable_libtorch or _C in " in reason(backend("empty_vllm"))


def test_an_old_version(backend: Callable[..., Backend]) -> None:
    """A version before 0.20 is refused by its metadata, before its library is loaded."""
    assert reason(backend("old_vllm", "0.19.1", "raise SystemExit")) == (
        "old_vllm: must be 0.20 or later (got 0.19.1); pip install -U old_vllm"
    )


def test_a_damaged_file(backend: Callable[..., Backend], tmp_path: Path) -> None:
    """Half of a download is a reason that names the file."""
    damaged = backend("damaged_vllm", folder=tmp_path)
    file = tmp_path / "damaged_vllm" / "_C_stable_libtorch.abi3.so"
    file.write_bytes(b"\x7fELF, the first half")
    assert "_C_stable_libtorch.abi3.so does not load: OSError: " in reason(damaged)
    assert str(file) in reason(damaged)


@pytest.mark.parametrize(
    ("name", "source", "wanted"),
    [
        ("aborting", "void abort(void); __attribute__((constructor)) static void load(void) { abort(); }", "by SIGABRT"),
        ("foreign", "extern int _ZN2at10of_anotherEv(void); int f(void) { return _ZN2at10of_anotherEv(); }", "undefined symbol"),
        ("silent", "int f(void) { return 0; }", "has no attribute 'cutlass_scaled_mm'"),
    ],
    ids=["aborting", "foreign", "silent"],
)
def test_libraries_that_do_not_load(
    backend: Callable[..., Backend], tmp_path: Path, compile_library: Callable[..., None], name: str, source: str, wanted: str
) -> None:
    """A library that aborts, of another torch, or without the operator ends a child process at most."""
    broken = backend(f"{name}_vllm", folder=tmp_path)
    compile_library(tmp_path / f"{name}_vllm" / "_C.abi3.so", "", source)
    assert wanted in reason(broken)


def test_another_signature(backend: Callable[..., Backend]) -> None:
    """A product of other arguments loads, and is refused with its schema."""
    schema = "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor scales, Tensor? bias) -> ()"
    changed = backend("changed_vllm", "0.34.0", DEFINE.format("changed_vllm_C", schema))
    assert changed.refusal(SHAPE, CPU) is None
    answer = changed.bind(SOLUTION, SHAPE, CPU)
    assert "cutlass_scaled_mm must take out, a, b, a_scales, b_scales, bias (got changed_vllm_C::" in str(answer)


def test_the_operators_of_a_running_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process has already is used: no file is looked for, and none is loaded again."""
    running = torch.library.Library("running_vllm_C", "FRAGMENT")
    running.define("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"loads {path}"))
    monkeypatch.setattr(library, "load_fault", lambda *asked: pytest.fail(f"starts a child for {asked}"))
    vendor = Vendor("running_vllm", "running_vllm_C")
    assert library.fault(vendor) == ""
    assert library.operator(vendor, library.PRODUCT) is torch.ops.running_vllm_C.cutlass_scaled_mm.default
    with pytest.raises(PluginError, match=r"running_vllm: its library has no silu_and_mul \(version unknown\)"):
        library.operator(vendor, "silu_and_mul")


def test_an_operator_of_a_further_library(backend: Callable[..., Backend], tmp_path: Path, compile_library: Callable[..., None]) -> None:
    """Older versions have some operators in another file, which is loaded when one is needed."""
    schema = "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"
    backend("split_vllm", "0.20.0", DEFINE.format("split_vllm_C", schema), tmp_path)
    further = tmp_path / "split_vllm" / "_C.abi3.so"
    compile_library(further, DEFINE.format("split_vllm_C", "silu_and_mul(Tensor! result, Tensor input) -> ()"))
    vendor = Vendor("split_vllm", "split_vllm_C")
    assert library.files_of("split_vllm")[1:] == [further]
    assert library.operator(vendor, library.PRODUCT) and not hasattr(library.operators(vendor), "silu_and_mul")
    assert library.operator(vendor, "silu_and_mul") is torch.ops.split_vllm_C.silu_and_mul.default
    with pytest.raises(PluginError, match=r"split_vllm: its library has no machete_mm \(version 0\.20\.0\)"):
        library.operator(vendor, "machete_mm")


def test_operators_of_an_absent_package() -> None:
    """The error of `operators` is the reason of `fault`."""
    with pytest.raises(PluginError, match="nowhere_vllm: not installed"):
        library.operators(Vendor("nowhere_vllm", "nowhere_vllm_C"))


@pytest.mark.parametrize(("set_to", "ending"), [("1", " batch_invariant"), ("0", ""), ("", ""), ("yes", "")])
def test_library_version(backend: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch, set_to: str, ending: str) -> None:
    """The version is the metadata's; batch-invariant kernels are other kernels."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", set_to)
    versioned = backend("versioned_vllm", "0.26.0.dev3")
    assert versioned.library_version(CPU) == f"versioned_vllm 0.26.0.dev3{ending}"
    assert library.release_of("versioned_vllm") == (0, 26)
    assert versioned.library_version(Device("sm_90", 132)) == ""


def test_details_name_the_file(backend: Callable[..., Backend], tmp_path: Path) -> None:
    """The stable library comes first; nothing is loaded for ``tunedgemm plugins -v``."""
    shown = backend("shown_vllm", "0.20.0", folder=tmp_path)
    for stem in ("_C", "_C_stable_libtorch"):
        (tmp_path / "shown_vllm" / f"{stem}.abi3.so").write_text("not loaded")
    assert shown.details(CPU) == (f"0.20.0: {tmp_path}/shown_vllm/_C_stable_libtorch.abi3.so",)
