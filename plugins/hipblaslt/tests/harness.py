"""The plugin's backends over the fake libraries, and checks of what they launch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from tunedgemm.plugin import Backend, Device, Launcher, LaunchError, Shape, Solution, Unsupported, device_of
from tunedgemm.testing.conformance import Poisoned
from tunedgemm.tools.launching import torch_dtype
from tunedgemm.tools.tables import ops
from tunedgemm_hipblaslt import backend_of
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import bind_functions

CPU = device_of(-1)
ABIS = {"cublaslt": CUBLASLT, "hipblaslt": HIPBLASLT}
#: Emulated devices.
MI300, MI350, H200 = (
    Device("gfx942", 304, "amd-instinct-mi300x"),
    Device("gfx950", 256, "amd-instinct-mi355x"),
    Device("sm_90", 132, "nvidia-h200"),
)
EMULATED = {"cublaslt": H200, "hipblaslt": MI300}
#: Name of the library's first answer.
FIRST = "heuristic"
#: Bytes of padding around an operand, and the largest power of two that divides its address.
PADDING, ALIGNMENT = 48 << 10, 16
#: Two roundings of an output of this dtype, or of the product before scales and bias.
ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-19}


def make_backend(path: Path, libtype: str, emulated: Device | None = None, abi: Abi | None = None) -> Backend:
    """Return a backend over the fake library at *path*, with separate handle and descriptors."""
    library = bind_functions(abi or ABIS[libtype], str(path))
    return backend_of(library.abi, load=lambda _: library, host=emulated or EMULATED[libtype])


def fake_reason(lt: Backend) -> str:
    """Return why the fake library refused the last refused call."""
    last_reason = ctypes.CDLL(lt.hooks.load(lt.hooks.abi).path).fake_last_reason
    last_reason.restype = ctypes.c_char_p
    return str(last_reason().decode())


def cost(lt: Backend, algo: bytes) -> float:
    """Return the simulated microseconds of an algorithm beyond the product."""
    cost_us = ctypes.CDLL(lt.hooks.load(lt.hooks.abi).path).fake_cost_us
    cost_us.restype = ctypes.c_double
    return float(cost_us(algo))


def count_calls(lt: Backend, function: str) -> int:
    """Return how often a function of the fake library was called."""
    calls = ctypes.CDLL(lt.hooks.load(lt.hooks.abi).path).fake_calls
    calls.restype = ctypes.c_long
    return int(calls(function.encode()))


def padded(operand: torch.Tensor, alignment: int = ALIGNMENT) -> torch.Tensor:
    """Return a copy at an address aligned to *alignment* and no more, between bytes 0xFF."""
    buffer = torch.full((operand.nbytes + 2 * PADDING + 64,), 0xFF, dtype=torch.uint8)
    start = PADDING + -buffer.data_ptr() % 64 + alignment
    if not operand.is_contiguous():  # scales with the strides of their order; gaps hold 0xFF, which is NaN
        floats = buffer[start : start + 4 * operand.stride(1) * operand.shape[1]].view(torch.float32)
        return floats.as_strided(operand.shape, operand.stride(), floats.storage_offset()).copy_(operand)
    return buffer[start : start + operand.nbytes].view(operand.dtype).view(operand.shape).copy_(operand)


@attrs.frozen(eq=False)
class Case:
    """Shape with operands and their reference.

    Attributes:
        operands: the operands as a plugin's launcher takes them.
        expected: the op's reference.
    """

    shape: Shape
    operands: tuple[Any, ...]
    expected: torch.Tensor

    def output_fault(self, out: torch.Tensor) -> str:
        """Return what is wrong with an output, "" for a correct one."""
        form = f"{tuple(out.shape)} {out.dtype}"
        dtype = torch_dtype(self.shape.outdtype)
        if out.dtype != dtype or out.numel() != self.expected.numel() or not out.is_contiguous():
            return f"{form} instead of {tuple(self.expected.shape)} {dtype}"
        rows = self.expected.double().reshape(-1, self.shape.n)
        error = (out.double().reshape(rows.shape) - rows).abs()
        bound = ROUNDING[self.shape.outdtype] * (rows.abs() + rows.pow(2).mean(dim=1, keepdim=True).sqrt())
        bad = ~(error <= bound)  # a NaN is bad
        return f"{int(bad.sum())} of {bad.numel()} numbers are wrong, by up to {error.nan_to_num(torch.inf).max():.3g}" if bad.any() else ""

    def launch_fault(self, launcher: Launcher) -> str:
        """Launch and return what is wrong with the output or the bytes around it."""
        with Poisoned() as poisoned:
            out = launcher.call(*self.operands)
        return self.output_fault(out) or ("writes outside its output" if poisoned.overwritten() else "")


def make_case(shape: Shape, seed: int = 0, place: Callable[[torch.Tensor], torch.Tensor] = padded) -> Case:
    """Draw random operands of a shape, laid out by *place*."""
    op = ops()[shape.op]
    operands = op.make_inputs(shape, torch.device("cpu"), seed)
    placed = tuple(None if operand is None else place(getattr(operand, "plain", operand)) for operand in operands)
    return Case(shape, placed, op.reference(shape, operands))


cached_case = functools.cache(make_case)


def bind(lt: Backend, name: str, shape: Shape, split_k: int = 0) -> Launcher:
    """Bind a solution by name; fail with the reason where it is refused."""
    answer = lt.bind(Solution(lt.hooks.abi.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Launcher), f"{shape}: {name}: {answer}"
    return answer


def refusal(lt: Backend, name: str, shape: Shape, split_k: int = 0) -> str:
    """Return why a solution does not bind; fail where it does."""
    answer = lt.bind(Solution(lt.hooks.abi.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Unsupported), f"{shape}: {name} binds"
    return answer.reason


def fault(lt: Backend, shape: Shape, name: str = FIRST, split_k: int = 0, case: Case | None = None) -> str:
    """Return the fault of a solution at the bind, at the launch or in its output; "" for none."""
    answer = lt.bind(Solution(lt.hooks.abi.libtype, name, split_k=split_k), shape, CPU)
    if not isinstance(answer, Launcher):
        return str(answer.reason)
    try:
        return (case or cached_case(shape)).launch_fault(answer)
    except LaunchError as error:
        return str(error)
