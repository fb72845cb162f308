"""A whole model with the table and without: prefill and decode, eager, compiled and captured, in interleaved rounds.

    python benchmarks/model_speed.py --home DIR --tune                       # captures and tunes, into DIR, and measures nothing
    python benchmarks/model_speed.py --home DIR --batch 1 --json one.json    # with the table that DIR has
    python benchmarks/model_speed.py --home DIR --batch 32 --stages captured --check

A command may do any of the stages, and says how long each took. Tuning goes on where another run was stopped (--budget stops it), and
--json is written after every stage and read first: stages that it has, of the same model, tables and machine, are not run again.

The model is that of ``examples/models/run_llama.py``: random weights, nothing of it changed, the same tokens in each arm; a copy in wider
arithmetic judges the logits of both. In every round the arms run in random order; a gain is the median of the rounds' ratios, torch over
tunedgemm, with its 95 % interval by order statistics. ``again`` is torch once more, which shows what the method cannot tell apart.
"slower" means that the whole interval lies below 0.98. Run it twice, in two processes: the second confirms the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import torch
import tunedgemm
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from harness import SLOWER, add_budget, add_check, add_only, add_rounds, head, interval, parser_of, ratio, save

MODELS = Path(__file__).parents[1] / "examples" / "models"
sys.path.insert(0, str(MODELS))
import run_llama  # noqa: E402  it lies in the folder above
from tune_llama import agree, covered  # noqa: E402

console = Console()
#: arm -> whose products; of torch's two the second is the control
ARMS = {"torch": "torch", "again": "torch", "tunedgemm": "tunedgemm"}
PREFILL, DECODE = run_llama.PHASES
#: stage -> mode and what of it is timed. A captured step has the prefill of eager mode; compiling takes longest, and is split.
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "eager": ("eager", (PREFILL, DECODE)),
    "compiled-prefill": ("compiled", (PREFILL,)),
    "compiled-decode": ("compiled", (DECODE,)),
    "captured": ("captured", (DECODE,)),
}
#: Stages that fill the home folder.
TUNING = ("capture", "tune")


@attrs.frozen
class Cell:
    """One mode and phase.

    Attributes:
        mode, phase: what ran.
        samples: arm -> milliseconds of a prefill, or of one decoded token, one sample a round.
        agree: whether our logits are as near as torch's to those in wider arithmetic.
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
def measured(asked: run_llama.Served, truth: torch.Tensor, stage: str, rounds: dict[str, int], how: str) -> list[Cell]:
    """Time the phases of a stage; *truth* are the exact logits."""
    mode, phases = STAGES[stage]
    device = asked.tokens.device.type
    ready, logits = {}, {}
    for name, routed in run_llama.ARMS.items():
        with routed():
            prefill, decode = ready[name] = run_llama.runs(asked, mode, how, phases)
            logits[name] = asked.logits(prefill, decode)
    console.print(f"{stage}: ", end="")
    same = agree(truth, logits["torch"], logits["tunedgemm"])
    cells = []
    for phase in phases:
        place = run_llama.PHASES.index(phase)
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
    table.add_column("mode", no_wrap=True)
    for column in ("torch", "tunedgemm", "gain", "95 %", "torch again", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        (gain, low, high), (again, control_low, control_high) = cell.over("tunedgemm"), cell.over("again")
        times = [f"{interval(cell.samples[arm])[0]:.3f}" for arm in ("torch", "tunedgemm")]
        verdict = "" if cell.fine else "slower" if cell.agree else "DIFFERS"
        spans = f"{low:.3f} to {high:.3f}", f"{again:.3f} ({control_low:.3f} to {control_high:.3f})"
        table.add_row(f"{cell.mode} {cell.phase}", *times, f"{gain:.3f}", *spans, verdict)
    console.print(table)


@contextlib.contextmanager
def stage_of(name: str) -> Iterator[None]:
    """Say how long a stage took."""
    start = time.perf_counter()
    yield
    console.print(f"{name}: {time.perf_counter() - start:.1f} s")


def tune(arguments: argparse.Namespace, stages: list[str]) -> None:
    """Capture the model's shapes, and tune them, into the home folder, in processes of their own."""
    if "capture" in stages:
        capture = [sys.executable, str(MODELS / "run_llama.py"), "--only-capture", *run_llama.parts(arguments)]
        with stage_of("capture"):
            subprocess.run(capture, check=True, env={**os.environ, "AITER_TUNE_GEMM": "1"})
    if "tune" in stages:
        command = [sys.executable, "-m", "tunedgemm", "tune", "--libtype", arguments.libtype, "--iters", arguments.iters]
        with stage_of("tune"):
            subprocess.run([*command, *(["--budget", f"{arguments.budget:g}"] if arguments.budget else [])], check=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = [stage for stage, (mode, _) in STAGES.items() if mode in run_llama.modes(device)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    run_llama.add_model(parser, device)
    parser.add_argument("--home", type=Path, required=True, metavar="DIR", help="where the shapes and the table are")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stages", default=",".join(here), help=f"a comma list of {', '.join([*TUNING, *here])} (default: %(default)s)")
    what.add_argument("--tune", dest="stages", action="store_const", const=",".join(TUNING), help="capture the shapes and tune them")
    parser.add_argument("--libtype", default="all", help="backends to tune (default: %(default)s)")
    parser.add_argument("--iters", default="31", help="most samples of a solution (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=0.0, metavar="SECONDS", help="of tuning; the next run goes on (default: no limit)")
    parser.add_argument("--rounds", type=int, default=31, help="rounds of decoding (default: %(default)s)")
    parser.add_argument("--prefill-rounds", type=int, default=11, help="rounds of prefill (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all samples there, and do not take again what it has")
    parser.add_argument("--check", action="store_true", help="exit 1 where a mode is slower, or its outputs differ")
    arguments = parser.parse_args()
    arguments.stages = list(dict.fromkeys(arguments.stages.split(",")))
    unknown = [stage for stage in arguments.stages if stage not in (*TUNING, *here)]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)} on {device}; there are {', '.join([*TUNING, *here])}")
    return arguments


def described(arguments: argparse.Namespace, asked: run_llama.Served) -> dict[str, Any]:
    """What a report is of: cells of others do not belong into it."""
    import transformers

    return {
        "gpu": torch.cuda.get_device_name() if asked.tokens.is_cuda else "", "machine": platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "tables": tunedgemm.fingerprint(), "model": arguments.model, "batch": asked.batch, "prompt": asked.prompt, "steps": asked.steps,
        "compile_mode": arguments.compile_mode, "rounds": {PREFILL: arguments.prefill_rounds, DECODE: arguments.rounds}, "unit": "ms",
    }  # fmt: skip


def kept(path: Path | None, of: dict[str, Any]) -> tuple[list[Cell], dict[str, int]]:
    """The cells that a file has, and its calls in graphs that torch serves; none where it is a report of something else."""
    if path is None or not path.exists():
        return [], {}
    report = json.loads(path.read_text())
    if any(report.get(name) != value for name, value in of.items()):
        console.print(f"{path} is of another model, machine or table, and is written anew")
        return [], {}
    names = [field.name for field in attrs.fields(Cell)]
    return [Cell(**{name: cell[name] for name in names}) for cell in report["cells"]], report["unbound"]


def measure(arguments: argparse.Namespace, stages: list[str]) -> list[Cell]:
    """Build the model, measure the stages that the report does not have, keep each as it is done; all cells of the report."""
    captured = arguments.home / "bf16_untuned_gemm.csv"
    answered = covered(captured) if captured.exists() else "no captured shapes"
    console.print(answered)
    with stage_of("building the model"):
        sizes = {name: getattr(arguments, name) for name in ("batch", "prompt", "steps")}
        asked = run_llama.served(arguments.model, "cuda" if torch.cuda.is_available() else "cpu", **sizes)
    of = described(arguments, asked)
    cells, unbound = kept(arguments.json, of)
    there, truth = {(cell.mode, cell.phase) for cell in cells}, None
    for stage in stages:
        mode, phases = STAGES[stage]
        if {(mode, phase) for phase in phases} <= there:
            console.print(f"{stage}: kept from {arguments.json}")
            continue
        with stage_of(stage):
            truth = run_llama.exact(asked) if truth is None else truth
            cells += measured(asked, truth, stage, of["rounds"], arguments.compile_mode)
        if arguments.json:
            unbound |= {str(shape): calls for shape, calls in tunedgemm.unbound().items()}  # graphs hold torch's product for them
            report = {"date": datetime.now(timezone.utc).date().isoformat(), **of, "coverage": answered, "unbound": unbound}
            arguments.json.write_text(json.dumps({**report, "cells": [cell.line() for cell in cells]}, indent=1) + "\n")
    show(cells, asked)
    return cells


def main() -> int:
    """Tune, and measure, as asked."""
    arguments = parsed()
    os.environ.pop("AITER_CONFIG_GEMM_BF16", None)  # a table named there would rank above that of the folder
    os.environ["TUNEDGEMM_HOME"] = str(arguments.home)
    arguments.home.mkdir(parents=True, exist_ok=True)
    tune(arguments, arguments.stages)
    tunedgemm.reload()
    stages = [stage for stage in arguments.stages if stage in STAGES]
    cells = measure(arguments, stages) if stages else []
    return 1 if arguments.check and not all(cell.fine for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
