"""Run a few instructions on waves with given registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .kernel import kernels_of
from .launch import Group, Machine, Rules
from .lds import Lds
from .memory import Memory
from .text import ACCUMULATION, VECTOR
from .wave import Wave

_TEXT = """
 .amdgcn_target "amdgcn-amd-amdhsa--{gfx}"
probe:
{body}
 s_endpgm
 .amdhsa_kernel probe
 .end_amdhsa_kernel
"""


class Bench:
    """One workgroup that runs instructions; registers of ``waves`` are undefined unless set by
    `give`.
    """

    def __init__(
        self, body: str, *, gfx: str = "gfx942", waves: int = 1, lds: int = 0, memory: Memory | None = None, rules: Rules | None = None
    ) -> None:
        self.kernel = kernels_of(_TEXT.format(gfx=gfx, body=body))["probe"]
        self.memory = memory or Memory()
        self.memory.begin()
        self.memory.groups += [0] * waves
        rules = rules or Rules()
        self.group = Group(0, (0, 0, 0), self.memory, Lds(lds), rules, 0)
        self.group.waves = [Wave(self.group, number, rules.slice) for number in range(waves)]
        self.machine = Machine(self.kernel, rules)

    def give(self, registers: Mapping[str, Any], wave: int | None = None) -> Bench:
        """Set registers by name (v3, a0, s2, vcc, exec) in one wave or all."""
        for each in self.group.waves if wave is None else [self.group.waves[wave]]:
            for name, value in registers.items():
                if name in ("vcc", "exec"):
                    each.put64({"vcc": 106, "exec": 126}[name], value)
                elif name[0] == "s":
                    each.put(int(name[1:]), value)
                else:
                    key = int(name[1:]) + {"v": VECTOR, "a": ACCUMULATION}[name[0]]
                    each.write(key, np.broadcast_to(np.asarray(value), 64).view(np.uint32) if np.ndim(value) else value, np.ones(64, bool))
        return self

    def run(self) -> Bench:
        """Run all waves to their end."""
        while not self.group.ended:
            self.machine.advance(self.group)
        return self

    def vector(self, register: str, dtype: Any = np.uint32, wave: int = 0) -> np.ndarray:
        """Return the lanes of a defined vector or accumulation register."""
        found, key = self.group.waves[wave], int(register[1:]) + {"v": VECTOR, "a": ACCUMULATION}[register[0]]
        found.check(key, np.ones(64, bool))
        return found.v[key - VECTOR].view(dtype).copy()

    def scalar(self, number: int, wave: int = 0) -> int:
        """Return a scalar register."""
        return self.group.waves[wave].get(number)
