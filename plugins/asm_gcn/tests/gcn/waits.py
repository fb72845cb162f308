"""Execute s_waitcnt. A load's registers are pending until an s_waitcnt covers it. vmcnt counts
loads and stores of vector memory in order. lgkmcnt counts LDS, in order, and scalar memory in any
order, which needs lgkmcnt(0).
"""

from __future__ import annotations

import re

from .fault import Fault
from .operands import Bound
from .text import Instruction
from .wave import Outstanding, Wave

_COUNTER = re.compile(r"(vmcnt|lgkmcnt|expcnt)\s*\(\s*(\d+)\s*\)")
#: The most that a counter can tell apart.
LIMITS = {"vmcnt": 63, "lgkmcnt": 15, "expcnt": 7}


def counts_of(instruction: Instruction) -> dict[str, int]:
    """Return the counters of an s_waitcnt, by name or from its encoding."""
    text = instruction.raw
    if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text):
        bits = int(text, 0)
        return {"vmcnt": (bits & 15) | (bits >> 10 & 0x30), "expcnt": bits >> 4 & 7, "lgkmcnt": bits >> 8 & 15}
    found = {name: int(value) for name, value in _COUNTER.findall(text)}
    if not found or _COUNTER.sub("", text).strip(" &,\t"):
        raise Fault("syntax", f"{instruction}")
    for name, value in found.items():
        if value > LIMITS[name]:
            raise Fault("operand", f"{instruction}: {name} is at most {LIMITS[name]}")
    return found


def bind(instruction: Instruction) -> Bound | None:
    if instruction.mnemonic == "s_barrier":

        def stop(wave: Wave) -> None:
            wave.waiting = True

        return Bound(instruction, stop, "control")
    if instruction.mnemonic != "s_waitcnt":
        return None
    counts = counts_of(instruction)
    vector, other = counts.get("vmcnt", LIMITS["vmcnt"]), counts.get("lgkmcnt", LIMITS["lgkmcnt"])

    def wait(wave: Wave) -> None:
        if vector < LIMITS["vmcnt"]:
            wait_vector(wave, vector)
        if other < LIMITS["lgkmcnt"]:
            wait_other(wave, other)

    return Bound(instruction, wait, "control")


def begin(wave: Wave, outstanding: Outstanding) -> None:
    """Start a memory instruction: its registers are pending."""
    (wave.vector_memory if outstanding.order == "vector" else wave.lds_and_scalar).append(outstanding)
    for key in outstanding.keys:
        wave.pending[key] = outstanding


def _finish(wave: Wave, outstanding: Outstanding) -> None:
    for key in outstanding.keys:
        if wave.pending.get(key) is outstanding:
            del wave.pending[key]
    if outstanding.finish:
        outstanding.finish()


def wait_vector(wave: Wave, count: int) -> None:
    """Complete all but the last ``count`` of vector memory."""
    while len(wave.vector_memory) > count:
        _finish(wave, wave.vector_memory.pop(0))


def wait_other(wave: Wave, count: int) -> None:
    """Complete LDS and scalar memory to at most ``count`` pending."""
    queue = wave.lds_and_scalar
    if count == 0:
        done, wave.lds_and_scalar = queue, []
    else:
        lds = [each for each in queue if each.order == "lds"]
        done = lds[: max(0, len(lds) - count)]
        wave.lds_and_scalar = [each for each in queue if each not in done]
    for each in done:
        _finish(wave, each)


def end(wave: Wave) -> None:
    """End a wave: its stores complete."""
    wait_vector(wave, 0)
    wait_other(wave, 0)


def check(wave: Wave, bound: Bound) -> None:
    """Raise where an instruction uses a pending register."""
    for key in bound.touched:
        if key in wave.pending:
            loading = wave.pending[key].instruction
            what = "reads" if key in bound.reads else "overwrites"
            raise Fault("pending", f"{what} a register of {loading}, which was not waited for")
