"""launch: operands as Humming reads them, compilation ahead, and what a launch gets."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Backend, Launcher, LaunchError, Shape, Solution, Unsupported, device_of
from tunedgemm.tools.launching import FORMATS
from tunedgemm.tools.tables import op_named

CPU, OP = device_of(-1), op_named("a16wn")
MMA, WGMMA = "mma_8x128x128_warp8x64x32_stages4_streamk", "wgmma_64x128x64_warp64x32x64_stages3_tma_ws_ctas2"


def weights(name: str, layout: str = "humming", group: int = 0, m: int = 4, dtype: str = "bf16", k: int = 256) -> Shape:
    """Return a shape of a weight, canonical for a group that is the whole row."""
    extra: Any = {"w_format": name, "w_group": group}
    return OP.canonical(Shape("a16wn", m, 128, k, dtype, dtype, scale="block", layout=layout, extra=extra))


def operands_of(shape: Shape) -> tuple[Any, ...]:
    """Return random operands as launchers get them."""
    made = OP.make_inputs(shape, torch.device("cpu"), 0)
    return tuple(getattr(operand, "plain", operand) for operand in made)


def error(shape: Shape, out: torch.Tensor, operands: tuple[Any, ...]) -> float:
    """Return the relative error by norm."""
    exact = OP.reference(shape, operands).double()
    return float((out.double().view(exact.shape) - exact).norm() / exact.norm())


@pytest.fixture
def backend(fake: ModuleType) -> Backend:
    """Return the backend over the fake."""
    made: Backend = fake.fakehumming
    return made


def bound(backend: Backend, shape: Shape, kernel: str = MMA) -> Launcher:
    """Bind a kernel."""
    launcher = backend.bind(Solution(backend.libtype, kernel), shape, CPU)
    assert isinstance(launcher, Launcher), launcher
    return launcher


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["marlin", "humming"])
def test_every_format_and_group(backend: Backend, layout: str, dtype: str) -> None:
    """The threads of the fake find each code, scale and zero point where they look for it."""
    served = set()
    for name, form in FORMATS.items():
        for group in form.groups:
            for k in (128, 256):
                shape = weights(name, layout, group, dtype=dtype, k=k)
                if not OP.problem(shape) and backend.refusal(shape, CPU) is None:
                    operands = operands_of(shape)
                    assert error(shape, bound(backend, shape).call(*operands), operands) < 2**-8, shape
                    served.add(name)
    symmetric = {name for name in FORMATS if "int" in name and FORMATS[name].zeros is None}
    if layout == "marlin":
        assert served == {name for name in symmetric if dtype == "fp16" or FORMATS[name].bits == 4}
    else:
        assert served == set(FORMATS) - symmetric - (set() if dtype == "bf16" else {"mxfp8", "mxfp4"})


@pytest.mark.parametrize("leading", [(4,), (2, 2), (1, 4)])
def test_leading_dimensions(backend: Backend, leading: tuple[int, ...]) -> None:
    """x has any leading dimensions, also where act-order moves its columns into a workspace."""
    shape = weights("gptq_int4_order", "marlin", 64)
    launcher, (x, *rest) = bound(backend, shape, WGMMA), operands_of(shape)
    out = launcher.call(x.view(*leading, 256), *rest)
    assert out.shape == (*leading, 128) and error(shape, out, (x, *rest)) < 2**-8
    assert launcher.workspace_bytes == 4 * 256 * 2
    assert bound(backend, weights("gptq_int4", "marlin", 64), WGMMA).workspace_bytes == 0
    assert bound(backend, weights("gptq_int4", "marlin", 64), MMA).workspace_bytes == 4 * 2 * 132


def test_engines_forms_of_operands(backend: Backend) -> None:
    """Scales may be bytes, weights native pairs, and a global scale one value of any dimension."""
    for name in ("mxfp4", "mxfp8", "nvfp4"):
        shape = weights(name, group=FORMATS[name].groups[0])
        x, weight, scale, *rest = operands_of(shape)
        wanted = bound(backend, shape).call(x, weight, scale, *rest)
        if name == "nvfp4":
            assert torch.equal(bound(backend, shape).call(x, weight, scale, None, None, rest[2].view(1)), wanted)
        else:
            assert torch.equal(bound(backend, shape).call(x, weight, scale.view(torch.uint8)), wanted)
        if name != "mxfp8":
            assert torch.equal(bound(backend, shape).call(x, weight.view(torch.float4_e2m1fn_x2), scale, *rest), wanted)


def test_the_kernel_gets_the_configuration(backend: Backend, fake: ModuleType) -> None:
    """The name's settings arrive, and binding launches one row, which loads the kernel."""
    shape = weights("gptq_int4", "marlin", 128, m=300)
    launcher = bound(backend, shape, f"default_{WGMMA}")
    ((kernel, rows),) = fake.launches
    assert rows == 1 and tuple(kernel["block_shape"]) == (64, 128, 64) and tuple(kernel["warp_shape"]) == (64, 32, 64)
    assert (kernel["mma_type"], kernel["num_stages"], kernel["num_ctas_per_sm"], kernel["use_stream_k"]) == ("wgmma", 3, 2, False)
    assert kernel["use_tma"] and kernel["use_warp_spec"] and kernel["gemm_type"] == "dense"
    launcher.call(*operands_of(shape))
    assert fake.launches[1] == (kernel, 300)


