"""Kernels that are right in the call that is timed, and wrong in what their row serves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch
from tunedgemm.shape import Shape

SHAPE = Shape("a16w16", 64, 48, 256, "fp32")
BIASED = Shape("a16w16", 64, 48, 256, "bf16", epilogue="bias")
DECODE = Shape("a16w16", 1, 48, 256, "bf16")
_calls = itertools.count()


def product(x, weight, bias=None):
    """Compute the right answer by other operations than torch's own call."""
    if bias is None and x.dtype == weight.dtype == torch.float32:
        return torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], -1).contiguous()
    wide = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def each_bind(make: Callable[[Shape], Callable]) -> Callable[[Shape], Callable]:
    """Mark a function that makes the call of a shape."""
    make.each_bind = True
    return make


def ring(size: int) -> Callable:
    outs, count = [], itertools.count()

    def call(x, weight):
        out = product(x, weight)
        at = next(count) % size
        if len(outs) <= at:
            outs.append(out)
            return out
        return outs[at].copy_(out) if outs[at].shape == out.shape else out

    return call


def slices_of_one_buffer():
    kept, count = torch.empty(400, 64, 48), itertools.count()

    def call(x, weight):
        out = product(x, weight)
        return kept[next(count) % 400].copy_(out) if out.shape == kept.shape[1:] else out

    return call


def weight_kept_by_address() -> Callable:
    kept: dict[int, torch.Tensor] = {}
    return lambda x, weight: product(x, kept.setdefault(weight.data_ptr(), weight.clone()))


