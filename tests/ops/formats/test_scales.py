"""scales: e8m0 scales that AITER's order types."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops.accuracy import same_bits
from tunedgemm.ops.formats.scales import (
    E8M0,
    ShuffledScale,
    as_shuffled_scale,
    shuffle_scale,
    swizzle_scale,
    unshuffle_scale,
    unswizzle_scale,
)
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.formats.tensor_bytes import duplicate
from tunedgemm.testing.listed import listed

PLAIN = torch.arange(512 * 8).remainder(251).to(torch.uint8).view(512, 8)


def saved(scale: torch.Tensor) -> torch.Tensor:
    """Return the scale after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save({"scale": scale}, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=True)["scale"]
    return loaded


KEPT = {
    "view": lambda s: s.view(2, 256, 8), "dtype": lambda s: s.view(torch.uint8).view(E8M0), "reshape": lambda s: s.reshape(4, 128, -1),
    "to": lambda s: s.to("cpu", copy=True), "clone": torch.clone, "contiguous": lambda s: s.contiguous(), "detach": torch.detach,
    "data": lambda s: s.data, "deepcopy": copy.deepcopy, "unsqueeze": lambda s: s.unsqueeze(0), "duplicate": duplicate, "save": saved,
    "parameter": lambda s: torch.nn.Parameter(s, requires_grad=False), "flatten": lambda s: s.flatten(),
}  # fmt: skip


@listed("name", list(KEPT))
@listed("dtype", [torch.uint8, E8M0])
def test_the_type_stays_where_the_order_does(name: str, dtype: torch.dtype):
    """Views, copies, parameters and files of shuffled scales are shuffled, and hold the same bytes."""
    shuffled = shuffle_scale(PLAIN.view(dtype))
    kept = KEPT[name](shuffled)
    assert isinstance(kept, ShuffledScale)
    assert kept.scale_order == "aiter32x8"
    assert torch.equal(kept.plain.view(torch.uint8).flatten(), shuffled.plain.view(torch.uint8).flatten())
    assert torch.equal(unshuffle_scale(kept.reshape(512, 8), 512, 8).view(torch.uint8), PLAIN)


def test_other_operations_read_the_bytes():
    """Comparisons, conversions and permutations give ordinary tensors."""
    shuffled = shuffle_scale(PLAIN)
    results = (shuffled == shuffled.plain, shuffled.float(), shuffled.view(16, 8, 4, 8).permute(0, 2, 1, 3), shuffled + 1)
    assert {type(result) for result in results} == {torch.Tensor}
    assert torch.equal(shuffled, shuffled.plain)
    assert type(shuffled.flatten()[5]) is torch.Tensor and shuffled.flatten()[5].item() == shuffled.plain.flatten()[5].item()


@listed("part", [lambda s: s[:255], lambda s: s[0], lambda s: s.narrow(1, 0, 4), lambda s: s[16:48], lambda s: s[torch.tensor([1])]])
def test_parts_of_tiles_are_refused(part):
    """A cut within 32 rows leaves bytes in no order."""
    with pytest.raises(OperandError, match=r"shuffled scales \(512, 8\) are cut between tiles of 32 rows alone .*; unshuffle_scale"):
        part(shuffle_scale(PLAIN))


@listed("part", [lambda s: s[:64], lambda s: s[0:], lambda s: s.view(16, 32, 8)[0], lambda s: s.chunk(4)[0], lambda s: s.narrow(0, 0, 32)])
def test_whole_tiles_keep_the_type(part):
    """The first tiles are the shuffled first rows."""
    taken = part(shuffle_scale(PLAIN))
    rows = taken.numel() // 8
    assert isinstance(taken, ShuffledScale)
    assert torch.equal(unshuffle_scale(taken.reshape(rows, 8), rows, 8), PLAIN[:rows])


def test_contents_of_another_order_are_refused():
    """Neither a copy nor an assignment puts row-major scales where shuffled ones are."""
    parameter = torch.nn.Parameter(shuffle_scale(PLAIN), requires_grad=False)
    for put in (lambda: parameter.copy_(PLAIN), lambda: PLAIN.clone().copy_(parameter), lambda: setattr(parameter, "data", PLAIN)):
        with pytest.raises(OperandError, match="shuffle_scale"):
            put()
    other = shuffle_scale(PLAIN.flip(0).contiguous())
    with pytest.raises(OperandError, match=r"scale\.data = others"):
        parameter.set_(other)
    for change in (parameter.t_, lambda: parameter.resize_(64, 64), lambda: parameter.unsqueeze_(0)):
        with pytest.raises(OperandError, match="keep their memory and sizes"):
            change()
    assert torch.equal(parameter.copy_(other).plain, other.plain)
    parameter.data = shuffle_scale(PLAIN)
    assert torch.equal(unshuffle_scale(parameter, 512, 8), PLAIN)
    assert torch.equal(torch.nn.Module().register_parameter("p", parameter) or parameter.plain, shuffle_scale(PLAIN).plain)


