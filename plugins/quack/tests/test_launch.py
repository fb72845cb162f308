"""Launches over a QuACK that computes on the host."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import attrs
import pytest
import torch
from torch.nn.functional import linear
from tunedgemm.plugin import Device, Launcher, LaunchError, Shape, Solution, Unsupported, device_of
from tunedgemm_quack import Quack, launch
from tunedgemm_quack.names import KernelConfig

CPU = device_of(-1)
PLAIN = Shape("a16w16", 6, 40, 512)
KERNELS = (KernelConfig(128, 192, 2, 1, True), KernelConfig(64, 16, 2, 1, False, True))


def bound(backend: Quack, shape: Shape, kernel: KernelConfig, splits: int = 0) -> Launcher:
    """Bind a configuration."""
    launcher = backend.bind(Solution(backend.libtype, kernel.name, splits), shape, CPU)
    assert isinstance(launcher, Launcher), launcher
    return launcher


def draw(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Draw normal numbers."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "swap"])
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("bias_dtype", ["", "bf16", "fp32"])
def test_outputs(backend: Quack, kernel: KernelConfig, splits: int, bias_dtype: str) -> None:
    """Both orders, with splits and biases, give new outputs of any leading dimensions."""
    shape = attrs.evolve(PLAIN, outdtype="fp32", epilogue="bias" if bias_dtype else "none", bias_dtype=bias_dtype)
    bias = (draw(40, dtype=torch.float32 if bias_dtype == "fp32" else torch.bfloat16),) if bias_dtype else ()
    weight, launcher = draw(40, 512), bound(backend, shape, kernel, splits)
    for sizes in ((6, 512), (2, 3, 512), (1, 6, 1, 512)):
        x = draw(*sizes)
        out = launcher.call(x, weight, *bias)
        assert out.shape == (*sizes[:-1], 40)
        assert out.is_contiguous()
        torch.testing.assert_close(out, linear(x.float(), weight.float(), *(each.float() for each in bias)))
        assert launcher.call(x, weight, *bias).data_ptr() != out.data_ptr()


def test_one_row_of_any_stride(backend: Quack) -> None:
    """A single row counts as contiguous with any stride; the kernel takes multiples of 16 bytes."""
    x = draw(512).as_strided((1, 512), (3, 1))
    assert x.is_contiguous()
    weight = draw(40, 512)
    for kernel in KERNELS:
        out = bound(backend, PLAIN.with_m(1), kernel).call(x, weight)
        torch.testing.assert_close(out, linear(x.float(), weight.float()).bfloat16())


def test_the_kernel_gets_the_configuration(backend: Quack, fake: ModuleType) -> None:
    """Tile, cluster, pingpong, splits and order of the operands arrive; K is split in the plan."""
    for kernel, splits in ((KERNELS[0], 0), (KERNELS[1], 4)):
        bound(backend, PLAIN, kernel, splits).call(draw(6, 512), draw(40, 512))
        m, n, k, plan = fake.launches[-1]
        assert (m, n, k) == ((40, 6, 512) if kernel.swapped else (6, 40, 512))
        assert (plan.tile, plan.cluster) == ((kernel.tile_m, kernel.tile_n), (kernel.cluster_m, kernel.cluster_n))
        assert (plan.pingpong, plan.split_k) == (kernel.pingpong, max(splits, 1))


def test_the_workspace_is_whole_clusters_of_float32_tiles(backend: Quack) -> None:
    """Three tiles of the weight's rows take four of a cluster of two."""
    shape = Shape("a16w16", 17, 136, 512)
    assert bound(backend, shape, KERNELS[1]).workspace_bytes == 0
    assert bound(backend, shape, KERNELS[1], 2).workspace_bytes == 4 * 2 * 4 * (64 * 16 + 1)


