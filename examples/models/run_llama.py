"""Capture, tune and run a real architecture with random weights, with the table and without.

    # Llama 3.1 8B's sizes on a GPU, a tiny model on a CPU
    python examples/models/run_llama.py

    python examples/models/run_llama.py --model FOLDER --batch 32 --home DIR

    # with the table of an earlier run
    python examples/models/run_llama.py --home DIR --skip-tuning

Each mode (eager, compiled, captured) runs twice: with torch's own products, and inside
``tunedgemm.patched()``. The model is not changed. ``captured`` is one decode step in a CUDA graph,
replayed for every token. ``benchmarks/model_speed.py`` measures the same with intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import tunedgemm
from rich.console import Console
from rich.table import Table
from tune_llama import WIDER, agree, covered, home, step
from tunedgemm.table.folders import named_model

console = Console()

#: Sizes of a small Llama that a CPU runs fast.
TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
DEFAULT = {"cuda": "llama8B", "cpu": "tiny"}
ARMS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "torch": contextlib.nullcontext,
    "tunedgemm": tunedgemm.patched,
}
MODES = ("eager", "compiled", "captured")
PHASES = ("prefill", "decode")

#: Maps tokens [batch, length] and their positions to the logits of the last token [batch,
#: vocabulary].
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@attrs.frozen(eq=False)
class Served:
    """A model and its inputs: prompts, then tokens one by one, the same in every run.

    Attributes:
        model: a model of transformers, on its device, in eval mode.
        cache: its keys and values, of fixed length, so that graphs and compiled code are reusable.
        tokens: [batch, prompt + steps]; the tokens of the steps are given, not sampled.
        prompt: number of tokens of the prefill.
    """

    model: torch.nn.Module
    cache: Any
    tokens: torch.Tensor
    prompt: int

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        return self.tokens.shape[0]

    @property
    def steps(self) -> int:
        """Return the number of decoded tokens."""
        return self.tokens.shape[1] - self.prompt

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the model on the next tokens of each sequence; see `Step`."""
        out = self.model(input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def rewind(self, length: int) -> None:
        """Truncate the cache to a length."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)

    def positions(self) -> torch.Tensor:
        """Return the positions of all tokens, [batch, prompt + steps]."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(self.batch, -1)

    def prefill(self, run: Step) -> torch.Tensor:
        """Run all prompts at once; return the logits of the next tokens."""
        self.rewind(0)
        return run(self.tokens[:, : self.prompt], self.positions()[:, : self.prompt])

    def decode(self, run: Step, *, keep: bool = False) -> list[torch.Tensor]:
        """Run all steps after a prefill, one token of each sequence at a time; return logits with *keep*."""
        self.rewind(self.prompt)
        kept = []
        positions = self.positions()
        for index in range(self.prompt, self.prompt + self.steps):
            logits = run(self.tokens[:, index : index + 1], positions[:, index : index + 1])
            if keep:
                kept.append(logits.clone())  # a graph overwrites them at the next step
        return kept

    def logits(self, prefill: Step, decode: Step) -> torch.Tensor:
        """Return the logits after the prompts and after each step, [rows, vocabulary], float32 or wider."""
        first = self.prefill(prefill).clone()
        rows = torch.stack([first, *self.decode(decode, keep=True)]).flatten(0, 1)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))


@torch.inference_mode()
def exact(asked: Served) -> torch.Tensor:
    """Compute the logits of all rows, [rows, vocabulary], by an eager copy of the model in `WIDER` dtype."""
    from transformers import StaticCache

    model = copy.deepcopy(asked.model).to(WIDER[asked.model.dtype])
    cache = StaticCache(config=asked.model.config, max_cache_len=asked.tokens.shape[1])
    wide = attrs.evolve(asked, model=model, cache=cache)
    wide.step(wide.tokens[:, :1], wide.positions()[:, :1])
    return wide.logits(wide.step, wide.step)


