"""Readers of trial logs and profiles that survive damaged lines, made for a million of lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.analysis.results.entry import UNKNOWN, Entry, Trial, Winner
from tunedgemm.analysis.results.files import Faults, lines_of, op_of_profile
from tunedgemm.analysis.results.findings import Findings, Run
from tunedgemm.device import Device
from tunedgemm.errors import TunedGemmError
from tunedgemm.libtypes import canonical
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.row import named_device, reason, shape_of
from tunedgemm.table.sheet import Record
from tunedgemm.text.cell import MISSING
from tunedgemm.timing import SCHEMA, STATUSES

#: Largest number of a measurement.
_MOST = 1e18
#: Longest reason that is kept.
_REASON = 300
#: Lines of one field beyond which its quote was never closed; a traceback has fewer.
_LINES_OF_FIELD = 60


def read_log_into(path: Path, findings: Findings, faults: Faults) -> None:
    """Read a trial log; count and name the lines that cannot be used.

    Raises:
        TableError: the file cannot be read.
    """
    reader = _LogReader(findings)
    for number, text in lines_of(path, faults):
        if text.strip() and (fault := reader.take(text)):
            faults.add(number, fault)


@attrs.define
class _LogReader:
    """Takes the lines of one log; shapes and texts that repeat are parsed once."""

    findings: Findings
    _entries: dict[tuple[Any, ...], Entry | str] = attrs.field(factory=dict, init=False)
    _texts: dict[str, str] = attrs.field(factory=dict, init=False)

    def take(self, text: str) -> str:
        """Take one line; return why it cannot be used, or ""."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return f"not JSON, as a line that was cut off (got {text.strip()[:40]!r})"
        schema = fields.get("schema") if type(fields) is dict else None
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            return f"'schema' must be 1 to {SCHEMA} (got {str(schema)[:40]})"
        kind = fields.get("kind", "trial")
        if kind == "trial":
            return self._trial(fields)
        if kind == "shape":
            return self._outcome(fields)
        if kind == "run":
            return self._run(fields)
        return "" if kind == "end" else f"'kind' is unknown (got {str(kind)[:40]!r})"

    def _trial(self, fields: dict[str, Any]) -> str:
        shape = fields.get("shape")
        if type(shape) is dict and shape.get("m") == 0:
            return ""  # bits for all M, without a time
        entry = self._entry(fields)
        if isinstance(entry, str):
            return entry
        status, us, noise = fields.get("status"), fields.get("us", 0.0), fields.get("noise", 0.0)
        if type(status) is not str or status not in STATUSES:
            return f"'status' is unknown (got {str(status)[:40]!r})"
        if not (_is_time(us) and _is_time(noise)):
            return f"'us' and 'noise' must be finite numbers from 0 (got {str(us)[:20]} and {str(noise)[:20]})"
        name = self._solution(fields.get("solution"))
        if not name:
            return "'solution' must have a libtype and a kernel name"
        libtype, detail, samples = name[1], fields.get("detail") or "", fields.get("samples", 0)
        detail = self._kept(detail[:_REASON]) if type(detail) is str else ""
        trial = Trial(libtype, self._kept(status), float(us), float(noise), samples if type(samples) is int else 0, detail)
        entry.trials[name[0]] = trial
        self.findings.timings += 1
        return ""

    def _outcome(self, fields: dict[str, Any]) -> str:
        entry = self._entry(fields)
        if isinstance(entry, str):
            return entry
        winner, us, noise = fields.get("winner"), fields.get("us", 0.0), fields.get("noise", 0.0)
        name = self._solution(winner) if winner is not None else None
        if winner is not None and not (name and _is_time(us) and us > 0 and _is_time(noise)):
            return "'winner' must have a libtype, a kernel name, and a time above 0"
        entry.outcome = Winner(*name, float(us), float(noise)) if name else None
        entry.ended = True
        entry.reason = str(fields.get("reason") or "")[:_REASON]
        tied = fields.get("tied", -1)
        entry.tied = tied if type(tied) is int else -1
        seconds = fields.get("seconds")
        for activity, value in seconds.items() if type(seconds) is dict else ():
            if _is_time(value):
                entry.seconds[activity] = entry.seconds.get(activity, 0.0) + value
        return ""

    def _run(self, fields: dict[str, Any]) -> str:
        identity = fields.get("identity")
        pairs = tuple((str(name), str(value)) for name, value in identity.items()) if type(identity) is dict else ()
        run, op, version, started = (str(fields.get(name, ""))[:_REASON] for name in ("run", "op", "version", "started"))
        self.findings.runs.append(Run(run, op, version, started, pairs))
        return ""

    def _entry(self, fields: dict[str, Any]) -> Entry | str:
        """Return the entry of a line, or why the line has none."""
        shape = fields.get("shape")
        if type(shape) is not dict:
            return "'shape' must be an object"
        values = (tuple(value.items()) if type(value) is dict else value for value in shape.values())
        key = (fields.get("gfx"), fields.get("cu_num"), fields.get("device"), tuple(shape), *values)
        try:
            found = self._entries.get(key)
        except TypeError:
            return "'shape' has a value of another type"
        if found is None:
            found = self._entries[key] = self._new_entry(fields, shape)
        return found

    def _new_entry(self, fields: Mapping[str, Any], shape: dict[str, Any]) -> Entry | str:
        try:
            parsed = Shape.from_dict(shape)
            gfx = fields.get("gfx", UNKNOWN)
            device = Device(gfx, fields.get("cu_num", 0), str(fields.get("device", "")))
        except (TunedGemmError, ValueError, TypeError) as error:
            return reason(error)
        op = ops().get(parsed.op)
        return f"no such op: {parsed.op}" if op is None else self.findings.entry(device, op, parsed)

    def _solution(self, fields: Any) -> tuple[str, str] | None:
        """Return the text and the libtype of a solution; None where it has none."""
        if type(fields) is not dict:
            return None
        libtype, kernel, split = fields.get("libtype"), fields.get("kernel_name", ""), fields.get("split_k", 0)
        if type(libtype) is not str or not libtype or type(kernel) is not str or type(split) is not int:
            return None
        return self._kept(_solution_text(libtype, kernel, split)), self._kept(libtype)

    def _kept(self, text: str) -> str:
        """Return the first copy of a text, so that a million of trials share their names."""
        return self._texts.setdefault(text, text)


