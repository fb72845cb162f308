"""Measure SGLang with tunedgemm and without: time per token, prefill, start-up and log probabilities.

    python benchmarks/sglang_speed.py CONFIG_DIR [CONFIG_DIR ...] --home DIR --json out.json

As `vllm_speed.py`, with ``sglang`` for SGLang alone and ``TUNEDGEMM_SGLANG=1`` in the arm ``tunedgemm``. Engines of several models start
together; each model is then measured in rounds of its own. An engine that does not start gets a second attempt with ``--fallback``.
The JSON is written after each figure, so what was measured before a failure or the end of ``--seconds`` is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm_speed
from vllm_speed import PROMPT, SHORT, measure, show, spread

OPTIONS = {
    "attention_backend": "fa3", "sampling_backend": "pytorch", "grammar_backend": "none", "disable_radix_cache": True,
    "context_length": 4096, "max_running_requests": 64, "max_total_tokens": 16384, "chunked_prefill_size": 8192,
    "mem_fraction_static": 0.9, "log_level": "info",
    "cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 8, 32, 64], "max_bs": 64}, "prefill": {"backend": "disabled"}},
}  # fmt: skip
#: Lines of an engine's log that tell what ran or failed.
TELLING = ("tunedgemm", "Error", "error:", "Exception", "attention backend", "Load weight end", "Capture", "DeepGEMM", "JIT", "KV Cache is")


class Engine:
    """One engine of SGLang in the child process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(model_path=model, load_format="dummy", skip_tokenizer_init=True, **options)
        self._vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]

    def _ask(self, batch: int, length: int, tokens: int, seed: int, **more: Any) -> Any:
        chosen = random.Random(seed)
        prompts = [[chosen.randrange(self._vocabulary) for _ in range(length)] for _ in range(batch)]
        params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return self._engine.generate(input_ids=prompts, sampling_params=params, **more)

    def _generate(self, batch: int, length: int, tokens: int, seed: int) -> float:
        start = time.perf_counter()
        self._ask(batch, length, tokens, seed)
        return (time.perf_counter() - start) * 1e3

    def decode(self, batch: int, tokens: int, seed: int) -> float:
        """Return milliseconds of one decoded token of each of *batch* sequences, as a difference of runs that differ by *tokens*."""
        short, long = (self._generate(batch, PROMPT, count, seed) for count in (SHORT, SHORT + tokens))
        return (long - short) / tokens

    def prefill(self, batch: int, length: int, seed: int) -> float:
        """Return milliseconds until *batch* prompts of *length* tokens have one token each."""
        return self._generate(batch, length, 1, seed)

    def logits(self, lengths: list[int], top: int) -> list[list[tuple[int, dict[int, float]]]]:
        """Return the tokens chosen after prompts of these lengths, three each, and the log probabilities of the most likely ones."""
        found = []
        for length in lengths:
            [output] = self._ask(1, length, 3, length, return_logprob=True, top_logprobs_num=top)
            likely = output["meta_info"]["output_top_logprobs"]
            each = zip(output["output_ids"], likely, strict=True)
            found.append([(token, {other: value for value, other, _ in one}) for token, one in each])
        return found


