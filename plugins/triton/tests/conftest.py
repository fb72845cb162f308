"""What the tests take from the installed Triton: its compiler and interpreter, not its launcher."""

from __future__ import annotations

import pytest
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm_triton import installed


@pytest.fixture(autouse=True)
def any_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """List and plan the same kernels whatever Triton is installed.

    On a GPU its launcher decides, and in the conformance suite, whose processes have no fixtures.
    """
    if not (request.node.get_closest_marker("gpu") or (request.cls and issubclass(request.cls, BackendConformance))):
        monkeypatch.setattr(installed, "launcher_fault", lambda: "")
