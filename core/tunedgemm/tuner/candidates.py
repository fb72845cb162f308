"""Stage 2, candidates: the solutions that a backend enumerates for a shape, and the baseline.

A shape with a bias also gets the best guesses for the unbiased shape, with the bias added
afterwards.
"""

from __future__ import annotations

from tunedgemm.backends import split_bias
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.libtypes import BUILTIN
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

#: Best guesses per backend to try with a split bias; refining adds their neighbours.
SPLIT_GUESSES = 4


def candidates(shape: Shape, device: Device, backend: Backend, most: int = 0) -> tuple[Solution, ...]:
    """List the solutions of a backend, without duplicates.

    Args:
        shape: the shape.
        device: the device to run on.
        backend: the backend.
        most: most solutions to list, best guesses first; 0 for all. Up to a quarter may have a
            split bias.

    Raises:
        PluginError: the backend breaks the contract.
    """
    product = _product(shape, backend)
    solutions = backend.solutions(shape, device)
    guesses = backend.solutions(product, device) if product is not None else []
    with_split_bias = guesses[: min(SPLIT_GUESSES, most // 4 if solutions else most) if most else SPLIT_GUESSES]
    solutions = solutions[: most - len(with_split_bias) if most else None]
    return tuple(dict.fromkeys([*solutions, *map(split_bias.with_add, with_split_bias)]))


def refusal(shape: Shape, device: Device, backend: Backend) -> str:
    """Return why a backend supports a shape neither with nor without its bias; "" if it does."""
    product = _product(shape, backend)
    refused = backend.refusal(shape, device)
    return "" if refused is None or (product is not None and not backend.refusal(product, device)) else refused.reason


def _product(shape: Shape, backend: Backend) -> Shape | None:
    """Return the unbiased shape if the bias may be split off; else None."""
    return split_bias.product_shape(shape) if backend.libtype != BUILTIN else None


def baseline(shape: Shape, device: Device, registry: Registry) -> Solution | None:
    """Return the baseline: torch's solution, whether or not it may be stored."""
    builtin = registry.get(BUILTIN)
    return builtin.heuristic_fallback(shape, device) if isinstance(builtin, Backend) else None
