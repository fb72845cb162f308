"""Served: kernels that are right where they are timed, and wrong in what their row serves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device, device_of
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.testing.siblings import module_at
from tunedgemm.tuner import tune
from tunedgemm.tuner.served import CALLS, Served
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Options
from tunedgemm.tuner.verify import Verifier

KERNELS = module_at(Path(__file__).parents[1] / "misbehaving" / "kernels")
CHEATS, SHAPE, BIASED, product = KERNELS.CHEATS, KERNELS.SHAPE, KERNELS.BIASED, KERNELS.product
CPU = torch.device("cpu")


def backend(kernel: Callable, name: str = "cheat"):
    bound: dict[Shape, Callable] = {}

    def call(solution, shape, *operands):
        if shape not in bound:
            bound[shape] = kernel(shape) if getattr(kernel, "each_bind", False) else kernel
        return bound[shape](*operands)

    return fake_backend(name, call=call)


def _rounded(shape: Shape, *operands: torch.Tensor) -> torch.Tensor:
    """Return the rounded product of any number of rows."""
    return exact(Solution("cheat", "fake"), shape.with_m(operands[0].shape[:-1].numel()), *operands)


def session(kernel: Callable, **options) -> Session:
    return Session("a16w16", -1, Options(**options), fake_registry(backend(kernel)))


@pytest.mark.parametrize("name", CHEATS)
def test_a_kernel_that_is_wrong_in_use_is_refused(name: str) -> None:
    """Check that each cheat passes the call that is timed, and fails what its row serves."""
    kernel, shape = CHEATS[name]
    here, solution = session(kernel), Solution("cheat", "fake")
    first = here.check_first(shape, solution)
    after = here.check_served(shape, solution)
    assert first.status == "ok", first.detail
    assert after.status != "ok"
    assert after.detail


@pytest.mark.parametrize("shape", [SHAPE, BIASED, Shape("a16w16", 1, 48, 256, "fp32"), Shape("a16w16", 16, 40, 72, "fp16")], ids=str)
def test_a_right_kernel_passes(shape: Shape) -> None:
    """Check that right kernels pass, with M that serve others or none."""
    after = session(product).check_served(shape, Solution("cheat", "fake"))
    assert after.status == "ok", after.detail


@pytest.mark.parametrize("layout", ["row", "aiter16x16", "columns128"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64", "fp8_e4m3fn"])
def test_right_products_of_every_dtype_and_layout_pass(dtype: str, layout: str) -> None:
    """Check that the rounded product passes in each dtype and layout of the weight that fit."""
    for scale in ("none", "tensor"):
        shape, solution = Shape("a16w16", 5, 1024, 256, dtype, "bf16", scale=scale, layout=layout), Solution("cheat", "fake")
        if not op_named("a16w16").problem(shape):
            after = session(functools.partial(_rounded, shape)).check_served(shape, solution)
            assert after.status == "ok", after.detail


@pytest.mark.parametrize("outdtype", ["fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz"])
def test_outputs_in_fp8_are_verified(outdtype: str) -> None:
    """Check that the rounded product passes, where infinity is a number, too, and one without NaN fails."""
    shape, solution = Shape("a16w16", 16, 64, 128, "bf16", outdtype), Solution("cheat", "fake")

    def rounded(*operands):
        return _rounded(shape, *operands)

    def hiding(*operands):
        return rounded(*operands).float().nan_to_num().to(torch_dtype(outdtype))

    found, hidden = (session(kernel).check_served(shape, solution) for kernel in (rounded, hiding))
    assert found.status == "ok", found.detail
    assert (hidden.status, "hides NaN" in hidden.detail) == ("wrong", True)


#: Ops whose references take less than a second; the conformance suite checks torch of all ops.
_SHORT = ("batched_a8w8", "batched_bf16")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _SHORT else pytest.mark.nightly) for name in sorted(ops())])
def test_the_reference_of_every_op_passes(name: str) -> None:
    """Check every op: its rounded reference serves all forms, and a last row lost at fewer rows does not."""
    op = op_named(name)
    device = device_of(-1)
    for shape in shapes_of(name, False):
        if not shape.m:
            continue
        sets = [op.make_inputs(shape, CPU, seed) for seed in (0, 1)]
        served = Served(Verifier(op, shape, sets, 0.05), device, None)

        def bind(at: Shape) -> Launcher:
            return Launcher(lambda *operands: exact(Solution("fake", "fake"), at, *operands))

        timing = served.check(Solution("fake", "fake"), bind(shape), bind)
        assert timing.status == "ok", f"{shape}: {timing.detail}"


def test_torchs_own_routes_pass() -> None:
    """Check that the built-in backend's solutions pass, and are not taken for substitutes."""
    registry = Registry()
    here = Session("a16w16", -1, Options(), registry)
    for shape in (SHAPE, BIASED):
        for solution in here.solutions("torch", shape):
            timing = here.check_served(shape, solution)
            assert timing.status in ("ok", "unsupported"), f"{shape} {solution}: {timing.detail}"


