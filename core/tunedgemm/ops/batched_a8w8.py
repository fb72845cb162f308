"""batched_a8w8: products of batches in int8 or fp8 with scales by row.

``out[B, M, N] = (x[B, M, K] @ weight[B, N, K].mT) * x_scale * w_scale (+ bias[B, N])``. AITER's
``batched_gemm_a8w8``; its table is ``a8w8_tuned_batched_gemm.csv``. Each row of x and of the weight
of each batch has one float32 scale. Accumulation is in int32 or float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import batched, quantised
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.op import Call, Columns, Op, Serving
from tunedgemm.ops.padded_m import exact
from tunedgemm.ops.product import exact_dtype, exact_product, tolerance
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

NAME = "batched_a8w8"
_OPERANDS = ("x", "weight", "x_scale", "w_scale", "bias?")
_DTYPES = ("int8", "fp8_e4m3fn", "fp8_e4m3fnuz")


def _shape_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    otype: torch.dtype | None = None,
) -> Shape:
    """Return the shape of a call; raises OperandError for operands that do not fit each other."""
    batches, m, n, k, dtype = batched.check_operands(NAME, _DTYPES, x, weight)
    _check_scale("x_scale", x_scale, ((batches, m, 1), (batches, m)), x.device)
    _check_scale("w_scale", w_scale, ((batches, 1, n), (batches, n, 1), (batches, n)), x.device)
    bias_dtype = batched.bias_dtype_of(NAME, bias, batches, n, x.device)
    return Shape(
        op=NAME,
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        outdtype=quantised.outdtype_of(NAME, otype, "bf16"),
        epilogue="bias" if bias_dtype else "none",
        bias_dtype=bias_dtype,
        scale="row",
        extra={"B": batches},  # type: ignore[arg-type]
    )


def _check_scale(name: str, scale: torch.Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    """Raise OperandError for a scale that is not float32, of one of the *shapes*, on *device*."""
    import torch

    is_tensor = isinstance(scale, torch.Tensor)
    if not is_tensor or tuple(scale.shape) not in shapes or scale.dtype != torch.float32 or scale.device != device:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        hint = "; one value for all rows must be expanded" if is_tensor and scale.numel() == 1 else ""
        raise OperandError(f"{NAME}: {name} must be {wanted}, torch.float32 on {device} (got {quantised.describe(scale)}){hint}")


def _make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw x [B, m, k] and weight [B, n, k] quantised by row, with their scales, and a bias if asked.

    Scales are [B, m, 1] and [B, n, 1]; the bias is [B, n].
    """
    import torch

    from tunedgemm.ops.formats.quant import pertoken_quant

    generator, batches = torch.Generator(device).manual_seed(seed), int(shape["B"])

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(batches, *sizes, generator=generator, device=device)

    def uneven(rows: int) -> torch.Tensor:  # a scale of another row shows
        return 2 ** -torch.rand(batches, rows, 1, generator=generator, device=device)

    x, x_scale = pertoken_quant(draw(shape.m, shape.k) * uneven(shape.m), quant_dtype=torch_dtype(shape.dtype))
    weight, w_scale = pertoken_quant(draw(shape.n, shape.k) * uneven(shape.n), quant_dtype=torch_dtype(shape.dtype))
    operands = (x, weight, x_scale, w_scale)
    return (*operands, draw(shape.n).to(torch_dtype(shape.bias_dtype))) if shape.bias else operands


def _reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute [B, m, n] on the operands' device, rounded to float64 where quick, else to float32."""
    x, weight, x_scale, w_scale, bias = (*operands, None)[:5]
    batches = int(shape["B"])
    wide = exact_dtype(batches * shape.m, shape.n, shape.k)
    out = exact_product(x, weight, wide)
    out *= x_scale.to(wide).reshape(batches, shape.m, 1)
    out *= w_scale.to(wide).reshape(batches, 1, shape.n)
    return out if bias is None else out + bias.to(wide).reshape(batches, 1, shape.n)


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:2], weight.shape[1]), dtype=otype or torch_dtype("bf16"))


def _entry(serving: Serving) -> Mapping[str, Call]:
    import torch

    scaled, bf16 = hot_function(serving, _OPERANDS), torch.bfloat16

    def batched_gemm_a8w8(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = bf16,
        splitK: int | None = None,
    ) -> torch.Tensor:
        """Compute ``(XQ[B, M, K] @ WQ[B, N, K].mT) * x_scale * w_scale (+ bias)`` by the tables.

        Args:
            XQ, WQ: activations and weight, both int8 or both fp8.
            x_scale: float32 [B, M, 1] or [B, M].
            w_scale: float32 [B, 1, N], [B, N, 1] or [B, N].
            bias: [B, N] or [B, 1, N] in bf16, fp16 or fp32, or absent.
            dtype: of the output: bf16, fp16 or fp32; None for bf16.
            splitK: accepted as AITER does and not used: the table decides.

        Returns:
            A new tensor [B, M, N].

        Raises:
            OperandError: shapes, dtypes or devices that do not fit each other.
        """
        del splitK
        return scaled(XQ, WQ, x_scale, w_scale, bias, dtype)

    return {"batched_gemm_a8w8": batched_gemm_a8w8, "batched_gemm_a8w8_CK": batched_gemm_a8w8}


_parse = batched.parser(NAME, _DTYPES, "row")
_example = quantised.example_of(_parse, batched.KEY)

op = Op(
    name=NAME,
    operands=_OPERANDS,
    weights=(1, 3, 4),
    columns=Columns(
        tuned_file="a8w8_tuned_batched_gemm.csv",
        untuned_file="a8w8_untuned_batched_gemm.csv",
        variable="AITER_CONFIG_A8W8_BATCHED_GEMM",
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
    problem=batched.domain(_DTYPES, "row").problem,
    equivalent_shapes=batched.equivalent_shapes_of(_DTYPES[0]),
    padded_m=exact,
    first_rows=batched.first_rows,
    examples=lambda: (
        _example(16, 1, 128, 256),
        _example(1, 33, 130, 72),
        _example(3, 17, 64, 99),  # an odd K: rows that are not 16-byte aligned
        _example(2, 64, 192, 128, bias="True"),
        _example(4, 5, 96, 64, bias="True", outdtype="fp32"),
        _example(8, 24, 80, 160, outdtype="fp16"),
        _example(5, 7, 48, 64, dtype="fp8_e4m3fn"),
        _example(2, 31, 64, 128, dtype="fp8_e4m3fn", bias="True", outdtype="fp16"),
        _example(3, 8, 32, 96, dtype="fp8_e4m3fnuz"),
        _example(4, 0, 64, 128),
    ),
    large=lambda: (
        _example(16, 512, 1280, 8192),
        _example(16, 4099, 2048, 576),  # a prime M beyond one wave of tiles
        _example(8, 1024, 4096, 4096, dtype="fp8_e4m3fn"),
    ),
    functions=("batched_gemm_a8w8", "batched_gemm_a8w8_CK"),
    entry=_entry,
)
