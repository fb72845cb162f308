"""Measure how far each of torch's solutions of each op is from float64, on operands of real
magnitudes.

    python benchmarks/accuracy.py [--op OP ...] [--k K ...] [-o FOLDER]

Activations are normal with outliers: one channel in 200 is 30 to 100 times as large, as in the
hidden states of language models. Weights are normal / sqrt(K). Both are quantised in the op's
format by `tunedgemm.ops.formats.quant`. Every solution is compared with the product of the
*quantised* operands in float64, which is what a solution answers for:

row error
    norm(out - exact) / norm(exact) of the worst row.
error ratio
    The share of elements outside the op's bounds.
quantisation
    The worst row error of that product against the one of the operands before they were quantised:
    the cost of the format itself.
bound
    The op's own bound of the row error.

``-o FOLDER`` writes ``FOLDER/<device>.csv`` and makes ``FOLDER/README.md`` from all CSV files
there; ``--page`` makes only the page. Exit 1 if a solution is outside its op's bounds or fails in a
call.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from harness import parser_of, today
from rich.console import Console
from rich.table import Table
from tunedgemm.backends import builtin
from tunedgemm.backends.builtin import hooks
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device, current_device
from tunedgemm.ops import moe, op_named
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, error_ratio, worst_row_error
from tunedgemm.ops.formats import quant
from tunedgemm.ops.formats.mxfp4 import per_1x32_f4_quant
from tunedgemm.ops.formats.scales import transposed_scale
from tunedgemm.ops.formats.shuffle import plain_weight, shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

Tensor = torch.Tensor
BATCH, EXPERTS, TOPK, INTER = 3, 4, 2, 256
FP8, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
FIELDS = (
    "op", "format", "M", "N", "K", "outdtype", "solution", "status",
    "row_error", "row_bound", "error_ratio", "atol", "rtol", "quantisation",
)  # fmt: skip


@attrs.frozen(eq=False)
class Draw:
    """Random operands before they are quantised.

    Attributes:
        m, n, k: the sizes.
        device: where.
        generator: of that device, seeded.
    """

    m: int
    n: int
    k: int
    device: torch.device
    generator: torch.Generator

    def normal(self, *sizes: int) -> Tensor:
        """Draw standard normal float32."""
        return torch.randn(*sizes, generator=self.generator, device=self.device)

    def activations(self, *batch: int) -> Tensor:
        """Draw [..., M, K]: normal, with outliers in one channel of 200, the same for all rows."""
        x = self.normal(*batch, self.m, self.k)
        count = max(1, self.k // 200)
        channels = torch.randperm(self.k, generator=self.generator, device=self.device)[:count]
        x[..., channels] *= 30 + 70 * torch.rand(count, generator=self.generator, device=self.device)
        return x

    def weights(self, *batch: int, rows: int = 0, cols: int = 0) -> Tensor:
        """Draw [..., N, K]: normal / sqrt(K)."""
        rows, cols = rows or self.n, cols or self.k
        return self.normal(*batch, rows, cols) / cols**0.5


#: (operands as a caller gives them, the result without quantisation in float64, further arguments
#: of shape_of)
Case = tuple[tuple[Any, ...], Tensor, dict[str, Any]]


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product in float64."""
    return x.double() @ weight.double().transpose(-1, -2)


def plain(dtype: torch.dtype) -> Callable[[Draw], Case]:
    """Return how cases of a16w16 are made."""

    def case(draw: Draw) -> Case:
        x, weight = draw.activations(), draw.weights()
        return (x.to(dtype), weight.to(dtype)), exact(x, weight), {}

    return case


def by_row(dtype: torch.dtype, layout: str = "", tensor: bool = False) -> Callable[[Draw], Case]:
    """Return how cases of a8w8 and, with a layout, of a8w8_bpreshuffle are made."""

    def case(draw: Draw) -> Case:
        quantise = quant.per_tensor_quant if tensor else quant.pertoken_quant
        x, weight = draw.activations(), draw.weights()
        (xq, x_scale), (wq, w_scale) = quantise(x, quant_dtype=dtype), quantise(weight, quant_dtype=dtype)
        return (xq, shuffle_weight(wq, layout) if layout else wq, x_scale, w_scale), exact(x, weight), {}

    return case


