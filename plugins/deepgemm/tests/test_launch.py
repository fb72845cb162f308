"""Launch over the stand-in: arguments, settings, compilation ahead, errors."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tunedgemm.plugin import Device, Launcher, LaunchError, Shape, Solution, Unsupported, device_of
from tunedgemm.tools.tables import op_named
from tunedgemm_deepgemm import launch
from tunedgemm_deepgemm.build import COMPILE

CPU = device_of(-1)
PLAIN = Shape("a16w16", 5, 48, 64)
ORDERS = ("", "m_major", "m_major_padded")


def scaled(m: int, n: int, k: int, order: str = "") -> Shape:
    return Shape("a8w8_blockscale", m, n, k, "fp8_e4m3fn", "bf16", scale="block", extra={"scale_order": order} if order else {})


def bound(backend: Any, shape: Shape, name: str = "native") -> Launcher:
    """Compile ahead, and bind."""
    solution = Solution(backend.libtype, name)
    backend.prepare(solution, shape, CPU)
    answer = backend.bind(solution, shape, CPU)
    assert isinstance(answer, Launcher), answer
    return answer


def compilations(cache: Path) -> list[str]:
    """Return the names of the kernels that the stand-in compiled, in order."""
    log = cache / "deepgemm" / "log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(1, 256, 384), (4, 136, 384), (7, 576, 208), (33, 136, 80), (1, 8, 16), (5, 64, 256)], ids=str)
def test_every_order_of_scales_is_read(backend: Any, sizes: tuple[int, int, int], order: str) -> None:
    """Outputs are right for each order; also where x has more dimensions, or one row any stride."""
    shape, op = scaled(*sizes, order), op_named("a8w8_blockscale")
    call, given = bound(backend, shape).call, op.make_inputs(shape, torch.device("cpu"), 0)
    wanted = op.reference(shape, given).float()
    assert torch.allclose(call(*given).float(), wanted, rtol=2e-2, atol=1e-2 * float(wanted.abs().max()))
    x, weight, x_scale, w_scale = given
    folded = call(x[None], weight, x_scale[None], w_scale)
    assert folded.shape == (1, shape.m, shape.n)
    assert torch.equal(folded[0], call(*given))
    single = [tensor.as_strided(tensor.shape, (3, 1)) if len(tensor) == 1 else tensor for tensor in (x, w_scale)]
    assert torch.equal(call(single[0], weight, x_scale, single[1]), folded[0])


def test_aligned_scales_are_not_transposed(backend: Any, cache: Path) -> None:
    """Row-major scales cost a kernel of the library; M-major ones and single columns none."""
    for shape in (scaled(8, 128, 256, "m_major"), scaled(7, 128, 256, "m_major_padded"), scaled(7, 128, 128)):
        assert bound(backend, shape).workspace_bytes == 0
    assert not [name for name in compilations(cache) if "transpose" in name]
    assert bound(backend, scaled(7, 128, 256)).workspace_bytes == 8 * 2 * 4
    assert bound(backend, scaled(7, 128, 256, "m_major")).workspace_bytes == 8 * 2 * 4
    assert len([name for name in compilations(cache) if "transpose" in name]) == 1


def test_serving_never_compiles(backend: Any, cache: Path) -> None:
    """`bind` refuses what is not compiled, `lacks` says the same, and after `prepare` neither compiles."""
    solution = Solution(backend.libtype, "n32")
    answer = backend.bind(solution, PLAIN, CPU)
    assert isinstance(answer, Unsupported)
    assert answer.reason == backend.lacks(solution, PLAIN, CPU)
    assert "is not compiled; tune the shape on this machine, or set TUNEDGEMM_DEEPGEMM_COMPILE=1" in answer.reason
    assert not compilations(cache)
    call = bound(backend, PLAIN, "n32").call
    assert call(*op_named("a16w16").make_inputs(PLAIN, torch.device("cpu"), 0)).shape == (5, 48)
    assert compilations(cache) == ["kernel.bf16.0x48x64.132.32 described"]
    assert not backend.lacks(solution, PLAIN, CPU)
    assert isinstance(backend.bind(Solution(backend.libtype, "n32_pdl"), PLAIN, CPU), Launcher), "PDL is no other kernel"


def test_a_deleted_kernel_is_compiled_again(backend: Any, cache: Path) -> None:
    """The library's cache decides, not the memory of an earlier compilation."""
    bound(backend, PLAIN)
    (kernel,) = (cache / "deepgemm").rglob("kernel.cubin")
    kernel.unlink()
    assert "is not compiled" in str(backend.bind(Solution(backend.libtype, "native"), PLAIN, CPU))
    bound(backend, PLAIN)
    assert len(compilations(cache)) == 2


