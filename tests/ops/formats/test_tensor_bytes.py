"""contents: tensors of any dtype copied, overwritten and compared."""

from __future__ import annotations

import pytest
import torch
from tunedgemm.dtype import DTYPES
from tunedgemm.ops.accuracy import same_bits
from tunedgemm.ops.formats.shuffle import ShuffledWeight, shuffle_weight
from tunedgemm.ops.formats.tensor_bytes import duplicate, moved, overwrite, raw
from tunedgemm.testing.listed import listed

KINDS = [getattr(torch, name) for name, _ in DTYPES.values()]


def drawn(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Random bytes, seen as that dtype."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 255, (*sizes[:-1], sizes[-1] * size), dtype=torch.uint8).view(dtype)


@listed("dtype", KINDS, ids=str)
def test_every_dtype_can_be_copied_and_put_back(dtype: torch.dtype) -> None:
    """A copy has separate memory and the same bits;
    overwriting brings other contents to the old address."""
    old, new = drawn(dtype, 4, 32), drawn(dtype, 4, 32)
    copy, address = duplicate(old), old.data_ptr()

    assert same_bits(copy, old) and copy.dtype == dtype and copy.data_ptr() != address
    overwrite(old, new)
    assert same_bits(old, new) and not same_bits(old, copy) and old.data_ptr() == address


@listed("dtype", KINDS, ids=str)
def test_a_dense_copy_has_the_values_of_a_view(dtype: torch.dtype) -> None:
    """Rows with gaps between them, and a transposed matrix, become contiguous."""
    rows = drawn(dtype, 8, 32)[::2]
    assert duplicate(rows, contiguous=True).is_contiguous() and same_bits(duplicate(rows, contiguous=True), rows)

    turned = drawn(dtype, 8, 32).t()
    copy = duplicate(turned, contiguous=True)
    assert copy.is_contiguous() and same_bits(duplicate(copy.t(), contiguous=True), turned.t())
    assert raw(turned).shape == (32, 8 * turned.element_size())


def test_a_copy_keeps_gaps_between_elements() -> None:
    """A copy has the strides of its source, padding included; one of expanded values is dense."""
    for source in (torch.randn(3, 8)[:, :5], torch.randn(4, 8)[:, :6].t(), drawn(torch.float8_e4m3fn, 8, 32)[::2]):
        copy = duplicate(source)
        assert copy.stride() == source.stride() and copy.data_ptr() != source.data_ptr() and same_bits(copy, source)
    assert duplicate(torch.randn(4, 1).expand(4, 3)).is_contiguous()


def test_a_copy_of_a_shuffled_weight_stays_shuffled() -> None:
    """Copies keep the layout, and contents can be exchanged;
    a plain weight of equal bytes is a different weight."""
    old, new = (shuffle_weight(torch.randn(32, 64)) for _ in range(2))
    copy = duplicate(old)

    assert isinstance(copy, ShuffledWeight) and copy.layout_name == old.layout_name and same_bits(copy, old)
    overwrite(copy, new)
    assert same_bits(copy, new) and not same_bits(copy, old)
    assert not same_bits(copy, copy.plain)


def test_none_equals_only_none() -> None:
    """None equals only None, and other sizes or dtypes are unequal."""
    some = torch.zeros(2, 4)
    assert same_bits(None, None) and not same_bits(None, some) and not same_bits(some, None)
    assert not same_bits(some, some[:1]) and not same_bits(some, some.int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_overwriting_raises_no_version_counter(dtype: torch.dtype) -> None:
    """New contents under the same version counter show a copy that a kernel keeps by it."""
    old, new = torch.zeros(2, 4).to(dtype), torch.ones(2, 4).to(dtype)
    version = old._version
    overwrite(old, new)
    assert same_bits(old, new) and old._version == version


def test_a_moved_tensor_is_aligned_to_sixteen_bytes_alone() -> None:
    """The contract promises 16 bytes; a kernel that needs more shows it."""
    address = moved(torch.zeros(4, 8)).data_ptr()
    assert address % 16 == 0 and address % 32
