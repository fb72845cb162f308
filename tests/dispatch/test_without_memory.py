"""Operands that an op does not take: missing ones, and those whose memory does not hold their values."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import tunedgemm
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.integrations.linear import routed_linear
from tunedgemm.integrations.patching import patched
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

EVERY = pytest.mark.parametrize("name", sorted(ops()))
CPU = torch.device("cpu")


def smallest(op: Op) -> Shape:
    """The example that is quickest to compute, with a bias where one is as quick."""
    shapes = [shape for shape in shapes_of(op.name) if shape.m and shape.layout == "row"] or [s for s in shapes_of(op.name) if s.m]
    return min(shapes, key=lambda shape: (op.flops(shape), str(shape)))


def called(gemm: TunedGemm, shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    return gemm.call(shape.op, *operands, otype=torch_dtype(shape.outdtype), **op_named(shape.op).fields(shape))


@pytest.fixture
def gemm() -> TunedGemm:
    """Every op by a backend that computes the reference, whatever the shape."""
    turbo = fake_backend("turbo", ops=tuple(ops()), heuristic="fake", call=exact, scale_orders=("m_major", "m_major_padded", "aiter32x8"))
    return TunedGemm(fake_registry(turbo), settings=Settings(untuned=("turbo",)))


@EVERY
def test_a_missing_operand_is_named(name: str, gemm: TunedGemm) -> None:
    """Also one that is None or a number, an operand too many and an argument that the op lacks."""
    op = op_named(name)
    operands = op.make_inputs(smallest(op), CPU, 0)
    required = [operand for operand in op.operands if not operand.endswith("?")]
    for count, missing in enumerate(required):
        for given in (operands[:count], (*operands[:count], None)):
            with pytest.raises(OperandError, match=rf"^{name}: {missing} must be a tensor \(got None\); pass {required[0]}, "):
                gemm.call(name, *given)
    for place, operand in enumerate(op.operands[: len(operands)]):
        with pytest.raises(OperandError, match=rf"^{name}: {operand.rstrip('?')} must be a tensor \(got 0.5\)"):
            gemm.call(name, *operands[:place], 0.5, *operands[place + 1 :])
    with pytest.raises(OperandError, match=rf"^{name}: too many operands \(got 12\)"):
        gemm.call(name, *[operands[0]] * 12)
    with pytest.raises(OperandError, match=rf"^{name}: unknown argument \(got 'colour'\); known: "):
        gemm.call(name, *operands, colour="red")


def negated(operand: torch.Tensor) -> torch.Tensor:
    """The same values, which torch negates as it reads them."""
    return torch._neg_view(operand.neg())


def imaginary(operand: torch.Tensor) -> torch.Tensor:
    """The same values as the imaginary part of a conjugated tensor, as torch's own functions negate."""
    return torch.complex(torch.zeros_like(operand), operand.neg()).conj().imag


def zeros(operand: torch.Tensor) -> torch.Tensor:
    """Zeros without memory, as derivatives of torch are."""
    return torch._efficientzerotensor(tuple(operand.shape), dtype=operand.dtype)


@pytest.fixture
def misread() -> list[torch.Size]:
    """The sizes of operands that a kernel of `watched` got, and whose memory does not hold their values."""
    return []


@pytest.fixture
def watched(misread: list[torch.Size]) -> TunedGemm:
    """Every op by a backend that reads memory."""

    def reading(solution: Any, shape: Shape, *operands: Any) -> torch.Tensor:
        given = [operand for operand in operands if operand is not None and operand.numel()]
        misread.extend(operand.shape for operand in given if not operand.data_ptr() or operand.is_neg())
        return exact(solution, shape, *operands)

    orders = ("m_major", "m_major_padded", "aiter32x8")
    turbo = fake_backend("turbo", ops=tuple(ops()), heuristic="fake", call=reading, scale_orders=orders)
    return TunedGemm(fake_registry(turbo), settings=Settings(untuned=("turbo",)))


