"""Served: kernels that are right where they are timed, and wrong in what their row serves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device, device_of
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.tuner import tune
from tunedgemm.tuner.requests import CheckServed
from tunedgemm.tuner.served import CALLS, Served
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Options
from tunedgemm.tuner.verify import Verifier

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 64, 48, 256, "fp32")
BIASED = Shape("a16w16", 64, 48, 256, "bf16", epilogue="bias")
CPU = torch.device("cpu")
_calls = itertools.count()


def product(x, weight, bias=None):
    """Compute the right answer by other operations than torch's own call."""
    if bias is None and x.dtype == weight.dtype == torch.float32:
        return torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], -1).contiguous()
    wide = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def each_bind(make: Callable[[Shape], Callable]) -> Callable[[Shape], Callable]:
    """Mark a function that makes the call of a shape."""
    make.each_bind = True
    return make


def ring(size: int) -> Callable:
    outs, count = [], itertools.count()

    def call(x, weight):
        out = product(x, weight)
        at = next(count) % size
        if len(outs) <= at:
            outs.append(out)
            return out
        return outs[at].copy_(out) if outs[at].shape == out.shape else out

    return call


def slices_of_one_buffer():
    kept, count = torch.empty(400, 64, 48), itertools.count()

    def call(x, weight):
        out = product(x, weight)
        return kept[next(count) % 400].copy_(out) if out.shape == kept.shape[1:] else out

    return call


def weight_kept_by_address() -> Callable:
    kept: dict[int, torch.Tensor] = {}
    return lambda x, weight: product(x, kept.setdefault(weight.data_ptr(), weight.clone()))


