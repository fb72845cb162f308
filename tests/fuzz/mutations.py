"""Mutate files structurally: a seed file and a list of small numbers make one broken file.

Hypothesis draws the numbers and shrinks them, so that a finding names few changes of one seed.
"""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

#: One change: its kind, its place, and the value it puts there.
Change = tuple[int, int, int]

#: Stands for a text that `json.dumps` cannot write; `_RAW` has it.
_DIGITS, _DEEP, _HUGE, _NAN, _INFINITE = "@digits@", "@deep@", "@huge@", "@nan@", "@infinite@"
_RAW = {
    _DIGITS: "9" * 5000,
    _DEEP: "[" * 3000 + "]" * 3000,
    _HUGE: "1e400",
    _NAN: "NaN",
    _INFINITE: "-Infinity",
}

#: Values of other types, sizes and spellings.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 128, 4096, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308,
    "", " ", "0", "1", "-1", "nan", "inf", "1e999", "x", "a16w16", "fmoe", "bf16", "torch.float8_e4m3fn", "True", "trial", "run", "shape",
    "end", "ok", "gfx942", "cpu-avx2", "torch", "M_LEQ_64", "any", "a,b", 'a"b', "a\nb", "a\rb", "a\0b", "\x1b[31m", "\u202e", "\ud800",
    "\u00b2", "\u0663",
    "é", "x" * 300, "x" * 70_000, "9" * 5000, "../x", "/etc/passwd", [], {}, [None], [[]], [1, "x"], {"x": 1}, {"": {}}, {"x": [{}]},
    _DIGITS, _DEEP, _HUGE, _NAN, _INFINITE,
)  # fmt: skip

#: Texts of cells; those that CSV files and numbers have special spellings for.
TEXTS = (
    *(str(value) for value in VALUES if isinstance(value, bool | int | float)), *(value for value in VALUES if isinstance(value, str)),
    "1.5", "1e3", "1_000", " 12 ", "+5", "0x10", "12%", "Infinity", "-inf", "NULL", "None", "<NA>", "Unnamed: 0", "<<<<<<<", "M", "cu_num",
)  # fmt: skip

_SCRAPS = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b'"', b",", b",,,,", b"\xed\xa0\x80", b"\xc2\x85", b"\xe2\x80\xa8", b"\x0c",
    b"\x1b", b"\x1c", b"{", b"}", b"[", b"#", b"/*", b"//", b";", b"\t", b"\x80", b"9" * 400, b"=======\n", b" ",
)  # fmt: skip


def of_bytes(content: bytes, changes: Sequence[Change]) -> bytes:
    """Cut, repeat, flip and insert bytes."""
    for kind, place, value in changes:
        at = place % (len(content) + 1)
        length = 1 + value % 64
        scrap = _SCRAPS[value % len(_SCRAPS)]
        match kind % 7:
            case 0:
                content = content[:at]
            case 1:
                content = content[:at] + content[at + length :]
            case 2:
                content = content[:at] + content[at : at + length] * 2 + content[at + length :]
            case 3:
                content = content[:at] + scrap + content[at:]
            case 4:
                content = content[:at] + scrap + content[at + 1 :]
            case 5 if at < len(content):
                content = content[:at] + bytes([content[at] ^ (1 << value % 8)]) + content[at + 1 :]
            case 6 if at < len(content):
                content = content[:at] + bytes([value % 256]) + content[at + 1 :]
    return content


