"""A plugin that claims libtypes of others."""

import sys

from tunedgemm.plugin import Backend, Solution, hookimpl


@hookimpl
def supports() -> None:
    """Accept every shape."""


@hookimpl
def enumerate_solutions() -> list[Solution]:
    """Return one solution, under another plugin's libtype."""
    return [Solution("fake", "rival")]


@hookimpl
def run(operands: tuple) -> object:
    """Fail: the libtype belongs to another distribution, so this is never reached."""
    raise AssertionError("the rival was launched")


fake, triton = (Backend(libtype, sys.modules[__name__], ops=("a16w16",)) for libtype in ("fake", "triton"))