def by_block(dtype: torch.dtype, layout: str = "") -> Callable[[Draw], Case]:
    """Return how cases of a8w8_blockscale and, with a layout, of a8w8_blockscale_bpreshuffle are
    made.
    """

    def case(draw: Draw) -> Case:
        x, weight = draw.activations(), draw.weights()
        (xq, x_scale), (wq, w_scale) = quant.per_1x128_quant(x, dtype), quant.per_block_quant(weight, dtype)
        if layout:
            return (xq, shuffle_weight(wq, layout), transposed_scale(x_scale), w_scale), exact(x, weight), {}
        return (xq, wq, x_scale, w_scale), exact(x, weight), {}

    return case


def mxfp4(layout: str = "") -> Callable[[Draw], Case]:
    """Return how cases of a4w4_blockscale are made."""

    def case(draw: Draw) -> Case:
        x, weight = draw.activations(), draw.weights()
        (xq, x_scale), (wq, w_scale) = (per_1x32_f4_quant(part, shuffle=bool(layout)) for part in (x, weight))
        return (xq, shuffle_weight(wq, layout) if layout else wq, x_scale, w_scale), exact(x, weight), {}

    return case


def weight_mxfp4(dtype: torch.dtype, layout: str = "") -> Callable[[Draw], Case]:
    """Return how cases of a16w4_blockscale are made."""

    def case(draw: Draw) -> Case:
        x, weight = draw.activations(), draw.weights()
        wq, w_scale = per_1x32_f4_quant(weight, shuffle=bool(layout))
        return (x.to(dtype), shuffle_weight(wq, layout) if layout else wq, w_scale), exact(x, weight), {}

    return case


def batched(dtype: torch.dtype) -> Callable[[Draw], Case]:
    """Return how cases of batched_bf16 and batched_a8w8 are made."""

    def case(draw: Draw) -> Case:
        x, weight = draw.activations(BATCH), draw.weights(BATCH)
        if dtype in (torch.bfloat16, torch.float16):
            return (x.to(dtype), weight.to(dtype)), exact(x, weight), {}
        (xq, x_scale), (wq, w_scale) = (quant.pertoken_quant(part, quant_dtype=dtype) for part in (x, weight))
        return (xq, wq, x_scale, w_scale), exact(x, weight), {}

    return case


