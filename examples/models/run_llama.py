"""A real architecture with random weights, eager, compiled and captured: capture its shapes, tune them, run it with the table and without.

    python examples/models/run_llama.py                          # the sizes of Llama 3.1 8B on a
    GPU, a tiny model on a CPU python examples/models/run_llama.py --model FOLDER --batch 32 --home
    DIR python examples/models/run_llama.py --home DIR --skip-tuning # with the table of an earlier
    run

Each mode runs twice, with torch's own products and inside ``tunedgemm.patched()``; nothing of the
model is changed. ``captured`` is one decode step in a CUDA graph, replayed for every token.
``benchmarks/model_speed.py`` times the same in earnest.
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

#: An architecture like Llama's that a CPU runs in no time.
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

#: tokens [batch, length] and their positions, to the logits of the last one [batch, vocabulary]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@attrs.frozen(eq=False)
class Served:
    """A model and what it is asked: prompts, then tokens one by one, the same in every run.

    Attributes:
        model: of transformers, on its device, in eval mode.
        cache: its keys and values, of fixed length, so that graphs and compiled code may be reused.
        tokens: [batch, prompt + steps]; those of the steps are given, not chosen.
        prompt: tokens of the prefill.
    """

    model: torch.nn.Module
    cache: Any
    tokens: torch.Tensor
    prompt: int

    @property
    def batch(self) -> int:
        """Sequences at a time."""
        return self.tokens.shape[0]

    @property
    def steps(self) -> int:
        """Tokens that are decoded."""
        return self.tokens.shape[1] - self.prompt

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the model on the next tokens of each sequence; see `Step`."""
        out = self.model(input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def rewind(self, length: int) -> None:
        """Forget what the cache holds from a length on."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)

    def positions(self) -> torch.Tensor:
        """Those of all tokens, [batch, prompt + steps]."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(self.batch, -1)

    def prefill(self, run: Step) -> torch.Tensor:
        """All prompts at once: the logits of the tokens that follow."""
        self.rewind(0)
        return run(self.tokens[:, : self.prompt], self.positions()[:, : self.prompt])

    def decode(self, run: Step, *, keep: bool = False) -> list[torch.Tensor]:
        """All steps, one token of each sequence at a time; their logits where they are to be kept. The prompts are in the cache."""
        self.rewind(self.prompt)
        kept = []
        positions = self.positions()
        for place in range(self.prompt, self.prompt + self.steps):
            logits = run(self.tokens[:, place : place + 1], positions[:, place : place + 1])
            if keep:
                kept.append(logits.clone())  # a graph writes the next ones to the same place
        return kept

    def logits(self, prefill: Step, decode: Step) -> torch.Tensor:
        """Those after the prompts and after each step, [rows, vocabulary] in float32 or wider."""
        first = self.prefill(prefill).clone()
        rows = torch.stack([first, *self.decode(decode, keep=True)]).flatten(0, 1)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))


@torch.inference_mode()
def exact(asked: Served) -> torch.Tensor:
    """The logits of all rows, [rows, vocabulary], by a copy of the model in `WIDER` arithmetic, run eagerly."""
    from transformers import StaticCache

    model = copy.deepcopy(asked.model).to(WIDER[asked.model.dtype])
    cache = StaticCache(config=asked.model.config, max_cache_len=asked.tokens.shape[1])
    wide = attrs.evolve(asked, model=model, cache=cache)
    wide.step(wide.tokens[:, :1], wide.positions()[:, :1])
    return wide.logits(wide.step, wide.step)


def served(name: str, device: str, *, batch: int, prompt: int, steps: int) -> Served:
    """Build a model with random weights, the same in every process, and what it is asked.

    Args:
        name: ``tiny``, a model that tunedgemm ships the sizes of, or a folder with a
            ``config.json``.
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
        asked.step(tokens[:, :1], asked.positions()[:, :1])  # the cache takes its memory at the first update
    return asked


def runs(asked: Served, mode: str, how: str = "default", phases: Collection[str] = PHASES) -> tuple[Step, Step]:
    """How prompts and how tokens are run in a mode, made ready inside the arm's context, and to be used there.

    Args:
        mode: one of `MODES`; the prompts of ``captured`` run eagerly.
        how: the mode of torch.compile.
        phases: what ``compiled`` compiles; the other phase runs eagerly.
    """
    prefill = decode = asked.step
    if mode == "compiled":
        compiled: Step = torch.compile(asked.step, fullgraph=True, dynamic=False, mode=how)
        prefill, decode = (compiled if phase in phases else asked.step for phase in PHASES)
    asked.prefill(prefill)
    asked.decode(decode)
    return prefill, captured(asked) if mode == "captured" else decode


def captured(asked: Served) -> Step:
    """One decode step as a CUDA graph. Its products were bound by calls before; prewarm() is the way where there were none."""
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
    """How long a piece of work takes, until the device is done."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def modes(device: str) -> tuple[str, ...]:
    """Those of `MODES` that a device has."""
    return MODES if device == "cuda" else MODES[:-1]


@torch.inference_mode()
def capture(asked: Served) -> None:
    """Prefill and decode with every F.linear routed, and capture a step; AITER_TUNE_GEMM=1 in the environment notes the shapes."""
    with tunedgemm.patched():
        runs(asked, "captured" if asked.tokens.is_cuda else "eager")


@torch.inference_mode()
def compared(
    asked: Served, truth: torch.Tensor, mode: str, rounds: int, how: str = "default"
) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Run one mode in both arms by turns, and judge their logits by the exact ones.

    Returns:
        Whether the logits agree; and the median seconds of a prefill and of a decode step by arm.
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
    """Run every mode, print the times; returns whether all outputs agree."""
    table = Table(title=f"Median of {rounds} rounds by turns, batch {asked.batch}, ms")
    for column in ("", "torch", "tunedgemm", "gain"):
        table.add_column(column, justify="left" if not column else "right")
    fine, truth = True, exact(asked)
    for mode in modes(asked.tokens.device.type):
        same, medians = compared(asked, truth, mode, rounds, how)
        fine &= same
        for place, what in enumerate((f"prefill of {asked.prompt} tokens", "one decode step")):
            if mode == "captured" and place == 0:
                continue
            before, after = (1e3 * medians[name][place] for name in ARMS)
            table.add_row(f"{mode}: {what}", f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}x")
    console.print(table)
    return fine


def add_model(parser: argparse.ArgumentParser, device: str) -> None:
    """The arguments that say what is run."""
    small = device == "cpu"
    parser.add_argument("--model", default=DEFAULT[device], help="tiny, a shipped one, or a folder with config.json (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16 if small else 1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4 if small else 16, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile (default: %(default)s)")


def parts(arguments: argparse.Namespace) -> Iterator[str]:
    """The arguments of `add_model` for another process."""
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
