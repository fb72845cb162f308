"""Measure vLLM with tunedgemm and without: time per token, prefill, a request trace, start-up and logits.

    python benchmarks/vllm_speed.py CONFIG_DIR --home DIR --json out.json
    python benchmarks/vllm_speed.py CONFIG_DIR --home DIR --batches 1,32 --trace 128

Each arm is one vLLM engine in its own process, with random weights; their starts overlap, and all stay alive. In every round the arms
run in random order. ``vllm`` is vLLM alone, ``again`` a second one (the A/A control), ``tunedgemm`` has ``TUNEDGEMM_VLLM=1`` and
the tables in DIR. A gain is the median of the rounds' ratios, vllm over the arm, with its 95 % interval by order statistics.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import time
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ARMS = ("vllm", "again", "tunedgemm")
#: Tokens of a prompt, and the two numbers of decoded tokens between which steps are timed.
PROMPT, SHORT, LONG = 16, 8, 136


def fill(model: Any) -> None:
    """Give a model random weights by their names: dummy ones vanish in 8 bits, and no output would depend on them."""
    import zlib

    import torch

    spread = 40.0  # of 8-bit weights: e4m3 holds up to 448, int8 up to 127
    with torch.inference_mode():
        for name, module in model.named_modules():
            for kind in ("weight", "w13_weight", "w2_weight"):
                weight = getattr(module, kind, None)
                if not isinstance(weight, torch.Tensor):
                    continue
                data = weight.data
                if data.dim() == 1:  # of a norm
                    data.fill_(1)
                    continue
                scale = getattr(module, "input_size_per_partition", data.shape[-1]) ** -0.5
                seeded = torch.Generator(data.device).manual_seed(zlib.crc32(f"{name}.{kind}".encode()))
                for part in data if data.dim() > 2 else [data]:  # expert by expert: float32 takes four times their memory
                    values = torch.randn(part.shape, generator=seeded, device=data.device)
                    part.copy_(values * scale if data.dtype.itemsize > 1 else (values * spread).clamp(-127, 127))
                if data.dtype.itemsize > 1:
                    continue
                for scales in (f"{kind}_scale", f"{kind}_scale_inv"):
                    if isinstance(getattr(module, scales, None), torch.Tensor):
                        getattr(module, scales).data.fill_(scale / spread)


def register() -> None:
    """Register the load format ``filled`` with vLLM: its dummy weights, then those of `fill`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("filled")
    class Filled(DummyModelLoader):  # type: ignore[misc, unused-ignore]
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            fill(model)


def offer_filled(folder: Path) -> None:
    """Make `register` one of vLLM's plugins for the processes that this one starts, by a distribution's metadata in *folder*."""
    about = folder / "filled-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: filled\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nfilled = vllm_speed:register\n")
    paths = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path[:0] = paths[:2]


