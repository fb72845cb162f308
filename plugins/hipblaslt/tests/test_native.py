"""The launch itself: the C extension and ctypes do the same, and threads that share a launcher do not see each other's pointers."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
SCALED = {"cublaslt": "fp8_e4m3fn", "hipblaslt": "fp8_e4m3fnuz"}


def shapes(libtype: str) -> list[Shape]:
    """One for each way in which a launch differs: bias, scales, int32 alpha, batches."""
    return [
        Shape("a16w16", 5, 48, 64),
        Shape("a16w16", 5, 48, 64, **BIAS),
        Shape("a8w8", 5, 48, 64, dtype=SCALED[libtype], outdtype="bf16", scale="row", **BIAS),
        Shape("a8w8", 5, 48, 64, dtype=SCALED[libtype], outdtype="bf16", scale="tensor"),
        Shape("a8w8", 5, 48, 64, dtype="int8", outdtype="bf16", scale="row"),
        Shape("batched_bf16", 5, 48, 64, extra={"B": 3}),
    ]


@extension
@both
def test_both_ways_give_the_same_bits(lt: Any, over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension and ctypes pass the library the same, whatever the shape and with scratch."""
    names = [(over.FIRST, 0), ("sol1004_v100200_fake0001", 0)] if lt.abi.libtype == "hipblaslt" else [(over.FIRST, 0)]
    for shape in shapes(lt.abi.libtype):
        case = over.case(shape)
        for name, split_k in names:
            outs = []
            for way in (native._extension, None):
                with monkeypatch.context() as patched:
                    patched.setattr(native, "_extension", way)
                    outs.append(over.bound(lt, name, shape, split_k).call(*case.plain))
            assert not case.wrong(outs[0])
            assert torch.equal(*outs)


@both
@pytest.mark.parametrize("way", ["extension", "ctypes"])
def test_threads_that_share_launchers(lt: Any, over: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads at once call two solutions of one shape, each with a bias and scales of its own, and get their own results."""
    if way == "extension" and native._extension is None:
        pytest.skip("the C extension was not built")
    monkeypatch.setattr(native, "_extension", native._extension if way == "extension" else None)
    shape = Shape("a8w8", 5, 48, 512, dtype=SCALED[lt.abi.libtype], outdtype="bf16", scale="row", **BIAS)
    split = "id66_tile20_stages15_reduce2_swizzle0_option0_inner0_cluster0", 2  # with scratch, one for each thread
    second = split if lt.abi.libtype == "cublaslt" else ("sol1004_v100200_fake0001", 0)
    launchers = [over.bound(lt, over.FIRST, shape), over.bound(lt, second[0], shape, second[1])]
    assert launchers[1].workspace_bytes > 0
    cases = [over.case(shape, seed) for seed in range(8)]
    start = threading.Barrier(len(cases))

    def work(case: Any) -> list[str]:
        start.wait(timeout=60)
        return [case.wrong(launchers[turn % 2].call(*case.plain)) for turn in range(40)]

    with ThreadPoolExecutor(len(cases)) as pool:
        assert {fault for faults in pool.map(work, cases) for fault in faults} == {""}


@both
@pytest.mark.parametrize("way", ["extension", "ctypes"])
def test_a_wrong_status_is_an_error(lt: Any, over: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused attribute or launch is an error with the status's name, and the launcher works again afterwards."""
    if way == "extension" and native._extension is None:
        pytest.skip("the C extension was not built")
    monkeypatch.setattr(native, "_extension", native._extension if way == "extension" else None)
    shape = Shape("a16w16", 5, 48, 64, **BIAS)
    case, launcher = over.case(shape), over.bound(lt, over.FIRST, shape)
    with pytest.raises(LaunchError, match=f"{lt.abi.libtype}: {lt.abi.prefix}Matmul: INVALID_VALUE"):
        launcher.call(*case.plain[:2])
    assert "there is none" in over.refusal(lt)
    assert not case.launched(launcher)
    monkeypatch.setattr(native, "_POINTERS", ("transpose_a", "a_scale", "b_scale"))  # an attribute of 4 bytes, not of a pointer
    with pytest.raises(LaunchError, match="INVALID_VALUE"):
        over.bound(lt, over.FIRST, shape).call(*case.plain)
    assert "takes 4 bytes (got 8)" in over.refusal(lt)


@extension
def test_the_extension_checks_what_it_is_given() -> None:
    """Wrong numbers and kinds of arguments raise, and an object that was not made is not launched."""
    made = native._extension.Launch(1, 1, 0, 0, 0, 0, 0, bytes(64), 0, False, (-1, -1, -1), None)
    with pytest.raises(TypeError, match="takes 8 addresses"):
        made.launch(1, 2, 3)
    with pytest.raises(TypeError):
        made.launch(*["address"] * 8)
    with pytest.raises(OverflowError):
        made.launch(*[-1] * 8)
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
    """Each argument of the launch reaches its place: addresses of 64 bits, alpha 1, beta 0, C as D."""
    seen: list[tuple[Any, ...]] = []
    matmul_type = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p)
    set_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)

    def matmul(*given: Any) -> int:
        places = list(given)
        for place in (2, 7):
            places[place] = ctypes.c_int32.from_address(given[place]).value
        places[12] = ctypes.string_at(given[12], 64)
        seen.append(tuple(places))
        return 5

    calls = matmul_type(matmul), set_type(lambda desc, name, value, size: seen.append((desc, name, value[0], size)) or 0)
    addresses = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]
    high, algo = 1 << 63, bytes(range(64))
    for whole, one in ((True, 1), (False, 0x3F800000)):
        made = native._extension.Launch(*addresses, high + 1, high + 2, high + 3, high + 4, high + 5, algo, 99, whole, (7, -1, 9), None)
        seen.clear()
        assert made.launch(10, 11, 12, 13, 14, 15, 16, high + 17) == 5
        assert seen[:2] == [(high + 2, 7, 15, 8), (high + 2, 9, high + 17, 8)]
        assert seen[2] == (high + 1, high + 2, one, 12, high + 3, 13, high + 4, 0, 11, high + 5, 11, high + 5, algo, 14, 99, 10)


