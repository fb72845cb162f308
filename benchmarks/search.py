"""Replay the quick and the full search over logs of trials: what the quick one loses and compiles.

    python benchmarks/search.py h200-2026-11-28/a8w8-trials.csv.gz [...] [-o FOLDER]

Logs are files of ``benchmarks/results``, whose names begin with the op, up to a hyphen. The
backends list and refine, the log times. "Loss" is the time of the fastest solution that
the quick search finds over the fastest of the log, less one. So the noise of screening counts as a loss. Solutions
without a time in the log count as compiled. Backends whose lists need their library are left out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
from harness import head, parser_of, save
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.testing.replay import ScreenReplay, read_times

RESULTS = Path(__file__).parent / "results"
LIBTYPES = ("asm", "triton", "skinny", "torch")
_FP8 = Shape("a8w8", 1, 1, 1, "fp8_e4m3fn", "bf16", scale="row")
#: Fields of the shapes of an op's trials.
LIKE = {
    "a16w16": Shape("a16w16", 1, 1, 1),
    "a8w8": _FP8,
    "a8w8_blockscale": attrs.evolve(_FP8, op="a8w8_blockscale", scale="block", extra={"scale_order": "m_major_padded"}),
}


@attrs.frozen
class Replayed:
    """Both searches of a shape.

    Attributes:
        file: the log.
        shape: the shape.
        loss: what the quick search loses.
        quick, full: solutions that each compiles, by libtype.
    """

    file: str
    shape: Shape
    loss: float
    quick: Counter[str]
    full: Counter[str]


def replay(file: str, every: int = 1) -> list[Replayed]:
    """Return both searches of every n-th shape of a log."""
    device = Device("sm_90", 132, "nvidia-h100-80gb-hbm3" if file.startswith("h100") else "nvidia-h200")
    registry = Registry()
    backends = [backend for libtype in LIBTYPES if isinstance(backend := registry.get(libtype), Backend)]
    replayed = []
    read = read_times(RESULTS / file, LIKE[Path(file).name.partition("-")[0]])
    for shape, times in list(read.items())[::every]:
        own = {key: us for key, us in times.items() if key[0] in LIBTYPES}
        searches = {search: ScreenReplay(shape, device, own, backends, search) for search in ("quick", "full")}
        us = {search: each.run() for search, each in searches.items()}
        replayed.append(Replayed(file, shape, us["quick"] / min(own.values()) - 1, searches["quick"].tried, searches["full"].tried))
    return replayed


def row_of(group: dict[str, Any], replayed: list[Replayed]) -> dict[str, Any]:
    """Return the losses of some shapes, and the solutions that a shape compiles."""
    losses = sorted(each.loss for each in replayed)
    compiled = {
        f"{search} {libtype}": round(sum(getattr(each, search)[libtype] for each in replayed) / len(replayed), 1)
        for search in ("full", "quick")
        for libtype in LIBTYPES
    }
    percent = {"mean": statistics.mean(losses), "p95": losses[int(0.95 * (len(losses) - 1))], "worst": losses[-1]}
    return {**group, "shapes": len(losses), **{name: round(100 * loss, 3) for name, loss in percent.items()}, **compiled}


def rows_of(replayed: list[Replayed]) -> list[dict[str, Any]]:
    """Return a row for each log, and one for each of its M."""
    groups: dict[tuple[str, str], list[Replayed]] = {}
    for each in replayed:
        for m in ("all", str(each.shape.m)):
            groups.setdefault((each.file, m), []).append(each)
    return [row_of({"log": file, "M": m}, group) for (file, m), group in groups.items()]


def main(words: list[str] | None = None) -> None:
    """Replay and print."""
    parser = parser_of(__doc__)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    arguments = parser.parse_args(words)
    rows = [row for file in arguments.logs for row in rows_of(replay(file))]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    save(arguments.output, head("search", rows=rows))


if __name__ == "__main__":
    main()