def test_the_switch_lets_bind_compile(backend: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the switch `bind` compiles in a child, not in this process."""
    monkeypatch.setenv(COMPILE, "1")
    assert isinstance(backend.bind(Solution(backend.libtype, "s100_mnk"), PLAIN, CPU), Launcher)
    assert compilations(cache) == ["kernel.bf16.5x48x64.100.1 described"]


def test_a_name_gives_the_settings(backend: Any, fake: ModuleType) -> None:
    """Each call has its settings, whatever the call before it had; one copy serves all."""
    given = op_named("a16w16").make_inputs(PLAIN, torch.device("cpu"), 0)
    names = {
        "native": (132, False, (1, 1), "nk"),
        "n32_s100_pdl": (100, True, (1, 32), "nk"),
        "mnk": (132, False, (1, 1), "mnk"),
    }
    calls = {name: bound(backend, PLAIN, name).call for name in names}
    (copy,) = fake.opened
    for name in (*names, *reversed(names)):
        copy.calls.clear()
        calls[name](*given)
        assert copy.calls == [names[name]]


def test_the_process_keeps_its_variables(backend: Any, fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy reads our folder and no workspace; the process keeps the user's variables."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/users/own")
    before = dict(os.environ)
    bound(backend, PLAIN)
    assert dict(os.environ) == before
    (copy,) = fake.opened
    assert copy.cache == Path(os.environ["TUNEDGEMM_CACHE"]).resolve() / "deepgemm"
    assert set(copy.variables.values()) == {"1"}


def test_threads_with_different_settings_do_not_mix(backend: Any, fake: ModuleType) -> None:
    """Every call of four threads runs with the settings of its launcher, from start to end."""
    wanted = {"native": (132, 1), "s8": (8, 1), "n32": (132, 32), "n64_s16": (16, 64)}
    given, thread = op_named("a16w16").make_inputs(PLAIN, torch.device("cpu"), 0), threading.local()
    bound(backend, PLAIN)
    (copy,), seen, start = fake.opened, set(), threading.Barrier(len(wanted))
    original = copy.bf16_gemm_nt

    def checked(*arguments: Any, **keywords: Any) -> None:
        before = copy.get_num_sms(), copy.multiple[1]
        original(*arguments, **keywords)
        seen.update((thread.name, settings) for settings in (before, (copy.get_num_sms(), copy.multiple[1])))

    copy.bf16_gemm_nt = checked

    def run(name: str) -> None:
        thread.name = name
        call = bound(backend, PLAIN, name).call
        start.wait()
        for _ in range(200):
            call(*given)

    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(run, wanted))
    assert seen == set(wanted.items())


def test_errors_name_the_kernel(backend: Any, fake: ModuleType) -> None:
    """An error of the library becomes a LaunchError; memory that runs out stays what it is."""
    bound(backend, PLAIN)
    (copy,), given = fake.opened, op_named("a16w16").make_inputs(PLAIN, torch.device("cpu"), 0)

    def failing(error: Exception) -> Any:
        def function(*_: Any, **__: Any) -> None:
            raise error

        return function

    original, copy.bf16_gemm_nt = copy.bf16_gemm_nt, failing(RuntimeError("CUDA driver error (a/b/handle.hpp:7): 700 (an address)"))
    with pytest.raises(LaunchError, match=r"deepgemm native: CUDA driver error \(handle.hpp:7\): 700"):
        backend.functions["bind"](Solution(backend.libtype, "native"), PLAIN, CPU.limiting(backend.host))
    copy.bf16_gemm_nt = failing(torch.OutOfMemoryError("none left"))
    with pytest.raises(torch.OutOfMemoryError):
        backend.functions["bind"](Solution(backend.libtype, "native"), PLAIN, CPU.limiting(backend.host))
    copy.bf16_gemm_nt = original
    assert bound(backend, PLAIN).call(*given).shape == (5, 48)


def test_a_thread_without_a_context_gets_one(backend: Any, fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's status 201 is mended once, and the call repeated."""
    bound(backend, PLAIN)
    (copy,), mended = fake.opened, []
    original = copy.bf16_gemm_nt

    class Driver:
        def mend(self, *arguments: Any) -> None:
            mended.append(arguments)

    def lacking(*arguments: Any) -> None:
        if not mended:
            raise RuntimeError("CUDA driver error (csrc/handle.hpp:7): 201 (CUDA_ERROR_INVALID_CONTEXT, invalid device context)")
        original(*arguments)

    copy.bf16_gemm_nt = lacking
    monkeypatch.setattr(launch, "loaded_driver", lambda interface: Driver())
    (target,) = launch.targets_of(backend.hooks.access, Solution(backend.libtype, "native"), PLAIN, Device("sm_90", 132, "nvidia-h200", 0))
    (x, weight), out = op_named("a16w16").make_inputs(PLAIN, torch.device("cpu"), 0), torch.zeros(5, 48, dtype=torch.bfloat16)
    launch._launch(launch.Copy(copy), target)(x, weight, out)
    assert mended == [("launch", 201, 0)]
    assert out.any()


def test_a_cache_that_others_may_write_is_a_reason(backend: Any, cache: Path) -> None:
    """Kernels of such a folder are not loaded."""
    (cache / "deepgemm").mkdir(parents=True)
    (cache / "deepgemm").chmod(0o777)
    assert "writable by others" in str(backend.bind(Solution(backend.libtype, "native"), PLAIN, CPU))


def test_no_rows_need_no_kernel(backend: Any, cache: Path, fake: ModuleType) -> None:
    """M = 0 binds without the library, with leading dimensions too."""
    shape = Shape("a16w16", 0, 48, 64, outdtype="fp32")
    call = backend.bind(Solution(backend.libtype, "native"), shape, CPU).call
    out = call(torch.empty(3, 0, 64, dtype=torch.bfloat16), torch.empty(48, 64, dtype=torch.bfloat16))
    assert (out.shape, out.dtype) == ((3, 0, 48), torch.float32)
    assert not fake.opened
    assert not compilations(cache)
