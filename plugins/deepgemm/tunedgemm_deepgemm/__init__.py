"""Register the backend ``deepgemm``: DeepGEMM's kernels, from `deep_gemm` or an installed vLLM.

Importing this package loads neither torch nor the library.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl

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
    """

    libtype: str = "deepgemm"
    access: library.Access = INSTALLED

    @hookimpl
    def library_version(self) -> str:
        """Return the library's version, and the distribution whose copy it is; "" without one."""
        try:
            found = self.access.find()
        except PluginError:
            return ""
        return f"{found.version} {found.owner}".strip()

    @hookimpl
    def details(self) -> list[str]:
        """Return lines for ``tunedgemm plugins -v``: library and compiler, or why there is none."""
        lines = []
        for found in (lambda: f"deep_gemm {self.library_version()}: {self.access.find().folder}", lambda: self.access.toolkit().nvcc):
            try:
                lines.append(str(found()))
            except PluginError as error:
                lines.append(str(error))
        return lines

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape, or an empty text.

        On a present device that includes a kernel that is not compiled.
        """
        if device.is_present:
            return launch.refusal(self.access, solution, shape, device)
        names.resolve(solution, shape, device)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Check the shape against the static limits; on a present device also that the library loads."""
        reason = limits.unsupported(shape, device)
        if not reason and device.is_present:
            reason = self.access.toolkit() and self.access.fault(self.access.find())
            reason = reason or (self.access.steps.fault() if shape.op == names.EXPERTS else "")
            if not reason and shape.op == "a16w16" and library.registers(self.access.find().extension):
                reason = f"deep_gemm {self.library_version()} multiplies bf16 by cuBLASLt, whose kernels cublaslt lists"
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the library's own choice, then settings that change it."""
        return space.enumerate_solutions(self.libtype, shape, device)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the library's own choice where it was the fastest; `bind` refuses one that is not compiled."""
        return space.choose_untuned(self.libtype, shape, device)

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile into the artifact cache, without a device."""
        launch.prepare(self.access, solution, shape, device)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the compiled kernel, and fix everything but the operands."""
        return launch.bind(self.access, solution, shape, device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the settings that differ in one step."""
        return space.refine(solution, shape, device)


deepgemm = Backend(
    "deepgemm",
    DeepGemm(),
    contract=1,
    ops=tuple(limits.OPS),
    platforms=limits.PLATFORMS,
    scale_orders=("m_major", "m_major_padded"),
    variables=("TUNEDGEMM_DEEPGEMM_COMPILE",),
)
