"""Capture the shapes of a Llama with random weights, tune them, and run it again through the table.

The steps are those of any workload. Capturing and tuning run in separate processes, as yours would:

    AITER_TUNE_GEMM=1 python workload.py   # record every F.linear under patched().
    tunedgemm tune                         # time every backend, write the table.
    tunedgemm coverage                     # show which calls the table serves.
    python workload.py                     # dispatch through the table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
import tunedgemm
from rich.console import Console
from rich.table import Table
from tunedgemm.analysis.coverage import coverage
from tunedgemm.plugin import Shape

console = Console()


@attrs.frozen
class Workload:
    """A model and its inputs: a prompt, then tokens one by one.

    Attributes:
        hidden, intermediate, heads, kv_heads, layers, vocabulary: the architecture's sizes; a head
            is hidden / heads wide.
        dtype: dtype of weights and activations.
        prompt: number of tokens of the prefill.
        steps: number of decode steps after it.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    dtype: torch.dtype
    prompt: int
    steps: int = 4

    def model(self, device: str) -> torch.nn.Module:
        """Build a LlamaForCausalLM with the same random weights in every process."""
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            max_position_embeddings=4 * self.prompt,
        )
        torch.manual_seed(0)
        with torch.device(device):
            return LlamaForCausalLM(sizes).to(self.dtype).eval()

    def tokens(self, device: str) -> torch.Tensor:
        """Return the prompt and the following tokens, [1, prompt + steps], the same in every run."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.vocabulary, (1, self.prompt + self.steps), generator=generator).to(device)


SIZES = {
    "small": Workload(128, 256, 4, 2, 2, 512, torch.float32, prompt=16, steps=2),
    "cpu": Workload(1024, 2816, 16, 4, 4, 8192, torch.float32, prompt=64),
    "cuda": Workload(4096, 14336, 32, 8, 4, 32000, torch.bfloat16, prompt=2048),
}

#: dtype -> a dtype in which the same model is exact to all digits of the first
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
#: Allowed error of the logits over torch's own, and an error that is always allowed: other orders
#: of sums round differently in every layer.
MORE, FLOOR = 1.5, 1e-5


@torch.inference_mode()
def run(model: torch.nn.Module, workload: Workload, tokens: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Prefill the prompt, then decode.

    Returns:
        The logits of the next token after the prompt and after each step, [steps + 1, vocabulary]
        in float32 or wider; and the seconds that the prefill and each step took.
    """
    wait: Callable[[], None] = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    logits, seconds, cache = [], [], None
    for part in (tokens[:, : workload.prompt], *tokens[:, workload.prompt :].split(1, dim=1)):
        start = time.perf_counter()
        out = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        wait()
        seconds.append(time.perf_counter() - start)
        cache = out.past_key_values
        row = out.logits[0, -1]
        logits.append(row.to(torch.promote_types(row.dtype, torch.float32)))
    return torch.stack(logits), seconds


def capture(workload: Workload, device: str) -> None:
    """Run the workload once with every F.linear routed; AITER_TUNE_GEMM=1 records the shapes."""
    model, tokens = workload.model(device), workload.tokens(device)
    with tunedgemm.patched():
        run(model, workload, tokens)


