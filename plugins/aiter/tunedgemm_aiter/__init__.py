"""Register the backends ``flydsl``, ``opus``, ``gluon`` and ``aiter``: kernels of the installed AITER.

Importing this package loads neither torch nor AITER.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution, Unsupported, hookimpl

from tunedgemm_aiter import experts, installed, launch, limits, space


@attrs.frozen(eq=False)
class Aiter:
    """Hooks of a backend over AITER's functions for one of its libtypes.

    Attributes:
        libtype: name of the backend in tables.
        family: AITER's libtype.
    """

    libtype: str
    family: str

    @hookimpl
    def library_version(self) -> str:
        """Return AITER's version; an empty text where it is not installed."""
        found = installed.find()
        return f"AITER {found.version}" if found is not None and found.version else ""

    @hookimpl
    def details(self) -> list[str]:
        """Return a line for ``tunedgemm plugins -v``: the installed AITER."""
        found = installed.find()
        return [found.name if found is not None else "AITER is not installed"]

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape, with the version of AITER that it needs."""
        check = experts.lacks if shape.op == "fmoe" else launch.lacks
        return check(self.family, solution, shape, device)

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Return why AITER's kernels exclude the shape; on a present device AITER must be installed."""
        reason = limits.unsupported(self.family, shape, device)
        if not reason and device.is_present and installed.find() is None:
            reason = f"AITER is not installed; {shape.op} needs amd-aiter {limits.LIMITS[self.family][shape.op].since}"
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List what AITER lists, best guesses first; for an absent device what needs no AITER."""
        return space.enumerate_solutions(self.libtype, self.family, shape, device)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Import AITER, let it compile the kernel, and fix all arguments but the operands."""
        if reason := self.lacks(solution, shape, device):
            return Unsupported(reason)
        return (experts.bind if shape.op == "fmoe" else launch.bind)(self.family, solution, shape, device)


def backend_of(family: str, libtype: str = "") -> Backend:
    """Return the backend of one of AITER's libtypes, under its name or another."""
    return Backend(
        libtype or family,
        Aiter(libtype or family, family),
        contract=1,
        ops=tuple(limits.LIMITS[family]),
        platforms=limits.platforms_of(family),
        rows=limits.ROWS.get(family, ()),
        options=(space.SPACE,),
    )


flydsl, opus, gluon, aiter = map(backend_of, limits.LIMITS)
