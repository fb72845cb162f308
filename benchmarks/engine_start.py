"""Measure the start-up of an engine with tunedgemm and without, on several GPUs at once.

    python benchmarks/engine_start.py CONFIG_DIR [...] --gpus 0 1 2 3 --rounds 3 -o start

In a round each GPU starts one engine: models times arms, repeated until all GPUs have one. Arms
change GPUs from round to round. A first start has empty caches of kernels and graphs; the second
start of the same engine finds them. No token is timed.

Each start is one row: seconds until the engine is up, the figures of its log, and the seconds
in our plugin by phase, from the plugin's log line. The result is written after each start, so a
killed run keeps its rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_speed import ENGINES, Arm
from harness import add_budget, head, interval, parser_of, save

ARMS = ("alone", "tunedgemm")
STARTS = ("first", "second")
#: Figure of vLLM's log -> its line; the last such line counts.
FIGURES = {
    "loading, s": r"Model loading took .*?([\d.]+) seconds",
    "compilation, s": r"torch\.compile took ([\d.]+) s in total",
    "graphs, s": r"Graph capturing finished in ([\d.]+) secs",
    "init engine, s": r"init engine .* took ([\d.]+) s",
    "DeepGEMM kernels": r"DeepGEMM warmup: 100%.*?\| (\d+)/\d+",
    "plugin, s": r"tunedgemm: ([\d.]+) s of start-up",
}
#: The plugin's phases in the same line.
PHASES = r"tunedgemm: [\d.]+ s of start-up: (.*)"
#: Variables of the folders whose kernels and graphs a second start finds.
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "DG_JIT_CACHE_DIR", "TUNEDGEMM_CACHE")


def figures_of(log: str) -> dict[str, Any]:
    """Return the figures of an engine's log, and the plugin's phases as text."""
    found: dict[str, Any] = {}
    for name, pattern in FIGURES.items():
        if values := re.findall(pattern, log):
            found[name] = float(values[-1])
    if phases := re.findall(PHASES, log):
        found["phases"] = phases[-1].strip()
    return found


def environment(arguments: argparse.Namespace, gpu: str, caches: Path) -> dict[str, str]:
    """Return the variables of one start: its GPU, its caches, and DeepGEMM's warm-up on."""
    folders = {name: str(caches / name.lower()) for name in CACHES}
    warm_up = {"VLLM_DEEP_GEMM_WARMUP": arguments.deepgemm, "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "1"}
    return {"CUDA_VISIBLE_DEVICES": gpu, **folders, **warm_up}


def waves(arguments: argparse.Namespace) -> Iterator[list[tuple[str, Path, str]]]:
    """Yield the engines that start together: GPU, model and arm; arms change GPUs in each round."""
    pairs = [(model, arm) for model in arguments.models for arm in arguments.arms]
    gpus, count = arguments.gpus, len(arguments.gpus)
    pairs *= max(1, count // len(pairs))
    for turn in range(arguments.rounds):
        for begin in range(0, len(pairs), count):
            chosen = pairs[begin : begin + count]
            yield [(gpus[(place + turn) % count], *pair) for place, pair in enumerate(chosen)]


def start_all(
    wave: list[tuple[str, Path, str]], turn: int, which: str, arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Start the engines of a wave together; pass one row of each to *keep*, and close all."""
    options = {**ENGINES[arguments.engine][2], **arguments.options}
    arms: list[tuple[str, Arm]] = []
    until = time.monotonic() + arguments.start_seconds
    try:
        for gpu, model, name in wave:
            folder = arguments.logs / f"{turn}-{which}-gpu{gpu}"
            caches = arguments.caches / f"{turn}-gpu{gpu}"
            own = argparse.Namespace(logs=folder, engine=arguments.engine, home=arguments.home)
            arms.append((gpu, Arm(name, model, own, options, environment(arguments, gpu, caches))))
        for gpu, arm in arms:
            up = arm.ready(until - time.monotonic())
            log = arm.log.read_text(errors="replace") if arm.log.exists() else ""
            seconds = arm.start_s if up else None
            keep({"model": arm.model, "arm": arm.name, "start": which, "round": turn, "gpu": gpu, "seconds": seconds, **figures_of(log)})
    finally:
        for _, arm in arms:
            arm.close(1)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each model and start: medians of the arms, and the plugin's own seconds."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for which in STARTS:
            seconds = {arm: _values(rows, "seconds", model, arm, which) for arm in ARMS}
            if not all(seconds.values()):
                continue
            (alone, *_), (ours, *_) = (interval(seconds[arm]) for arm in ARMS)
            counts = ", ".join(f"{len(values)} {arm}" for arm, values in seconds.items())
            line = f"{model}, {which} start: {alone:.1f} s alone, {ours:.1f} s with tunedgemm, {ours - alone:+.1f} s ({counts})"
            own = _values(rows, "plugin, s", model, "tunedgemm", which)
            lines.append(line + (f"; in the plugin {interval(own)[0]:.2f} s, at most {max(own):.2f} s" if own else ""))
    return lines


def _values(rows: list[dict[str, Any]], figure: str, model: str, arm: str, which: str) -> list[float]:
    wanted = (model, arm, which)
    return [row[figure] for row in rows if (row["model"], row["arm"], row["start"]) == wanted and row.get(figure) is not None]


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("models", type=Path, nargs="+", metavar="CONFIG_DIR", help="folders with config.json")
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="default: %(default)s")
    parser.add_argument("--home", type=Path, help="TUNEDGEMM_HOME of the arm tunedgemm (default: an empty folder, nothing tuned)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS), help="default: both")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="indices of the GPUs, one engine each at a time (default: 0)")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--deepgemm", default="relax", choices=("relax", "full", "skip"), help="vLLM's own warm-up (default: %(default)s)")
    add_budget(parser)
    parser.add_argument("--start-seconds", type=float, default=300, help="longest wait for a wave of engines (default: %(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help="arguments of the engine over the defaults, as JSON")
    parser.add_argument("--logs", type=Path, default=Path("start-logs"), help="folder of the engines' logs (default: %(default)s)")
    parser.add_argument("--caches", type=Path, default=Path("start-caches"), help="folder of the caches, emptied (default: %(default)s)")
    arguments = parser.parse_args(words)
    for name in ("logs", "caches", "home"):  # relative paths would hold in the engines' own folders alone
        setattr(arguments, name, (getattr(arguments, name) or arguments.caches / "home").resolve())
    return arguments


def main(words: list[str] | None = None) -> None:
    """Start the engines wave by wave, and keep a row of each start."""
    arguments, rows = parsed(words), list[dict[str, Any]]()
    end = time.monotonic() + (arguments.budget or float("inf"))
    about = {"engine": arguments.engine, "options": arguments.options, "deepgemm": arguments.deepgemm, "cores": os.cpu_count()}

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(*(f"{name} {value}" for name, value in row.items()), sep="; ", flush=True)
        save(arguments.output, head("engine_start", **about, summary=summary(rows), rows=rows))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are in separate sessions, and end here
    shutil.rmtree(arguments.caches, ignore_errors=True)
    arguments.home.mkdir(parents=True, exist_ok=True)
    for turn, wave in enumerate(waves(arguments)):
        for which in arguments.starts:
            if time.monotonic() > end:
                print("no time left", flush=True)
                return
            start_all(wave, turn, which, arguments, keep)
        print(*summary(rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