class Engine:
    """One engine in the child process; each public method answers one request of the parent."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._folder = tempfile.TemporaryDirectory()
        offer_filled(Path(self._folder.name))
        self._llm = LLM(model=model, skip_tokenizer_init=True, load_format="filled", disable_log_stats=True, **options)
        self._vocabulary = self._llm.llm_engine.model_config.get_vocab_size()

    def _prompts(self, count: int, length: int, seed: int) -> list[Any]:
        chosen = random.Random(seed)
        return [{"prompt_token_ids": [chosen.randrange(self._vocabulary) for _ in range(length)]} for _ in range(count)]

    def decode(self, batch: int, seed: int) -> float:
        """Return milliseconds of one decoded token of each of *batch* sequences.

        Timed from the step where all have `SHORT` tokens to that where the first has `LONG`: no prefill is in between.
        """
        from vllm import SamplingParams

        engine, tokens, begun = self._llm.llm_engine, dict[str, int](), (0.0, 0)
        params = SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=0, detokenize=False)
        for place, prompt in enumerate(self._prompts(batch, PROMPT, seed)):
            engine.add_request(f"decode-{seed}-{place}", prompt, params)
        milliseconds = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)
            now, most = time.perf_counter(), max(tokens.values(), default=0)
            if not begun[1] and len(tokens) == batch and min(tokens.values()) >= SHORT:
                begun = now, most
            elif begun[1] and not milliseconds and most == LONG:
                milliseconds = (now - begun[0]) * 1e3 / (LONG - begun[1])
        return milliseconds

    def prefill(self, batch: int, length: int, seed: int) -> float:
        """Return milliseconds until *batch* prompts of *length* tokens have one token each."""
        from vllm import SamplingParams

        prompts = self._prompts(batch, length, seed)
        start = time.perf_counter()
        self._llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, detokenize=False), use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    def trace(self, requests: list[tuple[float, int, int]], seed: int) -> dict[str, Any]:
        """Serve requests (arrival in seconds, tokens of the prompt, tokens to decode) and time each."""
        from vllm import SamplingParams

        engine, waiting = self._llm.llm_engine, list(enumerate(requests))
        prompts = [self._prompts(1, length, seed + place)[0] for place, (_, length, _) in enumerate(requests)]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        start = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while waiting and waiting[0][1][0] <= now:
                place, (_, _, tokens) = waiting.pop(0)
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
                engine.add_request(str(place), prompts[place], params)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0][1][0] - now))
                continue
            for output in engine.step():
                at = time.perf_counter() - start
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, at)
                last[output.request_id] = at
        seconds = time.perf_counter() - start
        keys = [next(key for key in first if key == str(place) or key.startswith(f"{place}-")) for place in range(len(requests))]
        ttft = [(first[key] - arrival) * 1e3 for key, (arrival, _, _) in zip(keys, requests, strict=True)]
        tpot = [(last[key] - first[key]) * 1e3 / (tokens - 1) for key, (_, _, tokens) in zip(keys, requests, strict=True) if tokens > 1]
        middle = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
        return {"tokens_per_s": sum(tokens for *_, tokens in requests) / seconds, "ttft_ms": middle(ttft), "tpot_ms": middle(tpot)}

    def logits(self, lengths: list[int], top: int) -> list[list[tuple[int, dict[int, float]]]]:
        """Return the tokens chosen after prompts of these lengths, three each, and the log probabilities of the most likely ones."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, detokenize=False, logprobs=top)
        found = []
        for length in lengths:  # one at a time: decoding is at batch 1
            [output] = self._llm.generate(self._prompts(1, length, length), params, use_tqdm=False)
            chosen = output.outputs[0]
            each = zip(chosen.token_ids, chosen.logprobs, strict=True)
            found.append([(token, {other: one.logprob for other, one in likely.items()}) for token, likely in each])
        return found


def serve(pipe: Connection, log: str, engine_of: type[Any], model: str, options: dict[str, Any]) -> None:
    """Run one arm in a child process until the parent closes the pipe."""
    os.setsid()  # the engine's own children end with this process
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    start = time.perf_counter()
    try:
        engine = engine_of(model, options)
        pipe.send(time.perf_counter() - start)
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(engine, name)(*arguments))
    except EOFError:
        pass
    except BaseException as error:
        pipe.send(error if isinstance(error, RuntimeError) else RuntimeError(f"{type(error).__name__}: {error}"))
        raise


