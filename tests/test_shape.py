"""Shape: a frozen key that validates itself."""

import json
import pickle

import attrs
import pytest
from tunedgemm.errors import DtypeError, ShapeError
from tunedgemm.shape import MAX_SIZE, Shape


def test_defaults_follow_the_activations():
    """Output and bias default to the dtype of the activations; without a bias its dtype is empty."""
    assert Shape("a16w16", 1, 2, 3, dtype="torch.float16").outdtype == "fp16"
    assert Shape("a16w16", 1, 2, 3, epilogue="bias").bias_dtype == "bf16"
    assert Shape("a16w16", 1, 2, 3, bias_dtype="fp32").bias_dtype == ""


def test_spellings_make_one_key():
    """Two spellings of one problem are equal, hash alike, and find each other in a dict."""
    one = Shape("a16w16", 1, 2, 3, "bf16", "fp32", extra={"b": 1, "a": 2})
    other = Shape("a16w16", 1, 2, 3, "torch.bfloat16", "f32", extra=(("a", 2), ("b", 1)))
    assert {one: "found"}[other] == "found"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"m": -1}, f"'m' must be an integer in 0..{MAX_SIZE - 1} \\(got -1\\)"),
        ({"m": MAX_SIZE}, "'m' must be an integer"),
        ({"n": 0}, "'n' must be at least 1"),
        ({"k": 0}, "'k' must be at least 1"),
        ({"k": 1.5}, "'k' must be an integer"),
        ({"m": True}, "'m' must be an integer"),
        ({"m": "4"}, "'m' must be an integer"),
        ({"epilogue": "gelu"}, "'epilogue' must be one of none, bias"),
        ({"scale": "tile"}, "'scale' must be one of none, tensor, row, block"),
    ],
)
def test_bad_fields_are_named(fields, message):
    """An error of a field names it, the allowed values and the given one."""
    with pytest.raises(ShapeError, match=message):
        Shape(**{"op": "a16w16", "m": 1, "n": 2, "k": 3, **fields})


def test_other_bad_fields():
    """Dtypes are of the closed list, layouts of harmless letters, the op a text."""
    with pytest.raises(DtypeError):
        Shape("a16w16", 1, 2, 3, "bf17")
    with pytest.raises(ValueError, match="layout"):
        Shape("a16w16", 1, 2, 3, layout="a b")
    with pytest.raises(TypeError):
        Shape(16, 1, 2, 3)


def test_an_empty_batch_is_a_shape():
    """M may be zero: batches without rows occur."""
    assert Shape("a16w16", 0, 2, 3).m == 0


@pytest.mark.parametrize(
    "shape", [Shape("a16w16", 1, 2, 3), Shape("moe", 1, 2, 3, "fp8", "bf16", "bias", "fp32", "row", "aiter16x16", {"E": 8})], ids=str
)
def test_round_trips(shape):
    """A shape survives JSON and pickling, as keys of equal hash."""
    assert Shape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    again = pickle.loads(pickle.dumps(shape))
    assert (again, hash(again)) == (shape, hash(shape))


def test_text_has_the_fields_that_are_not_defaults():
    """A plain shape is short; bias, scales, layout and further fields are added."""
    assert str(Shape("a16w16", 1, 2, 3)) == "a16w16 M=1 N=2 K=3 bf16->bf16"
    full = Shape("moe", 1, 2, 3, "fp8", "bf16", "bias", scale="row", layout="aiter16x16", extra={"E": 8})
    assert str(full) == "moe M=1 N=2 K=3 fp8_e4m3fn->bf16 bias scale=row layout=aiter16x16 E=8"


def test_further_fields_are_read_by_name():
    """A field that the op declared is an item; another name says which op lacks it."""
    shape = Shape("moe", 1, 2, 3, extra={"E": 8})
    assert shape["E"] == 8
    with pytest.raises(KeyError, match="op 'moe' has no field 'topk'"):
        shape["topk"]


def test_shapes_are_frozen():
    """A shape is immutable."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Shape("a16w16", 1, 2, 3).m = 2


def test_with_m_equals_a_new_shape():
    """A shape with another M equals one made from scratch, in hash, text, dict and pickle; M is checked."""
    shape = Shape("a16w16", 4, 16, 32, "fp16", "fp32", "bias", "fp32", layout="aiter16x16", extra={"B": 2})
    hash(shape)
    other = shape.with_m(9)
    wanted = Shape("a16w16", 9, 16, 32, "fp16", "fp32", "bias", "fp32", layout="aiter16x16", extra={"B": 2})
    assert (other, hash(other), str(other), other.to_dict()) == (wanted, hash(wanted), str(wanted), wanted.to_dict())
    assert pickle.loads(pickle.dumps(other)) == wanted and shape.m == 4 and shape != other
    for wrong in (-1, True, 2.0, 1 << 31):
        with pytest.raises(ShapeError, match="'m' must be an integer"):
            shape.with_m(wrong)
