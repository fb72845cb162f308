"""Emulate asynchronous operations: barriers, copies, wgmma."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import stores
from .formats import from_bits
from .machine import LANES, Arrival, Block, Instruction, Machine, Unit
from .memory import Barrier, Fault, box_of, swizzled
from .waiting import Blocked, only, whole

#: Distance of the same place in the shared memories of two blocks of a cluster, as `mapa` gives it.
_WINDOW = 1 << 24


def _initialise(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    count = int(told[0][1])
    unit.block.shared.barriers[only(mask, told[0][0])] = Barrier(count, count)


def _wait(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    (done, at, parity), value = told
    wanted = value(machine, unit, parity)
    for lane in np.flatnonzero(mask):
        if unit.block.shared.barrier(int(at[lane])).parity == int(wanted[lane]):
            raise Blocked
    unit.values[done] = np.ones(LANES, np.bool_)


def _announce(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    (_, at, count), value = told
    barrier = unit.block.shared.barrier(only(mask, at))
    barrier.bytes += only(mask, value(machine, unit, count))
    barrier.arrive()


def _arrive(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    for lane in np.flatnonzero(mask):
        block, at = divmod(int(told[0][1][lane]), _WINDOW)
        if "cluster.b64" not in i.name:
            unit.block.shared.barrier(at).arrive()
            continue
        machine.arrivals.append(Arrival(unit, functools.partial(_land, machine, unit.block.cluster.blocks[block], at)))


def _land(machine: Machine, block: Block, at: int) -> None:
    end = len(machine.program.instructions)
    if all((unit.at == end).all() for unit in machine.units if unit.block is block):
        raise Fault("an arrival at a barrier of a block that has ended")
    block.shared.barrier(at).arrive()


def _map_to(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    (result, own, rank), value = told
    far = value(machine, unit, own).astype(np.uint64) + value(machine, unit, rank).astype(np.uint64) * np.uint64(_WINDOW)
    unit.values[result] = far.astype(np.uint32)


def _copy(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    (to, source, full, *masks), value = told
    base, *coordinates = re.findall(r"%\w+", source)
    if f".{len(coordinates)}d." not in i.name:
        raise Fault(f"{len(coordinates)} coordinates")
    begin = only(mask, value(machine, unit, base)) - (1 << 60)
    at = [only(mask, value(machine, unit, each)) for each in coordinates]
    content = box_of(machine.memory, machine.arguments[begin : begin + 128], *at)
    to, full = only(mask, to), only(mask, full)
    wanted = only(mask, value(machine, unit, masks[0])) if masks else 1 << unit.block.rank
    if to % 128 or (to % 1024 and content.shape[0] % 8 == 0):
        raise Fault(f"a box to {to} of shared memory, whose swizzle starts at multiples of 1024")
    places = swizzled(to + np.arange(content.size))
    ordered = np.empty(content.size, np.uint8)
    ordered[places - to] = content.reshape(-1)

    def arrived() -> None:
        for rank, block in enumerate(unit.block.cluster.blocks):
            if wanted >> rank & 1:
                block.shared.write(to, ordered)
                barrier = block.shared.barrier(full)
                barrier.bytes -= content.size
                barrier.advance()

    machine.copies.append(arrived)


def _copy_scale(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Execute ``cp.async``: copy a lane's bytes later; its size beyond the source's is zeros."""
    (to, source, size, inside), value = told
    sizes = value(machine, unit, inside)
    for lane in np.flatnonzero(mask):
        content = np.zeros(int(size), np.uint8)
        if int(sizes[lane]):
            content[:] = machine.memory.find(int(source[lane]), int(size), False)
        unit.copying.setdefault(int(lane), []).append((int(to[lane]), content))