def timed(workload: Workload, device: str, rounds: int) -> bool:
    """Run without and with the table by turns; print the times; return whether the outputs agree."""
    model, tokens = workload.model(device), workload.tokens(device)
    arms = {"torch": contextlib.nullcontext, "tunedgemm": tunedgemm.patched}
    logits: dict[str, torch.Tensor] = {}
    seconds: dict[str, list[list[float]]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, routed in arms.items():
            with routed():
                logits[name], taken = run(model, workload, tokens)
            if turn:  # the first round loads and binds
                seconds[name].append(taken)
    table = Table(title=f"The model's time, median of {rounds} rounds by turns")
    for column in ("", "torch ms", "tunedgemm ms", "gain"):
        table.add_column(column, justify="left" if not column else "right")
    phases: dict[str, Callable[[list[float]], float]] = {
        f"prefill of {workload.prompt} tokens": lambda taken: taken[0],
        "one decode step": lambda taken: statistics.median(taken[1:]),
    }
    for phase, of in phases.items():
        before, after = (1e3 * statistics.median(map(of, seconds[name])) for name in arms)
        table.add_row(phase, f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}x")
    console.print(table)
    exact, _ = run(model.to(WIDER[workload.dtype]), workload, tokens)
    return agree(exact, logits["torch"], logits["tunedgemm"])


def agree(exact: torch.Tensor, torch_own: torch.Tensor, ours: torch.Tensor) -> bool:
    """Return whether our logits [rows, vocabulary] are as close to the exact ones as torch's.

    Every next token must be that of the exact logits, too, except near-ties.
    """
    errors = [((each - exact).norm() / exact.norm()).item() for each in (torch_own, ours)]
    first, second = exact.topk(2, dim=1).values.t()
    clear = (first - second) > 2 * (ours - exact).abs().amax(dim=1)
    same, torch_same = (exact.argmax(1) == each.argmax(1) for each in (ours, torch_own))
    fine = errors[1] <= max(MORE * errors[0], FLOOR) and bool(same[clear].all())
    console.print(
        f"Outputs {'agree' if fine else 'DIFFER'}: error of the logits {errors[1]:.1e} (torch's own {errors[0]:.1e}), "
        f"the next token of exact logits {int(same.sum())} times of {len(same)} (torch's {int(torch_same.sum())})"
    )
    return fine


@contextlib.contextmanager
def home(given: Path | None) -> Iterator[Path]:
    """Yield the folder for captured shapes and the table: the given one, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="tunedgemm-") as folder:
        yield Path(folder)


def step(title: str, command: list[str], **environment: str) -> None:
    """Run one step in a separate process.

    Raises:
        subprocess.CalledProcessError: it failed; it has printed its message.
    """
    console.rule(title, align="left")
    subprocess.run(command, check=True, env={**os.environ, **environment})


def covered(captured: Path) -> str:
    """Return a sentence on the share of the captured calls that rows of exactly their M serve."""
    result = coverage(captured)
    calls, time_of_all = result.share("exact", by="calls"), result.share("exact", by="time")
    return f"The table answers {calls:.0%} of {result.calls} calls exactly, {time_of_all:.0%} of their time"


def main() -> int:
    """Capture, tune, run again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, metavar="DIR", help="keep shapes and table there (default: a temporary folder)")
    parser.add_argument("--size", choices=SIZES, help="default: by the device")
    parser.add_argument("--small", dest="size", action="store_const", const="small", help="a size for tests")
    parser.add_argument("--libtype", default="all", help="backends to tune, a comma list")
    parser.add_argument("--iters", default="31", help="most samples of a solution")
    parser.add_argument("--rounds", type=int, default=11, help="runs of the model by turns")
    parser.add_argument("--only-capture", action="store_true", help="run the workload once and stop")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = arguments.size or device
    if arguments.only_capture:
        capture(SIZES[size], device)
        return 0
    with home(arguments.home) as folder:
        # A table named in the environment would rank above this run's table.
        os.environ.pop("AITER_CONFIG_GEMM_BF16", None)
        os.environ["TUNEDGEMM_HOME"] = str(folder)
        captured, tuned = folder / "bf16_untuned_gemm.csv", folder / "bf16_tuned_gemm.csv"
        step("1. Capture the shapes", [sys.executable, __file__, "--only-capture", "--size", size], AITER_TUNE_GEMM="1")
        console.print(f"{sum(1 for _ in captured.open()) - 1} shapes in {captured}")
        console.print(covered(captured))
        step("2. Tune them", [sys.executable, "-m", "tunedgemm", "tune", "--libtype", arguments.libtype, "--iters", arguments.iters])
        console.print(covered(captured))
        console.rule(f"3. Run again through {tuned.name}", align="left")
        fine = timed(SIZES[size], device, arguments.rounds)
        workload = SIZES[size]
        down = Shape("a16w16", 1, workload.hidden, workload.intermediate, dtype=str(workload.dtype))
        console.print("\nWhat serves down_proj in a decode step, and why (tunedgemm.explain):")
        console.print(str(tunedgemm.explain(down)), highlight=False, soft_wrap=True)
        fine = fine and tunedgemm.is_tuned(down)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
