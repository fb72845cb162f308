"""Register the backend ``deepgemm``: DeepGEMM's kernels, from `deep_gemm` or an installed vLLM.

Importing this package loads neither torch nor the library.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl

from tunedgemm_deepgemm import build, launch, library, limits, names, space
from tunedgemm_deepgemm.experts.steps import TritonSteps

#: The installed library.
INSTALLED = library.Access(library.find, library.find_toolkit, library.fault_of, library.open_copy, build.compile_ahead, TritonSteps())


@attrs.frozen(eq=False)
class DeepGemm:
    """Hooks of the backend.

    Attributes:
        libtype: name of the backend in tables.
        access: finds, compiles and opens the library.
        host: device that a CPU emulates, if any.
    """

    libtype: str = "deepgemm"
    access: library.Access = INSTALLED
    host: Device | None = None

    CONTRACT = 1
    OPS = tuple(limits.OPS)
    PLATFORMS = limits.PLATFORMS
    SCALE_ORDERS = ("m_major", "m_major_padded")
    VARIABLES = ("TUNEDGEMM_DEEPGEMM_COMPILE",)

    def library_version(self, device: Device) -> str:  # noqa: ARG002
        """Return the library's version, and the distribution whose copy it is; "" without one."""
        try:
            found = self.access.find()
        except PluginError:
            return ""
        return f"{found.version} {found.owner}".strip()

    def details(self, device: Device) -> list[str]:
        """Return lines for ``tunedgemm plugins -v``: library and compiler, or why there is none."""
        lines = []
        for found in (lambda: f"deep_gemm {self.library_version(device)}: {self.access.find().folder}", lambda: self.access.toolkit().nvcc):
            try:
                lines.append(str(found()))
            except PluginError as error:
                lines.append(str(error))
        return lines

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape, or an empty text.

        On a present device that includes a kernel that is not compiled.
        """
        limiting = device.limiting(self.host)
        if device.is_present(self.host):
            return launch.refusal(self.access, solution, shape, limiting)
        try:
            names.resolve(solution, shape, limiting)
        except PluginError as error:
            return str(error)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Check the shape against the static limits; on a present device also that the library loads."""
        answer = limits.supports(shape, device.limiting(self.host))
        if not answer or not device.is_present(self.host):
            return answer
        try:
            reason = self.access.toolkit() and self.access.fault(self.access.find())
            reason = reason or (self.access.steps.fault() if shape.op == names.EXPERTS else "")
        except PluginError as error:
            reason = str(error)
        return Unsupported(reason) if reason else True

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the library's own choice, then settings that change it."""
        return space.enumerate_solutions(self.libtype, shape, device.limiting(self.host))

    @hookimpl
    def heuristic_fallback(self) -> Solution | None:
        """Return None: an untuned call compiles nothing."""
        return None

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile into the artifact cache, without a device."""
        launch.prepare(self.access, solution, shape, device.limiting(self.host))

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the compiled kernel, and fix everything but the operands."""
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if not device.is_present(self.host):
            return Unsupported(f"device: not present (got {device})")
        return launch.bind(self.access, solution, shape, device.limiting(self.host), device.torch_device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the settings that differ in one step."""
        return space.refine(solution, shape, device.limiting(self.host))


deepgemm = DeepGemm()
