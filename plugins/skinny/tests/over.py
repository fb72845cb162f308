"""The plugin's backend over the fake GPUs, and the faults of its outputs."""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Backend, Device, Launcher, LaunchError, Shape, Solution, Unsupported, device_of
from tunedgemm.testing.conformance import Poisoned
from tunedgemm.testing.stand_in import bind_driver
from tunedgemm.tools.launching import torch_dtype
from tunedgemm.tools.tables import ops
from tunedgemm_skinny import Skinny, driver, rtc
from tunedgemm_skinny import skinny as real

CPU = device_of(-1)
#: Devices that the CPU emulates, by kind.
HOSTS = {"nvidia": Device("sm_90", 132, "nvidia-h200"), "amd": Device("gfx942", 304, "amd-instinct-mi300x")}
#: Names of the fake compiler and of the fake driver.
LIBRARIES = {"nvidia": ("nvrtc", "cuda"), "amd": ("hiprtc", "hip")}
#: Two units of rounding of each output dtype.
ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-19}


def backend(fake: ModuleType, kind: str, host: Device | None = None) -> Backend:
    """Make the backend over private copies of the fake libraries of ``nvidia`` or ``amd``."""
    compiler_name, driver_name = LIBRARIES[kind]
    compiler = rtc.bind_functions(rtc.INTERFACES[kind], str(fake.copy_of(compiler_name)))
    loaded = bind_driver(driver.INTERFACES[kind], str(fake.copy_of(driver_name)))
    return attrs.evolve(real, hooks=Skinny(compiler=lambda _: compiler, driver=lambda _: loaded), host=host or HOSTS[kind])


def native(skinny: Backend) -> Any:
    """Return the fake driver of a backend as a ctypes library, with its functions for tests."""
    library = ctypes.CDLL(skinny.hooks.driver(driver.INTERFACES[skinny.host.kind]).path)
    library.fake_last_reason.restype = ctypes.c_char_p
    library.fake_calls.restype = ctypes.c_long
    return library


def reason(skinny: Backend) -> str:
    """Return why the fake driver last refused a call of this thread."""
    return native(skinny).fake_last_reason().decode()


@attrs.frozen(eq=False)
class Case:
    """A shape with operands and their reference.

    Attributes:
        plain: operands as a plugin's launcher gets them.
        wanted: reference of the op.
    """

    shape: Shape
    plain: tuple[Any, ...]
    wanted: torch.Tensor

    def wrong(self, out: torch.Tensor) -> str:
        """Return the fault of an output; "" for a right one."""
        dtype = torch_dtype(self.shape.outdtype)
        if out.dtype != dtype or out.numel() != self.wanted.numel() or not out.is_contiguous():
            return f"{tuple(out.shape)} {out.dtype} instead of {tuple(self.wanted.shape)} {dtype}"
        rows = self.wanted.double().reshape(-1, self.shape.n)
        error = (out.double().reshape(rows.shape) - rows).abs()
        bound = ROUNDING[self.shape.outdtype] * (rows.abs() + rows.pow(2).mean(dim=1, keepdim=True).sqrt())
        bad = ~(error <= bound)  # a NaN is bad
        return f"{int(bad.sum())} of {bad.numel()} numbers are wrong, by up to {error.nan_to_num(torch.inf).max():.3g}" if bad.any() else ""

    def launched(self, launcher: Launcher) -> str:
        """Return the fault of a launch: in its output, or bytes written outside it."""
        with Poisoned() as poisoned:
            out = launcher.call(*self.plain)
        return self.wrong(out) or ("it writes outside its output" if poisoned.overwritten() else "")


def case(shape: Shape, seed: int = 0) -> Case:
    """Make random operands of a shape."""
    op = ops()[shape.op]
    operands = op.make_inputs(shape, torch.device("cpu"), seed)
    plain = tuple(None if each is None else getattr(each, "plain", each) for each in operands)
    return Case(shape, plain, op.reference(shape, operands))


def bound(skinny: Backend, name: str, shape: Shape, split_k: int = 0) -> Launcher:
    """Bind a solution; fail with the reason where it is refused."""
    answer = skinny.bind(Solution(skinny.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Launcher), f"{shape}: {name}: {answer}"
    return answer


def refused(skinny: Backend, name: str, shape: Shape, split_k: int = 0) -> str:
    """Return the reason for which a solution does not bind."""
    answer = skinny.bind(Solution(skinny.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Unsupported), f"{shape}: {name} binds"
    return answer.reason


same = functools.cache(case)


def fault(skinny: Backend, shape: Shape, name: str, split_k: int = 0, operands: Case | None = None) -> str:
    """Return the fault of a solution: its refusal by bind or launch, or that of its output."""
    answer = skinny.bind(Solution(skinny.libtype, name, split_k=split_k), shape, CPU)
    if not isinstance(answer, Launcher):
        return str(answer.reason)
    try:
        return (operands or same(shape)).launched(answer)
    except LaunchError as error:
        return f"{error}: {reason(skinny)}"


def message(launcher: Launcher, *operands: Any) -> str:
    """Return the message that a launch with wrong operands raises."""
    with pytest.raises(LaunchError) as error:
        launcher.call(*operands)
    return str(error.value)