#: In the extension's source: a text, and another that must not pass. Nothing here leaves a pointer unset, which would end the process.
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
    """The folder of Python's headers; skips where there is no compiler or no header."""
    folder = sysconfig.get_path("include")
    if shutil.which("cc") is None or not Path(folder, "Python.h").is_file():
        pytest.skip("the extension is compiled with `cc` and Python.h, and one is missing")
    return folder


def compiled(source: str, includes: str, folder: Path) -> Any:
    """The extension of that source, as a module."""
    (folder / "shim.c").write_text(source)
    target = folder / "_shim.so"
    flags = ("-O0", "-w", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030A0000", f"-I{includes}")
    subprocess.run(["cc", *flags, folder / "shim.c", "-o", target], check=True)
    loader = importlib.machinery.ExtensionFileLoader("tunedgemm_hipblaslt._shim", str(target))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def faults(backends: dict[str, Any], over: Any) -> list[str]:
    """What is wrong with launches in all the ways that differ, of both libraries."""
    found = []
    for libtype, lt in backends.items():
        for shape in shapes(libtype):
            try:
                found += [over.case(shape).launched(over.bound(lt, over.FIRST, shape))]
            except LaunchError as error:
                found += [str(error)]
    shape = Shape("a16w16", 5, 48, 64)
    try:
        found += [over.case(shape).launched(over.bound(backends["hipblaslt"], "sol1004_v100200_fake0001", shape))]
    except LaunchError as error:
        found += [str(error)]
    return [fault for fault in found if fault]


def test_each_part_of_the_extension_matters(
    backends: dict[str, Any], over: Any, includes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source as it is passes; with any two pointers, sizes or numbers changed, over the fakes it does not."""
    source, unseen = SOURCE.read_text(), []
    for number, (text, other) in enumerate([("", ""), *CHANGES]):
        assert text in source, text
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(native, "_extension", compiled(source.replace(text, other) if text else source, includes, folder))
        found = faults(backends, over)
        assert text or not found
        unseen += [(text, other)] if text and not found else []
    assert not unseen


def test_other_threads_run_while_a_launch_waits() -> None:
    """A launch that waits, here for a fifth of a second in place of a full queue, does not hold the interpreter up."""
    libc = ctypes.CDLL(None)
    wait = ctypes.cast(libc.usleep, ctypes.c_void_p).value  # takes what is the handle for microseconds
    launch = native._extension.Launch(wait, wait, 200_000, 0, 0, 0, 0, b"", 0, False, (-1, -1, -1), None).launch
    ticks, span = [], []

    def work() -> None:
        span.append(time.perf_counter())
        assert launch(*[0] * 8) == 0
        span.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.005)
    thread.join()
    assert span[1] - span[0] >= 0.2
    assert sum(span[0] < tick < span[1] for tick in ticks) >= 3
