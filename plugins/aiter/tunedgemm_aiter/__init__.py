"""Register the backends ``flydsl``, ``opus``, ``gluon`` and ``aiter``: kernels of the installed AITER.

Importing this package loads neither torch nor AITER.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from tunedgemm.plugin import Device, Launcher, Platform, Shape, Solution, Unsupported, hookimpl

from tunedgemm_aiter import experts, installed, launch, limits, space


@attrs.frozen(eq=False)
class Aiter:
    """AITER's functions for one of its libtypes as a backend.

    Attributes:
        libtype: name of the backend in tables.
        family: AITER's libtype.
        host: device that a CPU emulates, if any; AITER is then a stand-in in host memory.
    """

    libtype: str
    family: str
    host: Device | None = None

    CONTRACT = 1
    OPTIONS = (space.SPACE,)

    @property
    def OPS(self) -> tuple[str, ...]:
        """Return the names of the ops it covers."""
        return tuple(limits.LIMITS[self.family])

    @property
    def PLATFORMS(self) -> tuple[Platform, ...]:
        """Return the architectures of its ops; no kernel has run on a GPU."""
        return limits.platforms_of(self.family)

    @property
    def ROWS(self) -> tuple[str, ...]:
        """Return the rows of other libtypes that it runs."""
        return limits.ROWS.get(self.family, ())

    def library_version(self, device: Device) -> str:  # noqa: ARG002
        """Return AITER's version; an empty text where it is not installed."""
        found = installed.find()
        return f"AITER {found.version}" if found is not None and found.version else ""

    def details(self, device: Device) -> list[str]:  # noqa: ARG002
        """Return a line for ``tunedgemm plugins -v``: the installed AITER."""
        found = installed.find()
        return [found.name if found is not None else "AITER is not installed"]

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape, with the version of AITER that it needs."""
        check = experts.lacks if shape.op == "fmoe" else launch.lacks
        return check(self.family, solution, shape, device.limiting(self.host))

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Return whether AITER's kernels allow the shape; on a present device AITER must be installed."""
        answer = limits.supports(self.family, shape, device.limiting(self.host))
        if answer and device.is_present(self.host) and installed.find() is None:
            return Unsupported(f"AITER is not installed; {shape.op} needs amd-aiter {limits.LIMITS[self.family][shape.op].since}")
        return answer

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List what AITER lists, best guesses first; for an absent device what needs no AITER."""
        return space.enumerate_solutions(self.libtype, self.family, shape, device.limiting(self.host), device.is_present(self.host))

    @hookimpl
    def heuristic_fallback(self) -> Solution | None:
        """Return None: AITER's import and compilation take too long for an untuned call."""
        return None

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Import AITER, let it compile the kernel, and fix all arguments but the operands."""
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if not device.is_present(self.host):
            return Unsupported(f"device: not present (got {device})")
        if reason := self.lacks(solution, shape, device):
            return Unsupported(reason)
        binder = experts.bind if shape.op == "fmoe" else launch.bind
        return binder(self.family, solution, shape, device.limiting(self.host), device)


flydsl = Aiter("flydsl", "flydsl")
opus = Aiter("opus", "opus")
gluon = Aiter("gluon", "gluon")
aiter = Aiter("aiter", "aiter")
