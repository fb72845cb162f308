"""Compare the table's winners with torch: interleaved rounds, cold weights, an A/A control, raw
samples kept.

    python benchmarks/speed.py --table tuned.csv --shapes llama70b-tp8 -o speed

    python benchmarks/speed.py --op a8w8 --table tuned.csv --shapes layers

    python benchmarks/speed.py --table tuned.csv --shapes decode --arms inductor

    python benchmarks/speed.py --op a8w8_blockscale --scale-order m_major --table tuned.csv \\
        --shapes layers --arms deepgemm vllm

    python benchmarks/speed.py --op fmoe --table tuned.csv --shapes shapes.csv --arms experts

    python benchmarks/speed.py --op fmoe --table deepgemm.csv --rivals triton.csv --shapes moe.csv \\
        --arms deepgemm vllm

    python benchmarks/speed.py --table t.csv --shapes layers --layout columns128 --plain t.csv

    python benchmarks/speed.py --table HOME/batch_invariant/bf16_tuned_gemm.csv --shapes layers \\
        --unconstrained HOME/bf16_tuned_gemm.csv --arms persistent

A gain is the median of the per-round ratios, torch over the winner, with its 95 % interval by order
statistics. Torch is F.linear; for a quantised op it is torch's own call for the shape:
`torch._scaled_mm` where it has one. ``--arms`` adds subjects to the same rounds:

inductor
    F.linear as Inductor compiles it with max-autotune, at M = 1 a reduction.
offered
    The same with our op on offer (`tunedgemm.integrations.inductor`); the row says what Inductor
    took.
op
    Our op in a compiled graph.
deepgemm, humming, linear, machete, marlin, persistent, vllm
    Kernels of other projects, see `peers.py`.
any other name
    Another of torch's routes to the result.

``--rivals`` names tables whose winners are timed in the same rounds, each under its backend's name.

With ``--unconstrained`` the table counts as in batch-invariant mode: the winners are kernels of bit
classes, and that of the other table (without one, of the default tables) is timed next to each. The
summary says what a class costs: its time over the unconstrained one.

``--layout`` asks for shapes with shuffled weights. F.linear and torch's own calls still take plain
ones. So do the winners of the table named by ``--plain``, timed in the same rounds. All of them get
the same bytes: no product's time depends on their order. The floor has two parts: 1.5 us for a
launch and its ramp, and the bytes of operands and output over the read rate of this run.
Without ``--table`` the default tables count, and the guesses of untuned calls: for lists of
`drawn.py`. "slower" means that the whole interval is below 0.98. Run it twice, in two processes:
the second confirms the first.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import torch
import tunedgemm
from harness import (
    FIELDS,
    OF_PLAIN,
    OP,
    SLOWER,
    add_budget,
    add_rounds,
    add_shapes,
    geometric_mean,
    head,
    interval,
    parser_of,
    ratio,
    save,
    shapes_of,
)
from peers import PEERS, peer
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import current_device
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import UserError
from tunedgemm.integrations import inductor
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.scale_order import ORDERS, ROW, with_order
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.rounds import Workload
from tunedgemm.tuner.trial import Samples

DEFAULT, AGAIN = Solution("torch", "native"), Solution("torch", "native-again")
PLAIN, UNCONSTRAINED = Solution("torch", "plain-weight"), Solution("rival", "unconstrained")
#: Arm -> what is compiled. Each is on a separate line: the compiler keeps what it made by the
#: code object.
FUNCTIONS = {
    "inductor": lambda x, weight: torch.nn.functional.linear(x, weight, None),
    "offered": lambda x, weight: tunedgemm.linear(x, weight, None),
    "op": lambda x, weight: tunedgemm.linear(x, weight, None),
}
COMPILED = tuple(FUNCTIONS)
#: Microseconds of a launch in a graph, its ramp included; and bytes of a product from which the
#: floor is judged.
RAMP_US, LARGE = 1.5, 16e6
#: Key of the unconstrained winner's time over the class's.
OVER = f"over_{UNCONSTRAINED.kernel_name}"


def ceilings() -> dict[str, float]:
    """Return copy and read bandwidth in TB/s and the bf16 matrix rate in TFLOP/s, as this device
    gives them now.
    """
    if not torch.cuda.is_available():
        return {}
    big = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    out, square = torch.empty_like(big), torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    work = {
        "copy_tb_s": (lambda: out.copy_(big), 2 * big.nbytes / 1e12),
        "read_tb_s": (big.sum, big.nbytes / 1e12),
        "matmul_tflop_s": (lambda: square @ square, 2 * 8192**3 / 1e12),
    }
    rates = {}
    for name, (call, amount) in work.items():
        times = []
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        rates[name] = round(amount / sorted(times[2:])[5], 3)
    return rates


def floor_us(shape: Shape, rate: float) -> float:
    """Return the least microseconds: a ramp, and each byte once at *rate* TB/s."""
    return RAMP_US + op_named(shape.op).bytes_moved(shape) / rate / 1e6


def of_plain(shape: Shape) -> Shape:
    """Return the same product of a plain weight."""
    return shape if shape.layout == "row" else attrs.evolve(shape, op=OF_PLAIN.get(shape.op, shape.op), layout="row")


def with_plain_bytes(launcher: Launcher) -> Launcher:
    """Return the launcher for shuffled operands, whose bytes it takes for plain ones: the time is
    right, the numbers are not.
    """
    return attrs.evolve(launcher, call=lambda *operands: launcher.call(*map(plain_weight, operands)))


def winner(gemm: TunedGemm, shape: Shape) -> Launcher:
    """Return the launcher of the table's row for a shape.

    Raises:
        UserError: it cannot be bound.
    """
    dispatcher = gemm.of(shape.op)
    solution = dispatcher.explain(shape).offer.solution
    bound = dispatcher.registry.get(solution.libtype).bind(solution, shape, current_device())
    if not isinstance(bound, Launcher):
        raise UserError(f"{shape}: {solution} does not bind (got {bound})")
    return bound


def compiled(arm: str, shape: Shape) -> tuple[Launcher, str]:
    """Return a compiled linear layer, run once and checked, and the last choice that Inductor made
    for it.

    Raises:
        UserError: its product is wrong.
    """
    from torch._inductor.select_algorithm import add_feedback_saver, clear_feedback_savers

    taken: list[str] = []

    def keep(timings: dict[Any, float], *_: Any, **__: Any) -> None:
        if timings:
            taken.append(min(timings, key=timings.__getitem__).name)

    options: dict[str, Any] = {} if arm == "op" else {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    if arm == "inductor":  # a part of max-autotune, without which one row is multiplied as a matrix
        options["coordinate_descent_tuning"] = True
    x, weight = op_named(OP).make_inputs(shape, current_device().torch_device, 0)[:2]
    add_feedback_saver(keep)
    inductor.offer() if arm == "offered" else inductor.withdraw()
    try:
        call = torch.compile(FUNCTIONS[arm], fullgraph=True, dynamic=False, options=options)
        out = call(x, weight)
    finally:
        inductor.withdraw()
        clear_feedback_savers()
    wanted = torch.nn.functional.linear(x.float(), weight.float())
    if (out.float() - wanted).norm() > 0.02 * wanted.norm():
        raise UserError(f"{arm}: the product of {shape} is wrong")
    if arm == "op" or any(name.startswith("tunedgemm_") and "fallback" in name for name in taken):
        return Launcher(call), "our op"
    return Launcher(call), next((name for name in reversed(taken) if not name.startswith("tunedgemm_")), "ATen's")


def winners(rivals: list[TunedGemm], shape: Shape) -> dict[Solution, Launcher]:
    """Return the winners of other tables that have a row for the shape, named by their backends."""
    offers = [(rival, rival.of(shape.op).explain(shape)) for rival in rivals]
    return {Solution("rival", answer.offer.solution.libtype): winner(rival, shape) for rival, answer in offers if answer.tuned}


def unconstrained_arm(rival: TunedGemm | None, shape: Shape) -> tuple[dict[Solution, Launcher], dict[str, str]]:
    """Return the winner outside batch-invariant mode as a subject, and its name for the row."""
    if rival is None:
        return {}, {}
    return {UNCONSTRAINED: winner(rival, shape)}, {"unconstrained": str(rival.of(shape.op).explain(shape).offer.solution)}


def arms_of(gemm: TunedGemm, plain: TunedGemm | None, shape: Shape, names: list[str]) -> tuple[dict[Solution, Launcher], dict[str, str]]:
    """Return the further subjects of a shape, and what Inductor took in those that it compiled."""
    arms, took = {}, {}
    torch._dynamo.reset()
    for name in names:
        if name in COMPILED:
            arms[Solution("torch", name)], took[f"took_{name}"] = compiled(name, shape)
            continue
        if name in PEERS:
            answer = peer(name, shape)
            if isinstance(answer, Launcher):
                arms[Solution("peer", name)] = answer
            else:
                took[f"without_{name}"] = answer
            continue
        bound = gemm.of(shape.op).registry.get("torch").bind(route := Solution("torch", name), shape, current_device())
        arms |= {route: bound} if isinstance(bound, Launcher) else {}
    if plain and shape.layout != "row":
        arms[PLAIN] = winner(plain, of_plain(shape))
    return arms, took


def compare(gemm: TunedGemm, layer: str, shape: Shape, rounds: int, others: dict[Solution, Launcher]) -> dict[str, Any]:
    """Time the table's solution, torch, torch again, and others on one shape."""
    device, dispatcher = current_device(), gemm.of(shape.op)
    explanation = dispatcher.explain(shape)
    solution = explanation.offer.solution
    ours = dispatcher.registry.get(solution.libtype).bind(solution, shape, device)
    own = dispatcher.registry.get(DEFAULT.libtype).bind(DEFAULT, of_plain(shape), device)
    plain = Launcher(torch.nn.functional.linear) if shape.op == OP else own
    if shape.layout != "row":
        plain, others = with_plain_bytes(plain), {key: with_plain_bytes(other) for key, other in others.items()}
    launchers = {DEFAULT: plain, AGAIN: attrs.evolve(plain), **others}
    if solution != DEFAULT:
        launchers[solution] = ours
    workload = Workload(op_named(shape.op), shape, device, seed=1)
    workload(launchers, 5)
    samples = {key: answer.us for key, answer in workload(launchers, rounds).items() if isinstance(answer, Samples)}
    default, again, mine = samples[DEFAULT], samples[AGAIN], samples.get(solution, samples[DEFAULT])
    gain, low, high = ratio(default, mine) if solution != DEFAULT else (1.0, 1.0, 1.0)
    control, control_low, control_high = ratio(default, again)
    over = {f"over_{other.kernel_name}": ratio(samples[other], mine) for other in others if other in samples}
    kept = {"default": default, "again": again, "tuned": mine} | {other.kernel_name: samples[other] for other in others if other in samples}
    return {
        **over, "layer": layer, "M": shape.m, "N": shape.n, "K": shape.k, **dict(shape.extra),
        "solution": str(solution), "tuned": explanation.tuned,
        "default_us": interval(default)[0], "tuned_us": interval(mine)[0], "gain": gain, "low": low, "high": high,
        "control": control, "control_low": control_low, "control_high": control_high,
        "samples": {name: [round(us, 3) for us in values] for name, values in kept.items()},
    }  # fmt: skip


