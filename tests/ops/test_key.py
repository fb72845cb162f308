"""tunedgemm.ops.key: one definition makes the cache keys of hot functions, calls and choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tunedgemm.dispatch.call import Call
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.key import KeySource, key_function
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows, write_rows
from tunedgemm.table.row import Row, key_shape
from tunedgemm.table.untuned import Untuned, read_untuned, write_untuned
from tunedgemm.testing.shapes import shapes_of

CPU = torch.device("cpu")
SMALL = 1 << 24


def call_of(shape: Shape, seed: int) -> Call:
    """Make a call of a shape, with its key."""
    op = op_named(shape.op)
    operands, otype, fields = op.make_inputs(shape, CPU, seed), torch_dtype(shape.outdtype), op.fields(shape)
    return Call.of(op, operands, otype, fields, op.key_of(otype, tuple(fields.items()), *operands))


@pytest.mark.parametrize("name", sorted(ops()))
def test_a_call_its_captured_shape_and_its_row_have_one_key(name: str, tmp_path: Path) -> None:
    """Operands of a captured shape, or of the row tuned for it, find the launcher of the call."""
    op = op_named(name)
    shapes = [shape for shape in shapes_of(name) if shape.m and shape == key_shape(shape) and op.flops(shape) < SMALL]
    assert shapes
    for shape in shapes:
        gfx = "gfx942" if "fnuz" in str(shape.to_dict()) else "sm_90"
        call = call_of(shape, 0)
        untuned, tuned = tmp_path / "untuned.csv", tmp_path / "tuned.csv"
        write_untuned(untuned, op, [Untuned(call.shape)])
        write_rows(tuned, op, [Row(call.shape, gfx, 4, "x", Solution("torch", "native"), 5.0)])
        for again in (read_untuned(untuned, op)[0].shape, read_rows(tuned, op)[0][0].shape):
            found = call_of(again, 1)
            assert found.shape == call.shape and found.key == call.key, again


#: Changes of one operand that every key shows.
CHANGES: dict[str, Any] = {
    "sizes": lambda x: torch.cat([x, x]),
    "dtype": lambda x: x.half(),
    "type": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "gradient": lambda x: x.clone().requires_grad_(),
    "order": lambda x: x.repeat(1, 2)[:, : x.shape[1]],
    "address": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}
#: Changes that a choice between two weights does not see: it holds for any memory.
OF_MEMORY = ("order", "address")


SIGNATURES = [("x",), ("x", "w"), ("x", "w?", "b?"), ("x", "op", "b?"), ("x", "w", "s", "t"), ("x", "w", "b?", "s?")]


@pytest.mark.parametrize("operands", SIGNATURES, ids=" ".join)
@pytest.mark.parametrize("reads_memory", [True, False], ids=["launchers", "choices"])
def test_keys_show_each_property_of_each_operand(operands: tuple[str, ...], reads_memory: bool) -> None:
    """Equal operands have one key, whatever their values; each change at each place makes another."""
    key_of = key_function(operands, (1,), reads_memory)
    given = [torch.randn(4, 4) for _ in operands]
    key = key_of(None, (), *given)
    assert key == key_of(None, (), *[torch.randn(4, 4) for _ in operands])
    others = [key_of(torch.bfloat16, (), *given), key_of(None, (("order", 1),), *given)]
    for place, operand in enumerate(given):
        for what, change in CHANGES.items():
            changed = key_of(None, (), *given[:place], change(operand), *given[place + 1 :])
            assert (changed == key) is (what in OF_MEMORY and not reads_memory), (place, what)
        if operands[place].endswith("?"):
            others.append(key_of(None, (), *given[:place], None, *given[place + 1 :]))
    assert key not in others


def test_what_has_no_key() -> None:
    """Negated tensors have none, and other arguments than tensors raise."""
    key_of, x = key_function(("x", "w", "b?"), (1,)), torch.randn(4, 4)
    assert key_of(None, (), x, torch._neg_view(x)) is None and key_of(None, (), x, x, torch._neg_view(x)) is None
    with pytest.raises(AttributeError):
        key_of(None, (), x, [1.0])


def test_names_that_the_source_uses_are_refused() -> None:
    """An operand may not be called as a variable of the generated source, nor as a keyword."""
    for word in ("launcher", "class", "a b"):
        with pytest.raises(ValueError, match=rf"'{word}' cannot name an argument"):
            KeySource(("x", word), (1,), ("otype",)).check_names()
