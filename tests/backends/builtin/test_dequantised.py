"""Route ``dequantised`` of a16wn: the kept weight is right, and the tuner times it warm."""

import pytest
import torch
from tunedgemm.backends.builtin import backend
from tunedgemm.backends.builtin.dequantised import family
from tunedgemm.backends.kept_weights import LIMIT, used
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.weight_formats import FORMATS, format_of
from tunedgemm.solution import Solution
from tunedgemm.tuner.bits import StandardOperands, measure
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Options

OP, CPU = op_named("a16wn"), device_of(-1)
DEQUANTISED = Solution("torch", "dequantised")
SHAPES = [shape for shape in OP.examples if shape.m and shape.layout == "row" and not shape["w_format"].startswith("gptq_int4_")]


def bound(shape):
    return backend.bind(DEQUANTISED, shape, CPU)


@pytest.fixture
def limited(monkeypatch):
    """Allow 64 MiB of kept weights."""
    monkeypatch.setenv(LIMIT, "64MiB")


def test_without_a_limit_no_shape_lists_it():
    """The refusal names the variable and the size of a weight."""
    assert DEQUANTISED not in backend.solutions(SHAPES[0], CPU)
    reason = f"dequantised keeps 49,152 bytes for each weight; set {LIMIT}, such as to 8GiB (now 0 bytes)"
    assert (bound(SHAPES[0]).reason, backend.lacks(DEQUANTISED, SHAPES[0], CPU)) == (reason, reason)


def test_each_format_is_right(limited):
    """Every format is as exact as its record says, with bias, global scale and leading dimensions."""
    formats = set()
    for shape in SHAPES:
        launcher, operands = bound(shape), OP.make_inputs(shape, torch.device("cpu"), 0)
        if not isinstance(launcher, Launcher):
            assert shape.dtype == "fp16" or shape.outdtype != shape.dtype, launcher
            continue
        assert DEQUANTISED in backend.solutions(shape, CPU) and launcher.keeps_weights
        out = launcher.call(operands[0].view(1, shape.m, shape.k), *operands[1:])
        assert (out.shape, str(out.dtype)) == ((1, shape.m, shape.n), str(OP.fake(*operands, otype=out.dtype).dtype))
        exact = shape.outdtype == "fp32"
        assert worst_row_error(out[0], OP.reference(shape, operands)) < (1e-6 if exact else OP.tolerance(shape).row_error)
        formats.add(format_of(shape).name)
    assert formats == {name for name in FORMATS if not name.startswith("gptq_int4_")}


def test_scales_at_one_address_of_other_groups(limited):
    """A weight with the first row of its scales alone is another weight, and both are right in turns."""
    of_groups = next(each for each in SHAPES if each["w_format"] == "gptq_int4" and each["w_group"] == 64 and each.dtype == "bf16")
    whole = of_groups.with_extra((("w_format", "gptq_int4"), ("w_group", 0)))
    x, weight, scale = OP.make_inputs(of_groups, torch.device("cpu"), 0)[:3]
    for shape, scales in ((of_groups, scale), (whole, scale[:1]), (of_groups, scale)):
        out = bound(shape).call(x, weight, scales)
        assert worst_row_error(out, OP.reference(shape, (x, weight, scales))) < OP.tolerance(shape).row_error


def test_refusals_of_precision(limited):
    """A weight in the dtype of x must not be coarser than the output, or overflow."""
    cases = {("mxfp8", "fp16", "fp16"): "less range", ("gptq_int4", "bf16", "fp32"): "too coarse", ("nvfp4", "fp16", "fp32"): ""}
    for (name, dtype, out), reason in cases.items():
        shape = next(each for each in OP.examples if each["w_format"] == name and each.m)
        shape = OP.as_asked(type(shape)(**{**shape.to_dict(), "dtype": dtype, "outdtype": out}))
        assert reason in family.routes["dequantised"].unfit(shape, CPU) or not reason
        assert bool(reason) == bool(family.routes["dequantised"].unfit(shape, CPU))


def test_the_tuner_accepts_it_and_states_the_cost(limited):
    """All checks of a winner pass, writes included; the detail has the time of the decoding."""
    session, shape = Session("a16wn", -1, Options(), Registry([])), next(each for each in SHAPES if each.m == 5)
    for check in (session.check_first, session.check, session.check_again, session.check_served):
        timing = check(shape, DEQUANTISED)
        assert timing.status == "ok", timing
        if check == session.check:
            assert timing.detail.startswith("dequantised once in ") and timing.detail.endswith(" ms, 49,152 bytes kept")
    assert used() >= 2 * 49_152


def test_a_limit_below_the_copies_of_the_tuner_fails_the_candidate(monkeypatch):
    """No time of another kernel is taken for it."""
    monkeypatch.setenv(LIMIT, "50KiB")
    session = Session("a16wn", -1, Options(), Registry([]))
    with pytest.raises(Exception, match=f"{LIMIT}: .* set a higher limit"):
        session.check_first(SHAPES[0], DEQUANTISED)


def test_it_has_no_bit_class(limited):
    """Its bits follow the tables of a16w16."""
    operands = StandardOperands(OP, SHAPES[0].with_m(0), torch.device("cpu"))
    assert measure(operands, bound, (1, 2)).fault == "its bits depend on the tables of another op"
