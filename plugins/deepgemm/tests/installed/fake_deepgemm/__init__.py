"""The plugin's backend over a stand-in for DeepGEMM; the CPU emulates an H200."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import tunedgemm_deepgemm
from tunedgemm.plugin import Device, PluginError
from tunedgemm.tools.launching import environment_with
from tunedgemm_deepgemm.build import Target
from tunedgemm_deepgemm.experts.plan import Plan
from tunedgemm_deepgemm.experts.steps import Steps, TritonSteps
from tunedgemm_deepgemm.library import Access, Installation, Toolkit, variables

if TYPE_CHECKING:
    from fake_deepgemm.extension import Extension

H200 = Device("sm_90", 132, "nvidia-h200")
#: Every copy that this process opened.
opened: list[Extension] = []


def find() -> Installation:
    """Return an installation whose extension is this file."""
    return Installation(Path(__file__).parent, Path(__file__), "2.5.0", "vllm-0.25.1")


def toolkit() -> Toolkit:
    """Return a compiler that exists and is never called."""
    return Toolkit(Path("/bin/sh"))


def open_copy(installation: Installation, toolkit: Toolkit) -> Any:
    """Open a copy of the stand-in."""
    from fake_deepgemm.extension import Extension

    opened.append(Extension())
    opened[-1].init(str(installation.folder), str(toolkit.home))
    return opened[-1]


def compile_ahead(target: Target) -> list[str]:
    """Compile as the child process does, for a described device.

    Raises:
        PluginError: the stand-in refuses the product.
    """
    import torch
    from tunedgemm_deepgemm.product import apply, arguments_of, keywords_of, operands_of

    from fake_deepgemm.extension import Extension

    module, files = Extension(described=True), []
    with environment_with(variables(target.toolkit)):
        apply(module, target.kernel, target.device.cu_num)
        for form in target.product.compiled_forms():
            out = form.output(torch.device("cpu"))
            try:
                getattr(module, form.function)(*arguments_of(form)(operands_of(form, out.device), out), **keywords_of(target.kernel))
            except RuntimeError as error:
                if "only described" not in str(error):
                    raise PluginError(str(error)) from error
            files.append(str(module.loaded))
    return files


class HostSteps(TritonSteps):
    """The steps in torch; notes of what is compiled are those of the plugin."""

    def fault(self) -> str:
        """Return no fault: Triton is not needed."""
        return ""

    def load(self, plan: Plan, device: Device) -> Steps:
        """Return functions that compute a plan's steps on the host."""
        from fake_deepgemm import steps

        return steps.host_steps(plan)


ACCESS = Access(find, toolkit, lambda installation: "", open_copy, compile_ahead, HostSteps())
deepgemm = attrs.evolve(
    tunedgemm_deepgemm.deepgemm, libtype="fakedeepgemm", hooks=tunedgemm_deepgemm.DeepGemm("fakedeepgemm", ACCESS), host=H200
)
