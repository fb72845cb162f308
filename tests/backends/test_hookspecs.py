"""hookspecs: the contract, small enough to read."""

import inspect

import pluggy
import pytest
from tunedgemm.backends import hookspecs
from tunedgemm.backends.contract import HOOKS

#: The user's hooks; a change of any is a change of CONTRACT.
SIGNATURES = {
    "supports": ("shape", "device"),
    "enumerate_solutions": ("shape", "device"),
    "run": ("solution", "operands"),
    "heuristic_fallback": ("shape", "device"),
    "invariant_fallback": ("shape", "device"),
    "bind": ("solution", "shape", "device"),
    "prepare": ("solution", "shape", "device"),
    "refine": ("solution", "shape", "device"),
    "lacks": ("solution", "shape", "device"),
    "source_of": ("solution", "shape", "device"),
    "library_version": ("device",),
    "details": ("device",),
}


def test_the_hooks_are_these():
    """Names and arguments of all hooks, no more and no fewer."""
    manager = pluggy.PluginManager("tunedgemm")
    manager.add_hookspecs(hookspecs)
    specified = {name: caller.spec.argnames for name, caller in vars(manager.hook).items() if isinstance(caller, pluggy.HookCaller)}
    assert specified == SIGNATURES
    assert set(HOOKS) == set(SIGNATURES)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_documented_and_typed(hook):
    """Each hook documents its result, and its arguments and result have types."""
    function = getattr(hookspecs, hook)
    assert inspect.getdoc(function).endswith(".")
    assert "return" in function.__annotations__
    assert set(function.__annotations__) == {*SIGNATURES[hook], "return"}
    assert all(parameter.default is parameter.empty for parameter in inspect.signature(function).parameters.values())
