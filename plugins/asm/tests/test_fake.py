"""Test the fake HIP runtime: what it rejects, and that it computes from argument bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.nightly

SPLIT, WHOLE = "bf16gemm_fp32bf16_tn_32x64_splitk_clean", "bf16gemm_fp32bf16_tn_32x64_pf3_splitk"
M, N, K = 40, 128, 192
INVALID_VALUE, INVALID_IMAGE, NO_BINARY, INVALID_HANDLE, NOT_FOUND, ILLEGAL_ADDRESS, TIMEOUT = 1, 200, 209, 400, 500, 700, 702


class Hip:
    """The fake as a C program uses it."""

    def __init__(self, fake: ModuleType, objects: ModuleType) -> None:
        self.fake, self.native = fake, fake.native(fake.copy_of())
        self.code = objects.made([fake.symbol(SPLIT), fake.symbol(WHOLE)])
        module = ctypes.c_void_p()
        assert self.native.hipModuleLoadData(ctypes.byref(module), self.code) == 0
        self.module = module

    def function(self, stem: str) -> ctypes.c_void_p:
        """Return a kernel of the module."""
        found = ctypes.c_void_p()
        assert self.native.hipModuleGetFunction(ctypes.byref(found), self.module, self.fake.symbol(stem).encode()) == 0
        return found

    def launch(self, stem: str, arguments: bytes, grid: tuple[int, int, int], threads: int = 256, end: int = 3) -> int:
        """Launch a kernel and return the status."""
        buffer, size = ctypes.create_string_buffer(arguments, len(arguments)), ctypes.c_size_t(len(arguments))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), end)
        return int(self.native.hipModuleLaunchKernel(self.function(stem), *grid, threads, 1, 1, 0, None, None, extra))

    def reason(self) -> str:
        """Return why the last call was rejected."""
        return str(self.native.fake_last_reason().decode())


@pytest.fixture
def hip(fake: ModuleType, objects: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hip]:
    """Return the fake for gfx942."""
    monkeypatch.setenv("FAKE_GFX", "gfx942")
    found = Hip(fake, objects)
    yield found
    found.native.fake_forget_all()


class Product:
    """Operands and the 352 argument bytes of AITER's launcher."""

    def __init__(self, splits: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.weight = (torch.randn(rows, K, generator=generator).bfloat16() for rows in (M, N))
        self.out, self.semaphores = torch.full((M, N), torch.nan).bfloat16(), torch.zeros(1024, dtype=torch.int32)
        self.wanted = self.x.float() @ self.weight.float().T
        self.splits = splits

    def arguments(self, **changes: int) -> bytes:
        """Pack the arguments: D, C, A, B, alpha, beta, strides, sizes, splits, output, bias,
        semaphore.
        """
        values = {
            "D": self.out.data_ptr(), "C": 0, "A": self.x.data_ptr(), "B": self.weight.data_ptr(), "alpha": 0x3F800000, "beta": 0,
            "D0": 2 * N, "D1": 0, "C0": 2 * N, "C1": 0, "A0": 2 * K, "A1": 0, "B0": 2 * K, "B1": 0, "M": M, "N": N, "K": K,
            "splitk": self.splits, "is_out_b16": 1, "Bias": 0, "add_bias": 0,
            "semaphore": self.semaphores.data_ptr() if self.splits > 1 else 0, **changes,
        }  # fmt: skip
        return b"".join(struct.pack("<QQ", value, 0) for value in values.values())

    def right(self, rows: slice = slice(None), columns: slice = slice(None)) -> bool:
        """Check a part of the output."""
        wanted = self.wanted[rows, columns]
        return bool((self.out[rows, columns].float() - wanted).abs().max() <= 2**-6 * wanted.abs().max())


def test_the_bytes_alone_make_the_product(hip: Hip) -> None:
    """The fake computes the product from the argument bytes, only in launched tiles."""
    product = Product()
    assert hip.launch(WHOLE, product.arguments(), (2, 2, 1)) == 0, hip.reason()
    assert product.right()
    product.out.fill_(torch.nan)
    assert hip.launch(WHOLE, product.arguments(), (1, 1, 1)) == 0
    assert product.right(slice(32), slice(64))
    assert product.out[32:].isnan().all()
    assert product.out[:, 64:].isnan().all()
    assert hip.native.fake_launches() == 2


def test_parts_of_k_meet_over_semaphores(hip: Hip) -> None:
    """Splits count on semaphores; a nonzero counter or a missing split fails."""
    product = Product(splits=3)
    assert hip.launch(SPLIT, product.arguments(), (2, 2, 3)) == 0, hip.reason()
    assert product.right()
    assert not product.semaphores.any()
    product.semaphores[3] = 1
    assert hip.launch(SPLIT, product.arguments(), (2, 2, 3)) == TIMEOUT
    assert "semaphore 3 is 1 at the start" in hip.reason()
    product.semaphores.zero_()
    assert hip.launch(SPLIT, product.arguments(), (2, 2, 2)) == INVALID_VALUE
    assert hip.launch(SPLIT, product.arguments(semaphore=0), (2, 2, 3)) == ILLEGAL_ADDRESS


def test_arguments_that_aiters_launcher_never_makes(hip: Hip, failing: Any) -> None:
    """Invalid arguments are rejected, and nothing is written."""

    def check(changes: dict[str, int], status: int) -> None:
        product = Product()
        assert hip.launch(WHOLE, product.arguments(**changes), (2, 2, 1)) == status, hip.reason()
        assert product.out.isnan().all()

    assert not failing(
        check,
        [
            ({"C": 16}, INVALID_VALUE),
            ({"D1": 4}, INVALID_VALUE),
            ({"beta": 1}, INVALID_VALUE),
            ({"A0": 2 * K - 2}, INVALID_VALUE),
            ({"K": K - 32}, INVALID_VALUE),
            ({"N": N - 32}, INVALID_VALUE),
            ({"M": 0}, INVALID_VALUE),
            ({"A": 0}, ILLEGAL_ADDRESS),
            ({"B": 4096}, ILLEGAL_ADDRESS),
            ({"splitk": 2}, INVALID_VALUE),
            ({"add_bias": 1}, ILLEGAL_ADDRESS),
        ],
    )


def test_launches_that_hip_refuses(hip: Hip) -> None:
    """Invalid grids, workgroups, functions and argument lists are rejected."""
    arguments = Product().arguments()
    assert hip.launch(WHOLE, arguments, (0, 1, 1)) == INVALID_VALUE
    assert hip.launch(WHOLE, arguments, (3, 2, 1)) == INVALID_VALUE
    assert hip.launch(WHOLE, arguments, (2, 2, 1), threads=128) == INVALID_VALUE
    assert hip.launch(WHOLE, arguments, (2, 2, 1), end=0) == INVALID_VALUE
    assert hip.launch(WHOLE, arguments[:336], (2, 2, 1)) == INVALID_VALUE
    other = ctypes.create_string_buffer(512)
    assert hip.native.hipModuleLaunchKernel(other, 2, 2, 1, 256, 1, 1, 0, None, None, (ctypes.c_void_p * 1)(3)) == INVALID_HANDLE


def test_unregistered_memory_is_not_accessed(hip: Hip) -> None:
    """Accesses outside registered buffers are rejected."""
    product = Product()

    def named(tensor: torch.Tensor, writable: int, less: int = 0) -> None:
        hip.native.fake_register(tensor.data_ptr(), tensor.numel() * tensor.element_size() - less, writable)

    for out, less, status in ((0, 0, ILLEGAL_ADDRESS), (1, 1, ILLEGAL_ADDRESS), (1, 0, 0)):
        hip.native.fake_forget_all()
        named(product.x, 0)
        named(product.weight, 0, less)
        named(product.out, out)
        assert hip.launch(WHOLE, product.arguments(), (2, 2, 1)) == status, hip.reason()
    assert product.right()


def test_code_objects(hip: Hip, objects: ModuleType, fake: ModuleType) -> None:
    """Invalid code objects, other architectures and missing kernels are rejected."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    for code, status in (
        (b"no code object" * 20, INVALID_IMAGE),
        (objects.made(["one"], machine=62), INVALID_IMAGE),
        (objects.made([], "gfx942"), INVALID_IMAGE),
        (objects.made(["one"], "gfx950"), NO_BINARY),
    ):
        assert hip.native.hipModuleLoadData(ctypes.byref(module), code) == status
    assert hip.native.hipModuleGetFunction(ctypes.byref(function), hip.module, b"another") == NOT_FOUND
    unknown: Any = objects.made(["a_kernel_of_another_kind"])
    assert hip.native.hipModuleLoadData(ctypes.byref(module), unknown) == 0
    assert hip.native.hipModuleGetFunction(ctypes.byref(function), module, b"a_kernel_of_another_kind") == 0
