"""Register the backends ``ck``, ``cktile`` and ``cutlass``: template kernels, compiled on demand.

Importing this package loads neither torch nor a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from tunedgemm.plugin import Device, Launcher, Platform, PluginError, Shape, Solution, Unsupported, hookimpl

from tunedgemm_ck import cutlass as cutlass_family
from tunedgemm_ck import launch, limits, names, space, tile, toolchain, xdl
from tunedgemm_ck.build import targets_of
from tunedgemm_ck.family import Family
from tunedgemm_ck.problem import Problem, problem_of


@attrs.frozen(eq=False)
class TemplateBackend:
    """A template library as a backend.

    Attributes:
        family: the template library.
        finder: finds the toolchain; called when an object is compiled or looked up.
        host: device that a CPU emulates, if any; the objects then compute in host memory.
    """

    family: Family
    finder: toolchain.Finder
    host: Device | None = None

    CONTRACT = 1
    SCALE_ORDERS = ("m_major", "m_major_padded")
    OPTIONS = (space.SPACE,)
    VARIABLES = ("AITER_REBUILD", "TUNEDGEMM_CK_COMPILE")

    @property
    def OPS(self) -> tuple[str, ...]:
        """Return the names of the ops it covers."""
        return self.family.ops

    @property
    def PLATFORMS(self) -> tuple[Platform, ...]:
        """Return the architectures it serves."""
        return self.family.platforms

    def library_version(self, device: Device) -> str:
        """Return the library's version and the templates' revision; without a toolchain only the
        latter.
        """
        revision = f"r{self.family.revision}"
        try:
            return f"{self.finder(Problem(self.OPS[0], device.limiting(self.host).gfx, '', '')).library} {revision}"
        except PluginError:
            return revision

    def details(self, device: Device) -> list[str]:
        """Return lines for ``tunedgemm plugins -v``: the toolchain, or what it lacks."""
        try:
            tools = self.finder(Problem(self.OPS[0], device.limiting(self.host).gfx, "", ""))
        except PluginError as error:
            return [f"no toolchain: {error}"]
        return [f"toolchain: {tools.version} ({tools.compiler}), {tools.library} ({tools.includes[0]})"]

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape, or an empty text.

        On a present device that includes a missing object; without a name, a missing toolchain.
        """
        limiting = device.limiting(self.host)
        try:
            if solution.kernel_name:
                instance, _ = names.resolve(self.family, solution, shape, limiting)
                if device.is_present(self.host):
                    launch.check_objects(targets_of(self.family, instance, problem_of(shape, limiting.gfx), self.finder))
            else:
                self.finder(problem_of(shape, limiting.gfx))
        except PluginError as error:
            return str(error)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Return whether the architecture's static limits allow the shape."""
        return limits.supports(self.family, shape, device.limiting(self.host))

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """Return the instances worth timing, best guesses first; without a toolchain only those
        built.
        """
        return space.enumerate_available(self.family, self.finder, shape, device.limiting(self.host))

    @hookimpl
    def heuristic_fallback(self) -> Solution | None:
        """Return None: an untuned call compiles nothing."""
        return None

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile into the artifact cache, without a device."""
        launch.prepare(self.family, self.finder, solution, shape, device.limiting(self.host))

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the compiled object and fix everything that a call of exactly this shape needs."""
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if not device.is_present(self.host):
            return Unsupported(f"device: not present (got {device})")
        return launch.bind(self.family, self.finder, solution, shape, device.limiting(self.host), device.torch_device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """Return the solution's neighbours, where the full space is requested."""
        return space.refine(self.family, solution, shape, device.limiting(self.host))


ck = TemplateBackend(xdl.FAMILY, toolchain.hip)
cktile = TemplateBackend(tile.FAMILY, toolchain.hip)
cutlass = TemplateBackend(cutlass_family.FAMILY, toolchain.cuda)
