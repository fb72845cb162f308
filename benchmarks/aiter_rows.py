"""Read AITER's measured rows, and list what a backend of ours would try for their shapes."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from aiter_tables import asm_kernels
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import infer_op, read_rows
from tunedgemm_asm import cost as asm_cost
from tunedgemm_asm import limits as asm_limits
from tunedgemm_asm import names as asm_names
from tunedgemm_asm import space as asm_space
from tunedgemm_ck.tile import limits as tile_limits
from tunedgemm_ck.tile import space as tile_space
from tunedgemm_ck.xdl import cost, fitted_cost, limits, space
from tunedgemm_ck.xdl.template import DEVICE_OPS

BANDS = (16, 64, 256, 1024, 4096, math.inf)
#: Ops of ck without a row that splits K: AITER's tuner did not try it.
UNSPLIT = ("a8w8_bpreshuffle",)

Choice = tuple[str, int]
Order = Callable[[Shape], Iterable[Choice]]


@attrs.frozen
class Measured:
    """A row: its table, shape, fastest kernel with splits, and microseconds."""

    table: str
    shape: Shape
    winner: Choice
    us: float

    @property
    def layer(self) -> tuple[int, int]:
        """Return the sizes of the weight."""
        return self.shape.n, self.shape.k

    @property
    def group(self) -> tuple[str, int, int, int]:
        """Return the table, the layer and the band of M."""
        return self.table, *self.layer, next(number for number, most in enumerate(BANDS) if self.shape.m <= most)


@attrs.frozen
class Candidate:
    """A kernel with splits: as rows name it, and what the model reads.

    Attributes:
        choice: kernelName and splitK.
        sides: M, N and elements of K of a block.
        parts: of K.
        resident: blocks of a compute unit.
        key: of its factor.
    """

    choice: Choice
    sides: tuple[int, int, int]
    parts: int
    resident: int
    key: Any


@attrs.frozen(eq=False)
class Family:
    """Kernels of a libtype for an op on a device.

    Attributes:
        op, libtype, device: whose rows.
        candidates: all kernels with all splits.
        fitting: shape to the candidates that are tried for it.
        before: shape to the same in the order without a model.
        chosen: shape and a row's kernel and splitK to the candidate that they name.
    """

    op: str
    libtype: str
    device: Device
    candidates: tuple[Candidate, ...]
    fitting: Order
    before: Order
    chosen: Callable[[Shape, Choice], Choice]

    @property
    def name(self) -> str:
        """Return its name in tables."""
        return f"{self.libtype} {self.op}, {self.device.gfx}:{self.device.cu_num}"


def _as_written(_: Shape, row: Choice) -> Choice:
    return row


def _without_split(_: Shape, row: Choice) -> Choice:
    """Return the kernel alone: the op ignores splitK, whatever the row has."""
    return row[0], 0


def _candidates(instances: Iterable[Any], describe: Callable[[Any], Any], most: int, device: Device) -> tuple[Candidate, ...]:
    found = []
    for each in instances:
        threads, shared, key = describe(each)
        resident = fitted_cost.resident_blocks(each.sides, threads, shared, device.gfx)
        found += [Candidate((each.name, split), each.sides, 1 << split, resident, key) for split in range(most + 1)]
    return tuple(found)


def _orders(instances: Sequence[Any], offered: int, unfit: cost.Unfit, most: int, device: Device) -> tuple[Order, Order]:
    """Return what lists the candidates that fit a shape, and the first *offered* without a model."""

    @functools.cache
    def fitting(shape: Shape) -> Iterable[Choice]:
        costs = cost.fitting_costs(instances, unfit, most, shape, device, lambda *_: 0.0, space.ROUNDS)
        return [(each.name, split) for each, split in costs]

    def before(shape: Shape) -> Iterable[Choice]:
        return ((each.name, split) for each, split in cost.order_fitting(instances[:offered], unfit, most, shape, device, False))

    return fitting, before


def ck_family(op: str, device: Device, split: bool = True) -> Family:
    """Return Composable Kernel's listed instances of an op, with or without parts of K."""
    most = limits.MOST_SPLIT if split and DEVICE_OPS[op].split and op not in UNSPLIT else 0
    instances = space.listed_instances(op)
    candidates = _candidates(instances, fitted_cost.described, most, device)

    fitting, before = _orders(instances, space._DEFAULTS.get(op, space.DEFAULT), limits.unfit_sizes, most, device)
    return Family(op, "ck", device, candidates, fitting, before, _without_split if not DEVICE_OPS[op].split else _as_written)


