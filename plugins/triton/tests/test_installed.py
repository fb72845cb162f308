"""Which Triton serves, and what is said of one that does not."""

from __future__ import annotations

import pytest
from tunedgemm.plugin import Device, Shape, Solution, Unsupported
from tunedgemm_triton import enumerate_solutions, installed, lacks
from tunedgemm_triton.families import supports


@pytest.fixture(autouse=True)
def _forget():
    """Ask anew, before and after."""
    installed.fault.cache_clear()
    yield
    installed.fault.cache_clear()


@pytest.fixture
def any_launcher():
    """Leave the launcher of the installed Triton to the tests of this file."""
    installed.launcher_fault.cache_clear()
    yield
    installed.launcher_fault.cache_clear()


@pytest.mark.parametrize(
    ("found", "version", "said"),
    [(None, "", "not installed"), (1, "3.5.1", "3.6 or later (got 3.5.1)"), (1, "3.6.0", ""), (1, "3.10.0+git1", ""), (1, "", "")],
)
def test_a_triton_that_is_absent_or_too_old_is_named(monkeypatch, found, version, said):
    """No kernel is offered, with the fault and the remedy as the reason."""
    monkeypatch.setattr(installed, "find_spec", lambda name: found)
    monkeypatch.setattr(installed, "version", lambda: version)

    answer = supports(Shape("a16w16", 16, 64, 64), Device("sm_90", 132))

    assert isinstance(answer, Unsupported) and said in answer.reason and "; " in answer.reason if said else answer is True


@pytest.mark.parametrize(("version", "said"), [("3.6.0", ""), ("3.7.1", "3.6 only (got 3.7.1)"), ("3.10.0", "got 3.10.0"), ("", "")])
def test_tensor_descriptors_are_listed_where_their_launcher_is_known(monkeypatch, version, said):
    """A row or a guess with another Triton costs no compile, and the reason is named."""
    monkeypatch.setattr(installed, "version", lambda: version)
    shape, device = Shape("a16w16", 4096, 4096, 4096), Device("sm_90", 132)

    reason = lacks(Solution("triton", "tma_r1_m128n128k64_g8_w4s4"), shape, device)

    assert (said in reason and "; " in reason) if said else not reason
    assert any("tma" in solution.kernel_name for solution in enumerate_solutions(shape, device)) is not bool(said)
    assert not lacks(Solution("triton", "gemm_r1_m128n128k64_g8_w8s3"), shape, device)
