"""Our product among the choices of torch.compile's max-autotune, beside ATen's and Triton's; nothing happens before `offer`.

Without it a routed product is one op of the graph that looks at the tables at every call, for every M, and that is the better
rule where M varies: a choice of max-autotune is made once, for the M that the graph is compiled with, and kept for all that it serves.

Inductor keeps choices in its caches. After tuning anew let it choose anew: ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1``.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch

from tunedgemm.dispatch import tgemm
from tunedgemm.errors import UserError
from tunedgemm.integrations import linear as routing
from tunedgemm.integrations.graph_ops import _torchs, graph_op
from tunedgemm.ops import DEFAULT_OP

#: What torch multiplies without scales.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: In the key of what torch.compile caches: graphs that were compiled with the choice and without it are not exchanged.
_TAG = "+tunedgemm.inductor"

#: What takes back an offer.
_offered = contextlib.ExitStack()


def offer(*, external: bool = False) -> None:
    """Let max-autotune choose between our op, ATen and Triton, by time; for graphs that are compiled from here on.

    That is for routed products and calls of `gemm_a16w16`, without scales and with plain weights.

    Args:
        external: whether products that are not routed get our product as a choice, too (Inductor's ``external_matmul``). Inductor
            gives the output, so what is ours is copied into it: one more pass over it than a routed product takes.

    Raises:
        UserError: this torch has no such choices.
    """
    register, choice, lowerings = _inductor()
    withdraw()
    for op, decomposition in ((routing.op, linear), (graph_op(DEFAULT_OP), a16w16)):
        register(op, configs=[choice(decomposition)], name=f"tunedgemm_{decomposition.__name__}", min_speedup_threshold=1.0)
        lowerings[op] = _where_asked(lowerings[op], decomposition)
        _offered.callback(lowerings.pop, op, None)
    if external:
        torch._inductor.config.external_matmul = [*torch._inductor.config.external_matmul, tunedgemm_mm]
        _offered.callback(_without_external)
    torch.compiler.config.cache_key_tag += _TAG
    _offered.callback(_without_tag)


def withdraw() -> None:
    """Take back what `offer` did, if anything; graphs that are compiled stay as they are."""
    _offered.close()


def _without_external() -> None:
    left = [function for function in torch._inductor.config.external_matmul if function is not tunedgemm_mm]
    torch._inductor.config.external_matmul = left


def _without_tag() -> None:
    torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(_TAG, "")


def tunedgemm_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``a[M, K] @ b[K, N]`` into *out*, as Inductor calls an external product."""
    out.copy_(tgemm.mm(a, b.t(), None, out.dtype))


def _inductor() -> tuple[Any, Any, dict[Any, Any]]:
    """What registers choices of an op, what holds one, and where lowerings of an op are looked up before Inductor's own."""
    try:
        from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
        from torch._inductor.lowering import user_lowerings
    except ImportError as error:
        raise _too_old() from error
    if not {"configs", "name", "min_speedup_threshold"} <= inspect.signature(register_custom_op_autotuning).parameters.keys():
        raise _too_old()
    return register_custom_op_autotuning, CustomOpConfig, user_lowerings


def _too_old() -> UserError:
    return UserError(
        f"torch {torch.__version__} cannot choose between an op and others: offer() is verified with torch 2.13; "
        "routed products run in compiled graphs without it"
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, weight_layout: str = "row") -> torch.Tensor:
    """The routed op as Inductor knows it: choices of ATen and of Triton."""
    del weight_layout
    return torch._C._nn.linear(x, weight, bias)


def a16w16(  # noqa: PLR0913, PLR0917 - the op's arguments
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_a: None = None,
    scale_b: None = None,
    scale_c: None = None,
    otype: torch.dtype | None = None,
    weight_layout: str = "row",
    fields: str = "",
) -> torch.Tensor:
    """`gemm_a16w16` without scales in a graph, as Inductor knows it."""
    del scale_a, scale_b, scale_c, weight_layout, fields
    return _torchs(x, weight, bias, otype)


def _where_asked(choosing: Any, decomposition: Any) -> Any:
    """A lowering that chooses under max-autotune; None, which stands for the op as it is, else and for what is more than a product."""
    signature = inspect.signature(decomposition)

    def lowered(*arguments: Any, **named: Any) -> Any:
        settings = torch._inductor.config
        asked, told = settings.max_autotune or settings.max_autotune_gemm, signature.bind(*arguments, **named).arguments
        scaled = any(told.get(name) is not None for name in ("scale_a", "scale_b", "scale_c"))
        product = told.get("weight_layout", "row") == "row" and not scaled and told["x"].get_dtype() in _FLOATS
        return choosing(*arguments, **named) if asked and product else None

    return lowered
