"""Measure a whole model with the table and without: prefill and decode, eager, compiled and
captured, in interleaved rounds.

    # capture and tune into DIR, without measuring
    python benchmarks/model_speed.py --home DIR --only capture tune
    # with the table that DIR has
    python benchmarks/model_speed.py --home DIR --batch 1 -o one

    python benchmarks/model_speed.py --home DIR --batch 32 --only captured --check

``--only`` names the stages, each of which prints how long it took. Tuning resumes where another run
stopped (``--budget`` stops it). The result in the output folder is written after every stage and
read first: stages that it has, of the same model, tables and machine, are not run again.

The model is that of ``examples/models/run_llama.py``: random weights, unchanged, the same tokens in
each arm; a copy in wider arithmetic judges the logits of both. In every round the arms run in
random order; a gain is the median of the rounds' ratios, torch over tunedgemm, with its 95 %
interval by order statistics. ``again`` is the A/A control. "slower" means that the whole interval
is below 0.98. Run it twice, in two processes: the second confirms the first. ``--check`` exits 1 if
a mode is slower or its outputs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import tunedgemm
from harness import SLOWER, Interval, add_budget, add_check, add_only, add_rounds, head, interval, parser_of, ratio, save
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

MODELS = Path(__file__).parents[1] / "examples" / "models"
sys.path.insert(0, str(MODELS))
import run_llama  # noqa: E402  it is in the folder above
from tune_llama import agree, covered  # noqa: E402

console = Console()
#: arm -> whose products; of torch's two the second is the control
ARMS = {"torch": "torch", "again": "torch", "tunedgemm": "tunedgemm"}
PREFILL, DECODE = run_llama.PHASES
#: stage -> mode and what of it is timed. A captured step has the prefill of eager mode; compiling
#: takes longest, and is split.
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
    """Result of one mode and phase.

    Attributes:
        mode, phase: what ran.
        samples: arm -> milliseconds of a prefill, or of one decoded token, one sample a round.
        agree: whether our logits are as near as torch's to those in wider arithmetic.
    """

    mode: str
    phase: str
    samples: dict[str, list[float]]
    agree: bool

    def over(self, arm: str) -> Interval:
        """Return torch's time over that of an arm: the median over the rounds and its 95 %
        interval.
        """
        return ratio(self.samples["torch"], self.samples[arm])

    @property
    def fine(self) -> bool:
        """Return whether the logits agree and tunedgemm is not slower."""
        return self.agree and self.over("tunedgemm")[2] >= SLOWER

    def row(self) -> dict[str, Any]:
        """Return everything, for the result."""
        medians = {f"{arm}_ms": interval(values)[0] for arm, values in self.samples.items()}
        return {**attrs.asdict(self), **medians, "gain": self.over("tunedgemm"), "control": self.over("again")}


@torch.inference_mode()
def measured(asked: run_llama.Served, truth: torch.Tensor, stage: str, rounds: dict[str, int], how: str) -> list[Cell]:
    """Time the phases of a stage; *truth* holds the exact logits."""
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
        index = run_llama.PHASES.index(phase)
        work, tokens = (asked.prefill, 1) if phase == PREFILL else (asked.decode, asked.steps)
        samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(rounds[phase] + 1):
            for arm in random.sample(list(ARMS), len(ARMS)):
                with run_llama.ARMS[ARMS[arm]]():
                    run = ready[ARMS[arm]][index]
                    taken = run_llama.seconds(lambda work=work, run=run: work(run), device)
                if number:  # the first round fills caches and finds compiled code again
                    samples[arm].append(1e3 * taken / tokens)
        cells.append(Cell(mode, phase, samples, same))
    return cells


def show(cells: list[Cell], asked: run_llama.Served) -> None:
    """Print a line for each cell."""
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
    """Print how long a stage took."""
    start = time.perf_counter()
    yield
    console.print(f"{name}: {time.perf_counter() - start:.1f} s")


def tune(arguments: argparse.Namespace, stages: list[str]) -> None:
    """Capture the model's shapes and tune them into the home folder, each in a separate process."""
    if "capture" in stages:
        capture = [sys.executable, str(MODELS / "run_llama.py"), "--only-capture", *run_llama.parts(arguments)]
        with stage_of("capture"):
            subprocess.run(capture, check=True, env={**os.environ, "AITER_TUNE_GEMM": "1"})
    if "tune" in stages:
        command = [sys.executable, "-m", "tunedgemm", "tune", "--libtype", arguments.libtype, "--iters", arguments.iters]
        with stage_of("tune"):
            subprocess.run([*command, *(["--budget", f"{arguments.budget:g}"] if arguments.budget else [])], check=True)


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = [stage for stage, (mode, _) in STAGES.items() if mode in run_llama.modes(device)]
    parser = parser_of(__doc__)
    run_llama.add_model(parser, device)
    parser.add_argument("--home", type=Path, required=True, metavar="DIR", help="folder with the shapes and the table")
    add_only(parser, (*TUNING, *here), here)
    parser.add_argument("--libtype", default="all", help="backends to tune (default: %(default)s)")
    parser.add_argument("--iters", default="31", help="most samples of a solution (default: %(default)s)")
    add_budget(parser)
    add_rounds(parser, 31)
    parser.add_argument("--prefill-rounds", type=int, default=11, help="rounds of prefill (default: %(default)s)")
    add_check(parser)
    return parser.parse_args(words)


