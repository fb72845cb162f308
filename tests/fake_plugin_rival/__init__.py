"""A plugin that claims libtypes of others."""

from tunedgemm.plugin import Solution, hookimpl

OPS = ("a16w16",)


@hookimpl
def supports() -> bool:
    """Accept every shape."""
    return True


@hookimpl
def enumerate_solutions() -> list[Solution]:
    """Return one solution, under another plugin's libtype."""
    return [Solution("fake", "rival")]


@hookimpl
def run(operands: tuple) -> object:
    """Fail: the libtype belongs to another distribution, so this is never reached."""
    raise AssertionError("the rival was launched")
