"""Compare the bits of vLLM's answers alone, in batches and in other engines, and what they cost.

    python benchmarks/engine_bits.py CONFIG_DIR [...] --home DIR -o bits
    python benchmarks/engine_bits.py CONFIG_DIR --home DIR --only bits \\
        --arms ours ours-chunked ours-eager ours-again -o bits

Each arm is one engine, MODE or MODE-VARIANT, with the weights of `engines.py`; all of a model start
together. The modes:

plain, tuned
    vLLM alone, and with tunedgemm.
vllm, ours
    vLLM with ``VLLM_BATCH_INVARIANT=1``, alone and with tunedgemm.

The variants:

again, gpu1
    A second process, or one on the second GPU.
chunked, eager, cached
    With 256 tokens a step, without graphs, or with prefix caching.
speculative
    With three tokens guessed from the earlier ones.
compiled
    With compiled graphs, which vLLM's mode leaves out for some models.

The questions of ``--only``:

bits
    The same prompts are answered alone, in batches with other requests and in other orders. Tokens
    and log probabilities must equal those of the mode's first arm alone, bit for bit; compiled arms
    have their own first. A row has the number of prompts that differ.
layers
    In arms of ``ours`` the first row of each linear layer's output must be the same at each M. One
    layer of each kind is compared with tunedgemm's function in another process, on the engine's own
    weight.
kernels
    A profile of decoding steps and of a prefill has the time of products, attention and norms. It
    shows whether one graph runs several kernels, which differ by name, threads, shared memory or
    registers.
speed
    Milliseconds of a decoded token and of a prefill; the arms take turns.

The result is written after each row, so what was measured before a failure or the end of
``--budget`` is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_speed import ENGINES, TELLING, Arm, measure
from harness import add_budget, add_only, add_rounds, head, interval, parser_of, ratio, save
from page import shown

QUESTIONS = ("bits", "layers", "kernels", "speed")
#: Mode -> the values of the switches of tunedgemm and of vLLM's own mode.
MODES = {"plain": "00", "tuned": "10", "vllm": "01", "ours": "11"}
SWITCHES = ("TUNEDGEMM_VLLM", "VLLM_BATCH_INVARIANT")
#: Variant -> options of the engine, and variables.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "": ({}, {}),
    "again": ({}, {}),
    "cached": ({"enable_prefix_caching": True}, {}),
    "chunked": ({"max_num_batched_tokens": 256, "max_num_seqs": 256}, {}),
    "compiled": ({}, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}),
    "eager": ({"enforce_eager": True}, {}),
    "gpu1": ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
    "speculative": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}},
        {},
    ),
}
#: Variants whose speed is another one, and is measured.
TIMED = ("", "compiled")
#: Options of all engines. Without a cache each prompt is computed whenever it is asked.
OPTIONS = {
    "enable_prefix_caching": False, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 4096,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}, "worker_extension_cls": "engine_worker.Worker",
}  # fmt: skip
#: Sizes of batches, and seeds of the orders in which their requests arrive.
BATCHES = {"alone again": (1, 0), "batch 7": (7, 1), "batch 64": (64, 2), "batch 64, other order": (64, 3), "batch 200": (200, 4)}
#: Rows of x of the layers; listed tokens of a log probability; decoding steps of a profile.
ROWS, TOP, STEPS = [1, 7, 64, 2048], 5, 8
#: Kind of kernels -> words in their names; the first kind with one counts.
KINDS = {
    "attention": r"flash|attn|attention|fmha|kv_cache",
    "norm": r"norm|rsqrt",
    "sampling": r"softmax|argmax|topk|sort|sampl|log_soft|gather",
    "fused": r"^triton_(poi|red|per)_",  # of Inductor: its names list products that follow, too
    "products": r"gemm|gemv|matmul|nvjet|cutlass|wgmma|splitk|cublas|scaled_mm|dot|^(tma|tma_halves|streamk|sum_parts|skinny)\b",
}

Request = tuple[int, int, int]


def prompts(count: int, tokens: int) -> list[Request]:
    """Return the prompts that are compared: seed, length and tokens to decode."""
    chosen = random.Random(0)
    return [(place, int(2 ** chosen.uniform(2, 9.5)), tokens) for place in range(count)]


def batches(mine: list[Request], size: int, seed: int) -> list[list[Request]]:
    """Return batches in which up to half of the requests are mine, each of mine once, in a random
    order.

    The others have other prompts and lengths, so that the batch shrinks while mine decode.
    """
    chosen, left, made = random.Random(seed), list(mine), []
    chosen.shuffle(left)
    while left:
        own, left = left[: max(1, size // 2)], left[max(1, size // 2) :]
        others = [(chosen.randrange(10**6, 10**9), int(2 ** chosen.uniform(0, 9)), chosen.randint(1, 32)) for _ in range(size - len(own))]
        batch = own + others
        chosen.shuffle(batch)
        made.append(batch)
    return made


def answers(arm: Arm, asked: list[list[Request]]) -> dict[int, list[str]]:
    """Return the answers by the prompts' seeds."""
    replies = arm.ask("exact", asked, TOP)
    pairs = (pair for batch, reply in zip(asked, replies, strict=True) for pair in zip(batch, reply, strict=True))
    return {seed: reply for (seed, *_), reply in pairs}