def cost(rows: list[dict[str, Any]]) -> str:
    """Return the words for the time of the classes over that of the unconstrained winners."""
    ratios = [1 / row[OVER][0] for row in rows if OVER in row]
    if not ratios:
        return ""
    without = sum(not row["tuned"] for row in rows)
    classless = f", {without} without a class row" if without else ""
    return f"; class over unconstrained {geometric_mean(ratios):.3f}, at most {max(ratios):.3f}{classless}"


def summarise(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines that are printed and that the committed result carries."""
    lines = []
    for m in sorted({row["M"] for row in results}):
        rows = [row for row in results if row["M"] == m]
        gains = [row["gain"] for row in rows]
        line = f"M={m}: geometric mean {geometric_mean(gains):.3f} over {len(gains)} shapes, slowest {min(gains):.3f}"
        large = [row["tuned_us"] / row["floor_us"] for row in rows if row.get("bytes", 0) >= LARGE]
        line += f"; over the floor {geometric_mean(large):.3f}, at most {max(large):.3f}, for products from 16 MB" if large else ""
        for name in sorted({key for row in results for key in row if key.startswith("over_")} - {OVER}):
            ratios = [row[name][0] for row in rows if name in row]
            line += f"; over {name[5:]} {geometric_mean(ratios):.3f}, slowest {min(ratios):.3f}" if ratios else ""
        lines.append(line + cost(rows))
    gains = [row["gain"] for row in results]
    slower = sum(row["high"] < SLOWER for row in results)
    lines.append(
        f"all: geometric mean {geometric_mean(gains):.3f} over {len(gains)} shapes, slowest {min(gains):.3f}, slower than torch: {slower}"
        + cost(results)
    )
    return lines


def show(row: dict[str, Any]) -> None:
    """Print a line for a shape."""
    control = f"A/A {row['control']:.3f} [{row['control_low']:.3f}, {row['control_high']:.3f}]"
    sizes = f"{row['layer']:14} {row['M']:5} {row['N']:6} {row['K']:6} {row['default_us']:9.2f} {row['tuned_us']:9.2f}"
    over = "".join(f"  over {name[5:]} {value[0]:.3f}" for name, value in row.items() if name.startswith("over_"))
    print(f"{sizes} us  {row['gain']:.3f} [{row['low']:.3f}, {row['high']:.3f}]  {control}  {row['solution']}{over}", flush=True)


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--table", type=Path, help="the tuned CSV to judge; without it, what an untuned call gets")
    add_shapes(parser, "llama70b-tp8", op=True)
    add_rounds(parser, 51)
    add_budget(parser)
    parser.add_argument("--m", type=int, nargs="+", default=[], metavar="M", help="only these M")
    parser.add_argument("--layout", default="", help="of the weights of a subset's shapes (default: plain, or AITER's (16, 16))")
    parser.add_argument("--scale-order", default=ROW, choices=ORDERS, help="of the block scales of a subset's x (default: %(default)s)")
    parser.add_argument("--rivals", type=Path, nargs="+", default=[], help="tuned CSVs of other backends whose winners are timed too")
    parser.add_argument(
        "--unconstrained", nargs="?", const="", metavar="TABLE", help="judge bit classes: time this table's winners, of any bits, too"
    )
    parser.add_argument("--plain", type=Path, help="tuned CSV of plain weights whose winners are timed too")
    parser.add_argument(
        "--arms", nargs="+", default=[], help=f"further subjects: {', '.join(COMPILED)}, {', '.join(PEERS)}, or a route of torch's"
    )
    arguments = parser.parse_args(words)
    if arguments.op not in FIELDS and not all(word.endswith(".csv") for word in arguments.shapes):
        parser.error(f"--shapes: {arguments.op} has no shapes in shapes.csv; name a file of untuned shapes")
    if DEFAULT.kernel_name in arguments.arms:
        parser.error(f"--arms: {DEFAULT.kernel_name} is the baseline; leave it out")
    if arguments.op != OP and set(COMPILED) & set(arguments.arms):
        parser.error(f"--arms: only {OP} is compiled (got --op {arguments.op})")
    return arguments


def loaded(table: str | Path | None, op: str, *, batch_invariant: bool = False) -> TunedGemm:
    """Return a dispatcher of one table, or of the default ones."""
    gemm = TunedGemm(settings=Settings(batch_invariant=batch_invariant))
    if table:
        gemm.load_config(table, op)
    return gemm


def main(words: list[str] | None = None) -> int:
    """Compare and print; exit 1 if a shape is slower."""
    arguments = parsed(words)
    judges_classes = arguments.unconstrained is not None
    gemm = loaded(arguments.table, arguments.op, batch_invariant=judges_classes)
    unconstrained = loaded(arguments.unconstrained, arguments.op) if judges_classes else None
    plain = loaded(arguments.plain, OF_PLAIN.get(arguments.op, arguments.op)) if arguments.plain else None
    rivals = [loaded(table, arguments.op) for table in arguments.rivals]
    about = head(
        "speed", op=arguments.op, shapes=" ".join(arguments.shapes), rounds=arguments.rounds, layout=arguments.layout, ceilings=ceilings()
    )
    results, rate, start = [], about["ceilings"].get("read_tb_s", 0.0), time.monotonic()
    for layer, listed in shapes_of(arguments.shapes, arguments.op, arguments.layout):
        shape = listed if arguments.scale_order == ROW else with_order(listed, arguments.scale_order)
        if arguments.m and shape.m not in arguments.m:
            continue
        if arguments.budget and time.monotonic() - start > arguments.budget:
            break
        others, took = arms_of(gemm, plain, shape, arguments.arms)
        other, name = unconstrained_arm(unconstrained, shape)
        row = compare(gemm, layer, shape, arguments.rounds, winners(rivals, shape) | other | others) | took | name
        row |= {"floor_us": floor_us(shape, rate), "bytes": op_named(arguments.op).bytes_moved(shape)} if rate else {}
        results.append(row)
        show(row)
    lines = summarise(results)
    print("\n".join(lines))
    save(arguments.output, {**about, "summary": lines, "results": results})
    return 1 if any(row["high"] < SLOWER for row in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"speed.py: {error}")
