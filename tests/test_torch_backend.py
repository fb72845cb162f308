"""The built-in backend: the conformance suite, and what is its own."""

from tunedgemm.libtypes import BUILTIN
from tunedgemm.testing.conformance import BackendConformance


class TestConformance(BackendConformance):
    """The built-in backend passes the checks of every other."""

    libtype = BUILTIN