def test_an_open_call_of_torch_is_no_substitute() -> None:
    """Check that a backend may call torch's product where no kernel of it failed."""

    def linear(x, weight):
        return torch.nn.functional.linear(x, weight)

    here = session(linear)
    assert here.check_served(SHAPE, Solution("cheat", "fake")).status == "ok"


@pytest.mark.parametrize("name", ["a ring of 8 buffers", "right at the tuned M", "hides NaN"])
def test_the_next_solution_wins_where_the_fastest_is_wrong_in_use(name: str, tmp_path: Path) -> None:
    """Check through the tuner that a cheat which is the fastest leaves the row to a right solution."""
    kernel, shape = CHEATS[name]
    cheat = backend(kernel).functions["bind"](Solution("cheat", "fake"), shape, device_of(-1)).call

    def call(solution, at, *operands):
        if solution.kernel_name == "right":
            return product(*operands)
        return kernel(at)(*operands) if getattr(kernel, "each_bind", False) else cheat(*operands)

    both = fake_backend("mine", solutions=("wrong", "right"), call=call, sleep={"right": 5e-3})
    options = Options(libtype="mine", iters=8, seconds=0.5)
    [outcome] = tune(shapes=[shape], output=tmp_path / "t.csv", options=options, registry=fake_registry(both)).outcomes
    assert outcome.winner is not None and outcome.winner.solution.kernel_name == "right"
    assert {timing.solution.kernel_name: timing.status for timing in outcome.timings}["wrong"] == "wrong"


def test_zeros_of_either_sign_are_wrong_within_any_bounds() -> None:
    """Check that zeros alone are refused where flags lift all bounds, negative ones too."""
    timing = session(lambda x, weight: product(x, weight) * -0.0, errRatio=1.0).check_first(SHAPE, Solution("cheat", "fake"))
    assert "zeros alone" in timing.detail


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_split_sums_in_sixteen_bits_pass(dtype: str) -> None:
    """Check that partial sums which are rounded to the output's dtype count as right."""

    def split(x, weight):
        half = weight.shape[1] // 2
        parts = [torch.einsum("...k,nk->...n", x[..., at].float(), weight[:, at].float()) for at in (slice(half), slice(half, None))]
        return (parts[0].to(x.dtype).float() + parts[1].to(x.dtype).float()).to(x.dtype)

    for m, n, k in ((64, 48, 256), (1, 1, 1), (3, 8, 7)):
        timing = session(split).check_served(Shape("a16w16", m, n, k, dtype), Solution("cheat", "fake"))
        assert timing.status == "ok", timing.detail


def test_timed_calls_are_looked_at() -> None:
    """Check that a kernel which goes wrong while it is timed gets no time."""
    here, solution = session(KERNELS.wrong_after(30)), Solution("cheat", "fake")
    assert here.check_first(SHAPE, solution).status == "ok"
    answers = [here.sample(SHAPE, (solution,), 8)[solution] for _ in range(4)]
    assert "after timed calls" in answers[-1].detail


def test_calls_in_a_row_reach_a_thousand() -> None:
    """Check that quick kernels are called more than a thousand times."""
    assert CALLS > 1000


def test_a_late_change_of_operands_restarts_a_shared_process() -> None:
    """Check that of several timed solutions, none is blamed for operands that one of them changed."""
    from tunedgemm.tuner.trial import DeviceFault

    registry = fake_registry(backend(KERNELS.writes_x_at(40)), backend(product, "good"))
    here = Session("a16w16", -1, Options(), registry)
    both = (Solution("cheat", "fake"), Solution("good", "fake"))
    with pytest.raises(DeviceFault, match="changed its operands"):
        for _ in range(8):
            here.sample(SHAPE, both, 8)


@pytest.mark.gpu
def test_torchs_call_passes_on_a_gpu() -> None:
    """Check that torch's own call serves all forms on a GPU, and a substitute is refused."""
    shape, index = Shape("a16w16", 64, 512, 1024), current_device().index
    good = Session("a16w16", index, Options(), Registry())
    for solution in good.solutions("torch", shape):
        assert good.check_served(shape, solution).status == "ok"
    cheat = Session("a16w16", index, Options(), fake_registry(backend(KERNELS.torchs_call)))
    assert "torch's own call after its kernel failed" in cheat.check_served(shape, Solution("cheat", "fake")).detail