def test_declared_scales_share_memory():
    """as_shuffled_scale copies nothing, and refuses what cannot be shuffled."""
    raw = shuffle_scale(PLAIN).plain
    declared = as_shuffled_scale(raw)
    assert plain_weight(declared).data_ptr() == raw.data_ptr()
    assert as_shuffled_scale(declared) is declared
    assert not same_bits(declared, raw)
    assert same_bits(declared, as_shuffled_scale(raw.clone()))
    for wrong, message in ((raw.t(), "contiguous"), (raw.float(), "e8m0 scales are")):
        with pytest.raises(OperandError, match=message):
            as_shuffled_scale(wrong)
    with pytest.raises(OperandError, match="shuffled already"):
        shuffle_scale(declared)


def by_tiles(scale: torch.Tensor) -> torch.Tensor:
    """AITER's shuffled order element by element, the padding being 1."""
    rows, cols = scale.shape
    high, wide = -(-rows // 256) * 256, -(-cols // 8) * 8
    out = torch.full((high * wide,), 127, dtype=torch.uint8)
    for i in range(rows):
        for j in range(cols):
            tile = (i // 32) * (wide // 8) + j // 8
            a, r, b, c = (i % 32) // 16, i % 16, (j % 8) // 4, j % 4
            out[tile * 256 + ((c * 16 + r) * 2 + b) * 2 + a] = scale[i, j]
    return out.view(high, wide)


@listed("size", [(256, 8), (1, 1), (33, 9), (300, 20), (512, 16), (0, 8)], ids=str)
def test_shuffled_scales_match_aiters_order(size: tuple[int, int]):
    """shuffle_scale is the documented padded permutation for both dtypes,
    and unshuffle_scale its inverse."""
    scale = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        shuffled = shuffle_scale(scale.view(dtype))
        assert shuffled.dtype == dtype and torch.equal(shuffled.view(torch.uint8), by_tiles(scale))
        assert torch.equal(shuffle_scale(scale.view(dtype).unsqueeze(0)).view(torch.uint8), by_tiles(scale))
        back = unshuffle_scale(shuffled, *size)
        assert back.dtype == dtype and back.is_contiguous() and torch.equal(back.view(torch.uint8), scale)


@listed(("rows", "groups"), [(1, 1), (31, 3), (128, 4), (129, 5), (260, 9), (0, 4), (8, 8), (9, 2)])
@listed("dtype", [torch.uint8, E8M0, torch.float8_e4m3fn])
def test_tiles_against_their_byte_offsets(rows: int, groups: int, dtype: torch.dtype):
    """Each scale is at the offset that cuBLASLt and FlashInfer document; padding is zero."""
    plain = torch.arange(1, rows * groups + 1).remainder(250).add(1).to(torch.uint8).view(rows, groups)
    offsets = {
        "128x4": lambda r, c, wide: ((r // 128) * (wide // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4,
        "8x4": lambda r, c, wide: ((r // 8) * (wide // 4) + c // 4) * 32 + (r % 8) * 4 + c % 4,
    }
    for order, high in (("128x4", 128), ("8x4", 8)):
        tiles, wide = swizzle_scale(plain.view(dtype), order), -(-groups // 4) * 4
        assert (tiles.shape, tiles.dtype) == ((-(-rows // high) * high, wide), dtype) and tiles.is_contiguous()
        wanted = torch.zeros(tiles.numel(), dtype=torch.uint8)
        for r in range(rows):
            for c in range(groups):
                wanted[offsets[order](r, c, wide)] = plain[r, c]
        assert torch.equal(tiles.view(torch.uint8).flatten(), wanted)
        for given in (tiles, tiles.flatten()):
            assert torch.equal(unswizzle_scale(given, rows, groups, order).view(torch.uint8), plain)


def test_tiles_that_are_refused():
    """Another order, dtype or size is named with what would do."""
    leading = swizzle_scale(torch.ones(2, 3, 4, dtype=torch.uint8))
    assert torch.equal(leading, swizzle_scale(torch.ones(6, 4, dtype=torch.uint8)))
    with pytest.raises(OperandError, match=r"scale_order must be 128x4 or 8x4 \(got 'row'\); row-major scales need no swizzle"):
        swizzle_scale(torch.ones(2, 4, dtype=torch.uint8), "row")
    with pytest.raises(OperandError, match=r"must be \[\.\.\., groups\] \(got \(4,\)\)"):
        swizzle_scale(torch.ones(4, dtype=torch.uint8))
    with pytest.raises(OperandError, match=r"scales in tiles are torch\.float8_e8m0fnu or torch\.uint8 \(got torch\.float32\)"):
        swizzle_scale(torch.ones(2, 4))
    with pytest.raises(OperandError, match=r"128x4 scales of \[129, 4\] must be \[256, 4\] \(got \(128, 4\)\)"):
        unswizzle_scale(leading, 129, 4)