@EVERY
@pytest.mark.parametrize("kind", [negated, imaginary, zeros], ids=lambda kind: kind.__name__)
def test_kernels_get_the_values_of_operands_without_memory(name: str, kind: Any, watched: TunedGemm, misread: list[torch.Size]) -> None:
    """At each place, before and after a call with the same values in memory."""
    op = op_named(name)
    shape = smallest(op)
    operands = op.make_inputs(shape, CPU, 0)
    for place, operand in enumerate(operands):
        if type(operand) is not torch.Tensor or operand.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            continue
        if kind is imaginary and operand.dtype is not torch.float32:
            continue
        values = torch.zeros_like(operand) if kind is zeros else operand
        odd, plain = ((*operands[:place], each, *operands[place + 1 :]) for each in (kind(values), values))
        assert torch.equal(odd[place].clone().resolve_neg(), values)
        first = called(watched, shape, odd)
        wanted = called(watched, shape, plain)
        assert torch.equal(first, wanted) and torch.equal(called(watched, shape, odd), wanted) and not misread


@pytest.mark.parametrize("kind", [imaginary, zeros], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_hot_functions_and_routes_read_no_memory_that_is_absent(
    place: int, kind: Any, watched: TunedGemm, misread: list[torch.Size]
) -> None:
    """After calls with plain operands of the same strides, dense and not."""
    operands = torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)
    odd = tuple(kind(each) if at == place else each for at, each in enumerate(operands))
    gaps = tuple(torch.stack([each, each], -1)[..., 1] if at == place else each for at, each in enumerate(operands))
    wanted = torch._C._nn.linear(*odd)
    route = routed_linear(watched.dispatcher)
    for function in (watched.gemm_a16w16, route):
        for given in (operands, gaps, odd, odd):
            out = function(*given)
            torch.testing.assert_close(out, wanted if given is odd else torch._C._nn.linear(*given))
    assert not misread


def test_meta_tensors_run_no_kernel_of_the_cpu(watched: TunedGemm, misread: list[torch.Size]) -> None:
    """Which has the same index, and whose launchers are bound already."""
    for name in sorted(ops()):
        op = op_named(name)
        shape = smallest(op)
        operands = op.make_inputs(shape, CPU, 0)
        called(watched, shape, operands)
        absent = tuple(each if each is None else each.to("meta") for each in operands)
        if all(each is None or type(each) is torch.Tensor for each in absent):
            out = called(watched, shape, absent)
            assert out.is_meta and (out.shape, out.dtype) == (called(watched, shape, operands).shape, torch_dtype(shape.outdtype))
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    watched.gemm_a16w16(x, weight)
    assert watched.gemm_a16w16(x.to("meta"), weight.to("meta")).is_meta
    with pytest.raises(OperandError, match="x is on meta and weight on cpu"):
        watched.gemm_a16w16(x.to("meta"), weight)
    assert not misread


