"""Launches by the C extension and by ctypes, and threads that share a launcher."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tunedgemm.plugin import LaunchError, Shape
from tunedgemm_hipblaslt import native

SOURCE = Path(native.__file__).with_name("shim.c")
both = pytest.mark.parametrize("lt", ["cublaslt", "hipblaslt"], indirect=True)
extension = pytest.mark.skipif(native._extension is None, reason="the C extension was not built")
BIAS = {"epilogue": "bias"}
#: Solution of the fake hipBLASLt with a workspace.
WITH_WORKSPACE = "sol1004_v100200_fake0001"
FP8 = {"cublaslt": "fp8_e4m3fn", "hipblaslt": "fp8_e4m3fnuz"}


def launch_shapes(libtype: str) -> list[Shape]:
    """Return one shape for each kind of launch: bias, scales, int32 alpha, batches."""
    return [
        Shape("a16w16", 5, 48, 64),
        Shape("a16w16", 5, 48, 64, **BIAS),
        Shape("a8w8", 5, 48, 64, dtype=FP8[libtype], outdtype="bf16", scale="row", **BIAS),
        Shape("a8w8", 5, 48, 64, dtype=FP8[libtype], outdtype="bf16", scale="tensor"),
        Shape("a8w8", 5, 48, 64, dtype="int8", outdtype="bf16", scale="row"),
        Shape("batched_bf16", 5, 48, 64, extra={"B": 3}),
    ]


@extension
@both
def test_both_implementations_give_the_same_bits(lt: Any, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension and ctypes give the same bits for each kind of launch."""
    for shape in launch_shapes(lt.hooks.abi.libtype):
        case = harness.make_case(shape)
        for name in (harness.FIRST, WITH_WORKSPACE) if lt.hooks.abi.libtype == "hipblaslt" else (harness.FIRST,):
            outs = []
            for module in (native._extension, None):
                with monkeypatch.context() as patched:
                    patched.setattr(native, "_extension", module)
                    outs.append(harness.bind(lt, name, shape).call(*case.operands))
            assert not case.output_fault(outs[0])
            assert torch.equal(*outs)


@pytest.fixture(params=["extension", "ctypes"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Launch by the extension, where it was built, and by ctypes."""
    if request.param == "extension" and native._extension is None:
        pytest.skip("the C extension was not built")
    monkeypatch.setattr(native, "_extension", native._extension if request.param == "extension" else None)
    return request.param


@both
def test_a_wrong_status_is_an_error(lt: Any, harness: Any, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused attribute or launch raises the status's name, and the launcher works afterwards."""
    shape = Shape("a16w16", 5, 48, 64, **BIAS)
    case, launcher = harness.make_case(shape), harness.bind(lt, harness.FIRST, shape)
    with pytest.raises(LaunchError, match=f"{lt.hooks.abi.libtype}: {lt.hooks.abi.prefix}Matmul: INVALID_VALUE"):
        launcher.call(*case.operands[:2])
    assert "there is none" in harness.fake_reason(lt)
    assert not case.launch_fault(launcher)
    # transpose_a has 4 bytes, a pointer 8.
    monkeypatch.setattr(native, "_POINTERS", ("transpose_a", "a_scale", "b_scale"))
    with pytest.raises(LaunchError, match="INVALID_VALUE"):
        harness.bind(lt, harness.FIRST, shape).call(*case.operands)
    assert "takes 4 bytes (got 8)" in harness.fake_reason(lt)


@extension
def test_the_extension_checks_its_arguments() -> None:
    """Wrong numbers and types of arguments raise, and an uninitialised object does not launch."""
    launcher = native._extension.Launch(1, 1, 0, 0, 0, 0, 0, bytes(64), 0, False, (-1, -1, -1), None)
    with pytest.raises(TypeError, match="takes 8 addresses"):
        launcher.launch(1, 2, 3)
    with pytest.raises(TypeError):
        launcher.launch(*["address"] * 8)
    with pytest.raises(OverflowError):
        launcher.launch(*[-1] * 8)
    with pytest.raises(ValueError, match="64 bytes at most"):
        native._extension.Launch(1, 1, 0, 0, 0, 0, 0, bytes(65), 0, False, (-1, -1, -1), None)
    with pytest.raises(TypeError, match="no keywords"):
        native._extension.Launch(matmul=1)
    with pytest.raises(TypeError):
        native._extension.Launch(1, 2)
    with pytest.raises(RuntimeError, match="not initialised"):
        native._extension.Launch.__new__(native._extension.Launch).launch(*[0] * 8)


@extension
def test_the_extension_passes_every_argument() -> None:
    """Each argument reaches its position: addresses of 64 bits, alpha 1, beta 0, C as D."""
    received: list[tuple[Any, ...]] = []
    matmul_type = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p)
    set_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)

    def matmul(*given: Any) -> int:
        arguments = list(given)
        for position in (2, 7):
            arguments[position] = ctypes.c_int32.from_address(given[position]).value
        arguments[12] = ctypes.string_at(given[12], 64)
        received.append(tuple(arguments))
        return 5

    calls = matmul_type(matmul), set_type(lambda desc, name, value, size: received.append((desc, name, value[0], size)) or 0)
    addresses = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]
    high, algo = 1 << 63, bytes(range(64))
    for whole, one in ((True, 1), (False, 0x3F800000)):
        launcher = native._extension.Launch(*addresses, high + 1, high + 2, high + 3, high + 4, high + 5, algo, 99, whole, (7, -1, 9), None)
        received.clear()
        assert launcher.launch(10, 11, 12, 13, 14, 15, 16, high + 17) == 5
        assert received[:2] == [(high + 2, 7, 15, 8), (high + 2, 9, high + 17, 8)]
        assert received[2] == (high + 1, high + 2, one, 12, high + 3, 13, high + 4, 0, 11, high + 5, 11, high + 5, algo, 14, 99, 10)


