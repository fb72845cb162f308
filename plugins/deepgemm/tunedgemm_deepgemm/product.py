"""Describe a product to the library: its function, operands, and settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import scale_strides, torch_dtype

from tunedgemm_deepgemm.limits import BLOCK
from tunedgemm_deepgemm.names import EXPERTS, Kernel, expert_rows, usual_rows

if TYPE_CHECKING:
    import torch

#: Floats of 16 bytes, to whose multiple TMA's columns of scales are rounded up.
_FLOATS = 4
_FUNCTIONS = {"a16w16": "bf16_gemm_nt", "a8w8_blockscale": "fp8_gemm_nt"}
_CONTIGUOUS, _MASKED = "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"
#: Functions of products of experts.
GROUPED = ("set_mk_alignment_for_contiguous_layout", _CONTIGUOUS, _MASKED)
#: Largest block N, up to which a kernel reads weights beyond an expert's rows.
_BEYOND = 256


@attrs.frozen
class Product:
    """A product as the library sees it.

    Attributes:
        op, m, n, k, dtype, outdtype: of the shape.
        along_m, along_k: strides of x's scales, in floats; 0 without scales.
        experts: matrices of the weight, [experts, n, k]; 0 for one without that dimension.
        expected_m: mean rows of an expert in the masked layout, whose x is [experts, m, k]; 0 for
            the contiguous one, whose x is [m, k].
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str
    outdtype: str
    along_m: int = 0
    along_k: int = 0
    experts: int = 0
    expected_m: int = 0

    @property
    def function(self) -> str:
        """Return the name of the library's function."""
        return _FUNCTIONS.get(self.op) or (_MASKED if self.expected_m else _CONTIGUOUS)

    @property
    def leading(self) -> tuple[int, ...]:
        """Return the dimensions of x before its rows."""
        return (self.experts,) if self.expected_m else ()

    def output(self, device: torch.device) -> torch.Tensor:
        """Allocate the output."""
        import torch

        return torch.empty(*self.leading, self.m, self.n, dtype=self.torch_output, device=device)

    def rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate x and its scales in the order that the kernel reads."""
        import torch

        x = torch.empty(*self.leading, self.m, self.k, dtype=torch_dtype(self.dtype), device=device)
        outer = (self.along_k * self.blocks[1],) * len(self.leading)
        sizes, strides = (*self.leading, self.m, self.blocks[1]), (*outer, self.along_m, self.along_k)
        return x, torch.empty_strided(sizes, strides, device=device)

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

    def compiled_forms(self) -> tuple[Product, ...]:
        """Return the products whose calls each compile one kernel.

        The last has scales that the library does not copy. A kernel of the library copies row-major
        ones, and torch others, which needs a GPU.
        """
        copied = attrs.evolve(self, along_m=1, along_k=_padded(self.m)) if self.along_k else self
        return (self, copied) if self.along_m > 1 else (copied,)


def products_of(shape: Shape, kernel: Kernel) -> tuple[Product, ...]:
    """Return the products of a shape in order: two for experts, else one."""
    if shape.op != EXPERTS:
        return (product_of(shape),)
    rows, experts = (usual_rows if kernel.spill else expert_rows)(shape, kernel), int(shape["expert"])
    expected = max(1, -(-shape.m * int(shape["topk"]) // experts)) if kernel.masked else 0
    sizes = (2 * shape.k, shape.n), (shape.n, shape.k)
    return tuple(Product(shape.op, rows, n, k, "fp8_e4m3fn", "bf16", 1, rows, experts, expected) for n, k in sizes)


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

    if product.experts:
        return _expert_operands(product, device)
    dtype = torch_dtype(product.dtype)
    x, weight = (torch.empty(rows, product.k, dtype=dtype, device=device) for rows in (product.m, product.n))
    if not product.along_k:
        return x, weight
    x_scale = torch.empty_strided((product.m, product.blocks[1]), (product.along_m, product.along_k), device=device)
    return x, weight, x_scale, torch.empty(product.blocks, device=device)


class _Memory:
    """Bytes at an address, as torch takes arrays of other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _expert_operands(product: Product, device: torch.device) -> tuple[Any, ...]:
    """Return operands without a used row; a kernel then reads of the weight the first expert's part alone.

    So the weight of a GPU has memory for that part alone. The last two are output and that memory.
    """
    import torch

    dtype, sizes = torch_dtype(product.dtype), (product.experts, product.n, product.k)
    if device.type == "cuda":
        part = torch.empty(min(product.n + _BEYOND, product.experts * product.n) * product.k, dtype=torch.uint8, device=device)
        memory = torch.as_tensor(_Memory(part.data_ptr(), math.prod(sizes)), device=device)
        weight = memory.view(dtype).view(sizes)
    else:
        part, weight = None, torch.empty(sizes, dtype=dtype, device=device)
    count = product.experts if product.expected_m else product.m
    groups = torch.full((count,), 0 if product.expected_m else -1, dtype=torch.int32, device=device)
    w_scale = torch.empty(product.experts, *product.blocks, device=device)
    return *product.rows(device), weight, w_scale, groups, product.output(device), part


def arguments_of(product: Product) -> Callable[[tuple[Any, ...], Any], tuple[Any, ...]]:
    """Return a function of the op's operands and the output, which forms the library's arguments.

    The library has two dimensions, and checks strides of dimensions of size 1, too.
    """
    if product.experts:
        return _expert_arguments(product)
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


def _expert_arguments(product: Product) -> Callable[[tuple[Any, ...], Any], tuple[Any, ...]]:
    """Return a function of (x, x's scales, weight, its scales, groups) and the output.

    The weight's scales may be flat in each expert.
    """
    n, k, (rows, columns), expected = product.n, product.k, product.blocks, (product.expected_m,) if product.expected_m else ()
    weight_form = (product.experts, n, k), (n * k, k, 1)
    scale_form = (product.experts, rows, columns), (rows * columns, columns, 1)

    def grouped(operands: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        x, x_scale, weight, w_scale, groups = operands[:5]
        return (x, x_scale), (weight.as_strided(*weight_form), w_scale.as_strided(*scale_form)), out, groups, *expected

    return grouped


def keywords_of(kernel: Kernel) -> dict[str, str]:
    """Return the keyword arguments of a product."""
    return {"compiled_dims": "mnk"} if kernel.mnk else {}


def apply(module: Any, kernel: Kernel, sms: int) -> None:
    """Set a kernel's settings in a private copy of the library on a device of so many SMs."""
    module.set_num_sms(kernel.sms or sms)
    module.set_pdl(kernel.pdl)
    module.set_block_size_multiple_of((1, kernel.block_n or 1))
    if set_rows := getattr(module, GROUPED[0], None):  # absent from some 2.4
        set_rows(kernel.expert_rows)
