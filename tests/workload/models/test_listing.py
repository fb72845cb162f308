"""Listing: layers and numbers of rows as shapes of ops."""

from __future__ import annotations

from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.table.untuned import read_untuned, write_untuned
from tunedgemm.workload.models.layer import Experts, Layer
from tunedgemm.workload.models.listing import Formats, listed, merge_lists, rows_of

HEAD = Layer("lm_head", "head", 256, 64)


def test_rows_are_ascending_and_once():
    """Each number times the batch size."""
    assert rows_of((16, 1, 16), 2) == (2, 32)


def test_equal_shapes_are_one_with_both_names():
    """Two kinds of layers of one size: one row, the sum of their numbers, both names."""
    by_op, notes = listed([Layer("a.o", "linear", 8, 16, 3), Layer("b.o", "linear", 8, 16, 2)], (4,), Formats())
    (row,) = by_op["a16w16"]

    assert (row.shape.m, row.shape.n, row.shape.k, row.count, row.layer) == (4, 8, 16, 5, "a.o b.o")
    assert notes == ()


def test_a_row_is_one_that_its_op_writes_and_reads(tmp_path, faults_of):
    """Listed shapes are equal after writing and reading a file."""

    def check(layer, op):
        by_op, notes = listed([layer], (16,), Formats())
        ((found, (row,)),) = by_op.items()
        path = tmp_path / "untuned.csv"
        write_untuned(path, op_named(op), [row])

        assert (found, notes) == (op, ())
        assert read_untuned(path, op_named(op)) == [row]
        if layer.scheme in ("", "mxfp4/32"):
            assert row.shape.dtype == layer.dtype

    assert not faults_of(
        check,
        [
            (HEAD, "a16w16"),
            (Layer("gate", "router", 8, 64), "a16w16"),
            (Layer("a.w_uk", "batched", 32, 64, batch=4), "batched_bf16"),
            (Layer("e", "experts", 64, 32, experts=Experts(8, 2)), "fmoe"),
            (Layer("e", "experts", 64, 32, experts=Experts(8, 2, gated=False)), "fmoe"),
            (Layer("a", "linear", 128, 128, scheme="fp8_block"), "a8w8_blockscale"),
            (Layer("a", "linear", 128, 128, scheme="mxfp4"), "a4w4_blockscale"),
            (Layer("a", "linear", 128, 128, scheme="mxfp4/32", dtype="fp16", bias=True), "a16w4_blockscale"),
            (Layer("a", "linear", 128, 128, scheme="int8_channel/0", dtype="fp16"), "a16wn"),
            (Layer("a", "linear", 128, 128, scheme="fp8_block/128"), "a16wn"),
            (Layer("a", "linear", 128, 128, scheme="fp8_tensor/0", bias=True), "a16wn"),
        ],
    )


def test_layers_that_an_op_cannot_express_are_notes():
    """An activation that fmoe does not compute is a note, not a guess."""
    by_op, notes = listed([Layer("a.experts", "experts", 64, 32, experts=Experts(8, 2, act=""))], (16, 32), Formats())

    assert by_op == {}
    (note,) = notes
    assert note.startswith("a.experts: fmoe cannot have it: ")


def test_activations_of_experts_in_mxfp4_are_those_of_a_call(monkeypatch):
    """fused_moe decides by activation, tokens and device; a bias is an option."""
    layer = Layer("a.experts", "experts", 64, 32, experts=Experts(8, 2, act="swiglu"), scheme="mxfp4/32", bias=True)
    found = {}
    for gfx in ("gfx950", "sm_90"):
        monkeypatch.setattr("tunedgemm.ops.moe_operands.current_device", lambda gfx=gfx: Device(gfx, 1, "a-device"))
        by_op, notes = listed([layer], (16, 256), Formats())
        assert not notes
        found[gfx] = [(row.shape["q_dtype_a"], row.shape["q_dtype_w"], row.shape["options"]) for row in by_op["fmoe"]]

    assert found == {
        "gfx950": [(word, "fp4x2", "bias1 bias2") for word in ("bf16", "fp4x2")],
        "sm_90": [("fp4x2", "fp4x2", "bias1 bias2")] * 2,
    }


def test_lists_together_count_what_the_busiest_has():
    """A shape of two lists gets the higher count; rows are in order of N, K and M."""
    one, _ = listed([HEAD, Layer("a.o", "linear", 8, 16, 3)], (4, 2), Formats())
    two, _ = listed([Layer("b.o", "linear", 8, 16, 5)], (4,), Formats())
    rows = merge_lists([one, two])["a16w16"]

    assert [(row.shape.n, row.shape.m, row.count, row.layer) for row in rows] == [
        (8, 2, 3, "a.o"),
        (8, 4, 5, "a.o b.o"),
        (256, 2, 1, "lm_head"),
        (256, 4, 1, "lm_head"),
    ]


def test_weights_are_shuffled_where_asked():
    """The columns of weights shuffled as AITER's engines do."""
    (row,) = listed([HEAD], (4,), Formats(preshuffle=True))[0]["a16w16"]

    assert row.shape.layout == "aiter16x16" or dict(row.shape.extra).get("bpreshuffle") is True