def described(arguments: argparse.Namespace, asked: run_llama.Served) -> dict[str, Any]:
    """Return what a result is of: cells of another model, table or machine do not belong in it."""
    import transformers

    about = head("model_speed")
    about["versions"]["transformers"] = transformers.__version__
    return {
        **{name: about[name] for name in ("benchmark", "device", "machine", "versions")},
        "tables": tunedgemm.fingerprint(), "model": arguments.model, "batch": asked.batch, "prompt": asked.prompt, "steps": asked.steps,
        "compile_mode": arguments.compile_mode, "rounds": {PREFILL: arguments.prefill_rounds, DECODE: arguments.rounds}, "unit": "ms",
    }  # fmt: skip


def kept(folder: Path | None, of: dict[str, Any]) -> tuple[list[Cell], dict[str, int]]:
    """Return the cells of the result in a folder, and its calls in graphs that torch serves; none
    if it is of something else.
    """
    path = folder / "model_speed.json" if folder else None
    if path is None or not path.exists():
        return [], {}
    report = json.loads(path.read_text())
    if any(report.get(name) != value for name, value in of.items()):
        console.print(f"{path}: is of another model, machine or table; it is overwritten")
        return [], {}
    names = [field.name for field in attrs.fields(Cell)]
    return [Cell(**{name: row[name] for name in names}) for row in report["rows"]], report["unbound"]


def measure(arguments: argparse.Namespace, stages: list[str]) -> list[Cell]:
    """Build the model, measure the stages that the result lacks, save after each; return all
    cells.
    """
    captured = arguments.home / "bf16_untuned_gemm.csv"
    answered = covered(captured) if captured.exists() else "no captured shapes"
    console.print(answered)
    with stage_of("building the model"):
        sizes = {name: getattr(arguments, name) for name in ("batch", "prompt", "steps")}
        asked = run_llama.served(arguments.model, "cuda" if torch.cuda.is_available() else "cpu", **sizes)
    of = described(arguments, asked)
    cells, unbound = kept(arguments.output, of)
    there, truth = {(cell.mode, cell.phase) for cell in cells}, None
    for stage in stages:
        mode, phases = STAGES[stage]
        if {(mode, phase) for phase in phases} <= there:
            console.print(f"{stage}: kept from {arguments.output}")
            continue
        with stage_of(stage):
            truth = run_llama.exact(asked) if truth is None else truth
            cells += measured(asked, truth, stage, of["rounds"], arguments.compile_mode)
        unbound |= {str(shape): calls for shape, calls in tunedgemm.unbound().items()}  # graphs hold torch's product for them
        about = {**head("model_speed"), **of, "coverage": answered, "summary": [answered], "unbound": unbound}
        save(arguments.output, {**about, "rows": [cell.row() for cell in cells]})
    show(cells, asked)
    return cells


def main(words: list[str] | None = None) -> int:
    """Tune and measure what was asked for."""
    arguments = parsed(words)
    os.environ.pop("AITER_CONFIG_GEMM_BF16", None)  # a table named there would rank above that of the folder
    os.environ["TUNEDGEMM_HOME"] = str(arguments.home)
    arguments.home.mkdir(parents=True, exist_ok=True)
    tune(arguments, arguments.only)
    tunedgemm.reload()
    stages = [stage for stage in arguments.only if stage in STAGES]
    cells = measure(arguments, stages) if stages else []
    return 1 if arguments.check and not all(cell.fine for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
