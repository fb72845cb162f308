"""Build the backend over the fake HIP runtime, and check outputs of launches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
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
from tunedgemm_asm import Asm, asm, driver, launch, packs

CPU = device_of(-1)
#: Devices that the CPU stands for.
HOSTS = {"gfx942": Device("gfx942", 304, "amd-instinct-mi300x"), "gfx950": Device("gfx950", 256, "amd-instinct-mi355x")}
#: Two roundings of an output of this dtype, more of float32, whose sums are made in another order.
ROUNDING = {"bf16": 2.0**-7, "fp32": 2.0**-18}


def backend(fake: ModuleType, tree: Path, gfx: str) -> Backend:
    """Return the backend over its own copy of the fake library, with the packs of AITER's tree and
    next to it.
    """
    library = bind_driver(driver.HIP, str(fake.copy_of()))
    own = tree.with_name(f"{tree.name}-own")
    found = found_in(gfx, tree, *([own] if own.is_dir() else []))
    return attrs.evolve(asm, hooks=Asm(catalog=lambda _: found, driver=lambda _: library), host=HOSTS[gfx])


def found_in(gfx: str, *folders: Path) -> packs.Catalog:
    """Return the kernels of the packs in these folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AITER_ASM_DIR", raising=False)
        patch.setenv("TUNEDGEMM_ASM_PACKS", ":".join(map(str, folders)))
        packs.reload()
        try:
            return packs.catalog_of(gfx)
        finally:
            packs.reload()


def native(asm: Backend, fake: ModuleType) -> Any:
    """Return the fake library of a backend."""
    return fake.native(asm.hooks.driver(driver.HIP).path)


@attrs.frozen(eq=False)
class Case:
    """A shape with operands and the reference result.

    Attributes:
        plain: the operands as a plugin's launcher gets them.
        wanted: the op's reference.
    """

    shape: Shape
    plain: tuple[Any, ...]
    wanted: torch.Tensor

    def wrong(self, out: torch.Tensor, splits: int = 1) -> str:
        """Return the fault of an output, or an empty text; each added split rounds again."""
        dtype = torch_dtype(self.shape.outdtype)
        if out.dtype != dtype or out.numel() != self.wanted.numel() or not out.is_contiguous():
            return f"{tuple(out.shape)} {out.dtype} instead of {tuple(self.wanted.shape)} {dtype}"
        rows = self.wanted.double().reshape(-1, self.shape.n)
        error = (out.double().reshape(rows.shape) - rows).abs()
        bound = ROUNDING[self.shape.outdtype] * (splits + 1) / 2 * (rows.abs() + rows.pow(2).mean(dim=1, keepdim=True).sqrt())
        bad = ~(error <= bound)  # a NaN is bad
        return f"{int(bad.sum())} of {bad.numel()} numbers are wrong, by up to {error.nan_to_num(torch.inf).max():.3g}" if bad.any() else ""

    def launched(self, launcher: Launcher, splits: int = 1) -> str:
        """Launch and return the fault of the output or of memory around it."""
        with Poisoned() as poisoned:
            out = launcher.call(*self.plain)
        return self.wrong(out, splits) or ("it writes beside its output" if poisoned.overwritten() else "")


@functools.cache
def case(shape: Shape, seed: int = 0) -> Case:
    """Return random operands of a shape."""
    op = ops()[shape.op]
    operands = op.make_inputs(shape, torch.device("cpu"), seed)
    plain = tuple(None if each is None else getattr(each, "plain", each) for each in operands)
    return Case(shape, plain, op.reference(shape, operands))


@contextlib.contextmanager
def fenced(asm: Backend, fake: ModuleType, operands: tuple[Any, ...]) -> Iterator[None]:
    """Restrict launches to reading the *operands* and writing what the plugin allocates."""
    library = native(asm, fake)

    def registered(tensor: torch.Tensor, *, writable: bool = True) -> torch.Tensor:
        library.fake_register(tensor.data_ptr(), tensor.numel() * tensor.element_size(), int(writable))
        return tensor

    library.fake_forget_all()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, writable in (
            (torch, "empty", True),
            (launch, "workspace", True),
            (launch, "semaphores", True),
            (launch, "_zeros", False),
        ):
            plain = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, plain=plain, writable=writable, **k: registered(plain(*a, **k), writable=writable))
        for each in operands:
            registered(each, writable=False)
        try:
            yield
        finally:
            library.fake_forget_all()


def bound(asm: Backend, name: str, shape: Shape, split_k: int = 0) -> Launcher:
    """Bind a solution of that name; fail with the reason where it is refused."""
    answer = asm.bind(Solution(asm.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Launcher), f"{shape}: {name}: {answer}"
    return answer


def refused(asm: Backend, name: str, shape: Shape, split_k: int = 0) -> str:
    """Return the reason for which a solution of that name does not bind."""
    answer = asm.bind(Solution(asm.libtype, name, split_k=split_k), shape, CPU)
    assert isinstance(answer, Unsupported), f"{shape}: {name} binds"
    return answer.reason


def fault(asm: Backend, fake: ModuleType, shape: Shape, name: str, split_k: int = 0) -> str:
    """Return the fault of a solution, at the bind, at the launch or in its output, or an empty
    text.
    """
    answer = asm.bind(Solution(asm.libtype, name, split_k=split_k), shape, CPU)
    if not isinstance(answer, Launcher):
        return str(answer.reason)
    try:
        return case(shape).launched(answer, max(split_k, 1))
    except LaunchError as error:
        return f"{error}: {native(asm, fake).fake_last_reason().decode()}"