def tile_family(op: str, device: Device) -> Family:
    """Return CK Tile's listed instances of an op."""
    instances, most = tile_space.of_architecture(op, device.gfx), 0 if op == "a8w8_bpreshuffle" else limits.MOST_SPLIT
    candidates = _candidates(instances, tile_space.described, most, device)

    fitting, before = _orders(instances, tile_space.DEFAULT, tile_limits.unfit_sizes, most, device)
    return Family(op, "cktile", device, candidates, fitting, before, _as_written if most else _without_split)


def asm_family(op: str, device: Device, manifests: Path) -> Family:
    """Return AITER's assembly kernels of an op."""
    catalog = asm_kernels(manifests)[device.gfx]
    mine = {name: each for name, each in catalog.kernels.items() if op in each.abi.ops}
    candidates = tuple(
        Candidate((name, split), (each.kernel.tile_m, each.kernel.tile_n, asm_cost.STEPS[op]), split, 1, asm_cost.key_of(each.kernel))
        for name, each in mine.items()
        for split in range(1, asm_limits.RULES[each.kernel.abi].splits + 1)
    )

    @functools.cache
    def fitting(shape: Shape) -> Iterable[Choice]:
        listed = asm_space.enumerate_candidates(shape, device, mine)
        listed.sort(key=lambda chosen: asm_cost.rank_by_launcher(*chosen, shape, device))
        return [(kernel.name, splits) for kernel, splits in listed]

    def chosen(shape: Shape, row: Choice) -> Choice:
        try:
            kernel, splits = asm_names.resolve(Solution("asm", row[0], row[1]), shape, device, catalog)
        except PluginError:
            return row[0], -1
        return kernel.name, splits

    return Family(op, "asm", device, candidates, fitting, fitting, chosen)


def families(manifests: Path) -> list[Family]:
    """Return the families that have rows enough for a fit."""
    mi308x, mi300x, mi355x = Device("gfx942", 80), Device("gfx942", 304), Device("gfx950", 256)
    shuffled, blocks, both, fp4 = "a8w8_bpreshuffle", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a4w4_blockscale"
    of_ck = [(blocks, mi300x), (blocks, mi355x), (shuffled, mi308x), (shuffled, mi355x), (both, mi308x), (both, mi355x)]
    of_ck += [("a8w8", mi355x), (fp4, mi355x)]
    of_asm = [(fp4, mi355x), (both, mi308x), (both, mi355x), ("a16w16", mi355x), (shuffled, mi308x), (shuffled, mi300x)]
    return [
        *(ck_family(op, device) for op, device in of_ck),
        *(tile_family(op, mi355x) for op in (blocks, shuffled)),
        *(asm_family(op, device, manifests) for op, device in of_asm),
    ]


def measured(folder: Path) -> dict[tuple[str, str, str, int], list[Measured]]:
    """Return the valid rows of all tuned tables, by op, libtype and device."""
    groups = defaultdict[Any, list[Measured]](list)
    for path in sorted(folder.rglob("*tuned*.csv")):
        for row in () if "untuned" in path.name else read_rows(path, infer_op([path]))[0]:
            if row.valid:
                key = row.shape.op, row.solution.libtype, row.gfx, row.cu_num
                groups[key].append(Measured(path.stem, row.shape, (row.solution.kernel_name, row.solution.split_k), row.us))
    return dict(groups)


def rows_of(family: Family, rows: Mapping[Any, list[Measured]]) -> list[Measured]:
    """Return a family's rows whose kernel is a candidate, with splits as the family counts them."""
    known = {each.choice for each in family.candidates}
    found = []
    for row in rows.get((family.op, family.libtype, family.device.gfx, family.device.cu_num), ()):
        winner = family.chosen(row.shape, row.winner)
        if winner in known:
            found.append(attrs.evolve(row, winner=winner))
    return found
