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

#: How choices of Inductor are named that come from here.
NAME = "tunedgemm_linear"

#: In the key of what torch.compile caches: graphs that were compiled with the choice and without it are not exchanged.
_TAG = "+tunedgemm.inductor"

#: What takes back an offer.
_offered = contextlib.ExitStack()


def offer(*, external: bool = False) -> None:
    """Let max-autotune choose between the routed op, ATen and Triton, by time; for graphs that are compiled from here on.

    Args:
        external: whether products that are not routed get our product as a choice, too (Inductor's ``external_matmul``). Inductor
            gives the output, so what is ours is copied into it: one more pass over it than a routed product takes.

    Raises:
        UserError: this torch has no such choices.
    """
    register, choice, lowerings = _inductor()
    withdraw()
    register(routing.op, configs=[choice(decomposed)], name=NAME, min_speedup_threshold=1.0)
    lowerings[routing.op] = _where_asked(lowerings[routing.op])
    _offered.callback(lowerings.pop, routing.op, None)
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


def decomposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, weight_layout: str = "row") -> torch.Tensor:
    """The product as Inductor knows it: choices of ATen and of Triton."""
    del weight_layout
    return torch._C._nn.linear(x, weight, bias)


def _where_asked(choosing: Any) -> Any:
    """A lowering that chooses under max-autotune; None, which stands for the op as it is, else and for shuffled weights."""

    def lowered(x: Any, weight: Any, bias: Any = None, weight_layout: str = "row") -> Any:
        settings = torch._inductor.config
        asked = settings.max_autotune or settings.max_autotune_gemm
        return choosing(x, weight, bias, weight_layout) if asked and weight_layout == "row" else None

    return lowered
