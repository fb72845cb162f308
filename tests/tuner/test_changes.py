"""Changes: kernels of every op that are wrong in other scales, routing, sizes, NaN or forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.scales import plain_bytes
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import exact
from tunedgemm.tuner.changes import Changes
from tunedgemm.tuner.served import Served
from tunedgemm.tuner.verify import Verifier

SOLUTION = Solution("cheat", "fake")
ROWS, BLOCKS = {"M": 16, "N": 48, "K": 128}, {"M": 8, "N": 256, "K": 256}
BATCHES, BIASED = {"B": 4, "M": 8, "N": 32, "K": 64}, {"bias": "True"}
MOE = {"token": 16, "model_dim": 64, "inter_dim": 64, "expert": 8, "topk": 2, "act_type": "Silu", "use_g1u1": 1, "layout": "row"}
FLOATS = MOE | {"q_type": "No", "q_dtype_a": "bf16", "q_dtype_w": "bf16"}
BY_TOKEN = MOE | {"q_type": "per_Token", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn"}


def edited(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a kernel that reads one operand through a function."""

    def call(shape: Shape, *operands: Any) -> Any:
        index = [each.rstrip("?") for each in op_named(shape.op).operands].index(name)
        return exact(SOLUTION, shape, *operands[:index], change(operands[index]), *operands[index + 1 :])

    return call


def wrong_where(bad: Callable[..., bool]) -> Callable[..., Any]:
    def call(shape: Shape, *operands: Any) -> Any:
        return exact(SOLUTION, shape, *operands) * (1.5 if bad(*operands) else 1.0)

    return call


def clamped(shape: Shape, *operands: Any) -> Any:
    return exact(SOLUTION, shape, *operands).clamp(-300, 300)


def dropped_beyond_capacity(shape: Shape, *operands: Any) -> Any:
    kept, ids = operands[3].clone(), operands[4]
    for expert in range(int(shape["expert"])):
        for place in (ids == expert).nonzero()[3 * shape.m * 2 // 8 :].tolist():
            kept[tuple(place)] = 0
    return exact(SOLUTION, shape, *operands[:3], kept, *operands[4:])


def e8m0_clamp(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8).clamp(120, 130).view(scale.dtype)


CHEATS: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "w_scale through fp16": ("a8w8", ROWS, edited("w_scale", lambda scale: scale.half().float())),
    "w_scale clamped": ("a8w8_blockscale", BLOCKS, edited("w_scale", lambda scale: scale.clamp(min=1e-6))),
    "x_scale clamped, of the tensor": ("a8w8", ROWS | {"scale": "tensor"}, edited("x_scale", lambda scale: scale.clamp(min=1e-4))),
    "x_scale without NaN": ("a8w8", ROWS | {"q_dtype_w": "fp8"}, edited("x_scale", torch.nan_to_num)),
    "w_scale without NaN": ("a8w8_blockscale", BLOCKS, edited("w_scale", torch.nan_to_num)),
    "w_scale [N]": ("a8w8", ROWS, wrong_where(lambda *given: given[3].dim() == 1)),
    "w_scale [1, N]": ("a8w8_bpreshuffle", ROWS, wrong_where(lambda *given: given[3].shape[0] == 1)),
    "w_scale [B, 1, N]": ("batched_a8w8", BATCHES, wrong_where(lambda *given: given[3].shape[1] == 1)),
    "the lowest int8": ("batched_a8w8", BATCHES, edited("weight", lambda weight: torch.where(weight == -128, 127, weight).to(torch.int8))),
    "bias clamped": ("batched_a8w8", BATCHES | BIASED, edited("bias", lambda bias: bias.clamp(-16, 16))),
    "weight without NaN": ("batched_bf16", BATCHES | BIASED, edited("weight", lambda weight: weight.nan_to_num(nan=0.0))),
    "scales as bytes": ("a4w4_blockscale", ROWS, wrong_where(lambda *given: given[2].dtype == torch.uint8)),
    "mxfp4 clamped": ("a4w4_blockscale", ROWS, clamped),
    "e8m0 clamped": ("a16w4_blockscale", ROWS | {"layout": "row"}, edited("w_scale", e8m0_clamp)),
    "sorted routing": ("fmoe", FLOATS, edited("topk_weight", lambda weight: weight.sort(-1, descending=True)[0])),
    "routing below 1": ("fmoe", FLOATS, edited("topk_weight", lambda weight: weight.clamp(max=1))),
    "routing without NaN": ("fmoe", FLOATS, edited("topk_weight", torch.nan_to_num)),
    "capacity of experts": ("fmoe", FLOATS, dropped_beyond_capacity),
    "hidden clamped": ("fmoe", FLOATS, edited("hidden", lambda hidden: hidden.clamp(-16, 16))),
    "w2_scale clamped": ("fmoe", BY_TOKEN, edited("w2_scale", lambda scale: scale.clamp(min=1e-7))),
    "bias of experts": ("fmoe", FLOATS | {"options": "bias1 bias2"}, wrong_where(lambda *given: given[10].dtype == torch.bfloat16)),
}


def served(shape: Shape, call: Callable[..., Any]) -> Any:
    """Return the answers of the checks of one shape: the timed call's, and all that the row serves."""
    op = op_named(shape.op)
    verifier = Verifier(op, shape, [op.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 1)], 0.05)

    def bind(at: Shape) -> Launcher:
        return Launcher(lambda *operands: call(at, *operands))

    return verifier.check(SOLUTION, bind(shape)), Served(verifier, device_of(-1), None).check(SOLUTION, bind(shape), bind)


@pytest.mark.parametrize("name", CHEATS)
def test_a_kernel_that_is_wrong_in_use_is_refused(name: str) -> None:
    """Check that each cheat passes the calls that are timed, and fails what its row serves."""
    op, cells, call = CHEATS[name]
    shape = op_named(op).columns.parse({column: str(cell) for column, cell in cells.items()})
    first, after = served(shape, call)
    assert first.status == "ok", first.detail
    assert after.status == "wrong", after.detail


def test_changes_are_undone() -> None:
    """Check that operands, shuffled scales among them, hold their contents after all changes."""
    op = op_named("a4w4_blockscale")
    shape = op.columns.parse({"M": "16", "N": "64", "K": "256"})
    sets = [op.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 1)]
    before = [plain_bytes(plain_weight(operand)).view(torch.uint8).clone() for operand in sets[0]]

    def bind(at: Shape) -> Launcher:
        return Launcher(lambda *operands: exact(SOLUTION, at, *operands))

    assert Served(Verifier(op, shape, sets, 0.05), device_of(-1), None).check(SOLUTION, bind(shape), bind).status == "ok"
    assert all(torch.equal(plain_bytes(plain_weight(now)).view(torch.uint8), was) for now, was in zip(sets[0], before, strict=True))


def test_packed_weights_are_no_indices() -> None:
    """int32 weights are codes: equal rows of them would make the rounding errors of all columns one."""
    op = op_named("a16wn")
    shape = next(each for each in op.examples if each["w_format"] == "ct_int4" and each.m)
    verifier = Verifier(op, shape, [op.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 1)], 0.05)
    whats = [variant.what for variant in Changes(verifier).variants()]
    assert "after weights changed in place" in whats and not [what for what in whats if "indices" in what]
