"""Count the untuned calls on AMD GPUs that a backend other than torch answers, before and after ck.

    python benchmarks/aiter_untuned.py --manifests DIR [-o FOLDER]

The shapes are the layers of shapes.csv with M of 1, 2, 4 to 1024, as each op multiplies them. The
devices are absent. So objects of ck count as built, and AITER's packs as installed. The gain is
the least time of torch's routes over the predicted time of the answer: at least so much, if both
are right. Writes ``folder/untuned.md``.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from aiter_tables import asm_kernels
from harness import SHAPES, parser_of, write_page
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices
from tunedgemm.device import Device
from tunedgemm.dtype import fp8_of
from tunedgemm.libtypes import UNTUNED, UNTUNED_KINDS
from tunedgemm.shape import Shape
from tunedgemm_asm.limits import Kernels, unfit
from tunedgemm_asm.names import auto_splits
from tunedgemm_ck.xdl import fitted_cost, space

TITLE = """# Untuned calls on AMD GPUs

Written by `benchmarks/aiter_untuned.py`. Nothing ran: the devices are described, and all objects of
ck count as built.

- before: without ck; after: with ck in the default of `TUNEDGEMM_FALLBACK`. With packs: with AITER's
  kernels of asm, too.
- gain of ck: the least time of torch's routes at the device's peaks over the predicted time, of its
  answers, median and what nine of ten exceed.
"""
DEVICES = (Device("gfx942", 304), Device("gfx950", 256), Device("gfx942", 80))
MS = tuple(1 << power for power in range(11))
#: Op, with its dtype if it has several -> dtype (of fp8 the device's), kind of scales, layout.
OPS = {
    "a16w16": ("bf16", "none", "row"),
    "a8w8": ("fp8", "row", "row"),
    "a8w8 of int8": ("int8", "row", "row"),
    "a8w8_blockscale": ("fp8", "block", "row"),
    "a8w8_bpreshuffle": ("fp8", "row", "aiter16x16"),
    "a8w8_blockscale_bpreshuffle": ("fp8", "block", "aiter16x16"),
    "a4w4_blockscale": ("fp4x2", "block", "aiter16x16"),
}


def shapes_of(name: str, device: Device) -> list[Shape]:
    """Return the shapes of an op on a device."""
    dtype, scale, layout = OPS[name]
    dtype = fp8_of(device.gfx) if dtype == "fp8" else dtype
    with SHAPES.open() as file:
        layers = sorted({(int(row["N"]), int(row["K"])) for row in csv.DictReader(file)})
    return [Shape(name.split(maxsplit=1)[0], m, n, k, dtype, "bf16", scale=scale, layout=layout) for n, k in layers for m in MS]


def gain_of(shape: Shape, device: Device) -> float | None:
    """Return torch's least time over the predicted time of ck's answer, or None without one."""
    rates, predicted = fitted_cost.rates_of("ck", shape, device), fitted_cost.predictor("ck", fitted_cost.described, shape, device)
    answer = next(iter(space.enumerate_untuned(shape, device)), None)
    if rates is None or predicted is None or answer is None:
        return None
    return fitted_cost.torch_least_us(rates, shape, device) / predicted(*answer, shape, device)


def asm_answers(shape: Shape, device: Device, kernels: Kernels) -> bool:
    """Check whether a kernel of AITER's packs answers; only shuffled weights are answered."""
    mine = [each for each in kernels.values() if shape.layout != "row" and shape.op in each.abi.ops]
    return any(not unfit(each, auto_splits(each.kernel, shape, device), shape) for each in mine)


def lines(registry: Registry, manifests: Path) -> Iterator[str]:
    """Yield the table."""
    yield "| op | device | shapes | before | with AITER's packs | after | after, with packs | by | gain of ck, median / 90 % |"
    yield "|---" * 9 + "|"
    old = tuple(libtype for libtype in UNTUNED if libtype not in UNTUNED_KINDS)
    catalogs = asm_kernels(manifests)
    for device in DEVICES:
        for name in (each for each in OPS if device.gfx == "gfx950" or OPS[each][0] != "fp4x2"):
            shapes, counts, by, gains = shapes_of(name, device), Counter[str](), Counter[str](), defaultdict[str, list[float]](list)
            for shape in shapes:
                first, packs = next(choices(shape, device, registry, old), None), asm_answers(shape, device, catalogs[device.gfx].kernels)
                last = next(choices(shape, device, registry, UNTUNED), None)
                counts.update(before=first is not None, packs=packs or first is not None, after=last is not None)
                counts.update(both=packs or last is not None)
                by.update([last.libtype] if last else [])
                if last and last.libtype == "ck":
                    gains["ck"].append(gain_of(shape, device) or 1.0)
            shares = " | ".join(f"{counts[key] / len(shapes):.0%}" for key in ("before", "packs", "after", "both"))
            best = f"{np.median(gains['ck']):.1f} / {np.quantile(gains['ck'], 0.1):.1f}" if gains["ck"] else ""
            yield f"| {name} | {device.gfx}:{device.cu_num} | {len(shapes)} | {shares} | {', '.join(sorted(by))} | {best} |"


def main(words: list[str] | None = None) -> int:
    """Write the page, or print it without an output folder."""
    parser = parser_of(__doc__)
    parser.add_argument("--manifests", type=Path, required=True, help="AITER's manifests")
    arguments = parser.parse_args(words)
    text = "\n".join([TITLE, *lines(Registry(), arguments.manifests), ""])
    write_page(arguments.output, "untuned.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
