"""Compile ahead in a child process, for a device that is only described."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, LaunchError, PluginError, Shape
from tunedgemm_deepgemm import build, library
from tunedgemm_deepgemm.build import Target
from tunedgemm_deepgemm.names import Kernel
from tunedgemm_deepgemm.product import product_of

H200 = Device("sm_90", 132, "nvidia-h200")
ROWS = Shape("a8w8_blockscale", 8, 128, 256, "fp8_e4m3fn", "bf16", scale="block")
ASSERTION = "Assertion error (/a/csrc/apis/../heuristics/sm90.hpp:116): not candidates.empty()"


def real_toolkit() -> library.Toolkit:
    """Return this machine's toolkit with its headers."""
    try:
        return library.find_toolkit()
    except PluginError as error:
        pytest.skip(str(error))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """Return a target whose compiler does nothing."""
    extension, nvcc = tmp_path / "_C.so", tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    extension.write_bytes(b"")
    return Target(library.Installation(tmp_path, extension, "2.5.0"), library.Toolkit(nvcc), product_of(ROWS), Kernel(64, 100), H200)


def answering(monkeypatch: pytest.MonkeyPatch, status: int = 0, out: str = "[]", errors: str = "") -> list[Any]:
    """Replace the child by an answer; return what it is asked."""
    asked: list[Any] = []

    def run_child(*arguments: Any) -> subprocess.CompletedProcess[str]:
        asked.extend(arguments)
        return subprocess.CompletedProcess([], status, out, errors)

    monkeypatch.setattr(build, "run_child", run_child)
    return asked


def test_the_child_is_asked_for_the_whole_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of all kernels of the call come back: of the transposition of scales, then of the product."""
    monkeypatch.setenv("LD_PRELOAD", "/users/own.so")
    asked = answering(monkeypatch, errors="a warning\ncompiled /c/transpose/kernel.cubin\ncompiled /c/fp8/kernel.cubin\n")
    assert build.compile_ahead(target) == ["/c/transpose/kernel.cubin", "/c/fp8/kernel.cubin"]
    question, variables, _ = asked
    assert json.loads(json.dumps(question)) == {
        "installation": {name: str(value) for name, value in attrs.asdict(target.installation).items()},
        "home": str(target.toolkit.home),
        "product": attrs.asdict(target.product),
        "kernel": "n64_s100",
        "sms": 132,
    }
    assert variables["DG_JIT_NVCC_COMPILER"] == str(target.toolkit.nvcc)
    preloaded, _, users = variables["LD_PRELOAD"].partition(":")
    assert (Path(preloaded).name, users) == ("libcuda.so.1", "/users/own.so")


@pytest.mark.parametrize(
    ("status", "out", "errors", "kind", "reason"),
    [
        (0, json.dumps(["", ASSERTION]), "", PluginError, r"refuses .*Assertion error \(sm90.hpp:116\): not candidates.empty"),
        (
            0,
            "NVCC compilation failed: k.cu(3): error: no\n[]",
            "compiled /c/transpose",
            LaunchError,
            r"n64_s100 does not compile: .*error: no",
        ),
        (-11, "", "Segmentation fault", LaunchError, "the compiling process failed: Segmentation fault"),
        (1, "", "Traceback:\nRuntimeError: no driver\n  #0 torch.so at ??:0\n", LaunchError, "process failed: RuntimeError: no driver$"),
    ],
)
def test_failures_have_reasons(
    target: Target, monkeypatch: pytest.MonkeyPatch, status: int, out: str, errors: str, kind: type[Exception], reason: str
) -> None:
    """A refusal of the library, an error of nvcc and a crash differ."""
    answering(monkeypatch, status, out, errors)
    with pytest.raises(kind, match=reason):
        build.compile_ahead(target)


def test_keys_differ_with_what_the_kernel_depends_on(target: Target) -> None:
    """Every field of a target but overlapping launches is in its key."""
    others = [
        attrs.evolve(target, kernel=Kernel(64)),
        attrs.evolve(target, device=attrs.evolve(H200, cu_num=114)),
        attrs.evolve(target, product=attrs.evolve(target.product, m=9)),
        attrs.evolve(target, toolkit=library.Toolkit(Path("/bin/sh"))),
    ]
    assert len({target.key, *(other.key for other in others)}) == 5
    assert attrs.evolve(target, kernel=Kernel(64, 100, pdl=True)).key == target.key
    before = target.key
    target.installation.extension.write_bytes(b"upgraded")
    assert target.key != before


def test_the_described_gpu_answers_what_the_library_asks(target: Target, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """nvcc compiles the description, which reports the file of a kernel instead of loading it."""
    path = build._described_gpu(attrs.evolve(target, toolkit=real_toolkit()), tmp_path)
    described = ctypes.CDLL(str(path))
    index, library_handle, text = ctypes.c_int(7), ctypes.c_void_p(), ctypes.c_char_p()
    assert (described.cudaGetDevice(ctypes.byref(index)), index.value) == (0, 0)
    properties = ctypes.create_string_buffer(4096)
    assert described.cudaGetDeviceProperties(properties, 0) == 0
    assert (132).to_bytes(4, "little") in properties.raw
    assert described.cudaFree(None) == 0
    described.allocate.restype = ctypes.c_void_p
    memory = described.allocate(ctypes.c_ssize_t(64), 0, None)
    ctypes.memset(memory, 0, 64)
    described.release(ctypes.c_void_p(memory), ctypes.c_ssize_t(64), 0, None)
    assert described.cuLibraryLoadFromFile(ctypes.byref(library_handle), b"/c/kernel.cubin", None, None, 0, None, None, 0) == 100
    assert described.cuGetErrorName(100, ctypes.byref(text)) == 0
    assert text.value == b"CUDA_ERROR_NO_DEVICE"
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().err == "compiled /c/kernel.cubin\n"