def experts(kind: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[Draw], Case]:
    """Return how cases of fmoe with silu are made; K is the dimension of the hidden states, N does
    not count.

    Its bounds of one element are for outputs of about 1, so the second weights are divided by the
    output's root mean square.
    """

    def quantised(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        if kind == "No":
            return weight.to(dtype), None
        if kind == "per_1x128":
            return quant.per_block_quant(weight, dtype)
        if kind == "per_1x32":
            return per_1x32_f4_quant(weight)
        if kind == "per_Token":
            return quant.pertoken_quant(weight, quant_dtype=dtype)
        parts = [quant.per_tensor_quant(matrix, quant_dtype=dtype) for matrix in weight]
        return torch.stack([q.view(torch.uint8) for q, _ in parts]).view(dtype), torch.cat([scale for _, scale in parts])

    def case(draw: Draw) -> Case:
        hidden = draw.activations().bfloat16()
        w1, w2 = draw.weights(EXPERTS, rows=2 * INTER), draw.weights(EXPERTS, rows=draw.k, cols=INTER)
        chosen, ids = draw.normal(draw.m, EXPERTS).topk(TOPK)
        routing = (torch.softmax(chosen, -1), ids.to(torch.int32))
        wanted = unquantised(hidden.double(), w1.double(), w2.double(), *routing)
        size = wanted.square().mean().sqrt()
        w2, wanted = w2 / size.float(), wanted / size
        (q1, scale1), (q2, scale2) = quantised(w1), quantised(w2)
        scales = () if scale1 is None else (scale1, scale2)
        fields = {"activation": moe.ActivationType.Silu, "quant_type": moe.QuantType[kind]}
        return (hidden, q1, q2, *routing, *scales), wanted, fields

    return case


def unquantised(hidden: Tensor, w1: Tensor, w2: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Return what fmoe approximates, in float64: silu(gate) * up, every expert on every token,
    weighted.
    """
    gate, up = torch.einsum("td,erd->etr", hidden, w1).chunk(2, -1)
    out = torch.einsum("eti,edi->etd", torch.nn.functional.silu(gate) * up, w2)
    share = torch.zeros(len(w1), len(hidden), dtype=torch.float64, device=hidden.device)
    share.scatter_add_(0, ids.t().long(), weight.t().double())
    return (out * share.unsqueeze(2)).sum(0)


#: (op, what the quantised operands are called, how they are made)
CASES: tuple[tuple[str, str, Callable[[Draw], Case]], ...] = (
    ("a16w16", "bf16", plain(torch.bfloat16)),
    ("a16w16", "fp16", plain(torch.float16)),
    ("a8w8", "fp8_e4m3fn row", by_row(FP8)),
    ("a8w8", "fp8_e4m3fn tensor", by_row(FP8, tensor=True)),
    ("a8w8", "fp8_e4m3fnuz row", by_row(FNUZ)),
    ("a8w8", "int8 row", by_row(INT8)),
    ("a8w8", "int8 tensor", by_row(INT8, tensor=True)),
    ("a8w8_bpreshuffle", "fp8_e4m3fn row", by_row(FP8, "aiter16x16")),
    ("a8w8_bpreshuffle", "int8 row", by_row(INT8, "aiter32x16")),
    ("a8w8_blockscale", "fp8_e4m3fn", by_block(FP8)),
    ("a8w8_blockscale", "fp8_e4m3fnuz", by_block(FNUZ)),
    ("a8w8_blockscale_bpreshuffle", "fp8_e4m3fn", by_block(FP8, "aiter16x16")),
    ("a4w4_blockscale", "mxfp4 row", mxfp4()),
    ("a4w4_blockscale", "mxfp4 aiter16x16", mxfp4("aiter16x16")),
    ("a16w4_blockscale", "bf16, mxfp4 row", weight_mxfp4(torch.bfloat16)),
    ("a16w4_blockscale", "fp16, mxfp4 row", weight_mxfp4(torch.float16)),
    ("a16w4_blockscale", "bf16, mxfp4 aiter16x16", weight_mxfp4(torch.bfloat16, "aiter16x16")),
    ("batched_bf16", "bf16", batched(torch.bfloat16)),
    ("batched_a8w8", "int8", batched(INT8)),
    ("batched_a8w8", "fp8_e4m3fn", batched(FP8)),
    ("fmoe", "No bf16", experts("No")),
    ("fmoe", "per_Tensor fp8_e4m3fn", experts("per_Tensor", FP8)),
    ("fmoe", "per_Token fp8_e4m3fn", experts("per_Token", FP8)),
    ("fmoe", "per_Token int8", experts("per_Token", INT8)),
    ("fmoe", "per_1x128 fp8_e4m3fn", experts("per_1x128", FP8)),
    ("fmoe", "per_1x32 fp4x2", experts("per_1x32")),
)


def outputs(operands: tuple[Any, ...], fields: dict[str, Any], op_name: str) -> Iterator[Shape]:
    """Yield the shape of these operands for each output dtype that the op has."""
    narrow = operands[0].dtype if operands[0].dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    for dtype in (narrow,) if op_name == "fmoe" else (narrow, torch.float32):
        yield op_named(op_name).shape_of(*operands, otype=dtype, **fields)


def measured(shape: Shape, solution: Solution, operands: tuple[Any, ...], reference: Tensor, device: Device) -> dict[str, Any]:
    """Return status, row error and error ratio of one solution."""
    answer = builtin.backend.bind(solution, shape, device)
    if not isinstance(answer, Launcher):
        return {"status": f"refused: {answer}"[:120]}
    try:
        out = answer.call(*(plain_weight(operand) for operand in operands))
    except Exception as error:  # a library may refuse sizes only when it is called
        return {"status": f"{type(error).__name__}: {error}".replace("\n", " ")[:120]}
    tolerance = op_named(shape.op).tolerance(shape)
    row, ratio = worst_row_error(out, reference), error_ratio(out, reference, tolerance)
    status = "ok" if row <= tolerance.row_error and ratio <= MAX_ERROR_RATIO else "outside"
    return {"status": status, "row_error": row, "error_ratio": ratio}


def rows_of(name: str, label: str, make: Callable[[Draw], Case], draw: Draw, device: Device) -> Iterator[dict[str, Any]]:
    """Yield a row for each output dtype and solution of one format at one size."""
    op = op_named(name)
    operands, wanted, fields = make(draw)
    for shape in outputs(operands, fields, name):
        reference = op.reference(shape, operands)
        if reference.dtype != torch.float64:
            sys.exit(f"{shape}: too large for a reference in float64; choose fewer rows (--m, --n)")
        tolerance = op.tolerance(shape)
        common = {
            "op": name, "format": label, "M": shape.m, "N": shape.n, "K": draw.k, "outdtype": shape.outdtype,
            "row_bound": tolerance.row_error, "atol": tolerance.atol, "rtol": tolerance.rtol,
            "quantisation": worst_row_error(reference, wanted),
        }  # fmt: skip
        for solution in hooks.enumerate_solutions(shape, device):
            split = f" splitK={solution.split_k}" if solution.split_k else ""
            yield {**common, "solution": solution.kernel_name + split, **measured(shape, solution, operands, reference, device)}


def header(device: Device, arguments: argparse.Namespace) -> str:
    """Return what the figures are of."""
    versions = ", ".join(f"{name} {version}" for name, version in device.versions)
    return f"{device}; {versions}; {today()}; M={arguments.m} N={arguments.n} seed={arguments.seed}"


def printed(rows: list[dict[str, Any]], title: str) -> None:
    """Print a line for each format, output dtype and solution: its worst size."""
    table = Table("op", "format", "out", "solution", "worst row error", "at K", "bound", "error ratio", "quantisation", "", title=title)
    worst: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[field] for field in ("op", "format", "outdtype", "solution"))
        if key not in worst or badness(row) > badness(worst[key]):
            worst[key] = row
    for (*names, solution), row in worst.items():
        figures = (f"{row[field]:.1e}" if field in row else "" for field in ("row_error", "row_bound", "error_ratio", "quantisation"))
        error, bound, ratio, quantisation = figures
        table.add_row(*names, solution, error, str(row["K"]), bound, ratio, quantisation, row["status"])
    Console(width=180 if not sys.stdout.isatty() else None).print(table)


def badness(row: dict[str, Any]) -> float:
    """Return the row error; infinity for a solution without one."""
    return float(row.get("row_error", "inf"))


PAGE = """# How exact torch's solutions are

Written by `benchmarks/accuracy.py` from the CSV files of this folder; its docstring says what is drawn, and the first line of
each file on what it ran. One line stands for all solutions of the backend `torch` and all K.

- row error: norm(out - exact) / norm(exact) of the worst row against float64, from the same quantised operands
- outside: the largest share of elements outside the op's bounds of one element (5 % pass)
- bound: the op's bound of the row error, and why it is that
- quantisation: the row error that the format itself makes, whatever computes it

| why | the bound |
|---|---|
| rounding | 8 roundings of a 16-bit output: 2^-9 each in bf16, 2^-12 in fp16 |
| order | 2^-12: the order of a float32 sum |
| fp8 sums | 2^-11: Hopper's tensor cores add fp8 products up in less than float32 (3.5e-4 with one scale a tensor) |
| intermediate | 1.5 to 3 times the worst row of an fmoe that keeps its intermediate in 16 bits, or rounds it before it quantises it |
"""

PAGE_HEAD = (
    "| op | format | out | row error | by | at K | outside | bound | why | quantisation |\n|---|---|---|---|---|---|---|---|---|---|\n"
)


def why(row: dict[str, str]) -> str:
    """Return the word for the reason of a row's bound."""
    if row["op"] == "fmoe" and not row["format"].startswith("No"):
        return "intermediate"
    if row["outdtype"] != "fp32":
        return "rounding"
    return "fp8 sums" if row["format"].startswith("fp8") else "order"


def page_line(rows: list[dict[str, str]]) -> str:
    """Return the line of one format and output dtype: its worst solution and size."""
    worst = max(rows, key=lambda row: float(row["row_error"] or "inf"))
    names = sorted({row["solution"] for row in rows if row["row_error"] == worst["row_error"]}, key=lambda name: (name == "native", name))
    error = f"{float(worst['row_error']):.1e}" if worst["row_error"] else worst["status"]
    outside = max(float(row["error_ratio"] or 1) for row in rows)
    quantisation = max(float(row["quantisation"]) for row in rows)
    cells = (
        f"`{worst['op']}`", worst["format"], worst["outdtype"], error, names[0], worst["K"], f"{outside:.2%}",
        f"{float(worst['row_bound']):.1e}", why(worst), f"{quantisation:.1e}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def section(path: Path) -> str:
    """Return the section of one file."""
    with path.open(newline="") as file:
        title = file.readline().lstrip("# ").strip()
        rows = [row for row in csv.DictReader(file) if not row["status"].startswith("refused")]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["format"], row["outdtype"]), []).append(row)
    bad = sum(row["status"] != "ok" for row in rows)
    verdict = f"{len(rows)} outputs measured, {bad or 'none'} outside their bounds or failed."
    return f"\n## {title}\n\n[`{path.name}`]({path.name}): {verdict}\n\n{PAGE_HEAD}" + "\n".join(map(page_line, groups.values())) + "\n"


def write_readme(folder: Path) -> None:
    """Write README.md of all CSV files in *folder*."""
    sections = [section(path) for path in sorted(folder.glob("*.csv"))]
    (folder / "README.md").write_text(PAGE + "".join(sections))


def main(words: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--op", nargs="+", choices=builtin.backend.ops, default=builtin.backend.ops)
    parser.add_argument("--k", nargs="+", type=int, help="default: 1024 8192, on a GPU 16384 too")
    parser.add_argument("--m", type=int, default=24)
    parser.add_argument("--n", type=int, default=256, help="a multiple of 32 for shuffled weights; no part of fmoe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help="measure nothing: make the page of -o from its CSV files")
    arguments = parser.parse_args(words)
    if arguments.page:
        write_readme(arguments.output or parser.error("--page: needs the folder of the CSV files; name it with -o"))
        return 0
    device = current_device()
    sizes = arguments.k or [1024, 8192, *([16384] if device.kind != "cpu" else [])]
    rows = []
    for name, label, make in CASES:
        for k in sizes if name in arguments.op else ():
            generator = torch.Generator(device.torch_device).manual_seed(arguments.seed)
            rows += rows_of(name, label, make, Draw(arguments.m, arguments.n, k, device.torch_device, generator), device)
    printed(rows, header(device, arguments))
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        name = "cpu" if device.kind == "cpu" else device.name.rpartition("-")[2]
        with (arguments.output / f"{name}.csv").open("w", newline="") as file:
            file.write(f"# {header(device, arguments)}\n")
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
        write_readme(arguments.output)
    refused = [row for row in rows if row["status"].startswith("refused")]
    bad = [row for row in rows if row["status"] != "ok" and row not in refused]
    print(f"{len(rows) - len(refused)} measured, {len(bad)} outside their bounds or failed; {len(refused)} refused by this device's torch")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
