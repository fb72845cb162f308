"""dtype: a closed list of texts, never evaluated."""

import pytest
import torch
from tunedgemm import dtype
from tunedgemm.device import Device
from tunedgemm.dtype import DTYPES, dtype_bits, fp8_of, parse_dtype, short_dtype, table_text, torch_dtype
from tunedgemm.errors import DtypeError
from tunedgemm.shape import Shape
from tunedgemm.text.printable import warn_once


@pytest.mark.parametrize("text", ["bf16", "torch.bfloat16", "dtypes.bf16", "bfloat16", " bf16 ", "torch.bf16"])
def test_every_spelling_is_one_text(text):
    """AITER's files, its flags and torch write the same dtype in different ways."""
    assert parse_dtype(text) == "bf16"


@pytest.mark.parametrize(
    ("text", "short"), [("f32", "fp32"), ("half", "fp16"), ("fp8", "fp8_e4m3fn"), ("i8", "int8"), ("dtypes.fp8", "fp8_e4m3fn")]
)
def test_aliases(text, short):
    """AITER's flags have short dtype words."""
    assert parse_dtype(text) == short


@pytest.mark.parametrize(
    ("gfx", "short"), [("gfx940", "fp8_e4m3fnuz"), ("gfx942", "fp8_e4m3fnuz"), ("gfx950", "fp8_e4m3fn"), ("sm_90", "fp8_e4m3fn")]
)
def test_fp8_is_that_of_an_architecture(gfx, short):
    """MI300 multiplies e4m3fnuz, every other device e4m3fn."""
    assert fp8_of(gfx) == parse_dtype("fp8", gfx) == parse_dtype("dtypes.fp8", gfx) == short


@pytest.mark.parametrize(
    ("gfx", "short"), [("gfx943", "fp8_e4m3fnuz"), ("gfx951", "fp8_e4m3fn"), ("sm_88", "fp8_e4m3fn"), ("gfx115x", "fp8_e4m3fn")]
)
def test_fp8_of_an_unknown_architecture_needs_no_notice(gfx, short, caplog):
    """A table's rows may be for devices that are neither present nor known."""
    warn_once.cache_clear()
    assert fp8_of(gfx) == short and not caplog.records


def test_fp8_without_an_architecture_is_that_of_the_present_device(mi300):
    """The word alone means the present device's dtype, also in a shape."""
    del mi300
    assert fp8_of() == parse_dtype("fp8") == Shape("a8w8", 1, 16, 16, "fp8", "bf16").dtype == "fp8_e4m3fnuz"


def test_only_a_torch_for_amd_asks_the_driver(monkeypatch):
    """Devices of AMD are asked for their architecture, other ones for nothing."""
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("tunedgemm.device.current_device", lambda: Device("gfx942", 304))
    assert fp8_of() == "fp8_e4m3fn"
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert fp8_of() == "fp8_e4m3fnuz"


@pytest.mark.parametrize("text", ["", "bf17", "torch.", "__import__('os').system('true')", "x" * 500])
def test_other_texts_are_refused(text):
    """An unknown text is an error that shows it, truncated, and lists the known ones."""
    with pytest.raises(DtypeError, match="known: bf16, fp16") as caught:
        parse_dtype(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("short", DTYPES)
def test_round_trips(short):
    """Short text, torch dtype and table text lead to each other, and the bits agree with torch."""
    assert parse_dtype(table_text(short)) == short
    if not hasattr(torch, DTYPES[short][0]):
        pytest.skip(f"this torch has no {short}")
    assert short_dtype(torch_dtype(short)) == short
    assert torch_dtype(short).itemsize * 8 == dtype_bits(short)


def test_a_dtype_that_torch_lacks(monkeypatch):
    """An old torch without a dtype gives an error that names both."""
    monkeypatch.setitem(dtype.DTYPES, "fp6", ("float6_of_the_future", 6))
    with pytest.raises(DtypeError, match=r"torch .* has no dtype 'float6_of_the_future'"):
        torch_dtype("fp6")