def served(name: str, device: str, *, batch: int, prompt: int, steps: int) -> Served:
    """Build a model with random weights, and its inputs, the same in every process.

    Args:
        name: ``tiny``, a shipped model's name, or a folder with a ``config.json``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, StaticCache

    config = LlamaConfig(**TINY) if name == "tiny" else AutoConfig.from_pretrained(named_model(name))
    config.max_position_embeddings = max(config.max_position_embeddings, prompt + steps)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (batch, prompt + steps), generator=generator).to(device)
    asked = Served(model, StaticCache(config=config, max_cache_len=prompt + steps), tokens, prompt)
    with torch.no_grad():
        asked.step(tokens[:, :1], asked.positions()[:, :1])  # the cache allocates at the first update
    return asked


def runs(asked: Served, mode: str, how: str = "default", phases: Collection[str] = PHASES) -> tuple[Step, Step]:
    """Prepare a mode; return its functions for prompts and tokens. Call and use them in the arm's context.

    Args:
        mode: one of `MODES`; the prompts of ``captured`` run eagerly.
        how: the mode of torch.compile.
        phases: phases that ``compiled`` compiles; the other one runs eagerly.
    """
    prefill = decode = asked.step
    if mode == "compiled":
        compiled: Step = torch.compile(asked.step, fullgraph=True, dynamic=False, mode=how)
        prefill, decode = (compiled if phase in phases else asked.step for phase in PHASES)
    asked.prefill(prefill)
    asked.decode(decode)
    return prefill, captured(asked) if mode == "captured" else decode


def captured(asked: Served) -> Step:
    """Capture one decode step as a CUDA graph; earlier calls, or prewarm(), must have bound its products."""
    tokens, positions = asked.tokens[:, :1].clone(), torch.zeros(asked.batch, 1, dtype=torch.long, device=asked.tokens.device)
    positions.fill_(asked.prompt)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    asked.rewind(asked.prompt)
    with torch.cuda.stream(side):
        asked.step(tokens, positions)
    torch.cuda.current_stream().wait_stream(side)
    asked.rewind(asked.prompt)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = asked.step(tokens, positions)

    def replayed(next_tokens: torch.Tensor, next_positions: torch.Tensor) -> torch.Tensor:
        tokens.copy_(next_tokens)
        positions.copy_(next_positions)
        graph.replay()
        return logits

    return replayed


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds that *work* takes, until the device has finished."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def modes(device: str) -> tuple[str, ...]:
    """Return the `MODES` of a device."""
    return MODES if device == "cuda" else MODES[:-1]


@torch.inference_mode()
def capture(asked: Served) -> None:
    """Prefill, decode and capture a step with routed F.linear; AITER_TUNE_GEMM=1 records the shapes."""
    with tunedgemm.patched():
        runs(asked, "captured" if asked.tokens.is_cuda else "eager")


@torch.inference_mode()
def compared(
    asked: Served, truth: torch.Tensor, mode: str, rounds: int, how: str = "default"
) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Run one mode in both arms by turns, and compare their logits with the exact ones.

    Returns:
        Whether the logits agree, and each arm's median seconds of a prefill and of a decode step.
    """
    device = asked.tokens.device.type
    ready, logits = {}, {}
    for name, routed in ARMS.items():
        with routed():
            prefill, decode = ready[name] = runs(asked, mode, how)
            logits[name] = asked.logits(prefill, decode)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name, routed in ARMS.items():
            prefill, decode = ready[name]
            with routed():
                prompts = seconds(lambda run=prefill: asked.prefill(run), device)
                steps = seconds(lambda run=decode: asked.decode(run), device)
            taken[name].append((prompts, steps / asked.steps))
    medians = {name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in taken.items()}
    console.print(f"{mode}: ", end="")
    return agree(truth, logits["torch"], logits["tunedgemm"]), medians


def timed(asked: Served, rounds: int, how: str) -> bool:
    """Run every mode and print the times; return whether all outputs agree."""
    table = Table(title=f"Median of {rounds} rounds by turns, batch {asked.batch}, ms")
    for column in ("", "torch", "tunedgemm", "gain"):
        table.add_column(column, justify="left" if not column else "right")
    fine, truth = True, exact(asked)
    for mode in modes(asked.tokens.device.type):
        same, medians = compared(asked, truth, mode, rounds, how)
        fine &= same
        for index, phase in enumerate((f"prefill of {asked.prompt} tokens", "one decode step")):
            if mode == "captured" and index == 0:
                continue
            before, after = (1e3 * medians[name][index] for name in ARMS)
            table.add_row(f"{mode}: {phase}", f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}x")
    console.print(table)
    return fine


def add_model(parser: argparse.ArgumentParser, device: str) -> None:
    """Add the arguments that select the model and its inputs."""
    small = device == "cpu"
    parser.add_argument("--model", default=DEFAULT[device], help="tiny, a shipped one, or a folder with config.json (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16 if small else 1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4 if small else 16, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile (default: %(default)s)")


def parts(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the arguments of `add_model` for another process."""
    for name in ("model", "batch", "prompt", "steps"):
        yield from (f"--{name}", str(getattr(arguments, name)))


def main() -> int:
    """Capture, tune, run in every mode."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model(parser, device)
    parser.add_argument("--home", type=Path, metavar="DIR", help="keep shapes and table there (default: a temporary folder)")
    parser.add_argument("--libtype", default="all", help="backends to tune, a comma list (default: %(default)s)")
    parser.add_argument("--iters", default="31", help="most samples of a solution (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each mode (default: %(default)s)")
    parser.add_argument("--skip-tuning", action="store_true", help="run with the table that --home has")
    parser.add_argument("--only-capture", action="store_true", help="run once, routed, and stop")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("batch", "prompt", "steps")}
    if arguments.only_capture:
        capture(served(arguments.model, device, **sizes))
        return 0
    with home(arguments.home) as folder:
        os.environ.pop("AITER_CONFIG_GEMM_BF16", None)  # a table named there would rank above this run's
        os.environ["TUNEDGEMM_HOME"] = str(folder)
        captured_shapes = folder / "bf16_untuned_gemm.csv"
        if not arguments.skip_tuning:
            step("1. Capture the shapes", [sys.executable, __file__, "--only-capture", *parts(arguments)], AITER_TUNE_GEMM="1")
            tune = [sys.executable, "-m", "tunedgemm", "tune", "--libtype", arguments.libtype, "--iters", arguments.iters]
            step("2. Tune them", tune)
        console.rule("3. Run with the table and without", align="left")
        if captured_shapes.exists():
            console.print(covered(captured_shapes))
        fine = timed(served(arguments.model, device, **sizes), arguments.rounds, arguments.compile_mode)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
