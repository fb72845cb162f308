"""Functions with AITER's names and parameters, generated from a table of our products.

The source text has the table's names alone. Generated functions bind their arguments as quickly
as written ones, and raise the same TypeError. `linecache` shows them in tracebacks.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Mapping
from typing import Any

from tunedgemm_aiter_names.outputs import output_dtype, written

#: What an argument means, as our products name it, and AITER's spellings.
_SPELLINGS = {
    "x": "X XQ A x_fp4 x_fp8",
    "w": "WQ B w_fp4 w_fp8 w_preshuf w_shuffled",
    "x_scale": "x_scales A_scale x_fp4_scale x_fp8_scale",
    "w_scale": "w_scales B_scale w_fp4_scale w_fp8_scale",
    "bias": "bias_fp4 bias_fp8",
    "y": "YQ Out out y_fp4 y_fp8",
}
_MEANINGS = {spelling: meaning for meaning, spellings in _SPELLINGS.items() for spelling in spellings.split()}

Product = Callable[..., Any]


def functions(module: str, table: Mapping[Product, Mapping[str, str]]) -> dict[str, Product]:
    """Make AITER's functions of a module, by name.

    Args:
        table: our product -> the names of AITER's functions that compute it -> AITER's parameters,
            as Python writes them.
    """
    return {name: _function(module, name, parameters, product) for product, found in table.items() for name, parameters in found.items()}


def _function(module: str, name: str, parameters: str, product: Product) -> Product:
    """Make a function that passes a product the arguments that it names, by their meaning.

    An output that the product does not take gets a copy of its result, and sets its dtype.
    Arguments of AITER's that the product does not take have no effect.

    Raises:
        ValueError: the product needs an argument that AITER's function does not have.
    """
    given = {_meaning(argument): argument for argument in _names(parameters)}
    taken = {_meaning(key): parameter for key, parameter in inspect.signature(product).parameters.items()}
    is_written = "y" in given and "y" not in taken
    values = given | ({"dtype": f"output_dtype({given['y']}, {given.get('dtype')})"} if is_written else {})
    if lost := [key for key, parameter in taken.items() if key not in values and parameter.default is parameter.empty]:
        raise ValueError(f"{name}({parameters}): lacks arguments of its product (needs {', '.join(lost)})")
    call = f"product({', '.join(f'{parameter.name}={values[key]}' for key, parameter in taken.items() if key in values)})"
    return _compiled(module, name, parameters, f"written({given['y']}, {call})" if is_written else call, product)


def _names(parameters: str) -> list[str]:
    """Return the names of parameters, in order."""
    function = ast.parse(f"lambda {parameters}: None", mode="eval").body
    assert isinstance(function, ast.Lambda)
    return [argument.arg for argument in function.args.args]


def _meaning(argument: str) -> str:
    """Return what our products call an argument of AITER's."""
    return _MEANINGS.get(argument, argument)


def _compiled(module: str, name: str, parameters: str, result: str, product: Product) -> Product:
    """Compile a function of a module that returns the result, with the product's docstring.

    What it calls is in its closure: torch.compile looks globals up in the module.
    """
    text = f"def make(product, output_dtype, written):\n    def {name}({parameters}):\n        return {result}\n\n    return {name}\n"
    filename = f"<{module}.{name}>"
    # An entry without a time of change stays, as for attrs' methods.
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(text, filename, "exec"), scope)
    made: Product = scope["make"](product, output_dtype, written)
    made.__qualname__ = name
    made.__doc__ = getattr(product, "func", product).__doc__  # a partial has one of its class
    return made