def _is_time(value: Any) -> bool:
    return type(value) in (float, int) and 0.0 <= value < _MOST


def _solution_text(libtype: str, kernel: str, split: int) -> str:
    return f"{libtype}:{kernel} splitK={split}" if split else f"{libtype}:{kernel}"


def read_profile_into(path: Path, findings: Findings, faults: Faults, op: str = "") -> None:
    """Read a profile, which the tuner writes with ``-o2``; count and name unusable lines.

    Raises:
        TableError: the file cannot be read.
        UserError: its op is not certain.
    """
    records = _records(path, faults)
    _, header = next(records, (0, []))
    columns = [column.strip() for column in header]
    reader = _ProfileReader(findings, columns, op_of_profile(path, columns, op))
    for line, record in records:
        if fault := reader.take(record):
            faults.add(line, fault)


def _records(path: Path, faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """Yield the records of a CSV with their first lines; a reason may have line breaks."""
    reader = csv.reader(text for _, text in lines_of(path, faults))
    while True:
        first = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            faults.add(first, str(error))
            continue
        if reader.line_num - first >= _LINES_OF_FIELD:
            faults.add(first, f"an unclosed quote hides the lines up to {reader.line_num}")
        elif record:
            yield first, record


@attrs.define
class _ProfileReader:
    """Takes the records of one profile; shapes and texts that repeat are parsed once."""

    findings: Findings
    columns: list[str]
    op: Op
    _entries: dict[tuple[str, ...], Entry | str] = attrs.field(factory=dict, init=False)
    _texts: dict[str, str] = attrs.field(factory=dict, init=False)
    _at: dict[str, int] = attrs.field(init=False)
    _shape: tuple[int, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._at = {column: index for index, column in enumerate(self.columns)}
        wanted = ("gfx", "cu_num", *self.op.columns.key, *self.op.columns.own)
        self._shape = tuple(self._at[column] for column in wanted if column in self._at)

    def take(self, record: Sequence[str]) -> str:
        """Take one record; return why it cannot be used, or ""."""
        if len(record) != len(self.columns):
            return f"must have {len(self.columns)} fields (got {len(record)})"
        key = tuple(record[index] for index in self._shape)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._new_entry(record)
        if isinstance(entry, str):
            return entry
        cell = self._at
        status, libtype = record[cell["status"]], canonical(record[cell["libtype"]])
        if status not in STATUSES:
            return f"'status' is unknown (got {status[:40]!r})"
        try:
            us, noise = float(record[cell["us"]]), float(record[cell["noise"]])
            samples, split = int(record[cell["samples"]]), int(record[cell["splitK"]] or 0)
        except (ValueError, KeyError) as error:
            return f"a number is missing or wrong: {reason(error)[:80]}"
        if not (us < _MOST and 0.0 <= noise < _MOST) or not libtype:
            return f"a line needs a libtype and finite times (got {libtype[:40]!r}, {us:g} and {noise:g})"
        name = self._kept(_solution_text(libtype, record[cell["kernelName"]], split))
        detail = record[cell["detail"]][:_REASON] if "detail" in cell else ""
        entry.trials[name] = Trial(self._kept(libtype), self._kept(status), max(us, 0.0), noise, samples, self._kept(detail))
        self.findings.timings += 1
        return ""

    def _new_entry(self, record: Sequence[str]) -> Entry | str:
        cells = {column: record[self._at[column]].strip() for column in self._at}
        shaped = Record(cells={column: text for column, text in cells.items() if text not in MISSING})
        try:
            gfx, units = named_device(shaped)
            return self.findings.entry(Device(gfx or UNKNOWN, units, cells.get("device", "")), self.op, shape_of(shaped, self.op))
        except (TunedGemmError, ValueError) as error:
            return reason(error)

    def _kept(self, text: str) -> str:
        return self._texts.setdefault(text, text)
