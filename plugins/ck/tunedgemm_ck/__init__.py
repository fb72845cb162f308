"""Register the backends ``ck``, ``cktile`` and ``cutlass``: template kernels, compiled on demand.

Importing this package loads neither torch nor a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl

from tunedgemm_ck import cutlass as cutlass_family
from tunedgemm_ck import heuristic, launch, names, space, tile, toolchain, xdl
from tunedgemm_ck.build import targets_of
from tunedgemm_ck.family import Family
from tunedgemm_ck.problem import Problem, problem_of


@attrs.frozen(eq=False)
class Templates:
    """Hooks of a template library.

    Attributes:
        family: the template library.
        finder: finds the toolchain; called when an object is compiled or looked up.
    """

    family: Family
    finder: toolchain.Finder

    @hookimpl
    def library_version(self, device: Device) -> str:
        """Return the library's version and the templates' revision; without a toolchain only the
        latter.
        """
        revision = f"r{self.family.revision}"
        try:
            return f"{self.finder(Problem(self.family.ops[0], device.gfx, '', '')).library} {revision}"
        except PluginError:
            return revision

    @hookimpl
    def details(self, device: Device) -> list[str]:
        """Return lines for ``tunedgemm plugins -v``: the toolchain, or what it lacks."""
        try:
            tools = self.finder(Problem(self.family.ops[0], device.gfx, "", ""))
        except PluginError as error:
            return [f"no toolchain: {error}"]
        return [f"toolchain: {tools.version} ({tools.compiler}), {tools.library} ({tools.includes[0]})"]

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return an empty text; a solution that does not serve the shape is a PluginError.

        On a present device that includes a missing object; without a name, a missing toolchain.
        """
        if solution.kernel_name:
            instance, _ = names.resolve(self.family, solution, shape, device)
            if device.is_present:
                launch.check_objects(targets_of(self.family, instance, problem_of(shape, device.gfx), self.finder))
        else:
            self.finder(problem_of(shape, device.gfx))
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Return why no instance takes the shape on the architecture, or None."""
        reason: str | None = ""
        if device.kind != self.family.kind:
            vendor = {"nvidia": "NVIDIA", "amd": "AMD"}[self.family.kind]
            reason = f"{self.family.libtype} supports only {vendor} GPUs (got {device.gfx})"
        elif shape.m == 0:
            reason = "an empty batch needs no kernel"
        reason = reason or self.family.unsupported(shape, device)
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """Return the instances worth timing, best guesses first; without a toolchain only those
        built.
        """
        return space.enumerate_available(self.family, self.finder, shape, device)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the best built instance where measured times say that it beats torch, or None."""
        return heuristic.heuristic_fallback(self.family, self.finder, shape, device)

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile into the artifact cache, without a device."""
        launch.prepare(self.family, self.finder, solution, shape, device)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the compiled object and fix everything that a call of exactly this shape needs."""
        return launch.bind(self.family, self.finder, solution, shape, device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """Return the solution's neighbours, where the full space is requested."""
        return space.refine(self.family, solution, shape, device)


def backend_of(family: Family, finder: toolchain.Finder, host: Device | None = None) -> Backend:
    """Return the backend of a template library; with a *host*, its objects compute in host memory."""
    return Backend(
        family.libtype,
        Templates(family, finder),
        contract=1,
        ops=family.ops,
        platforms=family.platforms,
        scale_orders=("m_major", "m_major_padded"),
        options=(space.SPACE,),
        variables=("AITER_REBUILD", "TUNEDGEMM_CK_COMPILE"),
        host=host,
    )


ck = backend_of(xdl.FAMILY, toolchain.hip)
cktile = backend_of(tile.FAMILY, toolchain.hip)
cutlass = backend_of(cutlass_family.FAMILY, toolchain.cuda)
