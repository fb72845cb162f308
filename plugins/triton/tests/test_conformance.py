"""The backend `triton` keeps the contract."""

from __future__ import annotations

from tunedgemm.testing.conformance import BackendConformance


class TestTriton(BackendConformance):
    """Everything that the core asks of a backend."""

    libtype = "triton"
