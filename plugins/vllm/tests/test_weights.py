"""weights: Marlin and Machete get repacked weights as they read them, and each kernel has its row."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Backend, Launcher, Shape, Solution, Unsupported, device_of
from tunedgemm.tools.launching import FORMATS
from tunedgemm.tools.tables import op_named
from tunedgemm_vllm import library, vllm, weights

CPU, OP = device_of(-1), op_named("a16wn")


def shape_of(name: str, layout: str, group: int = 0, m: int = 4, dtype: str = "bf16", n: int = 128, k: int = 256) -> Shape:
    """Return a shape of a weight in a layout, canonical for a group that is the whole row."""
    extra = {"w_format": name, "w_group": group}
    return OP.canonical(Shape("a16wn", m, n, k, dtype, dtype, scale="block", layout=layout, extra=extra))


def operands_of(shape: Shape, device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """Return random operands as launchers get them."""
    made = OP.make_inputs(shape, torch.device(device), seed)
    return tuple(getattr(operand, "plain", operand) for operand in made)


def error(shape: Shape, out: torch.Tensor, operands: tuple[Any, ...]) -> float:
    """Return the relative error by norm."""
    exact = OP.reference(shape, operands).double()
    return float((out.double().view(exact.shape) - exact).norm() / exact.norm())


@pytest.fixture
def backend(importable: None) -> Backend:
    """Return the backend over the stand-in, whose calls are forgotten."""
    import fake_vllm

    library.operators(fake_vllm.vllm.hooks.vendor)
    sys.modules["vllm_stand_in_weights"].calls.clear()
    return fake_vllm.vllm


def bound(backend: Backend, shape: Shape, kernel: str = "") -> Launcher:
    """Bind a kernel, by default the first."""
    launcher = backend.bind(Solution(backend.libtype, kernel or weights.PRODUCTS[shape.layout]), shape, CPU)
    assert isinstance(launcher, Launcher), launcher
    return launcher


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", weights.PRODUCTS)
def test_every_format_and_group(backend: Backend, layout: str, dtype: str) -> None:
    """The threads of the stand-in find each code, scale and zero point where they look for it."""
    served = set()
    for name, form in FORMATS.items():
        for group in form.groups:
            shape = shape_of(name, layout, group, dtype=dtype)
            if not OP.problem(shape):
                operands = operands_of(shape)
                assert error(shape, bound(backend, shape).call(*operands), operands) < 2**-8, shape
                served.add(name)
    ints = {name for name in FORMATS if "int" in name}
    assert served == ints if layout == "machete" else served == set(FORMATS) - (set() if dtype == "bf16" else {"mxfp8", "mxfp4"})


@pytest.mark.parametrize("leading", [(4,), (2, 2), (1, 4)])
def test_leading_dimensions(backend: Backend, leading: tuple[int, ...]) -> None:
    """x has any leading dimensions, also where act-order moves its columns into a workspace."""
    for layout in weights.PRODUCTS:
        shape = shape_of("gptq_int4_order", layout, 64)
        launcher, (x, *rest) = bound(backend, shape), operands_of(shape)
        out = launcher.call(x.view(*leading, 256), *rest)
        assert out.shape == (*leading, 128) and error(shape, out, (x, *rest)) < 2**-8
        assert launcher.workspace_bytes == 4 * 256 * 2
        assert bound(backend, shape_of("gptq_int4", layout, 64)).workspace_bytes == 0


def test_engines_forms_of_operands(backend: Backend) -> None:
    """Scales may be bytes, weights native pairs, and a global scale one value of any dimension."""
    for name in ("mxfp4", "mxfp8", "nvfp4"):
        shape = shape_of(name, "marlin", FORMATS[name].groups[0])
        x, weight, scale, *rest = operands_of(shape)
        wanted = bound(backend, shape).call(x, weight, scale, *rest)
        if name != "nvfp4":
            assert torch.equal(bound(backend, shape).call(x, weight, scale.view(torch.uint8)), wanted)
        else:
            assert torch.equal(bound(backend, shape).call(x, weight, scale, None, None, rest[2].view(1)), wanted)
        if name != "mxfp8":
            assert torch.equal(bound(backend, shape).call(x, weight.view(torch.float4_e2m1fn_x2), scale, *rest), wanted)


def test_each_schedule_is_a_solution(backend: Backend) -> None:
    """The first one lets the operator choose, as vLLM does; the others name what it runs."""
    shape = shape_of("awq_int4", "machete", 128)
    operands, calls = operands_of(shape), sys.modules["vllm_stand_in_weights"].calls
    names = [solution.kernel_name for solution in backend.solutions(shape, CPU)]
    assert len(names) == 10 and names[0] == "machete_mm"
    for name in names:
        assert error(shape, bound(backend, shape, name).call(*operands), operands) < 2**-8
    assert [call[-1] for call in calls] == [None, *(name.removeprefix("machete_mm_") for name in names[1:])]


def test_a_schedule_that_the_library_lacks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of another version is refused with its schedule."""
    shape, real = shape_of("ct_int4", "machete", 64), weights.operator
    lacking = {"machete_supported_schedules": lambda *_: ["128x16_1x1x1_TmaMI__TmaCoop_streamK"]}
    monkeypatch.setattr(weights, "operator", lambda vendor, name: lacking.get(name) or real(vendor, name))
    answer = backend.bind(Solution("fakevllm", "machete_mm_256x64_2x1x1_TmaMI__TmaCoop_streamK"), shape, CPU)
    assert str(answer) == "vllm_stand_in: its Machete has no schedule 256x64_2x1x1_TmaMI__TmaCoop_streamK for bf16 by uint4b8; tune again"
    bound(backend, shape, "machete_mm_128x16_1x1x1_TmaMI__TmaCoop_streamK")


