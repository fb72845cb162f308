"""The plugin's backends over the fake libraries, and what is wrong with the output of a launch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, LaunchError, Shape, Solution, Unsupported, device_of, ops, torch_dtype
from tunedgemm.testing.conformance import Poisoned
from tunedgemm_hipblaslt import LtBackend
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import bind_functions

CPU = device_of(-1)
ABIS = {"cublaslt": CUBLASLT, "hipblaslt": HIPBLASLT}
#: What the CPU is taken for.
MI300, MI350, H200 = (
    Device("gfx942", 304, "amd-instinct-mi300x"),
    Device("gfx950", 256, "amd-instinct-mi355x"),
    Device("sm_90", 132, "nvidia-h200"),
)
HOSTS = {"cublaslt": H200, "hipblaslt": MI300}
#: The heuristic's first answer, asked at each bind.
FIRST = "heuristic"
#: Bytes around an operand that hold no number, and by which its address is no multiple of more than 16.
ROOM, ODD = 48 << 10, 16
#: Two roundings of an output of this dtype, or of the product before scales and bias.
ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-19}


def backend(path: Path, libtype: str, host: Device | None = None, abi: Abi | None = None) -> LtBackend:
    """The backend of a libtype over the fake library at *path*, with its own handle and descriptors."""
    library = bind_functions(abi or ABIS[libtype], str(path))
    return LtBackend(library.abi, load=lambda _: library, emulated=host or HOSTS[libtype])


def refusal(lt: LtBackend) -> str:
    """Why the fake library refused the last call that it refused."""
    tell = ctypes.CDLL(lt.load(lt.abi).path).fake_last_reason
    tell.restype = ctypes.c_char_p
    return str(tell().decode())


def cost(lt: LtBackend, algo: bytes) -> float:
    """Microseconds of an algorithm beyond the product."""
    tell = ctypes.CDLL(lt.load(lt.abi).path).fake_cost_us
    tell.restype = ctypes.c_double
    return float(tell(algo))


def calls(lt: LtBackend, function: str) -> int:
    """How often a function of the fake library was called."""
    count = ctypes.CDLL(lt.load(lt.abi).path).fake_calls
    count.restype = ctypes.c_long
    return int(count(function.encode()))


def roomy(operand: torch.Tensor, odd: int = ODD) -> torch.Tensor:
    """The same numbers at an address that is a multiple of *odd* and no more, with bytes 0xFF on either side."""
    buffer = torch.full((operand.nbytes + 2 * ROOM + 64,), 0xFF, dtype=torch.uint8)
    start = ROOM + -buffer.data_ptr() % 64 + odd
    return buffer[start : start + operand.nbytes].view(operand.dtype).view(operand.shape).copy_(operand)


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
        form = f"{tuple(out.shape)} {out.dtype}"
        dtype = torch_dtype(self.shape.outdtype)
        if out.dtype != dtype or out.numel() != self.wanted.numel() or not out.is_contiguous():
            return f"{form} instead of {tuple(self.wanted.shape)} {dtype}"
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


def case(shape: Shape, seed: int = 0, place: Callable[[torch.Tensor], torch.Tensor] = roomy) -> Case:
    """Random operands of a shape, laid out by *place*; what has one value for each row has others."""
    op = ops()[shape.op]
    operands = op.make_inputs(shape, torch.device("cpu"), seed)
    plain = tuple(None if each is None else place(getattr(each, "plain", each)) for each in operands)
    return Case(shape, plain, op.reference(shape, operands))


def bound(lt: LtBackend, name: str, shape: Shape, split_k: int = 0) -> Launcher:
    """A solution of that name, bound; fails with the reason where it is refused."""
    answer = lt.bind(Solution(lt.abi.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Launcher), f"{shape}: {name}: {answer}"
    return answer


def refused(lt: LtBackend, name: str, shape: Shape, split_k: int = 0) -> str:
    """The reason for which a solution of that name does not bind."""
    answer = lt.bind(Solution(lt.abi.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Unsupported), f"{shape}: {name} binds"
    return answer.reason


same = functools.cache(case)


def fault(lt: LtBackend, shape: Shape, name: str = FIRST, split_k: int = 0, operands: Case | None = None) -> str:
    """What is wrong with a solution: why it is refused, at the bind or at the launch, or its output."""
    answer = lt.bind(Solution(lt.abi.libtype, name, split_k=split_k), shape, CPU)
    if not isinstance(answer, Launcher):
        return str(answer.reason)
    try:
        return (operands or same(shape)).launched(answer)
    except LaunchError as error:
        return str(error)


def message(launcher: Launcher, *operands: Any) -> str:
    """What a launch with wrong operands raises."""
    with pytest.raises(LaunchError) as error:
        launcher.call(*operands)
    return str(error.value)
