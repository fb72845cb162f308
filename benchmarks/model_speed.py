"""A whole model with the table and without: prefill and decode, eager, compiled and captured, in interleaved rounds.

    python benchmarks/model_speed.py --home DIR --tune                       # captures and tunes first, into DIR
    python benchmarks/model_speed.py --home DIR --batch 1 --json one.json    # with the table that DIR has
    python benchmarks/model_speed.py --home DIR --batch 32 --modes captured --check

The model is that of ``examples/models/run_llama.py``: random weights, nothing of it changed, the same tokens in each arm. In every round
the arms run in random order; a gain is the median of the rounds' ratios, torch over tunedgemm, with its 95 % interval by order
statistics. ``again`` is torch once more, which shows what the method cannot tell apart. "slower" means that the whole interval lies below
0.98. Run it twice, in two processes: the second confirms the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import torch
import tunedgemm
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from speed import SLOWER, interval

MODELS = Path(__file__).parents[1] / "examples" / "models"
sys.path.insert(0, str(MODELS))
import run_llama  # noqa: E402  it lies in the folder above
from tune_llama import ALLOWED, agree, covered  # noqa: E402

console = Console()
#: arm -> whose products; of torch's two the second is the control
ARMS = {"torch": "torch", "again": "torch", "tunedgemm": "tunedgemm"}
PREFILL, DECODE = "prefill", "decode"


@attrs.frozen
class Cell:
    """One mode and phase.

    Attributes:
        mode, phase: what ran.
        samples: arm -> milliseconds of a prefill, or of one decoded token, one sample a round.
        agree: whether the logits of both arms are the same to rounding.
    """

    mode: str
    phase: str
    samples: dict[str, list[float]]
    agree: bool

    def over(self, arm: str) -> tuple[float, float, float]:
        """Torch's time over that of an arm: the median over the rounds and its 95 % interval."""
        return interval([before / after for before, after in zip(self.samples["torch"], self.samples[arm], strict=True)])

    @property
    def fine(self) -> bool:
        """Whether it is right, and not slower."""
        return self.agree and self.over("tunedgemm")[2] >= SLOWER

    def line(self) -> dict[str, Any]:
        """Everything, for --json."""
        medians = {arm: interval(values)[0] for arm, values in self.samples.items()}
        return {**attrs.asdict(self), "median_ms": medians, "gain": self.over("tunedgemm"), "control": self.over("again")}


@torch.inference_mode()
def measured(asked: run_llama.Served, mode: str, rounds: dict[str, int], how: str) -> list[Cell]:
    """Time both phases of a mode; a captured step has the prefill of eager mode, which is not timed again."""
    device = asked.tokens.device.type
    ready, logits = {}, {}
    for name, routed in run_llama.ARMS.items():
        with routed():
            prefill, decode = ready[name] = run_llama.runs(asked, mode, how)
            first = asked.prefill(prefill).clone()
            logits[name] = torch.stack([first, *asked.decode(decode, keep=True)]).flatten(0, 1).float()
    console.print(f"{mode}: ", end="")
    same = agree(logits["torch"], logits["tunedgemm"], ALLOWED[asked.model.dtype])
    cells = []
    for place, phase in enumerate((PREFILL, DECODE)):
        if mode == "captured" and phase == PREFILL:
            continue
        work, each = (asked.prefill, 1) if phase == PREFILL else (asked.decode, asked.steps)
        samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(rounds[phase] + 1):
            for arm in random.sample(list(ARMS), len(ARMS)):
                with run_llama.ARMS[ARMS[arm]]():
                    run = ready[ARMS[arm]][place]
                    taken = run_llama.seconds(lambda work=work, run=run: work(run), device)
                if number:  # the first round fills caches and finds compiled code again
                    samples[arm].append(1e3 * taken / each)
        cells.append(Cell(mode, phase, samples, same))
    return cells