def of_csv(content: bytes, changes: Sequence[Change]) -> bytes:
    """Change cells, columns, lines and then bytes of a CSV file."""
    rows = [list(row) for row in csv.reader(io.StringIO(content.decode()))]
    late = []
    for kind, place, value in changes:
        if kind % 3 == 2 and kind % 2:
            late.append((place // 3, value, place))
        else:
            _EDITS[kind % len(_EDITS)](rows, place % len(rows), place // len(rows), value)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow(row)
    return of_bytes(out.getvalue().encode("utf-8", "surrogatepass"), late)


def _set_cell(rows: list[list[str]], at: int, column: int, value: int) -> None:
    column %= len(rows[at]) + 1
    rows[at][column : column + 1] = [TEXTS[value % len(TEXTS)]]


def _set_column(rows: list[list[str]], _: int, column: int, value: int) -> None:
    for at in range(1, len(rows)):
        _set_cell(rows, at, column % (len(rows[0]) + 1), value)


def _rename_column(rows: list[list[str]], _: int, column: int, value: int) -> None:
    _set_cell(rows, 0, column, value)


def _delete_column(rows: list[list[str]], _: int, column: int, __: int) -> None:
    column %= len(rows[0]) + 1
    for row in rows:
        del row[column : column + 1]


def _repeat_column(rows: list[list[str]], _: int, column: int, value: int) -> None:
    column %= len(rows[0]) + 1
    for row in rows:
        to = value % (len(row) + 1)
        row[to:to] = row[column : column + 1]


def _move_column(rows: list[list[str]], at: int, column: int, value: int) -> None:
    column %= len(rows[0]) + 1
    for row in rows:
        row.extend(row[column : column + 1])
    _delete_column(rows, at, column, value)


def _delete_cell(rows: list[list[str]], at: int, column: int, _: int) -> None:
    column %= len(rows[at]) + 1
    del rows[at][column : column + 1]


def _copy_cell(rows: list[list[str]], at: int, column: int, value: int) -> None:
    column %= len(rows[at]) + 1
    rows[at][column : column + 1] = rows[value % len(rows)][column : column + 1]


def _repeat_line(rows: list[list[str]], at: int, _: int, value: int) -> None:
    rows.insert(value % (len(rows) + 1), list(rows[at]))


def _delete_line(rows: list[list[str]], at: int, _: int, __: int) -> None:
    if len(rows) > 1:
        del rows[at]


def _add_cells(rows: list[list[str]], at: int, _: int, value: int) -> None:
    rows[at] += [TEXTS[value % len(TEXTS)]] * (value % 3)


_EDITS = (
    _set_cell, _set_cell, _set_cell, _set_column, _rename_column, _delete_column, _repeat_column, _move_column, _delete_cell, _copy_cell,
    _repeat_line, _delete_line, _add_cells,
)  # fmt: skip


def of_json(content: bytes, changes: Sequence[Change]) -> bytes:
    """Change values, keys and nesting of a JSON document, then its bytes."""
    root = [json.loads(content)]
    late = []
    for kind, place, value in changes:
        spots = list(_spots(root))
        owner, key = spots[place % len(spots)]
        fresh = copy.deepcopy(VALUES[value % len(VALUES)])
        match kind % 9:
            case 0 | 1 | 2:
                owner[key] = fresh
            case 3 if owner is not root:
                del owner[key]
            case 4 if isinstance(owner, dict):
                owner[fresh if isinstance(fresh, str) else json.dumps(fresh)] = owner.pop(key)
            case 5:
                owner[key] = [owner[key]] if value % 2 else {"x": owner[key]}
            case 6:
                other, name = spots[value % len(spots)]
                owner[key] = copy.deepcopy(other[name])
            case 7 if isinstance(owner, dict):
                owner[f"@twice@{key}"] = fresh
            case _:
                late.append((place // 3, value, place))
    text = json.dumps(root[0]).replace('"@twice@', '"')
    for mark, raw in _RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return of_bytes(text.encode(), late)


def of_lines(content: bytes, changes: Sequence[Change]) -> bytes:
    """Change the JSON documents of a file that has one on each line, the order of lines, then bytes."""
    lines = content.splitlines()
    late = []
    for kind, place, value in changes:
        at = place % len(lines)
        match kind % 12:
            case 9:
                lines.insert(value % len(lines), lines[at])
            case 10 if len(lines) > 1:
                del lines[at]
            case 11:
                late.append((place // 3, value, place))
            case _:
                try:
                    lines[at] = of_json(lines[at], [(kind, place // len(lines), value)])
                except (ValueError, RecursionError):
                    late.append((place // 3, value, place))
    return of_bytes(b"\n".join(lines) + b"\n", late)


def _spots(node: Any) -> Any:
    """Yield (owner, key) of every value in a document, the root first."""
    waiting = [node]
    while waiting:
        owner = waiting.pop(0)
        for key in list(owner) if isinstance(owner, dict) else range(len(owner)):
            yield owner, key
            if isinstance(owner[key], dict | list):
                waiting.append(owner[key])


Mutate = Callable[[bytes, Sequence[Change]], bytes]
