"""The plugin's backend over the fake GPUs, and what is wrong with the output of a launch."""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, LaunchError, Shape, Solution, Unsupported, bind_driver, device_of, ops, torch_dtype
from tunedgemm.testing.conformance import Poisoned
from tunedgemm_skinny import Skinny, rtc
from tunedgemm_skinny import native as driver

CPU = device_of(-1)
#: What the CPU is taken for, by the kind of device.
HOSTS = {"nvidia": Device("sm_90", 132, "nvidia-h200"), "amd": Device("gfx942", 304, "amd-instinct-mi300x")}
#: Names of the fake compiler and of the fake driver.
LIBRARIES = {"nvidia": ("nvrtc", "cuda"), "amd": ("hiprtc", "hip")}
#: Two roundings of an output of this dtype.
ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-19}


def backend(fake: ModuleType, kind: str, host: Device | None = None) -> Skinny:
    """The backend over copies of the fake libraries of a kind of device, ``nvidia`` or ``amd``, which share nothing with others."""
    compiler, loaded = LIBRARIES[kind]
    compiles = rtc.bind_functions(rtc.INTERFACES[kind], str(fake.copy_of(compiler)))
    drives = bind_driver(driver.INTERFACES[kind], str(fake.copy_of(loaded)))
    return Skinny(compiler=lambda _: compiles, driver=lambda _: drives, host=host or HOSTS[kind])


def native(skinny: Skinny) -> Any:
    """The fake driver of a backend as ctypes has it, with its functions for tests, ``fake_register`` to ``fake_reset``."""
    found = ctypes.CDLL(skinny.driver(driver.INTERFACES[skinny.host.kind]).path)
    found.fake_last_reason.restype = ctypes.c_char_p
    found.fake_calls.restype = ctypes.c_long
    found.fake_register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


def reason(skinny: Skinny) -> str:
    """Why the fake driver refused the last call of this thread that it refused."""
    return native(skinny).fake_last_reason().decode()


@attrs.frozen(eq=False)
class Case:
    """A shape with operands and what comes out of them.

    Attributes:
        plain: the operands as a plugin's launcher gets them.
        wanted: the op's reference.
    """

    shape: Shape
    plain: tuple[Any, ...]
    wanted: torch.Tensor

    def wrong(self, out: torch.Tensor) -> str:
        """What is wrong with an output, "" for a right one."""
        dtype = torch_dtype(self.shape.outdtype)
        if out.dtype != dtype or out.numel() != self.wanted.numel() or not out.is_contiguous():
            return f"{tuple(out.shape)} {out.dtype} instead of {tuple(self.wanted.shape)} {dtype}"
        rows = self.wanted.double().reshape(-1, self.shape.n)
        error = (out.double().reshape(rows.shape) - rows).abs()
        bound = ROUNDING[self.shape.outdtype] * (rows.abs() + rows.pow(2).mean(dim=1, keepdim=True).sqrt())
        bad = ~(error <= bound)  # a NaN is bad
        return f"{int(bad.sum())} of {bad.numel()} numbers are wrong, by up to {error.nan_to_num(torch.inf).max():.3g}" if bad.any() else ""

    def launched(self, launcher: Launcher) -> str:
        """What is wrong with a launch: its output, or bytes beside it."""
        with Poisoned() as poisoned:
            out = launcher.call(*self.plain)
        return self.wrong(out) or ("it writes beside its output" if poisoned.overwritten() else "")


def case(shape: Shape, seed: int = 0) -> Case:
    """Random operands of a shape."""
    op = ops()[shape.op]
    operands = op.make_inputs(shape, torch.device("cpu"), seed)
    plain = tuple(None if each is None else getattr(each, "plain", each) for each in operands)
    return Case(shape, plain, op.reference(shape, operands))


def bound(skinny: Skinny, name: str, shape: Shape, split_k: int = 0) -> Launcher:
    """A solution of that name, bound; fails with the reason where it is refused."""
    answer = skinny.bind(Solution(skinny.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Launcher), f"{shape}: {name}: {answer}"
    return answer


def refused(skinny: Skinny, name: str, shape: Shape, split_k: int = 0) -> str:
    """The reason for which a solution of that name does not bind."""
    answer = skinny.bind(Solution(skinny.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Unsupported), f"{shape}: {name} binds"
    return answer.reason


same = functools.cache(case)


def fault(skinny: Skinny, shape: Shape, name: str, split_k: int = 0, operands: Case | None = None) -> str:
    """What is wrong with a solution: why it is refused, at the bind or at the launch, or its output."""
    answer = skinny.bind(Solution(skinny.libtype, name, split_k=split_k), shape, CPU)
    if not isinstance(answer, Launcher):
        return str(answer.reason)
    try:
        return (operands or same(shape)).launched(answer)
    except LaunchError as error:
        return f"{error}: {reason(skinny)}"


def message(launcher: Launcher, *operands: Any) -> str:
    """What a launch with wrong operands raises."""
    with pytest.raises(LaunchError) as error:
        launcher.call(*operands)
    return str(error.value)
