"""Find which kernels of all backends give equal bits at every M: the bit classes of some weights.

    python benchmarks/bit_classes.py --weights 4096,4096 6144,4096 --op a16w16 -o classes

At several M the first solutions of each backend's list are compiled in parallel and run on the
standard operands of `tunedgemm.tuner.bits`. The result has one row per kernel: its label, the order
of sums that its plugin declares, or how its bits depend on M. A declared order with several labels
is a broken claim and listed.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import attrs
from harness import FIELDS, add_budget, head, parser_of, save

#: M whose lists give the candidates.
LISTED = (1, 16, 64, 256, 4096)


def prepared(task: tuple[Any, Any, Any]) -> None:
    """Compile a kernel in a process without a device; the call in the main process reports errors."""
    from tunedgemm.backends.registry import Registry

    solution, shape, device = task
    try:
        Registry().get(solution.libtype).prepare(solution, shape, attrs.evolve(device, index=-1))  # type: ignore[union-attr]
    except Exception as error:  # a plugin may raise anything
        print(solution, error, flush=True)


def candidates_of(weight: tuple[int, int], arguments: argparse.Namespace, device: Any) -> dict[Any, Any]:
    """Return the candidates of a weight, each with the first shape that lists it."""
    from tunedgemm.backends.backend import Backend
    from tunedgemm.backends.registry import Registry
    from tunedgemm.ops.scale_order import with_order
    from tunedgemm.plugin import Shape

    found: dict[Any, Any] = {}
    registry = Registry()
    for libtype in arguments.libtype or registry.libtypes:
        backend = registry.get(libtype)
        for m in LISTED if isinstance(backend, Backend) else ():
            shape = Shape(arguments.op, m, *weight, **FIELDS[arguments.op])  # type: ignore[arg-type]
            if arguments.scale_order:
                shape = with_order(shape, arguments.scale_order)
            listed = backend.solutions(shape, device)  # type: ignore[union-attr]
            step = max(1, len(listed) // (2 * arguments.most))
            chosen = [*listed[: arguments.most // 2], *listed[arguments.most // 2 :: step]]
            for solution in chosen[: arguments.most]:
                found.setdefault(solution, shape)
    return found


def measured(weight: tuple[int, int], arguments: argparse.Namespace, device: Any, pool: Any) -> list[dict[str, Any]]:
    """Measure the bits of all candidates of a weight; return one row for each."""
    from tunedgemm.backends.registry import Registry
    from tunedgemm.ops import op_named
    from tunedgemm.tuner.bits import StandardOperands, measure

    registry, rows = Registry(), []
    found = candidates_of(weight, arguments, device)
    list(pool.map(prepared, [(solution, shape, device) for solution, shape in found.items()], chunksize=1))
    operands: dict[Any, Any] = {}
    for solution, shape in found.items():
        kind = shape.with_m(1)
        if kind not in operands:
            operands[kind] = StandardOperands(op_named(shape.op), shape, device.torch_device)
        backend = registry.get(solution.libtype)
        bind = functools.partial(backend.bind, solution, device=device)  # type: ignore[union-attr]
        bits = measure(operands[kind], bind, order=solution.sum_order)
        rows.append({
            "op": shape.op, "N": weight[0], "K": weight[1], "libtype": solution.libtype, "kernel": solution.kernel_name,
            "splitK": solution.split_k, "M listed": shape.m, "sum_order": solution.sum_order, "label": bits.label, "fault": bits.fault,
            "served": list(bits.served),
        })  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return lines: the classes of each weight by size, with their backends, and broken claims."""
    lines = []
    weights: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        weights[row["op"], row["N"], row["K"]].append(row)
    for weight, of_weight in weights.items():
        classes, orders = defaultdict[str, list[Any]](list), defaultdict[str, set[str]](set)
        for row in of_weight:
            classes[row["label"]].append(row)
            orders[row["sum_order"]].add(row["label"] or row["fault"] or "serves too few M")
        lines.append(f"{weight}: {len(of_weight)} kernels, {len(classes.keys() - {''})} classes, {len(classes[''])} in none")
        for label, members in sorted(filter(lambda each: each[1], classes.items()), key=lambda each: -len(each[1])):
            by = defaultdict[str, int](int)
            for row in members:
                by[f"{row['libtype']} {row['sum_order']}".strip()] += 1
            lines.append(f"  {label or 'none':16} {', '.join(f'{count} {name}' for name, count in sorted(by.items()))}")
        lines += [f"  broken claim: {order}: {', '.join(sorted(found))}" for order, found in orders.items() if order and len(found) > 1]
    return lines


def main() -> None:
    """Measure the weights, and print and save the classes."""
    parser = parser_of(__doc__)
    parser.add_argument("--weights", nargs="+", required=True, metavar="N,K", help="sizes of the weights")
    parser.add_argument("--op", choices=FIELDS, default="a16w16", help="default: %(default)s")
    parser.add_argument("--scale-order", default="", help="order of the scales of x, by block")
    parser.add_argument("--libtype", nargs="+", help="default: all installed")
    parser.add_argument("--most", type=int, default=40, help="most solutions of a backend at one M (default: %(default)s)")
    add_budget(parser)
    arguments = parser.parse_args()
    from tunedgemm.device import current_device

    device, rows, begin = current_device(), list[dict[str, Any]](), time.monotonic()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for text in arguments.weights:
            if arguments.budget and time.monotonic() - begin > arguments.budget:
                print("no time left", flush=True)
                break
            n, k = map(int, text.split(","))
            rows += measured((n, k), arguments, device, pool)
            print(*summary([row for row in rows if (row["N"], row["K"]) == (n, k)]), sep="\n", flush=True)
            save(
                arguments.output,
                head("bit_classes", device, op=arguments.op, summary=summary(rows), rows=rows),
                f"bit_classes-{arguments.op}",
            )


if __name__ == "__main__":
    main()
