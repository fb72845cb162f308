"""Describe a product to the library: its function, operands, and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from tunedgemm.plugin import Shape
from tunedgemm.tools import scale_strides, torch_dtype

from tunedgemm_deepgemm.limits import BLOCK
from tunedgemm_deepgemm.names import Kernel

if TYPE_CHECKING:
    import torch

#: Floats of 16 bytes, to whose multiple TMA's columns of scales are rounded up.
_FLOATS = 4
_FUNCTIONS = {"a16w16": "bf16_gemm_nt", "a8w8_blockscale": "fp8_gemm_nt"}


@attrs.frozen
class Product:
    """A product as the library sees it.

    Attributes:
        op, m, n, k, dtype, outdtype: of the shape.
        along_m, along_k: strides of x's scales, in floats; 0 without scales.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str
    outdtype: str
    along_m: int = 0
    along_k: int = 0

    @property
    def function(self) -> str:
        """Return the name of the library's function."""
        return _FUNCTIONS[self.op]

    @property
    def torch_output(self) -> torch.dtype:
        """Return the output's dtype."""
        return torch_dtype(self.outdtype)

    @property
    def blocks(self) -> tuple[int, int]:
        """Return the rows and columns of the weight's scales."""
        return -(-self.n // BLOCK), -(-self.k // BLOCK)

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of the scales that the library copies in each call."""
        in_place = not self.along_k or (self.along_m, self.along_k) == (1, _padded(self.m))
        return 0 if in_place else 4 * _padded(self.m) * self.blocks[1]

    def aligned(self) -> Product:
        """Return the product with scales that the library does not copy."""
        return attrs.evolve(self, along_m=1, along_k=_padded(self.m)) if self.along_m > 1 else self


def product_of(shape: Shape) -> Product:
    """Return the product of a shape.

    One block of K needs no order: its scales are a column, which TMA reads in place.
    """
    along_m, along_k = 0, 0
    if shape.scale == "block":
        along_m, along_k = (1, _padded(shape.m)) if shape.k <= BLOCK else scale_strides(shape)
    return Product(shape.op, shape.m, shape.n, shape.k, shape.dtype, shape.outdtype, along_m, along_k)


def _padded(m: int) -> int:
    return -(-m // _FLOATS) * _FLOATS


def operands_of(product: Product, device: torch.device) -> tuple[Any, ...]:
    """Return operands with any content, as the op has them."""
    import torch

    dtype = torch_dtype(product.dtype)
    x, weight = (torch.empty(rows, product.k, dtype=dtype, device=device) for rows in (product.m, product.n))
    if not product.along_k:
        return x, weight
    x_scale = torch.empty_strided((product.m, product.blocks[1]), (product.along_m, product.along_k), device=device)
    return x, weight, x_scale, torch.empty(product.blocks, device=device)


def arguments_of(product: Product) -> Callable[[tuple[Any, ...], Any], tuple[Any, ...]]:
    """Return a function of the op's operands and the output, which forms the library's arguments.

    The library has two dimensions, and checks strides of dimensions of size 1, too.
    """
    m, k, (rows, columns) = product.m, product.k, product.blocks
    along, regular, single = (product.along_m, product.along_k), (columns, 1), m == 1

    def plain(operands: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        x, weight = operands
        return x.as_strided((m, k), (k, 1)) if single or x.dim() != 2 else x, weight, out

    def scaled(operands: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        x, weight, x_scale, w_scale = operands
        if single or x.dim() != 2:
            x = x.as_strided((m, k), (k, 1))
        if x_scale.stride() != along:
            x_scale = x_scale.as_strided((m, columns), along)
        if w_scale.stride() != regular:
            w_scale = w_scale.as_strided((rows, columns), regular)
        return (x, x_scale), (weight, w_scale), out

    return scaled if product.along_k else plain


def keywords_of(kernel: Kernel) -> dict[str, str]:
    """Return the keyword arguments of a product."""
    return {"compiled_dims": "mnk"} if kernel.mnk else {}


def apply(module: Any, kernel: Kernel, sms: int) -> None:
    """Set a kernel's settings in a private copy of the library on a device of so many SMs."""
    module.set_num_sms(kernel.sms or sms)
    module.set_pdl(kernel.pdl)
    module.set_block_size_multiple_of((1, kernel.block_n or 1))
