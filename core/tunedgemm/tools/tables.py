"""Ops, table rows, kernel names and the tuner, each imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunedgemm.backends.kernelname import KernelName
    from tunedgemm.ops import op_named, ops
    from tunedgemm.ops.formats.shuffle import shuffle_weight
    from tunedgemm.table.csvfile import read_rows, upsert
    from tunedgemm.table.folders import named_file
    from tunedgemm.table.lookup import Table
    from tunedgemm.table.row import Row
    from tunedgemm.text.console import console
    from tunedgemm.tuner import Options, tune
    from tunedgemm.tuner.log import read_log
    from tunedgemm.tuner.progress import Progress
    from tunedgemm.tuner.report import summary
    from tunedgemm.tuner.trial import Outcome, Planned
    from tunedgemm.workload.lists import op_of_file, shape_of_texts, stated_cells

_MODULES = {
    "KernelName": "backends.kernelname",
    **dict.fromkeys(("op_named", "ops"), "ops"),
    "shuffle_weight": "ops.formats.shuffle",
    **dict.fromkeys(("read_rows", "upsert"), "table.csvfile"),
    "named_file": "table.folders",
    "Table": "table.lookup",
    "Row": "table.row",
    "console": "text.console",
    **dict.fromkeys(("Options", "tune"), "tuner"),
    "read_log": "tuner.log",
    "Progress": "tuner.progress",
    "summary": "tuner.report",
    **dict.fromkeys(("Outcome", "Planned"), "tuner.trial"),
    **dict.fromkeys(("op_of_file", "shape_of_texts", "stated_cells"), "workload.lists"),
}

__all__ = [
    "KernelName",
    "Options",
    "Outcome",
    "Planned",
    "Progress",
    "Row",
    "Table",
    "console",
    "named_file",
    "op_named",
    "op_of_file",
    "ops",
    "read_log",
    "read_rows",
    "shape_of_texts",
    "shuffle_weight",
    "stated_cells",
    "summary",
    "tune",
    "upsert",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tunedgemm.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
