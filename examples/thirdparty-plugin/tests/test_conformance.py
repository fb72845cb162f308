"""The checks that every backend passes; they need the plugin installed."""

from tunedgemm.testing.conformance import BackendConformance


class TestSwapped(BackendConformance):
    libtype = "swapped"
