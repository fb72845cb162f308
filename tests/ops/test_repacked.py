"""Layouts of repacked weights as data: names of codes, stored operands, and columns of a table."""

import attrs
import pytest
from tunedgemm.errors import ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.repacked import PACKINGS, kind_of, stored_as
from tunedgemm.ops.weight_formats import FORMATS, WeightFormat

CELLS = {"M": "4", "N": "128", "K": "256", "w_format": "gptq_int4", "w_group": "64", "layout": "marlin"}


def test_names_of_codes():
    """They follow from the values, so that a format without kernels has none."""
    kinds = {name: kind_of(form) for name, form in FORMATS.items()}
    assert set(kinds.values()) == set(PACKINGS["marlin"].kinds)
    assert kinds["ct_int4"] == kinds["gptq_int4_order"] == "uint4b8" and kinds["awq_int4"] == kinds["ct_int4_zp"] == "uint4"
    assert kind_of(WeightFormat("int3", 4, ("int32",), tuple(range(16)))) == ""
    assert kind_of(attrs.evolve(FORMATS["ct_int4"], bits=8, values=tuple(range(-128, 128)), order=tuple(range(4)))) == "uint8b128"


def test_operands_beside_the_weight():
    """They are [groups, N]; Machete's zero points have the dtype of x and are not packed."""
    form = FORMATS["ct_int4_zp"]
    assert stored_as(form, "row") is form
    assert stored_as(form, "marlin").zero_sizes(128, 256, 64) == (4, 16)
    machete = stored_as(form, "machete")
    assert (machete.zero_sizes(128, 256, 64), machete.dtypes) == ((4, 128), ())
    block = stored_as(FORMATS["fp8_block"], "marlin")
    assert (block.scale_sizes(256, 384, 128), block.scale) == ((3, 256), ())
    assert stored_as(FORMATS["mxfp8"], "marlin").scale == FORMATS["mxfp8"].scale


def test_the_column_of_the_layout():
    """A row may name a layout; an empty cell is the checkpoint's, and impossible ones are refused."""
    op = op_named("a16wn")
    shape = op.columns.parse(CELLS)
    assert shape.layout == "marlin" and op.columns.parse({**CELLS, "layout": ""}).layout == "row"
    assert op.columns.parse({**op.columns.format(shape), "M": "4"}) == shape
    for cells, message in (({"layout": "aiter16x16"}, "row or marlin or machete"), ({"K": "192", "N": "64"}, "64 and 128 or 128 and 64")):
        with pytest.raises(ShapeError, match=message):
            op.columns.parse({**CELLS, **cells})


def test_bytes_count_the_operands_that_are_read():
    """Scales of whole rows take 16 bits in Marlin, and zero points of Machete do."""
    op = op_named("a16wn")
    shape = op.columns.parse({**CELLS, "w_format": "awq_int4"})
    machete = attrs.evolve(shape, layout="machete")
    assert op.bytes_moved(machete) - op.bytes_moved(shape) == 128 * 4 * (16 - 4) // 8
