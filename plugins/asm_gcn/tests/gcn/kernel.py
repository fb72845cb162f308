"""Extract a kernel from a text: entry, and registers by its descriptor."""

from __future__ import annotations

import re
import struct

import attrs

from . import global_memory, lds_instructions, matrix, scalar, scalar_memory, vector, waits
from .fault import Fault
from .operands import Bound
from .text import Instruction, Program, Register, parse
from .wave import Wave

_TARGET = re.compile(r"amdgcn-amd-amdhsa--(gfx\w+)|^\s*\.target:\s*'?amdgcn.*?(gfx\w+)", re.MULTILINE)


@attrs.frozen(eq=False)
class Kernel:
    """A kernel ready to run."""

    name: str
    gfx: str
    entry: int
    bound: tuple[Bound, ...]
    fields: dict[str, int]

    def field(self, name: str, default: int = 0) -> int:
        return self.fields.get(name, default)

    @property
    def lds_bytes(self) -> int:
        return self.field("group_segment_fixed_size")

    def start(
        self, wave: Wave, group: tuple[int, int, int], thread: int, block: tuple[int, int, int], address: int, arguments: bytes
    ) -> None:
        """Fill a wave's initial registers (LLVM: "Initial Kernel Execution State")."""
        at = 0
        for name, words in (
            ("dispatch_ptr", 2),
            ("queue_ptr", 2),
            ("kernarg_segment_ptr", 2),
            ("dispatch_id", 2),
            ("private_segment_size", 1),
        ):
            if self.field(f"user_sgpr_{name}"):
                if name == "kernarg_segment_ptr":
                    wave.put64(at, address)
                at += words
        first = 4 * self.field("user_sgpr_kernarg_preload_offset")
        for word in range(self.field("user_sgpr_kernarg_preload_length")):
            wave.put(at + word, int.from_bytes(arguments[first + 4 * word : first + 4 * word + 4].ljust(4, b"\0"), "little"))
        at = max(self.field("user_sgpr_count"), at)
        for axis, name in enumerate("xyz"):
            if self.field(f"system_sgpr_workgroup_id_{name}", int(axis == 0)):
                wave.put(at, group[axis])
                at += 1
        threads = [thread + lane for lane in range(64)]
        total = block[0] * block[1] * block[2]
        wave.put64(126, sum(1 << lane for lane, each in enumerate(threads) if each < total))
        ids = [each % block[0] | (each // block[0] % block[1] << 10) | (each // (block[0] * block[1]) << 20) for each in threads]
        wave.write(1000, ids)
        wave.pc = self.entry


def _check_limits(instruction: Instruction, fields: dict[str, int]) -> None:
    """Raise where an instruction uses registers beyond the descriptor."""
    total = fields.get("next_free_vgpr")
    offset = fields.get("accum_offset")
    scalars = fields.get("next_free_sgpr")
    for operand in instruction.operands:
        if not isinstance(operand, Register):
            continue
        last = operand.first + operand.count - 1
        if operand.file == "s":
            if scalars is not None and scalars <= last < 102:
                raise Fault("operand", f"{instruction}: {operand}, and the kernel asks for {scalars} scalar registers")
        elif total is not None and offset is not None:
            limit = min(offset, total) if operand.file == "v" else total - offset
            if last >= limit:
                raise Fault("operand", f"{instruction}: {operand}, and the kernel asks for {limit} registers of this file")


def _bind(instruction: Instruction, gfx: str) -> Bound:
    for bind in (scalar.bind, waits.bind, scalar_memory.bind, lds_instructions.bind, global_memory.bind):
        bound = bind(instruction)
        if bound is not None:
            return bound
    for bind_for in (matrix.bind, vector.bind):
        bound = bind_for(instruction, gfx)
        if bound is not None:
            return bound
    raise Fault("unsupported", str(instruction))


def kernels_of(text: str, gfx: str | None = None, descriptors: str = "") -> dict[str, Kernel]:
    """Return the kernels of a text by name."""
    program = parse(text)
    found = _TARGET.search(text)
    gfx = gfx or (found and (found[1] or found[2]))
    if gfx not in ("gfx942", "gfx950"):
        raise Fault("unsupported", f"the architecture {gfx}")
    fields = program.descriptors | parse(descriptors).descriptors
    names = [name for name in fields if name in program.labels]
    starts = sorted(program.labels[name] for name in names)
    out = {}
    for name in names:
        entry = program.labels[name]
        end = next((start for start in starts if start > entry), len(program.instructions))
        out[name] = Kernel(name, gfx, entry, _bound(program, gfx, entry, end, fields[name]), fields[name])
    return out


def _bound(program: Program, gfx: str, entry: int, end: int, fields: dict[str, int]) -> tuple[Bound, ...]:
    """Return the instructions of a kernel at their places."""
    out: list[Bound] = [None] * entry  # type: ignore[list-item]
    for instruction in program.instructions[entry:end]:
        _check_limits(instruction, fields)
        try:
            out.append(_bind(instruction, gfx))
        except Fault as fault:
            if str(instruction) in fault.message:
                raise
            raise Fault(fault.rule, f"{instruction}: {fault.message}") from fault
        except (IndexError, ValueError, TypeError) as error:
            raise Fault("operand", f"{instruction}: {error}") from error
    return tuple(out)


def arguments(*values: tuple[str, int | float]) -> bytes:
    """Pack kernel arguments by `struct` letters, each naturally aligned."""
    out = b""
    for letter, value in values:
        size = struct.calcsize("<" + letter)
        out = out.ljust(-(-len(out) // size) * size, b"\0") + struct.pack("<" + letter, value)
    return out