def different(mine: dict[int, list[str]], wanted: dict[int, list[str]]) -> dict[str, Any]:
    """Count the prompts whose answers differ, and return how they do.

    The largest difference is that of the log probabilities of tokens that both chose, before their
    first other choice.
    """
    differing = [seed for seed in wanted if mine[seed] != wanted[seed]]
    first, largest = [], 0.0
    for seed in differing:
        pairs = list(zip(mine[seed], wanted[seed], strict=True))
        first.append(next(place for place, (a, b) in enumerate(pairs) if a != b))
        for a, b in pairs:
            (token, likely), (other, known) = parsed_token(a), parsed_token(b)
            if token != other:
                break
            largest = max(largest, abs(likely[token] - known[token]))
    return {"prompts": len(wanted), "differ": len(differing), "first token": min(first, default=""), "largest difference": largest}


def parsed_token(text: str) -> tuple[int, dict[int, float]]:
    """Return a token and the log probabilities of the most likely ones."""
    token, *likely = text.split()
    pairs = (entry.split(":") for entry in likely)
    return int(token), {int(other): float.fromhex(value) for other, value in pairs}


def mode_of(name: str) -> str:
    """Return the mode of an arm."""
    return name.partition("-")[0]


def variant_of(name: str) -> str:
    """Return the variant of an arm, "" for none."""
    return name.partition("-")[2]


def compare_bits(arms: list[Arm], arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None], until: float) -> None:
    """Answer the prompts under all conditions, and keep a row of each."""
    mine, wanted = prompts(arguments.prompts, arguments.tokens), dict[tuple[str, bool], dict[int, list[str]]]()
    conditions = {"alone": [[each] for each in mine]} | {name: batches(mine, *how) for name, how in BATCHES.items()}
    for condition, asked in conditions.items():
        for arm in arms:
            kind, begin = (mode_of(arm.name), variant_of(arm.name) == "compiled"), time.monotonic()
            if begin > until:
                print(f"{condition}, {arm.name}: no time left", flush=True)
                continue
            found = answers(arm, asked)
            row = different(found, wanted.setdefault(kind, {seed: found[seed] for seed, *_ in mine}))
            keep({"model": arm.model, "arm": arm.name, "condition": condition, **row, "seconds": round(time.monotonic() - begin, 1)})


def compare_layers(arms: list[Arm], arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Compare the layers of ours with tunedgemm's functions in a process of plain PyTorch."""
    for arm in [arm for arm in arms if mode_of(arm.name) == "ours" and not variant_of(arm.name)]:
        environment = {**os.environ, "TUNEDGEMM_HOME": str(arguments.home), "TUNEDGEMM_BATCH_INVARIANT": "1"}
        words = [sys.executable, str(Path(__file__).with_name("engine_worker.py"))]
        with tempfile.TemporaryDirectory() as folder:
            layers = arm.ask("layers", ROWS, folder)
            text = json.dumps({"layers": [layer for layer in layers if "file" in layer], "sizes": ROWS})
            done = subprocess.run(words, input=text, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            print(f"{arm.model}: the layers of PyTorch failed:", done.stderr[-2000:], flush=True)
            continue
        for row in of_layers(layers, json.loads(done.stdout.splitlines()[-1])):
            keep({"model": arm.model, "arm": arm.name, **row})


def of_layers(engine: list[dict[str, Any]], trainer: dict[str, dict[str, list[str]]]) -> list[dict[str, Any]]:
    """Return a row for each kind of layers: how many there are, are compared, and differ in what."""
    rows: dict[tuple[int, int, str], dict[str, Any]] = {}
    for mine in engine:
        start = {"layer": mine["name"], "N": mine["N"], "K": mine["K"], "layers": 0, "compared": 0}
        start |= {f"differ at M={m}": 0 for m in mine["bits"]} | {"first rows differ": 0}
        row, theirs = rows.setdefault((mine["N"], mine["K"], mine["scale"]), start), trainer.get(mine["name"], {})
        row["layers"] += 1
        row["compared"] += bool(theirs)
        for m, (out, _) in theirs.items():
            row[f"differ at M={m}"] += out != mine["bits"][m][0]
        row["first rows differ"] += len({first for side in (mine["bits"], theirs) for _, first in side.values()}) > 1
    return list(rows.values())


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE)), "other")


