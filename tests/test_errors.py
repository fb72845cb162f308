"""errors: one hierarchy, in which each user error is also the builtin error that code expects."""

import inspect

import pytest
from tunedgemm import errors

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_documented(kind):
    """Each class descends from TunedGemmError, is in the drawing, and has a one-sentence docstring."""
    assert issubclass(kind, errors.TunedGemmError)
    assert kind.__name__ in errors.__doc__
    assert kind.__doc__.endswith(".")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.DtypeError, ValueError),
        (errors.ShapeError, ValueError),
        (errors.OperandError, ValueError),
        (errors.UnknownOpError, LookupError),
        (errors.LibtypeError, LookupError),
    ],
)
def test_mistakes_are_builtin_errors_too(kind, builtin):
    """Code that catches the builtin class catches ours."""
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.UserError)


def test_a_failing_plugin_is_not_a_user_error():
    """The command line prints a UserError without a traceback, and a plugin's fault with one."""
    assert not issubclass(errors.PluginError, errors.UserError)
    assert issubclass(errors.OutOfResources, errors.LaunchError)
