"""Execute instructions on the active lanes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .asynchronous import ASYNCHRONOUS
from .machine import LANES, Instruction, Machine, Unit
from .memory import SHARED, Fault
from .waiting import Blocked, whole

KINDS = {"%p": np.bool_, "%h": np.uint16, "%r": np.uint32, "%f": np.float32, "%d": np.uint64}
PARAMETERS = 1 << 60
_ADDRESS = re.compile(r"\[(%?\w+)(?:\+(\d+))?\]")


def step(machine: Machine, unit: Unit) -> bool:
    """Execute one instruction of the lanes furthest behind that need not wait; return False if all
    have to.
    """
    end = len(machine.program.instructions)
    return any(_step(machine, unit, int(at)) for at in np.unique(unit.at[unit.at < end]))


def _step(machine: Machine, unit: Unit, at: int) -> bool:
    """Execute one instruction of the lanes that are at it; return False where they have to wait."""
    instruction, mask = machine.program.instructions[at], unit.at == at
    unit.at[mask] = at + 1
    if instruction.guard:
        held = value(machine, unit, instruction.guard)
        mask = mask & (~held if instruction.negated else held)
    try:
        if mask.any() or instruction.name.startswith("wgmma"):
            execute(machine, unit, instruction, mask)
    except Blocked:
        unit.at[mask] = at
        return False
    except Fault as fault:
        raise Fault(f"{instruction.name} {', '.join(instruction.operands)[:80]}: {fault}") from fault
    return True


def value(machine: Machine, unit: Unit, operand: str) -> np.ndarray:
    """Return an operand in all lanes."""
    block = unit.block
    if operand[:2] in KINDS and operand[2:].isdigit():
        if operand not in unit.values:
            raise Fault(f"{operand} was never written")
        if operand in unit.busy:
            raise Fault(f"{operand} is a sum that is not done")
        return unit.values[operand]
    special = {
        "%tid.x": unit.group * LANES + np.arange(LANES),
        "%ctaid.x": block.index,
        "%nctaid.x": machine.grid,
        "%cluster_ctarank": block.rank,
        "stages": SHARED,
    }
    if operand in special:
        return np.broadcast_to(np.asarray(special[operand], np.uint32), LANES)
    if operand == machine.program.parameter:
        return np.full(LANES, PARAMETERS, np.uint64)
    if operand.startswith("0f"):
        return np.full(LANES, np.array([int(operand[2:], 16)], np.uint32).view(np.float32)[0])
    return np.full(LANES, int(operand, 0) & ((1 << 64) - 1), np.uint64)


def _parameter(operand: str) -> tuple[str, int]:
    """Return the parameter and offset of an address in parameter space."""
    match = _ADDRESS.fullmatch(operand)
    assert match, operand
    return match[1], int(match[2] or 0)


def put(unit: Unit, name: str, result: np.ndarray, mask: np.ndarray) -> None:
    """Write a result to the active lanes."""
    if name in unit.busy:
        raise Fault(f"{name} is a sum that is not done")
    kind = KINDS[name[:2]]
    with np.errstate(over="ignore", invalid="ignore"):
        new = np.broadcast_to(np.asarray(result), LANES).astype(kind)
    old = unit.values.get(name, np.zeros(LANES, kind))
    unit.values[name] = np.where(mask, new, old)
    unit.unfenced.add(name)


def address(machine: Machine, unit: Unit, operand: str) -> np.ndarray:
    """Return the address in brackets."""
    match = _ADDRESS.fullmatch(operand)
    assert match, operand
    return value(machine, unit, match[1]).astype(np.uint64) + np.uint64(int(match[2] or 0))


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add.u32": lambda a, b: _low(a + b),
    "add.s64": lambda a, b: a + b,
    "sub.u32": lambda a, b: _low(a - b),
    "mul.lo.u32": lambda a, b: _low(a * b),
    "mul.wide.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: _low(a * b + c),
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "mad.lo.s64": lambda a, b, c: a * b + c,
    "div.u32": lambda a, b: a // b,
    "rem.u32": lambda a, b: a % b,
    "min.u32": np.minimum,
    "and.b32": lambda a, b: a & b,
    "or.b64": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "bfe.u32": lambda a, at, width: a >> at & ((np.uint64(1) << width) - np.uint64(1)),
    "setp.ne.u32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.lt.u32": lambda a, b: a < b,
    "setp.ge.u32": lambda a, b: a >= b,
    "sub.s32": lambda a, b: _low(a - b),
    "setp.gt.s32": lambda a, b: a.astype(np.uint32).view(np.int32) > b.astype(np.uint32).view(np.int32),
    **dict.fromkeys(("mov.u16", "mov.u32", "mov.b64", "mov.u64", "cvt.u64.u32", "cvta.param.u64"), lambda a: a),
}


def _low(given: np.ndarray) -> np.ndarray:
    return given & np.uint64(0xFFFFFFFF)


def _to_bf16(given: np.ndarray) -> np.ndarray:
    bits = given.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(given), 0x7FFF, rounded).astype(np.uint16)


def _to_half(given: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return given.astype(np.float16).view(np.uint16)


def _pair(convert: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda high, low: convert(high).astype(np.uint32) << np.uint32(16) | convert(low).astype(np.uint32)


FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "mov.f32": lambda a: a,
    "mov.pred": lambda a: a,
    "and.pred": lambda a, b: a & b,
    "add.rn.f32": lambda a, b: a + b,
    "mul.rn.f32": lambda a, b: a * b,
    "fma.rn.f32": lambda a, b, c: a.astype(np.float64) * b + c,
    "cvt.rn.f32.s32": lambda a: a.astype(np.uint32).view(np.int32),
    "cvt.rn.bf16.f32": _to_bf16,
    "cvt.rn.f16.f32": _to_half,
    "cvt.rn.bf16x2.f32": _pair(_to_bf16),
    "cvt.rn.f16x2.f32": _pair(_to_half),
    "cvt.f32.bf16": lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "cvt.f32.f16": lambda a: a.view(np.float16).astype(np.float32),
}
_IGNORED = ("prefetch.tensormap", "fence.mbarrier_init.release.cluster")


def execute(machine: Machine, unit: Unit, instruction: Instruction, mask: np.ndarray) -> None:
    """Execute one instruction in the lanes of a mask."""
    name, operands = instruction.name, instruction.operands
    if name in ARITHMETIC:
        given = (value(machine, unit, operand).astype(np.uint64) for operand in operands[1:])
        with np.errstate(divide="ignore"):  # in lanes that do not execute
            put(unit, operands[0], ARITHMETIC[name](*given), mask)
    elif name in FLOATS:
        put(unit, operands[0], FLOATS[name](*(value(machine, unit, operand) for operand in operands[1:])), mask)
    elif name in ("selp.b32", "selp.f32"):
        yes, no, which = (value(machine, unit, operand) for operand in operands[1:])
        put(unit, operands[0], np.where(which, yes, no), mask)
    elif name == "bra":
        unit.at[mask] = machine.program.labels[operands[0]]
    elif name == "ret":
        unit.at[mask] = len(machine.program.instructions)
    elif name.startswith("shfl.sync."):
        whole(unit, mask)
        put(unit, operands[0], value(machine, unit, operands[1])[_sources(name, int(operands[2]))], mask)
    elif name in ("ld.param.u32", "ld.param.u64"):
        parameter, offset, width = *_parameter(operands[1]), int(name[-2:]) // 8
        if parameter != machine.program.parameter or offset % width or offset + width > len(machine.arguments):
            raise Fault(f"{operands[1]} is no argument")
        put(unit, operands[0], np.uint64(int.from_bytes(machine.arguments[offset : offset + width], "little")), mask)
    elif name.startswith(("ld.", "st.", "atom.")):
        _memory(machine, unit, instruction, mask)
    elif name in ASYNCHRONOUS:
        given = [address(machine, unit, each) if _ADDRESS.fullmatch(each) else each for each in operands]
        ASYNCHRONOUS[name.split(".m64n")[0]](machine, unit, instruction, mask, (given, value))
    elif name.startswith("wgmma.mma_async"):
        ASYNCHRONOUS["wgmma.mma_async"](machine, unit, instruction, mask, (list(operands), value))
    elif name not in _IGNORED:
        raise Fault("an instruction that the emulator does not know")


def _sources(name: str, far: int) -> np.ndarray:
    """Return the source lane of each lane in a shuffle."""
    lane = np.arange(LANES)
    return lane ^ far if ".bfly." in name else lane // 32 * 32 + far


def _memory(machine: Machine, unit: Unit, instruction: Instruction, mask: np.ndarray) -> None:
    """Load or store registers lane by lane."""
    name, operands = instruction.name, instruction.operands
    store, atomic, shared = name.startswith("st."), name.startswith("atom."), ".shared" in name
    at = address(machine, unit, operands[0] if store else operands[1])
    registers = (operands[1] if store else operands[0]).strip("{}").replace(" ", "").split(",")
    width = {"16": 2, "32": 4}[name[-2:]]
    kept = [value(machine, unit, each).copy() if store or each in unit.values else np.zeros(LANES, KINDS[each[:2]]) for each in registers]
    most = value(machine, unit, operands[2]) if atomic else None
    for lane in np.flatnonzero(mask):
        place, size = int(at[lane]), width * len(registers)
        if store and shared:
            content = np.concatenate([register[lane : lane + 1].view(np.uint8) for register in kept])
            unit.block.shared.put(place, content, unit.group * LANES + int(lane))
            continue
        memory = unit.block.shared.content[place : place + size] if shared else machine.memory.find(place, size, store or atomic)
        if ".gpu." in name:
            machine.causality.access(id(unit), name, place)
        for index, register in enumerate(kept):
            part = memory[index * width : (index + 1) * width]
            if store:
                part[:] = register[lane : lane + 1].view(np.uint8)
                continue
            register[lane : lane + 1] = part.view(register.dtype)
            if most is not None:
                part.view(np.uint32)[0] = 0 if register[lane] >= most[lane] else register[lane] + 1
    if not store:
        for each, register in zip(registers, kept, strict=True):
            put(unit, each, register, mask)