#: Text of the extension's source -> mistake. No mistake leaves a pointer unset and crashes.
CHANGES = [
    ("&self->alpha, address[2]", "&self->beta, address[2]"),
    ("&self->beta, address[1]", "&self->alpha, address[1]"),
    ("address[2], self->a, address[3], self->b", "address[3], self->a, address[2], self->b"),
    ("address[2], self->a, address[3], self->b", "address[2], self->b, address[3], self->a"),
    ("self->d, address[1], self->d", "self->d, address[2], self->d"),
    ("self->d, self->algo", "self->b, self->algo"),
    ("self->algo, address[4]", "self->algo, NULL"),
    ("address[4], self->workspace_bytes", "address[4], 0"),
    ("&address[5 + i]", "&address[6 - i]"),
    ("&address[5 + i]", "&address[5]"),
    ("memcpy(self->algo, algo, (size_t)algo_bytes)", "memcpy(self->algo, algo, (size_t)algo_bytes - 8)"),
    ("self->alpha.whole = 1", "self->alpha.real = 1.0f"),
    ("self->alpha.real = 1.0f", "self->alpha.whole = 1"),
]


@pytest.fixture(scope="module")
def includes() -> str:
    """Return the folder of Python's headers; skip without a compiler or headers."""
    folder = sysconfig.get_path("include")
    if shutil.which("cc") is None or not Path(folder, "Python.h").is_file():
        pytest.skip("`cc` or Python.h not found")
    return folder


def compile_extension(source: str, includes: str, folder: Path) -> Any:
    """Compile a source and import it as the extension."""
    (folder / "shim.c").write_text(source)
    target = folder / "_shim.so"
    flags = ("-O0", "-w", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030A0000", f"-I{includes}")
    subprocess.run(["cc", *flags, folder / "shim.c", "-o", target], check=True)
    loader = importlib.machinery.ExtensionFileLoader("tunedgemm_hipblaslt._shim", str(target))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def find_faults(backends: dict[str, Any], harness: Any) -> list[str]:
    """Return the faults of each kind of launch, of both libraries."""
    launches = [(lt, shape, harness.FIRST) for libtype, lt in backends.items() for shape in launch_shapes(libtype)]
    launches.append((backends["hipblaslt"], Shape("a16w16", 5, 48, 64), WITH_WORKSPACE))
    faults = [harness.fault(lt, shape, name) for lt, shape, name in launches]
    return [fault for fault in faults if fault]


@pytest.mark.nightly
def test_each_part_of_the_extension_matters(
    backends: dict[str, Any], harness: Any, includes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source passes over the fakes, and fails with any one of the planted mistakes."""
    source, missed = SOURCE.read_text(), []
    for number, (text, other) in enumerate([("", ""), *CHANGES]):
        assert text in source, text
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(native, "_extension", compile_extension(source.replace(text, other) if text else source, includes, folder))
        faults = find_faults(backends, harness)
        assert text or not faults
        missed += [(text, other)] if text and not faults else []
    assert not missed


@extension
def test_other_threads_run_while_a_launch_waits() -> None:
    """A launch that waits, as for a full queue, releases the interpreter."""
    # usleep reads the handle as microseconds.
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    launch = native._extension.Launch(usleep, usleep, 500_000, 0, 0, 0, 0, b"", 0, False, (-1, -1, -1), None).launch
    started, finished, turns = threading.Event(), threading.Event(), 0

    def work() -> None:
        started.set()
        assert launch(*[0] * 8) == 0
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    while not finished.is_set():
        turns += 1
        time.sleep(0.005)
    thread.join()
    assert turns >= 3