def test_kernels_are_compiled_ahead(backend: Backend, fake: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once for all M and both names; `bind` compiles only if allowed, and `lacks` has the same reason."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    monkeypatch.delenv("TUNEDGEMM_HUMMING_COMPILE")
    shape, solution = weights("nvfp4", group=16), Solution("fakehumming", f"default_{WGMMA}")
    refused = backend.bind(solution, shape, CPU)
    remedy = "tune the shape on this machine, or set TUNEDGEMM_HUMMING_COMPILE=1 to compile here"
    reason = f"humming default_{WGMMA}: not compiled for humming 0.1.20; {remedy}"
    assert isinstance(refused, Unsupported) and str(refused) == reason == backend.lacks(solution, shape, CPU)
    backend.prepare(solution, shape, CPU)
    backend.prepare(solution, shape, CPU)
    assert len(fake.built) == 1 and not fake.launches
    bound(backend, weights("nvfp4", group=16, m=77), WGMMA)
    assert len(fake.built) == 1
    other = weights("nvfp4", group=16, k=384)
    assert isinstance(backend.bind(solution, other, CPU), Unsupported)
    for binary in tmp_path.glob("fake_humming/*.cubin"):
        binary.unlink()
    assert str(backend.bind(solution, shape, CPU)) == reason
    backend.prepare(solution, shape, CPU)
    assert len(fake.built) == 2
    bound(backend, shape, WGMMA)


def test_what_cannot_be_compiled_or_run(backend: Backend, fake: ModuleType) -> None:
    """Splits, other names and tiles that do not fit are refused; errors of Humming have the kernel's name."""
    shape = weights("fp8_channel")
    for solution, reason in (
        (Solution("fakehumming", MMA, 2), "humming: splitK must be 0, since names end in _streamk instead (got 2)"),
        (Solution("fakehumming", "mma"), "humming: no kernel of that name (got 'mma'); tune the shape again"),
    ):
        assert str(backend.bind(solution, shape, CPU)) == reason
        backend.prepare(solution, shape, CPU)
    assert not fake.built
    wide = Solution("fakehumming", "wgmma_64x256x64_warp64x64x64_stages3")
    with pytest.raises(LaunchError, match=f"humming {wide.kernel_name}: does not compile for .*: a limit of the kernel"):
        backend.hooks.prepare(wide, shape)

    def launch(**_: Any) -> None:
        raise RuntimeError("cuLaunchKernelEx\nfailed")

    failing = attrs.evolve(backend.hooks, load=lambda: attrs.evolve(fake.library, launch=launch))
    with pytest.raises(LaunchError, match=f"humming {MMA}: fails for .*: cuLaunchKernelEx failed"):
        failing.bind(Solution("fakehumming", MMA), shape, attrs.evolve(fake.fakehumming.host, emulated=True))