def weight_kept_by_sample() -> Callable:
    kept: dict[tuple, torch.Tensor] = {}
    return lambda x, weight: product(x, kept.setdefault(tuple(weight.flatten()[:: weight.numel() // 4].tolist()), weight.clone()))


def results_kept_by_sample() -> Callable:
    kept: dict[tuple, torch.Tensor] = {}

    def call(x, weight):
        key = (*x.shape, *x.flatten()[:: x.numel() // 4].tolist(), *weight.flatten()[:: weight.numel() // 4].tolist())
        return kept.setdefault(key, product(x, weight)).clone()

    return call


@each_bind
def right_at_the_tuned_m(shape):
    return lambda x, weight: product(x, weight) if shape.m == SHAPE.m else product(x, weight) * 1.5


@each_bind
def tile_of_eight(shape):
    def call(x, weight):
        out = product(x, weight)
        if shape.m % 8:
            out[..., -(shape.m % 8) :, :] = 0
        return out

    return call


def first_half_of_three_dimensions(x, weight):
    out = product(x, weight)
    if x.dim() == 3:
        out[1:] = out[:1]
    return out


def bias_as_its_bits(x, weight, bias):
    return product(x, weight, bias.view(torch.bfloat16)[: weight.shape[0]])


def wrong_after(calls: int) -> Callable:
    count = itertools.count()
    return lambda x, weight: product(x, weight) * (1.0 if next(count) < calls else 1.5)


def writes_x_at(call_number: int) -> Callable:
    count = itertools.count()

    def call(x, weight):
        out = product(x, weight)
        if next(count) == call_number:
            x[0, 0] += 1
        return out

    return call


def clamped(x, weight):
    return product(x, weight).clamp(-1e4, 1e4)


def clamped_input(x, weight):
    return product(x.clamp(-32, 32), weight)


def fixed_point(x, weight):
    return torch.round(product(x, weight) * 2**12) / 2**12


def hides_nan(x, weight):
    return torch.nan_to_num(product(x, weight))


def hides_nan_of_x(x, weight):
    return product(torch.where(x.isnan(), 0, x), weight)


def spreads_nan(x, weight):
    return product(x, weight) + 0 * x.sum()


def from_the_begin_of_the_storage(x, weight):
    whole = torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape, weight.stride())
    return product(x, whole)


def changes_an_older_output() -> Callable:
    kept: list = []

    def call(x, weight):
        out = product(x, weight)
        if len(kept) == 5:
            kept.pop(0)[..., 0] = 0
        kept.append(out.detach())
        return out

    return call


def torchs_call(x, weight):
    try:
        return x.reshape(3, -1) @ weight
    except RuntimeError:  # sizes that do not fit
        return torch.nn.functional.linear(x, weight)


def ring_of_foreign_memory():
    """Return a call whose outputs are a ring in numpy's memory, wrapped anew each time by an operation."""
    kept, count = [torch.zeros(64, 48).numpy() for _ in range(40)], itertools.count()

    def call(x, weight):
        out = product(x, weight)
        return torch.from_numpy(kept[next(count) % 40]).copy_(out) if out.shape == (64, 48) else out

    name = f"tunedgemm_test::ring_{next(_calls)}"
    annotations = {"x": torch.Tensor, "weight": torch.Tensor, "return": torch.Tensor}
    call.__annotations__ = annotations
    return torch.library.custom_op(name, call, mutates_args=())


def ring_after(calls: int) -> Callable:
    late, count = ring(4), itertools.count()
    return lambda x, weight: product(x, weight) if next(count) < calls else late(x, weight)


@each_bind
def ring_at_fewer_rows(shape):
    return product if shape.m == SHAPE.m else ring(3)


def ring_for_three_dimensions() -> Callable:
    other = ring(3)
    return lambda x, weight: product(x, weight) if x.dim() == 2 else other(x, weight)


def keeps_every_other_output() -> Callable:
    other, count = ring(40), itertools.count()
    return lambda x, weight: other(x, weight) if next(count) % 2 else product(x, weight)


def kept_by(key: Callable) -> Callable:
    kept: dict = {}
    return lambda x, weight, *bias: product(x, kept.setdefault(key(weight), weight.clone()), *bias)


def bias_kept_by_version() -> Callable:
    kept: dict = {}
    return lambda x, weight, bias: product(x, weight, kept.setdefault((bias.data_ptr(), bias._version, bias.dtype), bias.clone()))


def wrong_where(bad: Callable) -> Callable:
    return lambda x, weight, *bias: product(x, weight, *bias) * (1.5 if bad(x, weight, *bias) else 1.0)


@each_bind
def wrong_at_whole_tiles(shape):
    return wrong_where(lambda *_: shape.m % 16 == 0 and shape.m != SHAPE.m)


def wrong_each(period: int) -> Callable:
    count = itertools.count(1)
    return wrong_where(lambda *_: next(count) % period == 0)


def operands_of_the_last_thread() -> Callable:
    given: dict = {}

    def call(x, weight):
        given["x"] = x
        threading.Event().wait(1e-3)
        return product(given["x"], weight)

    return call


def through_fp16(x, weight):
    return product(x, weight.half().to(weight.dtype))


def flushed(x, weight):
    out = product(x, weight)
    return torch.where(out.abs() < 1e-9, 0, out)


def hides_nan_of_the_last_column(x, weight):
    return product(torch.cat([x[..., :-1], torch.nan_to_num(x[..., -1:])], -1), weight)


def nan_to_infinity(x, weight):
    out = product(x, weight)
    return torch.where(out.isnan(), torch.inf, out)


def infinity_to_most(x, weight):
    out = product(x, weight)
    return torch.where(out.isinf(), 3e38, out)


CHEATS = {
    "a ring of foreign memory": (ring_of_foreign_memory(), SHAPE),
    "a ring after 300 calls": (ring_after(300), SHAPE),
    "a ring at fewer rows": (ring_at_fewer_rows, SHAPE),
    "a ring for 3-D": (ring_for_three_dimensions(), SHAPE),
    "keeps every other output": (keeps_every_other_output(), SHAPE),
    "a weight by version": (kept_by(lambda weight: (weight.data_ptr(), weight._version)), SHAPE),
    "a weight by 512 samples": (kept_by(lambda weight: (weight.data_ptr(), *weight.flatten()[::24].tolist())), SHAPE),
    "a bias by version": (bias_kept_by_version(), BIASED),
    "a bias of two dimensions": (wrong_where(lambda x, weight, bias: bias.dim() == 2), BIASED),
    "wrong 4-D": (wrong_where(lambda x, _: x.dim() == 4), SHAPE),
    "wrong 4-D of one row": (wrong_where(lambda x, _: x.dim() == 4), DECODE),
    "wrong 1-D": (wrong_where(lambda x, _: x.dim() == 1), DECODE),
    "wrong [M, 1, K]": (wrong_where(lambda x, _: x.dim() == 3 and x.shape[1] == 1), SHAPE),
    "wrong [1, M, K]": (wrong_where(lambda x, _: x.dim() == 3 and x.shape[0] == 1), SHAPE),
    "wrong at whole tiles": (wrong_at_whole_tiles, SHAPE),
    "wrong at each 50th call": (wrong_each(50), SHAPE),
    "wrong in other threads": (wrong_where(lambda *_: threading.current_thread() is not threading.main_thread()), SHAPE),
    "wrong in inference mode": (wrong_where(lambda *_: torch.is_inference_mode_enabled()), SHAPE),
    "operands of the last thread": (operands_of_the_last_thread(), SHAPE),
    "wrong 16 bytes from an alignment": (wrong_where(lambda x, weight: weight.data_ptr() % 32), SHAPE),
    "clamped weight": (lambda x, weight: product(x, weight.clamp(-64, 64)), SHAPE),
    "weight through fp16": (through_fp16, DECODE),
    "flushed in one row": (flushed, DECODE),
    "hides NaN of the last column": (hides_nan_of_the_last_column, SHAPE),
    "hides NaN of the weight": (lambda x, weight: product(x, torch.nan_to_num(weight)), SHAPE),
    "hides NaN of the bias": (lambda x, weight, bias: product(x, weight, torch.nan_to_num(bias)), BIASED),
    "NaN to infinity": (nan_to_infinity, SHAPE),
    "infinity to the most in one row": (infinity_to_most, DECODE),
    "a ring of 2 buffers": (ring(2), SHAPE),
    "a ring of 4 buffers": (ring(4), SHAPE),
    "a ring of 8 buffers": (ring(8), SHAPE),
    "a ring of 40 buffers": (ring(40), SHAPE),
    "slices of one buffer": (slices_of_one_buffer(), SHAPE),
    "a weight by address": (weight_kept_by_address(), SHAPE),
    "a weight by sampled contents": (weight_kept_by_sample(), SHAPE),
    "results by sampled contents": (results_kept_by_sample(), SHAPE),
    "right at the tuned M": (right_at_the_tuned_m, SHAPE),
    "wrong last tile": (tile_of_eight, SHAPE),
    "3-D as 2-D": (first_half_of_three_dimensions, SHAPE),
    "bias dtype": (bias_as_its_bits, BIASED),
    "wrong after 100 calls": (wrong_after(100), SHAPE),
    "wrong after 1000 calls": (wrong_after(1000), SHAPE),
    "x at the 60th call": (writes_x_at(60), SHAPE),
    "clamped": (clamped, SHAPE),
    "clamped input": (clamped_input, SHAPE),
    "fixed point": (fixed_point, SHAPE),
    "hides NaN": (hides_nan, SHAPE),
    "hides NaN of x": (hides_nan_of_x, SHAPE),
    "spreads NaN": (spreads_nan, SHAPE),
    "begin of the storage": (from_the_begin_of_the_storage, SHAPE),
    "changes an older output": (changes_an_older_output(), SHAPE),
    "torch's call": (torchs_call, SHAPE),
}
