"""The hot path of the products with scales: one flat tuple key, one look-up, one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


Placed = tuple[tuple["torch.Tensor | None", ...], "torch.dtype | None", dict[str, Any]]


def _place_scaled(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    otype: torch.dtype | None,
) -> Placed:
    """The arguments of `scaled_entry`'s function as those of `Dispatcher.call`."""
    return (x, weight, x_scale, w_scale) if bias is None else (x, weight, x_scale, w_scale, bias), otype, {}


def _place_weight_scaled(
    x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, otype: torch.dtype | None
) -> Placed:
    """The arguments of `weight_scaled_entry`'s function as those of `Dispatcher.call`."""
    return (x, weight, w_scale) if bias is None else (x, weight, w_scale, bias), otype, {}


def scaled_entry(dispatcher: Any) -> Callable[..., torch.Tensor]:
    """The function (x, weight, x_scale, w_scale, bias or None, otype or None) over a dispatcher's launchers, as a closure: no
    attribute look-ups, no locks."""
    from torch import is_grad_enabled

    get, resolve, demote = dispatcher.launchers.get, dispatcher.resolve, dispatcher.demote

    def scaled(
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None,
        otype: torch.dtype | None,
    ) -> torch.Tensor:
        operands: tuple[torch.Tensor, ...] = (x, weight, x_scale, w_scale)
        try:
            key: tuple[Any, ...] = (
                x.shape, weight.shape, x_scale.shape, w_scale.shape, x.dtype, weight.dtype, x_scale.dtype, w_scale.dtype,
                x.get_device(), weight.get_device(), x_scale.get_device(), w_scale.get_device(), otype,
                type(x), type(weight), type(x_scale), type(w_scale),
                x_scale.is_contiguous(),  # apart: one whose memory holds the transpose must be
                not (x.data_ptr() | weight.data_ptr() | x_scale.data_ptr() | w_scale.data_ptr()) & 15
                and x.is_contiguous() and weight.is_contiguous() and w_scale.is_contiguous(),
                is_grad_enabled() and (x.requires_grad or weight.requires_grad or x_scale.requires_grad or w_scale.requires_grad),
            )  # fmt: skip
            if bias is not None:
                operands = (x, weight, x_scale, w_scale, bias)
                key = (
                    *key, bias.shape, bias.dtype, bias.get_device(), type(bias), not bias.data_ptr() & 15 and bias.is_contiguous(),
                    is_grad_enabled() and bias.requires_grad,
                )  # fmt: skip
            call = get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensor, which shape_of names; no memory; a size that is a symbol
            return resolve(None, (x, weight, x_scale, w_scale, bias), otype)  # type: ignore[no-any-return]
        if call is None:
            return resolve(key, operands, otype)  # type: ignore[no-any-return]
        try:
            return call(*operands)  # type: ignore[no-any-return]
        except Exception as error:  # a kernel of a plugin may raise anything
            return demote(error, key, operands, otype)  # type: ignore[no-any-return]

    return dispatcher.hot(scaled, _place_scaled)  # type: ignore[no-any-return]


def weight_scaled_entry(dispatcher: Any) -> Callable[..., torch.Tensor]:
    """The function (x, weight, w_scale, bias or None, otype or None) over a dispatcher's launchers: `scaled_entry` where x has no scale."""
    from torch import is_grad_enabled

    get, resolve, demote = dispatcher.launchers.get, dispatcher.resolve, dispatcher.demote

    def weight_scaled(
        x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, otype: torch.dtype | None
    ) -> torch.Tensor:
        operands: tuple[torch.Tensor, ...] = (x, weight, w_scale)
        try:
            key: tuple[Any, ...] = (
                x.shape, weight.shape, w_scale.shape, x.dtype, weight.dtype, w_scale.dtype,
                x.get_device(), weight.get_device(), w_scale.get_device(), otype, type(x), type(weight), type(w_scale),
                w_scale.is_contiguous(),  # apart: shuffled scales must be
                not (x.data_ptr() | weight.data_ptr() | w_scale.data_ptr()) & 15 and x.is_contiguous() and weight.is_contiguous(),
                is_grad_enabled() and (x.requires_grad or weight.requires_grad or w_scale.requires_grad),
            )  # fmt: skip
            if bias is not None:
                operands = (x, weight, w_scale, bias)
                key = (
                    *key, bias.shape, bias.dtype, bias.get_device(), type(bias), not bias.data_ptr() & 15 and bias.is_contiguous(),
                    is_grad_enabled() and bias.requires_grad,
                )  # fmt: skip
            call = get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensor, which shape_of names; no memory; a size that is a symbol
            return resolve(None, (x, weight, w_scale, bias), otype)  # type: ignore[no-any-return]
        if call is None:
            return resolve(key, operands, otype)  # type: ignore[no-any-return]
        try:
            return call(*operands)  # type: ignore[no-any-return]
        except Exception as error:  # a kernel of a plugin may raise anything
            return demote(error, key, operands, otype)  # type: ignore[no-any-return]

    return dispatcher.hot(weight_scaled, _place_weight_scaled)  # type: ignore[no-any-return]