@pytest.mark.parametrize(("m", "n", "listed"), [(1, 2048, True), (64, 2048, True), (65, 2048, False), (65, 1024, True), (1, 2112, False)])
def test_atomic_sums(backend: Backend, m: int, n: int, listed: bool) -> None:
    """Marlin adds by atomic operations for small outputs alone; such a kernel claims no equal bits."""
    shape = shape_of("gptq_int4", "marlin", 128, m=m, n=n)
    solutions = {solution.kernel_name: solution.deterministic for solution in backend.solutions(shape, CPU)}
    assert solutions == {"marlin_gemm": True} | ({"marlin_gemm_atomic": False} if listed else {})
    answer = backend.bind(Solution("fakevllm", "marlin_gemm_atomic"), shape, CPU)
    assert isinstance(answer, Launcher if listed else Unsupported)
    if m == 1 and listed:
        answer.call(*operands_of(shape))
        bound(backend, shape).call(*operands_of(shape))
        assert [call[-1] for call in sys.modules["vllm_stand_in_weights"].calls] == [True, False]


def test_locks_are_left_at_zero(backend: Backend) -> None:
    """Calls share the locks of a stream, of which there are enough for four blocks a multiprocessor."""
    shape = shape_of("nvfp4", "marlin", 16)
    operands = operands_of(shape)
    first, again = (bound(backend, shape).call(*operands) for _ in range(2))
    assert torch.equal(first, again)


def test_an_older_marlin(backend: Backend) -> None:
    """Versions with an index among the arguments get none; another signature is refused."""
    stand_in = sys.modules["vllm_stand_in_weights"]
    older = torch.library.Library("older_vllm_C", "FRAGMENT")
    older.define("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()")
    older.define(stand_in.OLD_MARLIN)
    older.impl("marlin_gemm", stand_in.old_marlin_gemm, "CompositeExplicitAutograd")
    older.define("machete_mm(Tensor A, Tensor B) -> Tensor")
    vendor, device = library.Vendor("older_vllm", "older_vllm_C"), attrs.evolve(CPU, gfx="sm_90", cu_num=132)
    shape = shape_of("gptq_int4_zp_order", "marlin", 64)
    operands = operands_of(shape)
    assert error(shape, weights.bind(vendor, "marlin_gemm", shape, device).call(*operands), operands) < 2**-8
    with pytest.raises(library.PluginError, match=r"older_vllm: machete_mm must take A, B, b_type, .* \(got older_vllm_C::machete_mm\("):
        weights.bind(vendor, "machete_mm", shape_of("ct_int4", "machete"), device)


