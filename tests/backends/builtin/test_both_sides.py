"""Routes of a16wn that quantise x: off by default, judged by the other op, their error recorded."""

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.backends.builtin import backend
from tunedgemm.backends.builtin.both_sides import OPTION, PREFIX
from tunedgemm.backends.kept_weights import LIMIT
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.ops.both_sides import PRODUCTS, quantiser
from tunedgemm.solution import Solution
from tunedgemm.testing.launch_checks import LaunchChecks
from tunedgemm.testing.launching import Case
from tunedgemm.testing.listed import listed
from tunedgemm.tuner.bits import StandardOperands, measure
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Options
from tunedgemm.tuner.verify import Verifier

OP, CPU = op_named("a16wn"), device_of(-1)
SHAPES = {name: next(each for each in OP.examples if each["w_format"] == name and each.m == 5) for name in PRODUCTS}


def as_(op):
    return Solution("torch", f"{PREFIX}{op}")


@pytest.fixture
def allowed(monkeypatch):
    """Allow quantised activations."""
    monkeypatch.setenv(OPTION.variable, "quantised")


def test_repacked_weights_are_refused(allowed, monkeypatch):
    """Neither route that reads the checkpoint's bytes takes those of an engine's layout."""
    monkeypatch.setenv(LIMIT, "64MiB")
    shape = attrs.evolve(SHAPES["fp8_channel"], layout="marlin")
    for solution in (as_("a8w8"), Solution("torch", "dequantised")):
        assert "the checkpoint's layout, not marlin" in backend.lacks(solution, shape, CPU)


@listed(("w_format", "op"), PRODUCTS.items())
def test_without_the_option_it_is_refused(w_format, op):
    """No shape lists it, and the refusal names the variable."""
    assert not [each for each in backend.solutions(SHAPES[w_format], CPU) if each.kernel_name.startswith(PREFIX)]
    reason = f"{PREFIX}{op} quantises the activations; set {OPTION.variable}=quantised to allow it (now given)"
    assert backend.bind(as_(op), SHAPES[w_format], CPU).reason == reason == backend.lacks(as_(op), SHAPES[w_format], CPU)


def test_a_call_is_the_other_op_of_quantised_activations(allowed):
    """Its bits are those of the other op, which alone is listed for a format."""
    for w_format, op in PRODUCTS.items():
        shape = SHAPES[w_format]
        assert [each for each in backend.solutions(shape, CPU) if each.kernel_name.startswith(PREFIX)] == [as_(op)]
        x, *weights = OP.make_inputs(shape, torch.device("cpu"), 0)
        out = backend.bind(as_(op), shape, CPU).call(x.view(1, 5, shape.k), *weights)
        assert torch.equal(out[0], tunedgemm.call(op, *quantiser(shape)(x, *weights), otype=x.dtype)), w_format
    with_bias = attrs.evolve(SHAPES["fp8_block"], epilogue="bias", bias_dtype="fp16")
    assert backend.bind(as_("a8w8_blockscale"), with_bias, CPU).reason == "as_a8w8_blockscale adds no bias"


def test_the_tuner_records_its_error(allowed):
    """It passes by the other op's tolerance, and the row has the error by a16wn's reference."""
    shape, solution = attrs.evolve(SHAPES["nvfp4"], m=16, n=32, k=64), as_("a4w4_nvfp4")
    session = Session("a16wn", -1, Options(), Registry([]))
    for check in (session.check_first, session.check_again, session.check_served, session.check):
        timing = check(shape, solution)
        assert timing.status == "ok", timing
    assert timing.err_ratio > 0.3 and 0.01 < timing.row_error < 0.2
    assert timing.detail.startswith("other numbers than a16wn: ")
    assert session.sample(shape, [solution], 1)[solution].us


def test_other_verifiers_refuse_it(allowed):
    """By a16wn's own reference it is wrong; by the other op's, so is a product of wrong scale."""
    shape, solution = SHAPES["mxfp8"], as_("a8w8_mxfp8")
    launcher = backend.bind(solution, shape, CPU)
    own = Verifier(OP, shape, [OP.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 1)], 0.05)
    assert own.verify(solution, launcher.call, own.variant(0)).status == "wrong"
    assert own.of(solution).check(solution, launcher).status == "ok"
    assert own.of(solution) is own.of(solution) and own.of(Solution("torch", "native")) is own
    scaled = Launcher(lambda *operands: launcher.call(*operands) * 1.02)
    assert own.of(solution).check(solution, scaled).status == "wrong"


@pytest.mark.usefixtures("allowed")
class TestConformance(LaunchChecks):
    """The suite judges such a solution by the other op, too."""

    libtype, shapes = BUILTIN, tuple(attrs.evolve(SHAPES[name], m=3) for name in ("fp8_channel", "nvfp4"))


def test_the_suite_finds_wrong_numbers(allowed):
    """A wrong scale is a fault by the other op, and any of its numbers by a16wn."""
    shape, solution = SHAPES["mxfp8"], as_("a8w8_mxfp8")
    case = Case(shape, CPU, OP, (), ())
    out = backend.bind(solution, shape, CPU).call(*case.operands)
    judge = case.of(solution)
    assert case.of(Solution("torch", "native")) is case and case.fault(out)
    assert not judge.fault(out) and not judge.fault(out, judge.drawn(0).reference) and judge.fault(out * 1.02)


def test_it_has_no_bit_class(allowed):
    """Its bits follow the tables of the other op."""
    shape = SHAPES["mxfp8"]
    operands = StandardOperands(OP, shape.with_m(0), torch.device("cpu"))
    found = measure(operands, lambda at: backend.bind(as_("a8w8_mxfp8"), at, CPU), (1,))
    assert found.fault == "its bits depend on the tables of another op"