def _arrive_after_copies(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Execute ``cp.async.mbarrier.arrive.noinc``: arrive once the lane's copies are done."""
    for lane in np.flatnonzero(mask):
        copies, full = unit.copying.pop(int(lane), []), int(told[0][0][lane])

        def arrived(copies: list[tuple[int, np.ndarray]] = copies, full: int = full, lane: int = int(lane)) -> None:
            for to, content in copies:
                unit.block.shared.put(to, content, unit.group * LANES + lane)
            unit.block.shared.barrier(full).arrive()

        machine.copies.append(arrived)


def _fence(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    unit.unfenced.clear()


def _rows(unit: Unit, told: int, rows: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the bytes [rows, 32] of a matrix descriptor, and the range that they cover."""
    if told >> 62 != 1 or told >> 16 & 0x3FFF != 1 or told >> 49 & 7:
        raise Fault(f"descriptor {told:#x}")
    start, stride = (told & 0x3FFF) * 16, (told >> 32 & 0x3FFF) * 16
    row = np.arange(rows)[:, None]
    logical = start + row // 8 * stride + row % 8 * 128 + np.arange(32)
    return swizzled(logical), (int(logical.min()), int(logical.max()) + 1)


#: Kind of operands -> elements along K, kind of the sums, and what stands behind the flag (PTX ISA,
#: "wgmma.mma_async").
_FORMS = {
    "bf16": ("16", "f32", ["1", "1", "0", "0"]),
    "f16": ("16", "f32", ["1", "1", "0", "0"]),
    "e4m3": ("32", "f32", ["1", "1"]),
    "s8": ("32", "s32", []),
}


def _form(name: str, rest: list[str]) -> tuple[int, str]:
    """Return the rows of b and the operand kind of a supported instruction shape."""
    match = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)", name)
    if not match or match[4] != match[5] or (match[2], match[3], rest) != _FORMS.get(match[4]):
        raise Fault("another form of the instruction")
    width, kind = int(match[1]), match[4]
    if width % 8 or not 8 <= width <= 256 or (kind == "s8" and width > 32 and width % 16):
        raise Fault(f"{width} rows, for which there is no instruction")
    return width, kind


def _multiply(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    (sums, a, b, added, *rest), value = told
    whole(unit, mask)
    width, kind = _form(i.name, rest)
    adding = value(machine, unit, added)
    if (adding != adding[0]).any():
        raise Fault("lanes do not agree on a flag")
    begins = not adding[0]
    names = sums.strip("{}").replace(" ", "").split(",")
    if len(names) != width // 2 or unit.unfenced & set(names):
        raise Fault("sums that no wgmma.fence covers")
    if not begins and not unit.values.keys() >= set(names) - unit.touched:
        raise Fault("sums that were never written")
    descriptors = [value(machine, unit, each) for each in (a, b)]
    if any((each != each[0]).any() for each in descriptors):
        raise Fault("lanes do not agree on a descriptor")
    (at_a, region_a), (at_b, region_b) = (_rows(unit, int(each[0]), rows) for each, rows in zip(descriptors, (64, width), strict=True))
    shared = unit.block.shared
    if max(region_a[1], region_b[1]) > shared.content.size:
        raise Fault("an operand beyond shared memory")

    def done() -> None:
        # Exact, so that bits do not depend on where a tile begins; nor do they on a GPU.
        x, y = (from_bits(shared.content[at], kind).astype(np.float64) for at in (at_a, at_b))
        product = x @ y.T
        product = product.astype(np.int32).view(np.uint32) if kind == "s8" else product.astype(np.float32)
        lane = np.arange(LANES)
        for index, name in enumerate(names):
            row = lane // 32 * 16 + lane % 32 // 4 + 8 * (index // 2 % 2)
            column = lane % 4 * 2 + 8 * (index // 4) + index % 2
            own = product[row, column]
            unit.values[name] = own if begins else unit.values[name] + own

    unit.opened.append(done)
    unit.touched |= set(names)
    unit.regions += [region_a, region_b]
    shared.reading += [region_a, region_b]


def _commit(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    unit.flying.append((unit.opened, unit.touched, unit.regions))
    unit.opened, unit.touched, unit.regions = [], set(), []


def _wait_group(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    whole(unit, mask)
    if len(unit.flying) > int(i.operands[0]):
        raise Blocked


def _meet(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Execute ``bar.sync``: a warpgroup waits until its generation has passed."""
    whole(unit, mask)
    operands, value = i.operands, told[1]
    name = int(value(machine, unit, operands[0])[0])
    needed = int(operands[1]) if len(operands) > 1 else machine.program.threads
    block, now = unit.block, unit.block.generation.get(name, 0)
    if unit.passing < 0:
        unit.passing = now
        block.waiting[name] = block.waiting.get(name, 0) + LANES
        if block.waiting[name] == needed:
            block.waiting[name], block.generation[name] = 0, now + 1
    if block.generation.get(name, 0) == unit.passing:
        raise Blocked
    unit.passing = -1
    block.shared.meet(unit.group * LANES, LANES)
    machine.causality.meet(id(unit))


def _cluster_arrive(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    cluster = unit.block.cluster
    if i.name.endswith("release"):
        for arrival in [each for each in machine.arrivals if each.unit is unit]:
            machine.arrivals.remove(arrival)
            arrival()
    unit.arrived[mask] = cluster.generation
    cluster.arrived += int(mask.sum())
    if cluster.arrived == machine.program.threads * len(cluster.blocks):
        cluster.arrived, cluster.generation = 0, cluster.generation + 1


def _cluster_wait(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    if (unit.arrived[mask] == unit.block.cluster.generation).any():
        raise Blocked


def _registers(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    whole(unit, mask)
    wanted = int(i.operands[0])
    if (".inc" in i.name) == (wanted < unit.registers) or wanted % 8:
        raise Fault(f"from {unit.registers} to {wanted} registers")
    if (wanted - unit.registers) * LANES > unit.block.pool:
        raise Blocked
    unit.block.pool -= (wanted - unit.registers) * LANES
    unit.registers = wanted


_TMA = [f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" for rank in (2, 3)]
ASYNCHRONOUS: dict[str, Callable[[Machine, Unit, Instruction, np.ndarray, Any], None]] = {
    "mbarrier.init.shared::cta.b64": _initialise,
    "mbarrier.try_wait.parity.shared::cta.b64": _wait,
    "mbarrier.arrive.expect_tx.shared::cta.b64": _announce,
    "mbarrier.arrive.release.cta.shared::cta.b64": _arrive,
    "mbarrier.arrive.release.cta.shared::cluster.b64": _arrive,
    "mapa.shared::cluster.u32": _map_to,
    **dict.fromkeys(_TMA, _copy),
    **dict.fromkeys((f"{name}.multicast::cluster" for name in _TMA), _copy),
    "cp.async.ca.shared.global": _copy_scale,
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64": _arrive_after_copies,
    "wgmma.fence.sync.aligned": _fence,
    "wgmma.mma_async": _multiply,
    "wgmma.commit_group.sync.aligned": _commit,
    "wgmma.wait_group.sync.aligned": _wait_group,
    "bar.sync": _meet,
    "barrier.cluster.arrive.relaxed": _cluster_arrive,
    "barrier.cluster.arrive.release": _cluster_arrive,
    "barrier.cluster.wait.acquire": _cluster_wait,
    "setmaxnreg.inc.sync.aligned.u32": _registers,
    "setmaxnreg.dec.sync.aligned.u32": _registers,
    "stmatrix.sync.aligned.m8n8.x4.shared.b16": stores.matrices,
    "fence.proxy.async.shared::cta": stores.fence,
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group": stores.store,
    "cp.async.bulk.commit_group": stores.commit,
    "cp.async.bulk.wait_group.read": stores.wait_read,
}
