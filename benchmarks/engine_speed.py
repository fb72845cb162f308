"""Measure a serving engine with tunedgemm and without: time per token, prefill, a request trace,
start-up and log probabilities.

    python benchmarks/engine_speed.py CONFIG_DIR --engine vllm --home DIR -o engine
    python benchmarks/engine_speed.py CONFIG_DIR [...] --engine sglang --home DIR \\
        --prefill 8x1024 -o engine

Each arm is one engine in its own process, with random weights; their starts overlap, and all stay
alive. In every round the arms run in random order. ``alone`` is the engine alone, ``again`` a
second one (the A/A control), ``tunedgemm`` has ``TUNEDGEMM_VLLM=1`` or ``TUNEDGEMM_SGLANG=1`` and
the tables in DIR. A gain is the median of the rounds' ratios, alone over the arm, with its 95 %
interval by order statistics.

Engines of several models start together; each model is then measured by itself. An engine that does
not start gets a second attempt with ``--fallback``. The result is written after each figure, so
what was measured before a failure or the end of ``--budget`` is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engines import SGLANG, Sglang, Vllm, serve
from harness import add_budget, add_rounds, head, interval, parser_of, save

ARMS = ("alone", "again", "tunedgemm")
#: Lines of an engine's log that tell what ran or failed.
TELLING = ("tunedgemm", "Error", "error:", "Exception", "attention backend", "Load weight end", "Capture", "DeepGEMM", "JIT", "KV Cache is")
#: Engine -> the class that runs in the child, the variable that switches the plugin on, and options
#: by default.
ENGINES: dict[str, tuple[type[Any], str, dict[str, Any]]] = {
    # Engines start together: a cache of stated size, as vLLM's measurement would see the others.
    "vllm": (Vllm, "TUNEDGEMM_VLLM", {"max_logprobs": 500, "kv_cache_memory_bytes": 6 << 30}),
    "sglang": (Sglang, "TUNEDGEMM_SGLANG", SGLANG),
}


class Arm:
    """The parent's end of one engine.

    Attributes:
        name: of the arm.
        model: name of the model's folder.
        start_s: seconds until it was up.
        log: file of the engine's output.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        arguments: argparse.Namespace,
        options: dict[str, Any],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self.model, self.start_s = name, model.name, 0.0
        folder = arguments.logs / model.name
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        engine, variable, _ = ENGINES[arguments.engine]
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        before = dict(os.environ)
        os.environ |= {
            variable: "1" if name == "tunedgemm" else "0",
            "TUNEDGEMM_HOME": str(arguments.home),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # Without these DeepGEMM compiles for each number of rows, for minutes.
            "VLLM_DEEP_GEMM_WARMUP": "skip",
            "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
            **environment,
        }
        try:
            self._process = context.Process(target=serve, args=(child, str(self.log), engine, str(model), options))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        child.close()

    def answer(self, patience: float | None = None) -> Any:
        """Wait for the engine's answer to the last request, for ever if *patience* is None."""
        if not self._pipe.poll(patience):
            raise TimeoutError(f"{self.name}: no answer in {patience:.0f} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ready(self, seconds: float) -> bool:
        """Wait until the engine is up; return whether it is."""
        try:
            self.start_s = round(self.answer(max(0.1, seconds)), 1)
        except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            print(f"{self.model} {self.name}: did not start: {error!r}", flush=True)
            self.show_log(40)
            self.close()
            return False
        return True

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine."""
        self._pipe.send((method, arguments))
        return self.answer()

    def show_log(self, count: int, words: tuple[str, ...] = ("",)) -> None:
        """Print the last lines of the engine's log that contain one of these words."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        matching = [line for line in lines if any(word in line for word in words) and "server_args=" not in line and "it/s" not in line]
        print(f"{self.model} {self.name}:", *(f"  | {line[:400]}" for line in matching[-count:]), sep="\n", flush=True)

    def close(self, patience: float = 10) -> None:
        """Let the engine end; kill it after some seconds."""
        self._pipe.close()
        self._process.join(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def spread(mine: list[list[tuple[int, dict[int, float]]]], theirs: list[list[tuple[int, dict[int, float]]]]) -> float:
    """Compute the root mean square of the differences of log probabilities over their standard
    deviation.

    Tokens that both have are compared, up to the first place where another one was chosen.
    """
    squares, variances = [], []
    for my_tokens, their_tokens in zip(mine, theirs, strict=True):
        for (token, likely), (chosen, known) in zip(my_tokens, their_tokens, strict=True):
            both = sorted(likely.keys() & known.keys())
            mean = sum(known[other] for other in both) / len(both)
            squares += [(likely[other] - known[other]) ** 2 for other in both]
            variances += [(known[other] - mean) ** 2 for other in both]
            if token != chosen:
                break
    return float((sum(squares) / sum(variances)) ** 0.5)


def requests(count: int, rate: float, seed: int) -> list[tuple[float, int, int]]:
    """Draw a trace: Poisson arrivals at *rate* a second, prompts of 32 to 2048 tokens, 16 to 256
    tokens to decode.
    """
    chosen, at, trace = random.Random(seed), 0.0, []
    for _ in range(count):
        at += chosen.expovariate(rate)
        trace.append((at, int(2 ** chosen.uniform(5, 11)), int(2 ** chosen.uniform(4, 8))))
    return trace


def measure(arms: list[Arm], rounds: int, method: str, *arguments: Any) -> dict[str, list[Any]]:
    """Collect samples by arm, the arms in random order in each round; the first round is not
    counted.
    """
    samples: dict[str, list[Any]] = {arm.name: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm in random.sample(arms, len(arms)):
            sample = arm.ask(method, *arguments, turn)
            if turn:
                samples[arm.name].append(sample)
    return samples


def row_of(model: str, figure: str, samples: dict[str, list[float]], more_is_better: bool = False) -> dict[str, Any]:
    """Return a figure: the medians of the arms and the gain of each over the engine alone."""
    row: dict[str, Any] = {"model": model, "figure": figure, **{name: interval(values)[0] for name, values in samples.items()}}
    for name, values in samples.items():
        if name != "alone" and "alone" in samples:
            pairs = zip(samples["alone"], values, strict=True)
            row[f"gain {name}"] = interval([(b / a if more_is_better else a / b) for a, b in pairs])
    return {**row, "samples": samples}


def start(arguments: argparse.Namespace, until: float, arms: list[Arm]) -> dict[str, list[Arm]]:
    """Start all engines, those with tunedgemm first; list them in *arms*, and return those that are
    up by their model.
    """
    options, asked = {**ENGINES[arguments.engine][2], **arguments.options}, []
    for name in sorted(arguments.arms, key=lambda name: name != "tunedgemm"):
        for model in arguments.models:
            time.sleep(arguments.stagger if arms else 0)
            arms.append(Arm(name, model, arguments, options))
            asked.append((name, model))
    up: dict[str, list[Arm]] = {model.name: [] for model in arguments.models}
    failed = []
    for arm, request in zip(list(arms), asked, strict=True):
        if arm.ready(until - time.monotonic()):
            up[arm.model].append(arm)
        else:
            failed.append(request)
    if arguments.fallback and until - time.monotonic() > 30:
        second = [Arm(name, model, arguments, {**options, **arguments.fallback}) for name, model in failed]
        arms += second
        for arm in [arm for arm in second if arm.ready(until - time.monotonic())]:
            print(f"{arm.model} {arm.name}: started with {arguments.fallback}", flush=True)
            up[arm.model].append(arm)
    return up


def figures(arguments: argparse.Namespace) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return title, method, arguments and rounds of each figure."""
    tokens = (arguments.tokens,) if arguments.engine == "sglang" else ()
    listed = [(f"decode {batch}, ms", "decode", (batch, *tokens), arguments.rounds) for batch in arguments.batches]
    for sizes in arguments.prefill:
        rounds = max(3, arguments.rounds // 2) if arguments.engine == "vllm" else arguments.rounds
        listed.append((f"prefill {sizes}, ms", "prefill", tuple(map(int, sizes.split("x"))), rounds))
    return listed


def report(arms: list[Arm], arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None], until: float) -> None:
    """Measure one model's engines until a time; pass a row of each figure to *keep*."""
    model = arms[0].model
    keep({"model": model, "figure": "start-up, s, overlapping", **{arm.name: arm.start_s for arm in arms}})
    answers = {arm.name: arm.ask("logits", [5, 64, 200], 500) for arm in arms}
    if "alone" in answers:
        spreads = {name: spread(answer, answers["alone"]) for name, answer in answers.items()}
        keep({"model": model, "figure": "differences of log probabilities over their standard deviation", **spreads})
    for title, method, values, rounds in figures(arguments):
        if time.monotonic() > until:
            print(f"{title}: no time left", flush=True)
            continue
        keep(row_of(model, title, measure(arms, rounds, method, *values)))
    if arguments.trace:
        traces = measure(arms, arguments.trace_rounds, "trace", requests(arguments.trace, arguments.rate, 1))
        for key in ("tokens_per_s", "ttft_ms", "tpot_ms"):
            samples = {name: [trace[key] for trace in values] for name, values in traces.items()}
            keep(row_of(model, f"trace of {arguments.trace} requests, {key}", samples, key == "tokens_per_s"))


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("models", type=Path, nargs="+", metavar="CONFIG_DIR", help="folders with config.json")
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="default: %(default)s")
    parser.add_argument("--home", type=Path, required=True, help="TUNEDGEMM_HOME of the arm tunedgemm: the folder with the tables")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64], help="sequences decoded together (default: 1 8 32 64)")
    parser.add_argument("--prefill", nargs="*", default=["16x1024"], metavar="PROMPTSxTOKENS", help="default: 16x1024")
    add_rounds(parser, 15)
    add_budget(parser)
    parser.add_argument("--tokens", type=int, default=128, help="decoded tokens that are timed, SGLang (default: %(default)s)")
    parser.add_argument("--trace", type=int, default=0, help="requests of the trace, vLLM; 0 for none (default)")
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--trace-rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--stagger", type=float, default=25, help="seconds between the starts of two engines (default: %(default)s)")
    parser.add_argument("--start-seconds", type=float, default=600, help="longest wait for the engines (default: %(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help="arguments of the engine over the defaults, as JSON")
    parser.add_argument("--fallback", type=json.loads, default={}, help="arguments of a second attempt, as JSON")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder of the engines' logs")
    arguments = parser.parse_args(words)
    if arguments.trace and arguments.engine != "vllm":
        parser.error(f"--trace: only vLLM serves a trace (got --engine {arguments.engine})")
    return arguments


def main(words: list[str] | None = None) -> None:
    """Start the engines, measure each model, and keep every sample."""
    arguments, rows = parsed(words), list[dict[str, Any]]()
    begin = time.monotonic()
    end = begin + (arguments.budget or float("inf"))

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in row.items() if name != "samples"}
        print(*(f"{name} {value}" for name, value in shown.items()), sep="; ", flush=True)
        save(arguments.output, head("engine_speed", engine=arguments.engine, options=arguments.options, rows=rows))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are in separate sessions, and end here
    started: list[Arm] = []
    try:
        up = start(arguments, begin + arguments.start_seconds, started)
        for left, arms in zip(range(len(up), 0, -1), up.values(), strict=True):
            now = time.monotonic()
            if not arms:
                continue
            try:
                report(arms, arguments, keep, now + (end - now) / left)
            except Exception:
                traceback.print_exc(file=sys.stdout)
            for arm in arms:
                arm.show_log(30, TELLING)
    finally:
        for arm in started:
            arm.close()


if __name__ == "__main__":
    main()
