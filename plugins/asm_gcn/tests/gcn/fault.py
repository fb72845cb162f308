"""Define the faults of a program."""

from __future__ import annotations


class Fault(Exception):
    """Error of a broken rule: ``rule`` is one of RULES, and the message names the line."""

    def __init__(self, rule: str, message: str) -> None:
        assert rule in RULES, rule
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.message = message


#: The kinds: of the text itself, and of what a run relies on without having the right to.
RULES = {
    "syntax": "text that is no instruction",
    "unsupported": "an instruction, a register or a modifier that the emulator does not know",
    "pending": "a register of a load that has not been waited for is read or overwritten",
    "wait states": "too few instructions between two that the ISA keeps apart",
    "undefined": "a register, or a byte of LDS or of memory, that nothing was written to is used",
    "bounds": "an address outside every allocation, or outside LDS",
    "alignment": "an address that is no multiple of what the access needs",
    "race": "LDS or memory that two waves use with no barrier between them",
    "coherence": "memory written by another workgroup, read without what makes it visible",
    "operand": "a register that the kernel did not ask for, or operands that no encoding has",
    "hang": "a barrier that not all waves reach, or a loop without end",
}
