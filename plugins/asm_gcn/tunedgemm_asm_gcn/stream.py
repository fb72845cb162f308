"""Represent instructions as values, and streams of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from tunedgemm_asm_gcn.registers import EXEC, SCC, Reg

Operand = Reg | int | float | str
#: Scalar instructions that preserve SCC; all others used here write it.
_KEEP_SCC = ("s_mov", "s_cselect", "s_mul", "s_load", "s_nop", "s_waitcnt", "s_barrier", "s_branch", "s_cbranch", "s_endpgm", "s_setprio")
_READ_SCC = ("s_addc", "s_subb", "s_cselect", "s_cbranch_scc")
_KEEP_EXEC = ("v_readfirstlane", "v_mfma")


@attrs.frozen
class Op:
    """One instruction.

    Attributes:
        name: mnemonic.
        to: register operands that it writes.
        of: operands that it reads, in the order of the text.
        mods: text after the operands.
        reads, writes: registers that it accesses without naming them, LDS included.
        note: a comment.
    """

    name: str
    to: tuple[Reg, ...] = ()
    of: tuple[Operand, ...] = ()
    mods: str = ""
    reads: tuple[Reg, ...] = ()
    writes: tuple[Reg, ...] = ()
    note: str = ""

    @property
    def unit(self) -> str:
        """Return its unit: ``mfma``, ``valu``, ``salu``, ``smem``, ``vmem``, ``lds``, ``branch``,
        ``barrier``, ``wait`` or ``end``.
        """
        return _unit(self.name)

    @property
    def stores(self) -> bool:
        """Check whether it writes memory outside the workgroup."""
        return self.unit == "vmem" and ("store" in self.name or "atomic" in self.name)

    @property
    def read(self) -> tuple[Reg, ...]:
        """Return all registers that it reads."""
        implied = (SCC,) if self.name.startswith(_READ_SCC) else ()
        if self.unit in ("valu", "vmem", "lds") and not self.name.startswith(_KEEP_EXEC):
            implied += (EXEC,)
        return (*(operand for operand in self.of if isinstance(operand, Reg)), *self.reads, *implied)

    @property
    def written(self) -> tuple[Reg, ...]:
        """Return all registers that it writes."""
        implied = (SCC,) if self.unit == "salu" and not self.name.startswith(_KEEP_SCC) else ()
        return (*self.to, *self.writes, *implied)

    def __str__(self) -> str:
        operands = ", ".join(_written(operand) for operand in (*self.to, *self.of))
        text = f"    {self.name} {operands}{' ' if self.mods else ''}{self.mods}".rstrip()
        return f"{text:<72}; {self.note}" if self.note else text


@attrs.frozen
class Label:
    """Target of a branch."""

    name: str

    def __str__(self) -> str:
        return f".L{self.name}:"


Item = Op | Label
Stream = Sequence[Item]


@functools.cache
def _unit(name: str) -> str:
    special = {"s_barrier": "barrier", "s_waitcnt": "wait", "s_nop": "wait", "s_endpgm": "end", "s_branch": "branch"}
    starts = {"s_cbranch": "branch", "s_load": "smem", "s_": "salu", "v_mfma": "mfma", "v_": "valu", "ds_": "lds"}
    return special.get(name) or next((unit for start, unit in starts.items() if name.startswith(start)), "vmem")


def _written(operand: Operand) -> str:
    if isinstance(operand, int) and not isinstance(operand, bool) and not -16 <= operand <= 64:
        return hex(operand & 0xFFFFFFFF)
    return str(operand)


def op(name: str, to: Reg | Sequence[Reg] = (), *of: Operand, mods: str = "", note: str = "") -> Op:
    """Return an instruction whose operands are all that it accesses."""
    return Op(name, (to,) if isinstance(to, Reg) else tuple(to), of, mods, note=note)


def branch(name: str, label: Label, note: str = "") -> Op:
    """Return a branch to a label."""
    return Op(name, (), (f".L{label.name}",), note=note)


def weave(main: Sequence[Op], *tracks: tuple[float, float, Sequence[Op]]) -> list[Op]:
    """Interleave instructions with ``main``, which keeps its order.

    An MFMA takes several cycles, in which the other units are free; the interleaving keeps them
    busy.

    Args:
        main: the MFMAs.
        tracks: instructions to spread evenly, in order, between two fractions of ``main``; where
            tracks meet, the earlier track goes first.
    """
    placed: list[tuple[int, Op]] = []
    for first, last, ops in tracks:
        step = (last - first) * len(main) / max(len(ops), 1)
        placed += [(round(first * len(main) + (index + 1) * step), item) for index, item in enumerate(ops)]
    woven: list[Op] = []
    pending = sorted(placed, key=lambda pair: pair[0])
    for at, item in enumerate((*main, None)):
        while pending and pending[0][0] <= at:
            woven.append(pending.pop(0)[1])
        if item is not None:
            woven.append(item)
    return woven + [item for _, item in pending]
