"""The ``--json`` of every command: one JSON document with the name and the version of its schema.

docs/json.md lists the fields. A version rises when a field goes or changes its meaning; new fields
do not raise it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.analysis.estimate import Estimate
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution


def add_json(parser: argparse._ActionsContainer) -> None:
    """Define ``--json``, which `print_document` answers."""
    parser.add_argument("--json", action="store_true", help="print one JSON document for programs; docs/json.md lists its fields")


def print_document(schema: str, version: int, facts: Mapping[str, Any]) -> None:
    """Print facts as a JSON object that begins with its schema, ``tunedgemm.NAME``, and its version."""
    print(document_text({"schema": f"tunedgemm.{schema}", "version": version, **facts}))


def document_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON in ASCII: shapes, solutions, devices and paths as `plain` writes them."""
    return json.dumps(plain(document), indent=1, allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value made of JSON's types alone; a number without a finite value becomes None."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Shape):
        return plain({"text": str(value), **value.to_dict()})
    if isinstance(value, Solution):
        named = {"libtype": value.libtype, "kernel_name": value.kernel_name, "split_k": value.split_k, "solidx": value.solidx}
        return plain({"text": str(value), **named, "extra": dict(value.extra)})
    if isinstance(value, Device):
        return plain({"gfx": value.gfx, "cu_num": value.cu_num, "name": value.name, "versions": dict(value.versions)})
    if isinstance(value, Estimate):
        return plain({**attrs.asdict(value), "resolved": value.resolved})
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    raise TypeError(f"document: cannot be written as JSON (got {type(value).__name__}); convert it first")