class Arm:
    """The parent's end of one engine.

    Attributes:
        engine: class that runs in the child.
        variable: environment variable that switches the plugin on.
        patience: seconds until an answer is given up, None for no limit.
    """

    engine: type[Any] = Engine
    variable = "TUNEDGEMM_VLLM"
    patience: float | None = None

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        log = str(Path(arguments.logs) / f"{name}.log")
        before = dict(os.environ)
        os.environ |= {
            self.variable: "1" if name == "tunedgemm" else "0",
            "TUNEDGEMM_HOME": str(arguments.home),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        try:
            self._process = context.Process(target=serve, args=(child, log, self.engine, str(arguments.model), arguments.options))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        child.close()

    def answer(self) -> Any:
        """Wait for the engine's answer to the last request."""
        if not self._pipe.poll(self.patience):
            raise TimeoutError(f"{self.name}: no answer in {self.patience} s")
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine."""
        self._pipe.send((method, arguments))
        return self.answer()

    def close(self) -> None:
        """Let the engine end."""
        self._pipe.close()
        self._process.join(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def spread(mine: list[list[tuple[int, dict[int, float]]]], theirs: list[list[tuple[int, dict[int, float]]]]) -> float:
    """Compute the root mean square of the differences of log probabilities over their standard deviation.

    Tokens that both have are compared, up to the first place where another one was chosen.
    """
    squares, variances = [], []
    for one, other in zip(mine, theirs, strict=True):
        for (token, likely), (chosen, known) in zip(one, other, strict=True):
            both = sorted(likely.keys() & known.keys())
            mean = sum(known[place] for place in both) / len(both)
            squares += [(likely[place] - known[place]) ** 2 for place in both]
            variances += [(known[place] - mean) ** 2 for place in both]
            if token != chosen:
                break
    return float((sum(squares) / sum(variances)) ** 0.5)


def requests(count: int, rate: float, seed: int) -> list[tuple[float, int, int]]:
    """Draw a trace: Poisson arrivals at *rate* a second, prompts of 32 to 2048 tokens, 16 to 256 tokens to decode."""
    chosen, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += chosen.expovariate(rate)
        found.append((at, int(2 ** chosen.uniform(5, 11)), int(2 ** chosen.uniform(4, 8))))
    return found


def measure(arms: list[Arm], rounds: int, method: str, *arguments: Any) -> dict[str, list[Any]]:
    """Collect samples by arm, the arms in random order in each round; the first round is not counted."""
    samples: dict[str, list[Any]] = {arm.name: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm in random.sample(arms, len(arms)):
            found = arm.ask(method, *arguments, turn)
            if turn:
                samples[arm.name].append(found)
    return samples


def show(title: str, samples: dict[str, list[float]], more_is_better: bool = False, alone: str = "vllm") -> None:
    """Print one line: medians by arm and the gain of each over the engine alone."""
    from speed import interval  # here: a child imports this file, and vLLM alone must not meet tunedgemm

    parts = []
    for name, values in samples.items():
        ratios = [(b / a if more_is_better else a / b) for a, b in zip(samples[alone], values, strict=True)]
        gain = "" if name == alone else " {:.3f} [{:.3f}, {:.3f}]".format(*interval(ratios))
        parts.append(f"{name} {sorted(values)[len(values) // 2]:.3f}{gain}")
    print(f"{title}: " + "; ".join(parts), flush=True)


def add_options(parser: argparse.ArgumentParser, engine: str) -> None:
    """Add the options that the benchmarks of all engines have; *engine* is what ``--options`` are arguments of."""
    parser.add_argument("--home", type=Path, required=True, help="TUNEDGEMM_HOME of the arm tunedgemm: the folder with the tables")
    parser.add_argument("--batches", default="1,8,32,64", help="sequences decoded at once (default: %(default)s)")
    parser.add_argument("--prefill", default="16x1024", help="prompts x tokens, comma list (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--stagger", type=float, default=25, help="seconds between the starts of two engines (default: %(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help=f"arguments of {engine} as JSON")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder of the engines' logs")
    parser.add_argument("--json", type=Path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with config.json")
    add_options(parser, "vllm.LLM")
    parser.add_argument("--arms", default=",".join(ARMS), help="default: %(default)s")
    parser.add_argument("--trace", type=int, default=0, help="requests of the trace; 0 for none (default)")
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--trace-rounds", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()

    arms = []
    for name in arguments.arms.split(","):
        time.sleep(arguments.stagger if arms else 0)
        arms.append(Arm(name, arguments))
    report(arms, arguments)


def report(arms: list[Arm], arguments: argparse.Namespace) -> None:
    """Measure what the arguments ask for, print it, write it down, and end the engines."""
    import torch

    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(), "model": arguments.model.name, "options": arguments.options,
        "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }  # fmt: skip

    def keep() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(result))

    try:
        result["start_s"] = {arm.name: round(arm.answer(), 1) for arm in arms}
        print("start-up, seconds, overlapping:", result["start_s"], flush=True)
        answers = {arm.name: arm.ask("logits", [5, 64, 200], 500) for arm in arms}
        result["logits"] = {name: spread(found, answers["vllm"]) for name, found in answers.items()}
        print("differences of log probabilities over their standard deviation:", result["logits"], flush=True)
        for batch in filter(None, arguments.batches.split(",")):
            result[f"decode {batch}"] = samples = measure(arms, arguments.rounds, "decode", int(batch))
            show(f"ms a token, batch {batch}", samples)
            keep()
        for sizes in filter(None, arguments.prefill.split(",")):
            result[f"prefill {sizes}"] = samples = measure(arms, max(3, arguments.rounds // 2), "prefill", *map(int, sizes.split("x")))
            show(f"ms of prefill {sizes}", samples)
            keep()
        if arguments.trace:
            found = measure(arms, arguments.trace_rounds, "trace", requests(arguments.trace, arguments.rate, 1))
            for key in ("tokens_per_s", "ttft_ms", "tpot_ms"):
                result[f"trace {key}"] = samples = {name: [one[key] for one in values] for name, values in found.items()}
                show(f"trace of {arguments.trace} requests, {key}", samples, key == "tokens_per_s")
        keep()
    finally:
        for arm in arms:
            arm.close()


if __name__ == "__main__":
    main()