def weight_kept_by_sample() -> Callable:
    kept: dict[tuple, torch.Tensor] = {}
    return lambda x, weight: product(x, kept.setdefault(tuple(weight.flatten()[:: weight.numel() // 4].tolist()), weight.clone()))


def results_kept_by_sample() -> Callable:
    kept: dict[tuple, torch.Tensor] = {}

    def call(x, weight):
        key = (*x.shape, *x.flatten()[:: x.numel() // 4].tolist(), *weight.flatten()[:: weight.numel() // 4].tolist())
        return kept.setdefault(key, product(x, weight)).clone()

    return call


@each_bind
def right_at_the_tuned_m(shape):
    return lambda x, weight: product(x, weight) if shape.m == SHAPE.m else product(x, weight) * 1.5


@each_bind
def tile_of_eight(shape):
    def call(x, weight):
        out = product(x, weight)
        if shape.m % 8:
            out[..., -(shape.m % 8) :, :] = 0
        return out

    return call


def first_half_of_three_dimensions(x, weight):
    out = product(x, weight)
    if x.dim() == 3:
        out[1:] = out[:1]
    return out


def bias_as_its_bits(x, weight, bias):
    return product(x, weight, bias.view(torch.bfloat16)[: weight.shape[0]])


def wrong_after(calls: int) -> Callable:
    count = itertools.count()
    return lambda x, weight: product(x, weight) * (1.0 if next(count) < calls else 1.5)


def writes_x_at(call_number: int) -> Callable:
    count = itertools.count()

    def call(x, weight):
        out = product(x, weight)
        if next(count) == call_number:
            x[0, 0] += 1
        return out

    return call


def clamped(x, weight):
    return product(x, weight).clamp(-1e4, 1e4)


def clamped_input(x, weight):
    return product(x.clamp(-32, 32), weight)


def fixed_point(x, weight):
    return torch.round(product(x, weight) * 2**12) / 2**12


def hides_nan(x, weight):
    return torch.nan_to_num(product(x, weight))


def hides_nan_of_x(x, weight):
    return product(torch.where(x.isnan(), 0, x), weight)


def spreads_nan(x, weight):
    return product(x, weight) + 0 * x.sum()


def from_the_begin_of_the_storage(x, weight):
    whole = torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape, weight.stride())
    return product(x, whole)


def changes_an_older_output() -> Callable:
    kept: list = []

    def call(x, weight):
        out = product(x, weight)
        if len(kept) == 5:
            kept.pop(0)[..., 0] = 0
        kept.append(out.detach())
        return out

    return call


def torchs_call(x, weight):
    try:
        return x.reshape(3, -1) @ weight
    except RuntimeError:  # sizes that do not fit
        return torch.nn.functional.linear(x, weight)


CHEATS = {
    "a ring of 2 buffers": (ring(2), SHAPE),
    "a ring of 4 buffers": (ring(4), SHAPE),
    "a ring of 8 buffers": (ring(8), SHAPE),
    "a ring of 40 buffers": (ring(40), SHAPE),
    "slices of one buffer": (slices_of_one_buffer(), SHAPE),
    "a weight by address": (weight_kept_by_address(), SHAPE),
    "a weight by sampled contents": (weight_kept_by_sample(), SHAPE),
    "results by sampled contents": (results_kept_by_sample(), SHAPE),
    "right at the tuned M": (right_at_the_tuned_m, SHAPE),
    "wrong last tile": (tile_of_eight, SHAPE),
    "3-D as 2-D": (first_half_of_three_dimensions, SHAPE),
    "bias dtype": (bias_as_its_bits, BIASED),
    "wrong after 100 calls": (wrong_after(100), SHAPE),
    "wrong after 1000 calls": (wrong_after(1000), SHAPE),
    "x at the 60th call": (writes_x_at(60), SHAPE),
    "clamped": (clamped, SHAPE),
    "clamped input": (clamped_input, SHAPE),
    "fixed point": (fixed_point, SHAPE),
    "hides NaN": (hides_nan, SHAPE),
    "hides NaN of x": (hides_nan_of_x, SHAPE),
    "spreads NaN": (spreads_nan, SHAPE),
    "begin of the storage": (from_the_begin_of_the_storage, SHAPE),
    "changes an older output": (changes_an_older_output(), SHAPE),
    "torch's call": (torchs_call, SHAPE),
}


def backend(kernel: Callable, name: str = "cheat"):
    bound: dict[Shape, Callable] = {}

    def call(solution, shape, *operands):
        if shape not in bound:
            bound[shape] = kernel(shape) if getattr(kernel, "each_bind", False) else kernel
        return bound[shape](*operands)

    return fake_backend(name, call=call)


def session(kernel: Callable, **options) -> Session:
    return Session("a16w16", -1, Options(**options), fake_registry(backend(kernel)))


@pytest.mark.parametrize("name", CHEATS)
def test_a_kernel_that_is_wrong_in_use_is_refused(name: str) -> None:
    """Check that each cheat passes the call that is timed, and fails what its row serves."""
    kernel, shape = CHEATS[name]
    here, solution = session(kernel), Solution("cheat", "fake")
    first = here.check_first(shape, solution)
    after = CheckServed(shape, solution).run(here)
    assert first.status == "ok", first.detail
    assert after.status != "ok"
    assert after.detail


@pytest.mark.parametrize("shape", [SHAPE, BIASED, Shape("a16w16", 1, 48, 256, "fp32"), Shape("a16w16", 16, 40, 72, "fp16")], ids=str)
def test_a_right_kernel_passes(shape: Shape) -> None:
    """Check that right kernels pass, with M that serve others or none."""
    after = session(product).check_served(shape, Solution("cheat", "fake"))
    assert after.status == "ok", after.detail


@pytest.mark.parametrize("name", sorted(ops()))
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
        for solution in here.list("torch", shape):
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
    cheat = backend(kernel).hooks["bind"](Solution("cheat", "fake"), shape, device_of(-1)).call

    def call(solution, at, *operands):
        if solution.kernel_name == "right":
            return product(*operands)
        return kernel(at)(*operands) if getattr(kernel, "each_bind", False) else cheat(*operands)

    both = fake_backend("mine", solutions=("wrong", "right"), call=call, sleep={"right": 5e-3})
    options = Options(libtype="mine", iters=8, seconds=0.5)
    [outcome] = tune(shapes=[shape], output=tmp_path / "t.csv", options=options, registry=fake_registry(both)).outcomes
    assert outcome.winner is not None and outcome.winner.solution.kernel_name == "right"
    assert {timing.solution.kernel_name: timing.status for timing in outcome.timings}["wrong"] == "wrong"


def test_timed_calls_are_looked_at() -> None:
    """Check that a kernel which goes wrong while it is timed gets no time."""
    here, solution = session(wrong_after(30)), Solution("cheat", "fake")
    assert here.check_first(SHAPE, solution).status == "ok"
    answers = [here.sample(SHAPE, (solution,), 8)[solution] for _ in range(4)]
    assert "after timed calls" in answers[-1].detail


def test_calls_in_a_row_reach_a_thousand() -> None:
    """Check that quick kernels are called more than a thousand times."""
    assert CALLS > 1000


def test_a_late_change_of_operands_restarts_a_shared_process() -> None:
    """Check that of several timed solutions, none is blamed for operands that one of them changed."""
    from tunedgemm.tuner.trial import DeviceFault

    registry = fake_registry(backend(writes_x_at(40)), backend(product, "good"))
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
    for solution in good.list("torch", shape):
        assert good.check_served(shape, solution).status == "ok"
    cheat = Session("a16w16", index, Options(), fake_registry(backend(torchs_call)))
    assert "torch's own call after its kernel failed" in cheat.check_served(shape, Solution("cheat", "fake")).detail