SPARSE = {
    "coo": lambda operand: operand.to_sparse(),
    "csr": lambda operand: operand.to_sparse_csr(),
    "csc": lambda operand: operand.to_sparse_csc(),
    "bsr": lambda operand: operand.to_sparse_bsr((4, 4)),
    "mkldnn": lambda operand: operand.to_mkldnn(),
    "nested": lambda operand: torch.nested.nested_tensor([operand[:1], operand]),
    "jagged": lambda operand: torch.nested.nested_tensor([operand[:1], operand], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*ested:UserWarning")
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", SPARSE)
def test_other_layouts_get_torchs_call_or_a_named_error(kind: str, place: int) -> None:
    """Routed functions give torch's own result or error; an op gives it, too, or names the operand."""
    operands = tuple(SPARSE[kind](each) if at == place else each for at, each in enumerate((torch.randn(32, 32), torch.randn(32, 32))))

    def outcome(function: Any) -> Any:
        try:
            out = function(*operands)
        except OperandError as error:
            return re.sub("weight|x", "", str(error)) if ("x", "weight")[place] in str(error) else error
        except Exception as error:
            return type(error), str(error)[:40]
        return out.layout, out.is_nested, str(out if out.is_nested else out.to_dense())

    wanted = outcome(torch.nn.functional.linear)
    for _ in range(2):
        with patched():
            assert outcome(torch.nn.functional.linear) == wanted
        for function in (tunedgemm.gemm_a16w16, functools.partial(tunedgemm.call, "a16w16")):
            found = outcome(function)
            assert found == wanted or isinstance(found, str), found


@pytest.mark.parametrize("name", ["a16w16", "a8w8", "a8w8_blockscale", "batched_bf16", "batched_a8w8"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_holds_torchs_operations(name: str, watched: TunedGemm) -> None:
    """`torch.jit.trace` follows torch's call of an op; it has no views of packed and shuffled operands."""
    op = op_named(name)
    shape = smallest(op)
    x, *others = op.make_inputs(shape, CPU, 0)
    expected = called(watched, shape, (x, *others))

    traced = torch.jit.trace(lambda given: called(watched, shape, (given, *others)), (x,), check_trace=False)

    torch.testing.assert_close(traced(x), expected, rtol=0.02, atol=0.02)
    assert "aten::" in str(traced.graph)


@pytest.mark.gpu
@pytest.mark.parametrize("libtype", ["cublaslt", "skinny", "triton", "cutlass", "asm"])
def test_kernels_of_plugins_get_the_values_of_operands_without_memory(libtype: str, tmp_path: Path) -> None:
    """Also after calls with plain operands of the same strides; no context is lost."""
    shape, here = Shape("a16w16", 4, 256, 512, "fp16", epilogue="bias", bias_dtype="fp16"), current_device()
    backend = Registry().get(libtype)
    solution = next(iter(backend.iterate(shape, here)), None) if isinstance(backend, Backend) else None
    if solution is None:
        pytest.skip(f"{libtype} has no kernel for {shape} on {here}")
    if lack := backend.lacks(solution, shape, here):
        pytest.skip(lack)
    write_rows(
        tmp_path / "t.csv", op_named("a16w16"), [Row(shape=shape, gfx=here.gfx, cu_num=here.cu_num, device="", solution=solution, us=1.0)]
    )
    gemm = TunedGemm(settings=Settings())
    gemm.load_config(tmp_path / "t.csv")
    operands = op_named("a16w16").make_inputs(shape, torch.device("cuda"), 0)
    assert gemm.dispatcher.bound(shape, here).libtype == libtype
    for function in (gemm.gemm_a16w16, routed_linear(gemm.dispatcher)):
        for place, operand in enumerate(operands):
            parts = torch.view_as_complex(torch.stack([torch.zeros_like(operand), operand.neg()], -1))
            absent = torch._efficientzerotensor(tuple(operand.shape), dtype=operand.dtype, device="cuda")
            for odd in (parts.conj().imag, absent):
                given = [*operands[:place], odd, *operands[place + 1 :]]
                wanted = torch._C._nn.linear(*(each.clone().resolve_neg() for each in given))
                gaps = [*operands[:place], torch.stack([operand, operand], -1)[..., 1], *operands[place + 1 :]]
                for each in (operands, gaps, given, given):
                    out = function(*each)
                torch.testing.assert_close(out, wanted, rtol=0.01, atol=0.1)
        with pytest.raises((OperandError, RuntimeError), match=r"is on meta|device meta|on meta"):
            function(operands[0].to("meta"), *operands[1:])
    negative = [negated(operand) for operand in operands]
    wanted = torch._C._nn.linear(*operands)
    torch.testing.assert_close(gemm.call("a16w16", *negative), wanted, rtol=0.01, atol=0.1)
    torch.cuda.synchronize()
