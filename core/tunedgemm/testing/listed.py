"""Turn a sweep into one test that lists its faults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def listed(names: str | tuple[str, ...], cases: Iterable[Any], ids: Any = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run all cases in one test, which fails with the list of faults.

    Fixtures are shared by all cases, so a test that changes one cannot use it.

    Args:
        names: the arguments that the cases give.
        cases: a value or a tuple of them for each case.
        ids: accepted, as by `pytest.mark.parametrize`, but unused.
    """
    del ids
    names = (names,) if isinstance(names, str) else names
    values_of_cases = [case if len(names) > 1 else (case,) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(*fixtures: Any, **named: Any) -> None:
            faults = []
            for case in values_of_cases:
                values = dict(zip(names, case, strict=True))
                try:
                    test(*fixtures, **named, **values)
                except (Exception, pytest.fail.Exception) as error:
                    faults.append(f"{values}: {type(error).__name__}: {error}")
            assert not faults, "\n".join(faults)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        every.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        del every.__wrapped__  # type: ignore[attr-defined]
        return every

    return decorate
