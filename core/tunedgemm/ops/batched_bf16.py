"""batched_bf16: ``out[B, M, N] = x[B, M, K] @ weight[B, N, K].mT (+ bias[B, N])`` in bf16 or fp16.

AITER's ``batched_gemm_bf16``; its table is ``bf16_tuned_batched_gemm.csv``. Accumulation is in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import batched, quantised
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.op import Arguments, Call, Columns, Op, Serving
from tunedgemm.ops.padded_m import exact
from tunedgemm.ops.product import exact_dtype, exact_product, tolerance
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

NAME = "batched_bf16"
_OPERANDS = ("x", "weight", "bias?")
_DTYPES = ("bf16", "fp16")


def _shape_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, otype: torch.dtype | None = None) -> Shape:
    """Return the shape of a call; raises OperandError for operands that do not fit each other."""
    batches, m, n, k, dtype = batched.check_operands(NAME, _DTYPES, x, weight)
    bias_dtype = batched.bias_dtype_of(NAME, bias, batches, n, x.device)
    return Shape(
        op=NAME,
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        outdtype=quantised.outdtype_of(NAME, otype, dtype),
        epilogue="bias" if bias_dtype else "none",
        bias_dtype=bias_dtype,
        extra={"B": batches},  # type: ignore[arg-type]
    )


def _make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal x [B, m, k], weight [B, n, k] and, if the shape has one, bias [B, n]."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*sizes: int, dtype: str) -> torch.Tensor:
        return torch.randn(int(shape["B"]), *sizes, generator=generator, device=device, dtype=torch_dtype(dtype))

    operands = [draw(shape.m, shape.k, dtype=shape.dtype), draw(shape.n, shape.k, dtype=shape.dtype)]
    return (*operands, draw(shape.n, dtype=shape.bias_dtype)) if shape.bias else tuple(operands)


def _reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute [B, m, n] on the operands' device, rounded to float64 where quick, else to float32."""
    x, weight, bias = (*operands, None)[:3]
    wide = exact_dtype(int(shape["B"]) * shape.m, shape.n, shape.k)
    out = exact_product(x, weight, wide)
    return out if bias is None else out + bias.to(wide).reshape(-1, 1, shape.n)


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:2], weight.shape[1]), dtype=otype or x.dtype)


def _entry(serving: Serving) -> Mapping[str, Call]:
    import torch

    bf16 = torch.bfloat16

    def batched_gemm_bf16(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = bf16,
        splitK: int | None = None,
    ) -> torch.Tensor:
        """Compute ``XQ[B, M, K] @ WQ[B, N, K].mT (+ bias[B, N])`` by the solution of the tables.

        Args:
            XQ, WQ: activations and weight, both bf16 or both fp16.
            bias: [B, N] or [B, 1, N] in bf16, fp16 or fp32, or absent.
            dtype: of the output: bf16, fp16 or fp32; None for that of XQ.
            splitK: accepted as AITER does and not used: the table decides.

        Returns:
            A new tensor [B, M, N].

        Raises:
            OperandError: shapes, dtypes or devices that do not fit each other.
        """
        del splitK
        return hot(XQ, WQ, bias, dtype)

    def arrange(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = bf16,
        splitK: int | None = None,
    ) -> Arguments:
        """Return the arguments of `batched_gemm_bf16` as those of `Serving.call`."""
        del splitK
        return (XQ, WQ, bias), dtype, {}

    hot = hot_function(serving, ("XQ", "WQ", "bias?"), otype="dtype", general=batched_gemm_bf16, arrange=arrange)
    return {"batched_gemm_bf16": hot, "batched_gemm_bf16_CK": hot}


_parse = batched.parser(NAME, _DTYPES)
_example = quantised.example_of(_parse, batched.KEY)

op = Op(
    name=NAME,
    operands=_OPERANDS,
    weights=(1, 2),
    columns=Columns(
        tuned_file="bf16_tuned_batched_gemm.csv",
        untuned_file="bf16_untuned_batched_gemm.csv",
        variable="AITER_CONFIG_BF16_BATCHED_GEMM",
        key=batched.KEY,
        values=quantised.VALUES,
        parse=_parse,
        format=batched.formatter(_DTYPES[0]),
        own=batched.OWN,
    ),
    shape_of=_shape_of,
    make_inputs=_make_inputs,
    reference=_reference,
    tolerance=tolerance,
    flops=batched.flops,
    bytes_moved=batched.bytes_moved,
    fake=_fake,
    problem=batched.domain(_DTYPES).problem,
    equivalent_shapes=batched.equivalent_shapes_of(_DTYPES[0]),
    padded_m=exact,
    first_rows=batched.first_rows,
    examples=lambda: (
        _example(16, 1, 128, 256),
        _example(1, 33, 130, 72),
        _example(3, 17, 64, 99),  # an odd K: rows that are not 16-byte aligned
        _example(2, 64, 192, 128, bias="True"),
        _example(4, 5, 96, 64, bias="True", outdtype="fp32"),
        _example(8, 24, 80, 160, dtype="fp16", outdtype="fp16"),
        _example(5, 7, 48, 64, dtype="fp16"),
        _example(4, 0, 64, 128),
    ),
    large=lambda: (
        _example(16, 512, 1280, 8192),
        _example(128, 1024, 512, 128),  # DeepSeek V3: the absorbed projection of each head
        _example(16, 4099, 2048, 576),  # a prime M beyond one wave of tiles
    ),
    functions=("batched_gemm_bf16", "batched_gemm_bf16_CK"),
    entry=_entry,
)