class Arm(vllm_speed.Arm):
    """The parent's end of one engine of SGLang."""

    engine = Engine
    variable = "TUNEDGEMM_SGLANG"
    patience = 60.0

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        super().__init__(name, arguments)
        self.model, self.start, self.log = arguments.model.name, 0.0, Path(arguments.logs) / f"{name}.log"

    def ready(self, seconds: float) -> bool:
        """Wait until the engine is up; return whether it is."""
        try:
            self.patience = max(0.1, seconds)
            self.start = round(self.answer(), 1)
            self.patience = Arm.patience
        except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            print(f"{self.model} {self.name}: did not start: {error!r}", flush=True)
            self.show_log(40)
            self.close()
            return False
        return True

    def show_log(self, count: int, words: tuple[str, ...] = ("",)) -> None:
        """Print the last lines of the engine's log that have one of these words."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        found = [line for line in lines if any(word in line for word in words) and "server_args=" not in line and "it/s" not in line]
        print(f"{self.model} {self.name}:", *(f"  | {line[:400]}" for line in found[-count:]), sep="\n", flush=True)


def start(arguments: argparse.Namespace, until: float, arms: list[Arm]) -> dict[str, list[Arm]]:
    """Start all engines, those with tunedgemm first; list them in *arms*, and return those that are up by their model."""
    asked = []
    for name in sorted(arguments.arms.split(","), key=lambda name: name != "tunedgemm"):
        for model in arguments.models:
            one = argparse.Namespace(**{**vars(arguments), "model": model, "logs": arguments.logs / model.name})
            one.logs.mkdir(parents=True, exist_ok=True)
            time.sleep(arguments.stagger if arms else 0)
            arms.append(Arm(name, one))
            asked.append(one)
    up: dict[str, list[Arm]] = {model.name: [] for model in arguments.models}
    failed = []
    for arm, one in zip(list(arms), asked, strict=True):
        if arm.ready(until - time.monotonic()):
            up[arm.model].append(arm)
        else:
            failed.append((arm.name, one))
    if arguments.fallback and until - time.monotonic() > 30:
        second = [Arm(name, argparse.Namespace(**{**vars(one), "options": {**one.options, **arguments.fallback}})) for name, one in failed]
        arms += second
        for arm in [arm for arm in second if arm.ready(until - time.monotonic())]:
            print(f"{arm.model} {arm.name}: started with {arguments.fallback}", flush=True)
            up[arm.model].append(arm)
    return up


def report(arms: list[Arm], arguments: argparse.Namespace, result: dict[str, Any], keep: Callable[[], None], until: float) -> None:
    """Measure one model's engines until a time, and print each figure."""
    result["start_s"] = {arm.name: arm.start for arm in arms}
    print("start-up, seconds, overlapping:", result["start_s"], flush=True)
    answers = {arm.name: arm.ask("logits", [5, 64, 200], 500) for arm in arms}
    if "sglang" in answers:
        result["logits"] = {name: spread(found, answers["sglang"]) for name, found in answers.items()}
        print("differences of log probabilities over their standard deviation:", result["logits"], flush=True)
    keep()
    figures = [(f"decode {batch}", "decode", (int(batch), arguments.tokens)) for batch in filter(None, arguments.batches.split(","))]
    sizes = [tuple(map(int, one.split("x"))) for one in filter(None, arguments.prefill.split(","))]
    figures += [(f"prefill {batch}x{length}", "prefill", (batch, length)) for batch, length in sizes]
    for title, method, values in figures:
        if time.monotonic() > until:
            print(f"{title}: no time left", flush=True)
            continue
        result[title] = samples = measure(arms, arguments.rounds, method, *values)
        keep()
        if "sglang" in samples:
            show(f"{title}, ms", samples, alone="sglang")
        else:
            print(f"{title}, ms: {samples}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders with config.json")
    vllm_speed.add_options(parser, "sglang.Engine, over the defaults,")
    parser.set_defaults(prefill="8x1024", rounds=7, stagger=8)
    parser.add_argument("--arms", default="tunedgemm,sglang", help="of tunedgemm, sglang and again (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="decoded tokens that are timed (default: %(default)s)")
    parser.add_argument("--start-seconds", type=float, default=300, help="longest wait for the engines (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1800, help="of the whole run; later figures are left out (default: %(default)s)")
    parser.add_argument("--fallback", type=json.loads, default={}, help="arguments of a second attempt, as JSON")
    arguments = parser.parse_args()
    arguments.options = {**OPTIONS, **arguments.options}

    begin, result = time.monotonic(), {"options": arguments.options}

    def keep() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(result))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are in sessions of their own, and end here
    started: list[Arm] = []
    try:
        up = start(arguments, begin + arguments.start_seconds, started)
        print(f"up after {time.monotonic() - begin:.0f} s", flush=True)
        for left, (model, arms) in zip(range(len(up), 0, -1), up.items(), strict=True):
            print(f"== {model}", flush=True)
            now = time.monotonic()
            try:
                report(arms, arguments, result.setdefault(model, {}), keep, now + (begin + arguments.seconds - now) / left)
            except Exception:
                traceback.print_exc(file=sys.stdout)
                for arm in arms:
                    arm.show_log(25)
            for arm in arms:
                arm.show_log(30, TELLING)
            keep()
    finally:
        for arm in started:
            arm.close()


if __name__ == "__main__":
    main()