def profile_row(kernels: dict[str, tuple[int, float]], steps: int) -> dict[str, Any]:
    """Return the microseconds of a step by kind, and all kernels with those that take longest first."""
    by_kind = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, (_, us) in kernels.items():
        by_kind[kind_of(name)] += us / steps
    listed = {name: kernels[name] for name in sorted(kernels, key=lambda name: -kernels[name][1])}
    return {"us": sum(by_kind.values()), **{f"{kind}, us": us for kind, us in by_kind.items()}, "kernels": listed}


def profile(arms: list[Arm], arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Keep the kernels of decoding steps and of a prefill, and say which products both run."""
    for arm in [arm for arm in arms if variant_of(arm.name) in TIMED]:
        seen = []
        for title, method, values, steps in (
            (f"decode {arguments.profiled[0]}", "decode_kernels", (arguments.profiled[0], STEPS), STEPS),
            (f"prefill {arguments.profiled[1]}", "prefill_kernels", (1, arguments.profiled[1]), 1),
        ):
            kernels = arm.ask(method, *values)
            keep({"model": arm.model, "arm": arm.name, "profile": title, **profile_row(kernels, steps)})
            seen.append({name for name in kernels if kind_of(name) == "products"})
            print(*(f"  {name[:150]}" for name in sorted(seen[-1])), sep="\n", flush=True)
        print(f"{arm.name}: {len(seen[0])} and {len(seen[1])} kernels of products, {len(seen[0] & seen[1])} in both", flush=True)


def time_arms(arms: list[Arm], arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None], until: float) -> None:
    """Keep milliseconds of a token and of a prefill, and the gains over the arms of vLLM alone."""
    arms = [arm for arm in arms if variant_of(arm.name) in TIMED]
    figures: list[tuple[str, str, tuple[int, ...]]] = [(f"decode {batch}, ms", "decode", (batch,)) for batch in arguments.batches]
    figures += [(f"prefill {sizes}, ms", "prefill", tuple(map(int, sizes.split("x")))) for sizes in arguments.prefill]
    for title, method, values in figures:
        if time.monotonic() > until:
            print(f"{title}: no time left", flush=True)
            continue
        samples = measure(arms, arguments.rounds, method, *values)
        row: dict[str, Any] = {"model": arms[0].model, "figure": title, **{name: interval(each)[0] for name, each in samples.items()}}
        for base in [name for name in samples if mode_of(name) in ("plain", "vllm")]:
            others = {name: each for name, each in samples.items() if name != base and mode_of(name) != "plain"}
            row |= {f"{name} over {base}": ratio(samples[base], each) for name, each in others.items()}
        keep({**row, "samples": samples})


def start(model: Path, arguments: argparse.Namespace, arms: list[Arm]) -> list[Arm]:
    """Start the engines of a model together, list them in *arms*, and return those that are up."""
    until = time.monotonic() + arguments.start_seconds
    cut = {"hf_overrides": {"num_hidden_layers": arguments.layers}} if arguments.layers else {}
    for name in arguments.arms:
        time.sleep(arguments.stagger if arms else 0)
        more, variables = VARIANTS[variant_of(name)]
        options = {**ENGINES["vllm"][2], **OPTIONS, **cut, **arguments.options, **more}
        switches = dict(zip(SWITCHES, MODES[mode_of(name)], strict=True))
        arms.append(Arm(name, model, arguments, options, {**switches, **variables}))
    return [arm for arm in arms if arm.ready(until - time.monotonic())]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the main results: prompts and layers that differ, time of products, and gains."""
    lines = []
    for key in dict.fromkeys((row["model"], row["arm"]) for row in rows if "arm" in row):
        mine = [row for row in rows if (row["model"], row.get("arm")) == key]
        asked = [row for row in mine if "condition" in row]
        listed = ", ".join(f"{row['differ']} {row['condition']}" for row in asked)
        lines += [f"{' '.join(key)}: of {asked[0]['prompts']} prompts differ: {listed}"] if asked else []
        layers = [row for row in mine if "layers" in row]
        outputs = sum(value for row in layers for name, value in row.items() if name.startswith("differ at") or name == "first rows differ")
        lines += (
            [f"{' '.join(key)}: {sum(row['layers'] for row in layers)} layers, {outputs} differ from PyTorch or by M"] if layers else []
        )
        profiles = (f"{row['profile']} {row['products, us']:.0f} of {row['us']:.0f} us" for row in mine if "profile" in row)
        lines += [f"{' '.join(key)}: products: {text}"] if (text := ", ".join(profiles)) else []
    for row in (row for row in rows if "figure" in row):
        gains = ", ".join(f"{name} {value[0]:.3f}" for name, value in row.items() if " over " in name)
        lines.append(f"{row['model']}, {row['figure']}: {gains}")
    return lines


def arm_name(text: str) -> str:
    """Return the name of an arm if it is one."""
    if mode_of(text) not in MODES or variant_of(text) not in VARIANTS:
        raise argparse.ArgumentTypeError(f"no such arm (got {text}); MODE or MODE-VARIANT of {', '.join(MODES)}; {', '.join(VARIANTS)}")
    return text


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("models", type=Path, nargs="+", metavar="CONFIG_DIR", help="folders with config.json")
    add("--home", type=Path, required=True, help="TUNEDGEMM_HOME: the folder with the tables")
    add(
        "--arms",
        nargs="+",
        type=arm_name,
        default=["plain", "vllm", "ours"],
        help="engines, MODE or MODE-VARIANT (default: plain vllm ours)",
    )
    add_only(parser, QUESTIONS)
    add("--prompts", type=int, default=32, help="prompts that are compared (default: %(default)s)")
    add("--tokens", type=int, default=16, help="tokens of each answer (default: %(default)s)")
    add("--layers", type=int, default=0, help="layers of the model; 0 is all (default)")
    add("--profiled", type=int, nargs=2, default=[8, 2048], metavar="M", help="batch and tokens of the profile (default: 8 2048)")
    add("--batches", type=int, nargs="*", default=[1, 8, 32, 64], help="sequences decoded together (default: 1 8 32 64)")
    add("--prefill", nargs="*", default=["1x2048"], metavar="PROMPTSxTOKENS", help="default: 1x2048")
    add_rounds(parser, 9)
    add_budget(parser)
    add("--stagger", type=float, default=2, help="seconds between the starts of two engines (default: %(default)s)")
    add("--start-seconds", type=float, default=300, help="longest wait for the engines of a model (default: %(default)s)")
    add("--options", type=json.loads, default={}, help="arguments of the engine over the defaults, as JSON")
    add("--logs", type=Path, default=Path(), help="folder of the engines' logs")
    arguments = parser.parse_args(words)
    arguments.engine, arguments.home = "vllm", arguments.home.resolve()
    return arguments


def report(arms: list[Arm], arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None], until: float) -> None:
    """Answer the questions about one model's engines; a question that fails leaves the others."""
    keep({"model": arms[0].model, "start-up, s": "overlapping", **{arm.name: arm.start_s for arm in arms}})
    ways: dict[str, Callable[[], None]] = {
        "bits": lambda: compare_bits(arms, arguments, keep, until),
        "layers": lambda: compare_layers(arms, arguments, keep),
        "kernels": lambda: profile(arms, arguments, keep),
        "speed": lambda: time_arms(arms, arguments, keep, until),
    }
    for question in arguments.only:
        try:
            if time.monotonic() < until:
                ways[question]()
        except Exception:
            traceback.print_exc(file=sys.stdout)


def main(words: list[str] | None = None) -> None:
    """Start the engines model by model, and keep every row."""
    arguments, rows = parsed(words), list[dict[str, Any]]()
    end = time.monotonic() + (arguments.budget or float("inf"))

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(*(f"{name} {text}" for name, value in row.items() if (text := shown(value)) is not None), sep="; ", flush=True)
        save(arguments.output, head("engine_bits", options=arguments.options, summary=summary(rows), rows=rows))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are in separate sessions, and end here
    for model in arguments.models:
        started: list[Arm] = []
        try:
            if time.monotonic() < end and (up := start(model, arguments, started)):
                report(up, arguments, keep, end)
                for arm in up:
                    arm.show_log(30, TELLING)
        finally:
            for arm in started:
                arm.close()
    print(*summary(rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
