"""Compare the stand-in with the installed library, which loads without a GPU."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_deepgemm import library
from tunedgemm_deepgemm.product import GROUPED


@pytest.fixture(scope="module")
def extension() -> Any:
    """Return a copy of the installed library."""
    try:
        found = library.find()
    except PluginError as error:
        pytest.skip(str(error))
    if fault := library.fault_of(found):
        pytest.skip(fault)
    if found.extension.name.startswith("_C_extension"):
        pytest.skip("operations of torch, whose schemas are checked when they are loaded")
    return library.load_copy(found.extension)


def documented(function: Any) -> list[tuple[str, Any]]:
    """Return names and defaults of the parameters that an extension's docstring states."""
    (definition,) = ast.parse(f"def {function.__doc__.splitlines()[0]}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    names, values = [argument.arg for argument in definition.args.args], definition.args.defaults
    defaults = [inspect.Parameter.empty] * (len(names) - len(values)) + [ast.literal_eval(value) for value in values]
    return list(zip(names, defaults, strict=True))


@pytest.mark.parametrize("name", [*library.FUNCTIONS, *GROUPED])
def test_the_stand_in_has_the_librarys_signatures(name: str, extension: Any, fake: ModuleType) -> None:
    """Names, order and defaults of all parameters agree; `init` has no names in the library."""
    stand_in = inspect.signature(getattr(fake.open_copy(fake.find(), fake.toolkit()), name)).parameters.values()
    theirs = documented(getattr(extension, name))
    ours = [(parameter.name, parameter.default) for parameter in stand_in]
    assert (len(ours) if name == "init" else ours) == (len(theirs) if name == "init" else theirs)
