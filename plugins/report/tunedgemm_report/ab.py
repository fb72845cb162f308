"""What files of ``tunedgemm ab -o`` say, as texts for the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunedgemm.analysis.results import number_of, printable_line
from tunedgemm.plugin import UserError
from tunedgemm.tools.files import read_regular


def read_ab(path: Path) -> dict[str, str]:
    """Return the arms, the estimates and the verdict of a file, as texts.

    Raises:
        UserError: the file cannot be read, or is not of `tunedgemm ab`.
    """
    try:
        texts = _texts(json.loads(read_regular(path)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; name another file with --ab") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a document of `tunedgemm ab -o` (got {type(error).__name__}: {str(error)[:100]})") from None
    return {name: printable_line(text) for name, text in {"path": str(path), **texts}.items()}


def _texts(read: Mapping[str, Any]) -> dict[str, str]:
    """Return a document as texts.

    Raises:
        ValueError: it is another document.
    """
    if (read["schema"], read["version"]) != ("tunedgemm.ab", 1):
        raise ValueError(f"schema {read['schema']!r:.40}, version {read['version']!r:.10}")
    return {
        "what": " ".join(read["command"]) if "command" in read else f"kernels of {read['op']}",
        "a": _arm(read["arms"]["a"]),
        "b": _arm(read["arms"]["b"]),
        "turns": number_of(len(read["turns"]), "turn") + (f"; ended early: {read['ended']}" if read["ended"] else ""),
        "effect": _estimate(read["effect"]),
        "control": _estimate(read["control"]),
        "verdict": {"slower": "B is slower", "faster": "B is faster"}.get(read["verdict"], "not resolved"),
    }


def _arm(arm: Mapping[str, str] | str) -> str:
    return arm if isinstance(arm, str) else " ".join(f"{name}={value}" for name, value in arm.items()) or "no variables"


def _estimate(found: Mapping[str, Any] | None) -> str:
    return "too few turns" if found is None else f"{found['share']:+.2%} [{found['low']:+.2%}, {found['high']:+.2%}]"