def test_refusals(backend: Quack) -> None:
    """An unknown name, too many splits and an absent device have their reasons."""
    for solution, reason in (
        (Solution("fakequack", "tile128x96_cluster3x1"), "no kernel of that name"),
        (Solution("fakequack", KERNELS[0].name, 9), "splitK: must be 0 to 8 for K=512 (got 9)"),
    ):
        answer = backend.bind(solution, PLAIN, CPU)
        assert isinstance(answer, Unsupported)
        assert reason in answer.reason
        assert answer.reason == backend.lacks(solution, PLAIN, CPU)


def test_a_kernel_that_does_not_compile(backend: Quack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hooks raise LaunchError with the configuration, the shape and the compiler's message."""
    monkeypatch.setenv("FAKE_QUACK_FAILS", "compile")
    solution = Solution("fakequack", KERNELS[0].name)
    text = rf"quack {KERNELS[0].name}: \w+( not compile)? for a16w16 M=6 N=40 K=512 .*: DSLRuntimeError: does not lower"
    for hook in ("prepare", "bind"):
        with pytest.raises(LaunchError, match=text):
            backend.functions[hook](solution, PLAIN, CPU.limiting(backend.host))


def test_bind_compiles_only_if_allowed(backend: Quack, fake: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A serving process does not wait for a compiler: what was not prepared is refused, also by `lacks`."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    monkeypatch.setenv("TUNEDGEMM_QUACK_COMPILE", "0")
    solution = Solution("fakequack", KERNELS[0].name, 2)
    shape = attrs.evolve(PLAIN, epilogue="bias")
    reason = (
        f"quack {KERNELS[0].name}: not compiled for quack 0.6.5 cutlass-dsl 4.8.1; "
        "tune the shape on this machine, or set TUNEDGEMM_QUACK_COMPILE=1 to compile here"
    )
    assert str(backend.bind(solution, shape, CPU)) == reason == backend.lacks(solution, shape, CPU)
    assert not fake._kernels
    assert backend.lacks(solution, shape, Device("sm_90", 132)) == ""
    backend.prepare(solution, shape, CPU)
    assert isinstance(backend.bind(solution, shape.with_m(99), CPU), Launcher)
    for other in (attrs.evolve(shape, outdtype="fp32"), attrs.evolve(shape, bias_dtype="fp32"), PLAIN):
        assert str(backend.bind(solution, other, CPU)) == reason
    assert str(backend.bind(attrs.evolve(solution, split_k=3), shape, CPU)) == reason
    monkeypatch.setenv("QUACK_CACHE_DIR", "/other")
    assert str(backend.bind(solution, shape, CPU)) == reason


def test_prepare_compiles_what_bind_needs(backend: Quack, fake: ModuleType) -> None:
    """`prepare` compiles without a device, with the target in the environment, and `bind` nothing more."""
    seen = []
    library = backend.hooks.load()

    def gemm(*arguments: object, **named: object) -> object:
        seen.append((os.environ["QUACK_ARCH"], os.environ["CUTE_DSL_ARCH"]))
        return library.gemm(*arguments, **named)

    spy = attrs.evolve(backend, hooks=attrs.evolve(backend.hooks, load=lambda: attrs.evolve(library, gemm=gemm)))
    for shape in (PLAIN, attrs.evolve(PLAIN, epilogue="bias", bias_dtype="fp32", outdtype="fp32")):
        for kernel, splits in ((KERNELS[0], 0), (KERNELS[1], 0), (KERNELS[1], 2)):
            before = len(fake._kernels)
            spy.prepare(Solution("fakequack", kernel.name, splits), shape, CPU)
            assert len(fake._kernels) == before + 1
            spy.prepare(Solution("fakequack", kernel.name, splits), shape, CPU)
            bound(backend, shape, kernel, splits)
            assert len(fake._kernels) == before + 1
    assert not fake.launches or all(sizes[0] <= launch._SMALL for sizes in fake.launches)
    assert set(seen) == {("90", "sm_90a")}
    assert "QUACK_ARCH" not in os.environ
