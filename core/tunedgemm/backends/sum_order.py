"""Names of orders of sums, `Solution.sum_order`: words for what decides an output's bits."""

from __future__ import annotations

from tunedgemm.shape import Shape

#: Scales of whole tensors or rows: sums are multiplied by that of x, then by that of the weight.
X_THEN_W = "x-w"
#: Scales of whole tensors or rows: sums are multiplied by their product.
PRODUCT = "xw"


def sum_order(shape: Shape, products: str, *, promoted: int = 0, part: int = 0, scales: str = X_THEN_W, fused: bool = False) -> str:
    """Return the name of an order of sums, such as ``wgmma-k16-s1024`` or ``exact-x-w``.

    Kernels of equal names give equal bits for one N, K, dtypes and epilogue, at every M. Sums of
    int8 products are exact in any order, so only the epilogue counts.

    Args:
        products: who adds products in the order of K to float32, and how many at once.
        promoted: elements of K after which sums leave the matrix unit and are added in float32: by
            one addition, or with block scales by one fused multiply-add with their product.
        part: elements of K of each part but the last, which are added in the order of K; 0 for one
            part.
        scales: how sums are multiplied by scales of whole tensors or rows, `X_THEN_W` or `PRODUCT`.
        fused: whether the last of these multiplications and the addition of the bias round once.
    """
    exact, scaled = shape.dtype == "int8", shape.scale in ("tensor", "row")
    words = ["exact"] if exact else [products]
    words += [f"p{promoted}"] * (promoted > 0 and not exact) + [f"s{part}"] * (0 < part < shape.k and not exact)
    words += [scales] * scaled + ["fma"] * (scaled and shape.bias and fused)
    return "-".join(words)
