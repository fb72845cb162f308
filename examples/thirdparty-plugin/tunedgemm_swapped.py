"""The backend ``swapped``: ``out.T = weight @ x.T`` on CPUs and GPUs, with K whole or split.

Vendor libraries choose by the roles of M and N. With few rows the swapped product runs another
kernel, sometimes a faster one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution, Unsupported, hookimpl

if TYPE_CHECKING:
    import torch

MOST_ROWS = 256  # the transpose at the end is one more pass over the output


class Swapped:
    """Hooks of the backend."""

    @hookimpl
    def library_version(self, device: Device) -> str:
        """Return torch's version, which decides the kernel behind a name."""
        return dict(device.versions).get("torch", "")

    @hookimpl
    def supports(self, shape: Shape) -> Unsupported | None:
        """Accept plain operands of one dtype with few rows."""
        if shape.layout != "row" or shape.scale != "none":
            return Unsupported("takes plain [N, K] weights without scales")
        if shape.outdtype != shape.dtype or shape.bias_dtype not in ("", shape.dtype):
            return Unsupported("takes and returns one dtype")
        return None if shape.m <= MOST_ROWS else Unsupported(f"M={shape.m} is more than {MOST_ROWS} rows")

    @hookimpl
    def enumerate_solutions(self, shape: Shape) -> Iterator[Solution]:
        """List K in one piece first, then equal pieces of at least 512."""
        yield Solution("swapped", "mm_v1", split_k=1)
        for pieces in (2, 4, 8):
            if shape.k % pieces == 0 and shape.k // pieces >= 512:
                yield Solution("swapped", "bmm_v1", split_k=pieces)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape) -> Launcher | Unsupported:
        """Bind torch's products to the sizes."""
        import torch

        n, k, pieces = shape.n, shape.k, max(solution.split_k, 1)
        if solution.kernel_name not in ("mm_v1", "bmm_v1") or k % pieces:
            return Unsupported(f"no kernel {solution.kernel_name!r} for K={k} in {pieces} pieces")

        def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            swapped = torch.mm(weight, x.reshape(-1, k).t())
            return finished(swapped, x, bias)

        def split(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            weights = weight.view(n, pieces, k // pieces).transpose(0, 1)
            columns = x.reshape(-1, pieces, k // pieces).permute(1, 2, 0)
            return finished(torch.bmm(weights, columns).sum(0), x, bias)

        def finished(swapped: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = swapped.t().contiguous()
            return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], n)

        return Launcher(whole if solution.kernel_name == "mm_v1" else split)


swapped = Backend("swapped", Swapped(), contract=1, ops=("a16w16",))