def show(cells: list[Cell], asked: run_llama.Served) -> None:
    """Print one line a cell."""
    title = f"batch {asked.batch}, prompts of {asked.prompt} tokens, {asked.steps} decoded; ms of a prefill and of a token, medians"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    table.add_column("mode")
    for column in ("torch", "tunedgemm", "gain", "95 %", "torch again", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        (gain, low, high), (again, control_low, control_high) = cell.over("tunedgemm"), cell.over("again")
        times = [f"{interval(cell.samples[arm])[0]:.3f}" for arm in ("torch", "tunedgemm")]
        verdict = "" if cell.fine else "slower" if cell.agree else "DIFFERS"
        spans = f"{low:.3f} to {high:.3f}", f"{again:.3f} ({control_low:.3f} to {control_high:.3f})"
        table.add_row(f"{cell.mode} {cell.phase}", *times, f"{gain:.3f}", *spans, verdict)
    console.print(table)


def tune(arguments: argparse.Namespace) -> None:
    """Capture the model's shapes and tune them, into the home folder, in processes of their own."""
    capture = [sys.executable, str(MODELS / "run_llama.py"), "--only-capture", *run_llama.parts(arguments)]
    subprocess.run(capture, check=True, env={**os.environ, "AITER_TUNE_GEMM": "1"})
    subprocess.run([sys.executable, "-m", "tunedgemm", "tune", "--libtype", arguments.libtype, "--iters", arguments.iters], check=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    run_llama.add_model(parser, device)
    parser.add_argument("--home", type=Path, required=True, metavar="DIR", help="where the shapes and the table are")
    parser.add_argument("--tune", action="store_true", help="capture the shapes and tune them first")
    parser.add_argument("--libtype", default="all", help="backends to tune (default: %(default)s)")
    parser.add_argument("--iters", default="31", help="most samples of a solution (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(run_llama.modes(device)), help="a comma list (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=31, help="rounds of decoding (default: %(default)s)")
    parser.add_argument("--prefill-rounds", type=int, default=11, help="rounds of prefill (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--check", action="store_true", help="exit 1 where a mode is slower, or its outputs differ")
    arguments = parser.parse_args()
    unknown = set(arguments.modes.split(",")) - set(run_llama.modes(device))
    if unknown:
        parser.error(f"no mode {', '.join(sorted(unknown))} on {device}; there are {', '.join(run_llama.modes(device))}")
    return arguments


def main() -> int:
    """Tune if asked, measure every mode, print, keep."""
    arguments = parsed()
    os.environ.pop("AITER_CONFIG_GEMM_BF16", None)  # a table named there would rank above that of the folder
    os.environ["TUNEDGEMM_HOME"] = str(arguments.home)
    if arguments.tune:
        arguments.home.mkdir(parents=True, exist_ok=True)
        tune(arguments)
    tunedgemm.reload()
    captured = arguments.home / "bf16_untuned_gemm.csv"
    answered = covered(captured) if captured.exists() else "no captured shapes"
    console.print(answered)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {name: getattr(arguments, name) for name in ("batch", "prompt", "steps")}
    asked = run_llama.served(arguments.model, device, **sizes)
    rounds = {PREFILL: arguments.prefill_rounds, DECODE: arguments.rounds}
    cells = [cell for mode in arguments.modes.split(",") for cell in measured(asked, mode, rounds, arguments.compile_mode)]
    show(cells, asked)
    if arguments.json:
        import transformers

        where = {
            "date": datetime.now(timezone.utc).date().isoformat(), "gpu": torch.cuda.get_device_name() if device == "cuda" else "",
            "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "tables": tunedgemm.fingerprint(),
        }  # fmt: skip
        asked_for = {"model": arguments.model, **sizes, "compile_mode": arguments.compile_mode, "coverage": answered}
        asked_for["unbound"] = {str(shape): calls for shape, calls in tunedgemm.unbound().items()}  # graphs hold torch's product for them
        report = {**where, **asked_for, "unit": "ms", "cells": [cell.line() for cell in cells]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if arguments.check and not all(cell.fine for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