def gpu(shape: Shape) -> Iterator[tuple[Solution, Launcher]]:
    """Yield the solutions of the current GPU; skip where it has none."""
    device = device_of(torch.cuda.current_device())
    if answer := vllm.refusal(shape, device):
        pytest.skip(str(answer))
    for solution in vllm.solutions(shape, device):
        launcher = vllm.bind(solution, shape, device)
        assert isinstance(launcher, Launcher), launcher
        yield solution, launcher


NEEDS_VLLM = pytest.mark.skipif(library.folder_of("vllm") is None, reason="needs an installed vLLM")


@pytest.mark.gpu
@NEEDS_VLLM
@pytest.mark.parametrize("m", [1, 17, 64, 300])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", weights.PRODUCTS)
def test_every_kernel_on_a_gpu(layout: str, dtype: str, m: int) -> None:
    """vLLM's own operators agree with the op's reference, in all formats, groups and schedules."""
    for name, form in FORMATS.items():
        for group in form.groups:
            shape = shape_of(name, layout, group, m, dtype, 1024, 2048)
            if not OP.problem(shape):
                operands = operands_of(shape, "cuda")
                for solution, launcher in gpu(shape):
                    assert error(shape, launcher.call(*operands), operands) < (2**-7 if dtype == "bf16" else 2**-9), (shape, solution)


@pytest.mark.gpu
@NEEDS_VLLM
def test_the_bytes_are_those_of_vllms_repacking() -> None:
    """The core packs codes as the library's own functions do; Machete's want K contiguous."""
    operators = library.operators(library.VLLM)
    list(gpu(shape_of("ct_int4", "machete", 64)))  # skips
    for name, bits in (("gptq_int4", 4), ("ct_int4", 4), ("int8_channel", 8)):
        weight = operands_of(shape_of(name, "row", n=1024, k=2048), "cuda")[1]
        words = weight if FORMATS[name].is_kn else (weight.view(torch.uint8) ^ (128 if bits == 8 else 0)).view(torch.int32).t()
        takes_index = "perm" in str(operators.gptq_marlin_repack.default._schema)
        index = (torch.empty(0, dtype=torch.int32, device="cuda"),) if takes_index else ()
        of_marlin = operators.gptq_marlin_repack(words.contiguous(), *index, 2048, 1024, bits, False)
        kind = weights.TYPES["uint4b8" if bits == 4 else "uint8b128"]
        of_machete = operators.machete_prepack_B(words.t().contiguous().t(), torch.bfloat16, kind, torch.bfloat16)
        for layout, theirs in (("marlin", of_marlin), ("machete", of_machete)):
            ours = operands_of(shape_of(name, layout, n=1024, k=2048), "cuda")[1]
            assert torch.equal(ours.view(-1).view(torch.int32), theirs.as_strided((theirs.numel(),), (1,))), (name, layout)


@pytest.mark.gpu
@NEEDS_VLLM
@pytest.mark.parametrize("layout", weights.PRODUCTS)
def test_the_first_call_may_be_captured(layout: str) -> None:
    """A graph replays with other activations, and its locks begin at zero each time."""
    shape = shape_of("gptq_int4_order", layout, 128, 16, "bf16", 2048, 4096)
    for _, launcher in gpu(shape):
        x, *rest = operands_of(shape, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = launcher.call(x, *rest)
        for seed in (1, 2):
            x.copy_(operands_of(shape, "cuda", seed)[0])
            out.fill_(torch.nan)
            graph.replay()
            assert error(shape, out, (x, *rest)) < 2**-7
