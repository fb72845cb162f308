"""Which Triton serves, and what is said of one that does not."""

from __future__ import annotations

import pytest
from tunedgemm.plugin import Device, Shape, Unsupported
from tunedgemm_triton import installed
from tunedgemm_triton.families import supports


@pytest.fixture(autouse=True)
def _forget():
    """Ask anew, before and after."""
    installed.fault.cache_clear()
    yield
    installed.fault.cache_clear()


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
