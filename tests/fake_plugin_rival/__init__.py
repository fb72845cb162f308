"""A plugin that claims libtypes which others have."""

from tunedgemm.plugin import Solution, hookimpl

OPS = ("a16w16",)


@hookimpl
def supports() -> bool:
    """Everything."""
    return True


@hookimpl
def enumerate_solutions() -> list[Solution]:
    """One, under a name that is not its own."""
    return [Solution("fake", "rival")]


@hookimpl
def run(operands: tuple) -> object:
    """Not reached: the libtype belongs to another distribution."""
    raise AssertionError("the rival was launched")
