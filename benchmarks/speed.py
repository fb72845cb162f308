"""Compare the table's winners with F.linear: interleaved rounds, cold weights, an A/A control, raw samples kept.

    python benchmarks/speed.py --table tuned.csv --subset llama70b-tp8 --json speed.json
    python benchmarks/speed.py --op a8w8 --table tuned.csv --subset layers
    python benchmarks/speed.py --table tuned.csv --subset decode --inductor
    python benchmarks/speed.py --op fmoe --table tuned.csv --untuned shapes.csv --beside experts
    python benchmarks/speed.py --table tuned.csv --subset layers --layout columns128 --plain tuned.csv

A gain is the median of the per-round ratios, F.linear over the winner, with its 95 % interval by order statistics. For a quantised op
torch's own call for the shape takes the place of F.linear: `torch._scaled_mm` where it has one.
``--inductor`` times F.linear as Inductor compiles it with max-autotune in the same rounds, ``--beside`` another of torch's routes to the
result. The shapes are those of an untuned file of the op where one is given. ``--layout`` asks for shapes with shuffled weights; F.linear
and torch's own calls still take plain ones, as do the winners of the table named by ``--plain``, which are timed in the same rounds. All
of them get the same bytes: no product's time depends on their order. The floor is 1.5 us, for a launch and its ramp,
and the bytes of both operands and the output over the read rate that this device gives in this run.
"slower" means that the whole interval lies below 0.98. Run it twice, in two processes: the second confirms the first.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import current_device
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_untuned
from tunedgemm.tuner.trial import Samples
from tunedgemm.tuner.workload import Workload

HERE = Path(__file__).parent
OP = op_named("a16w16")
#: Fields beside M, N and K of the shapes of an op.
FIELDS: dict[str, dict[str, str]] = {
    "a16w16": {},
    "a8w8": {"dtype": "fp8_e4m3fn", "outdtype": "bf16", "scale": "row"},
    "a8w8_blockscale": {"dtype": "fp8_e4m3fn", "outdtype": "bf16", "scale": "block"},
    "a4w4_blockscale": {"dtype": "fp4x2", "outdtype": "bf16", "scale": "block"},
    "a16w4_blockscale": {"dtype": "bf16", "outdtype": "bf16", "scale": "block"},
}
#: Op for shuffled weights -> the op for plain ones.
OF_PLAIN = {f"{op}_bpreshuffle": op for op in ("a8w8", "a8w8_blockscale")}
FIELDS |= {op: {**FIELDS[plain], "layout": "aiter16x16"} for op, plain in OF_PLAIN.items()}
DEFAULT, AGAIN, INDUCTOR = Solution("torch", "native"), Solution("torch", "native-again"), Solution("torch", "inductor")
PLAIN = Solution("torch", "plain-weight")
SLOWER = 0.98
#: Microseconds of a launch in a graph, its ramp included; and bytes of a product from which the floor is judged.
RAMP_US, LARGE = 1.5, 16e6


def shapes_of(subset: str, path: Path, op: str = OP.name, layout: str = "") -> list[tuple[str, Shape]]:
    """(layer, shape of the op) of each row of the shapes file that belongs to the subset, each shape once; weights of a layout if given."""
    fields = FIELDS[op] | ({"layout": layout} if layout else {})
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not subset or subset in row["subsets"].split(";")]
    sizes = {(int(row["M"]), int(row["N"]), int(row["K"])): row["layer"] for row in reversed(rows)}
    named = {Shape(op, *size, **fields): layer for size, layer in sizes.items()}  # type: ignore[arg-type]
    return sorted(((layer, shape) for shape, layer in named.items()), key=lambda pair: (pair[1].n, pair[1].k, pair[1].m))


def shapes_of_file(path: Path, op: str) -> list[tuple[str, Shape]]:
    """("", shape) of each row of an untuned file."""
    return [("", row.shape) for row in read_untuned(path, op_named(op))]


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval by order statistics."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    return ordered[count // 2], ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, math.ceil(count / 2 + reach))]


def ceilings() -> dict[str, float]:
    """Copy and read bandwidth in TB/s and bf16 matrix rate in TFLOP/s, as this device gives them now."""
    if not torch.cuda.is_available():
        return {}
    big = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    out, square = torch.empty_like(big), torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    work = {
        "copy_tb_s": (lambda: out.copy_(big), 2 * big.nbytes / 1e12),
        "read_tb_s": (big.sum, big.nbytes / 1e12),
        "matmul_tflop_s": (lambda: square @ square, 2 * 8192**3 / 1e12),
    }
    found = {}
    for name, (call, amount) in work.items():
        times = []
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        found[name] = round(amount / sorted(times[2:])[5], 3)
    return found


def floor_us(shape: Shape, rate: float) -> float:
    """Least microseconds: a ramp, and each byte once at *rate* TB/s."""
    return RAMP_US + op_named(shape.op).bytes_moved(shape) / rate / 1e6


def of_plain(shape: Shape) -> Shape:
    """The same product of a plain weight."""
    return shape if shape.layout == "row" else attrs.evolve(shape, op=OF_PLAIN.get(shape.op, shape.op), layout="row")


def as_they_lie(launcher: Launcher) -> Launcher:
    """The same of shuffled operands, whose bytes are taken for plain ones: the time is that, the numbers are others."""
    return attrs.evolve(launcher, call=lambda *operands: launcher.call(*map(plain_weight, operands)))


def winner(gemm: TunedGemm, shape: Shape) -> Launcher:
    """What the table has for a shape.

    Raises:
        UserError: it cannot be bound.
    """
    dispatcher = gemm.of(shape.op)
    solution = dispatcher.explain(shape).offer.solution
    bound = dispatcher.registry.get(solution.libtype).bind(solution, shape, current_device())
    if not isinstance(bound, Launcher):
        raise UserError(f"{solution} of {shape}: {bound}")
    return bound


def inductor() -> Launcher:
    """F.linear as Inductor compiles it for the sizes of its first call, tuned over its own templates."""
    torch._dynamo.reset()
    return Launcher(torch.compile(torch.nn.functional.linear, mode="max-autotune-no-cudagraphs", dynamic=False))


def compare(gemm: TunedGemm, layer: str, shape: Shape, rounds: int, others: dict[Solution, Launcher]) -> dict[str, Any]:
    """Time the table's solution, the default, the default again, and others on one shape."""
    device, dispatcher = current_device(), gemm.of(shape.op)
    explanation = dispatcher.explain(shape)
    solution = explanation.offer.solution
    ours = dispatcher.registry.get(solution.libtype).bind(solution, shape, device)
    own = dispatcher.registry.get(DEFAULT.libtype).bind(DEFAULT, of_plain(shape), device)
    plain = Launcher(torch.nn.functional.linear) if shape.op == OP.name else own
    if shape.layout != "row":
        plain, others = as_they_lie(plain), {key: as_they_lie(other) for key, other in others.items()}
    launchers = {DEFAULT: plain, AGAIN: attrs.evolve(plain), **others}
    if solution != DEFAULT:
        launchers[solution] = ours
    workload = Workload(op_named(shape.op), shape, device, seed=1)
    workload(launchers, 5)
    answers = workload(launchers, rounds)
    samples = {key: answer.us for key, answer in answers.items() if isinstance(answer, Samples)}
    default, again, mine = samples[DEFAULT], samples[AGAIN], samples.get(solution, samples[DEFAULT])
    gain, low, high = interval([a / b for a, b in zip(default, mine, strict=True)]) if solution != DEFAULT else (1.0, 1.0, 1.0)
    control, control_low, control_high = interval([a / b for a, b in zip(default, again, strict=True)])
    timed = [other for other in others if other in samples]
    beside = {f"over_{other.kernel_name}": interval([a / b for a, b in zip(samples[other], mine, strict=True)]) for other in timed}
    return {
        **beside, "layer": layer, "M": shape.m, "N": shape.n, "K": shape.k, "solution": str(solution), "tuned": explanation.tuned,
        "default_us": interval(list(default))[0], "tuned_us": interval(list(mine))[0], "gain": gain, "low": low, "high": high,
        "control": control, "control_low": control_low, "control_high": control_high,
        "samples": {"default": default, "again": again, "tuned": mine},
    }  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    """The geometric mean; 0 of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def summarise(results: list[dict[str, Any]]) -> list[str]:
    """The lines that are printed and that the committed result carries."""
    lines = []
    for m in sorted({r["M"] for r in results}):
        mine = [r["gain"] for r in results if r["M"] == m]
        line = f"M={m}: geometric mean {geometric_mean(mine):.3f} over {len(mine)} shapes, slowest {min(mine):.3f}"
        large = [r["tuned_us"] / r["floor_us"] for r in results if r["M"] == m and r.get("bytes", 0) >= LARGE]
        line += f"; over the floor {geometric_mean(large):.3f}, at most {max(large):.3f}, for products from 16 MB" if large else ""
        for name in sorted({key for r in results for key in r if key.startswith("over_")}):
            found = [r[name][0] for r in results if r["M"] == m and name in r]
            line += f"; over {name[5:]} {geometric_mean(found):.3f}, slowest {min(found):.3f}" if found else ""
        lines.append(line)
    gains = [r["gain"] for r in results]
    slower = [r for r in results if r["high"] < SLOWER]
    verdict = f"slowest {min(gains):.3f}, slower than F.linear: {len(slower)}"
    lines.append(f"all: geometric mean {geometric_mean(gains):.3f} over {len(gains)} shapes, {verdict}")
    return lines


def main() -> int:
    """Compare and print; exit 1 if a shape is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="the tuned CSV to judge")
    parser.add_argument("--op", default=OP.name, choices=ops())
    parser.add_argument("--shapes", type=Path, default=HERE / "shapes.csv")
    parser.add_argument("--subset", default="llama70b-tp8", help="subset of the shapes file; empty for all")
    parser.add_argument("--rows", default="", help="these M alone, with commas")
    parser.add_argument("--untuned", type=Path, help="an untuned file of the op, in place of a subset")
    parser.add_argument("--layout", default="", help="of the weights of a subset's shapes; plain, or AITER's (16, 16), if not given")
    parser.add_argument("--plain", type=Path, help="the tuned CSV of plain weights whose winners are timed, too")
    parser.add_argument("--beside", default="", metavar="ROUTE", help="a route of torch's to time, too, where it takes the shape")
    parser.add_argument("--inductor", action="store_true", help="time what Inductor compiles, too")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--json", type=Path, help="write everything, raw samples included")
    arguments = parser.parse_args()
    if not arguments.untuned and arguments.op not in FIELDS:
        parser.error(f"shapes.csv has no shapes of {arguments.op}: give --untuned")
    if arguments.beside == DEFAULT.kernel_name:
        parser.error(f"--beside {arguments.beside} is what everything is compared with")
    gemm = TunedGemm(settings=Settings())
    gemm.load_config(arguments.table, arguments.op)
    plain_gemm = TunedGemm(settings=Settings())
    if arguments.plain:
        plain_gemm.load_config(arguments.plain, OF_PLAIN.get(arguments.op, arguments.op))
    device = current_device()
    head = {
        "date": datetime.now(timezone.utc).date().isoformat(), "device": str(device), "versions": dict(device.versions),
        "op": arguments.op, "subset": str(arguments.untuned or arguments.subset), "beside": arguments.beside, "rounds": arguments.rounds,
        "layout": arguments.layout, "ceilings": ceilings(),
    }  # fmt: skip
    print(json.dumps(head))
    results, rate = [], head["ceilings"].get("read_tb_s", 0.0)  # type: ignore[attr-defined]
    op, untuned, layout = arguments.op, arguments.untuned, arguments.layout
    for layer, shape in shapes_of_file(untuned, op) if untuned else shapes_of(arguments.subset, arguments.shapes, op, layout):
        if arguments.rows and str(shape.m) not in arguments.rows.split(","):
            continue
        others = {INDUCTOR: inductor()} if arguments.inductor else {}
        others |= {PLAIN: winner(plain_gemm, of_plain(shape))} if arguments.plain and shape.layout != "row" else {}
        if arguments.beside:
            beside = gemm.of(op).registry.get("torch").bind(route := Solution("torch", arguments.beside), shape, device)
            others |= {route: beside} if isinstance(beside, Launcher) else {}
        found = compare(gemm, layer, shape, arguments.rounds, others)
        found |= {"floor_us": floor_us(shape, rate), "bytes": op_named(op).bytes_moved(shape)} if rate else {}
        results.append(found)
        band = f"[{found['low']:.3f}, {found['high']:.3f}]"
        control = f"A/A {found['control']:.3f} [{found['control_low']:.3f}, {found['control_high']:.3f}]"
        sizes = f"{layer:14} {shape.m:5} {shape.n:6} {shape.k:6} {found['default_us']:9.2f} {found['tuned_us']:9.2f}"
        over = "".join(f"  over {name[5:]} {value[0]:.3f}" for name, value in found.items() if name.startswith("over_"))
        print(f"{sizes} us  {found['gain']:.3f} {band}  {control}  {found['solution']}{over}", flush=True)
    lines = summarise(results)
    print("\n".join(lines))
    if arguments.json:
        for result in results:
            result["samples"] = {name: [round(us, 3) for us in values] for name, values in result["samples"].items()}
        arguments.json.write_text(json.dumps({**head, "summary": lines, "results": results}))
    return 1 if any(result["high"] < SLOWER for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
