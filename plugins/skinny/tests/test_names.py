"""Solution names: round trips, and names of other versions."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import tunedgemm_skinny
from tunedgemm.plugin import PluginError
from tunedgemm_skinny.names import EXAMPLES, REVISION, Rows, Tiles, Wgmma, parse_name

KERNELS = Path(tunedgemm_skinny.__file__).with_name("kernels")


def test_names_are_as_documented() -> None:
    """Names have the documented parts and suffixes, in order."""
    assert Rows(4, 2, 2, 4).name == f"rows_r{REVISION}_n4w2x2u4"
    assert Rows(1, 16, 1, 8, True).name == f"rows_r{REVISION}_n1w16x1u8_s"
    assert Rows(1, 16, 1, 8, True, stages=3).name == f"rows_r{REVISION}_n1w16x1u8a3_s"
    assert Tiles(1, 2, 4, 2).name == f"tiles_r{REVISION}_n1w2x4u2"
    assert Tiles(1, 2, 4, 2, stages=4).name == f"tiles_r{REVISION}_n1w2x4u2a4"
    assert Tiles(1, 2, 4, 2, 4, True, True).name == f"tiles_r{REVISION}_n1w2x4u2a4_s_c"
    assert Wgmma(2, 1, 4, 2, 3).name == f"wgmma_r{REVISION}_n2w1x4u2a3"
    assert Wgmma(1, 2, 1, 1, 6, True).name == f"wgmma_r{REVISION}_n1w2x1u1a6_c"
    assert f"{Rows(4, 2, 2, 4).name}, {Tiles(1, 2, 4, 2, 4, True, True).name}" == EXAMPLES


@pytest.mark.cases(
    ("name", "reason"),
    [
        (f"rows_r{REVISION}_n3w2x2u4", "n_each must be one of 1, 2, 4, 8 (got 3)"),
        (f"tiles_r{REVISION}_n8w2x2u4", "n_each must be one of 1, 2, 4 (got 8)"),
        (f"rows_r{REVISION}_n4w2x2u5", "unroll must be one of"),
        (f"rows_r{REVISION}_n4w0x2u4", "warps_n must be one of"),
        (f"rows_r{REVISION}_n4w2x2u4a1", "stages must be one of"),
        (f"rows_r{REVISION}_n4w16x16u4", "warps of a block must be at most 32 (got 256)"),
        (f"rows_r{REVISION + 1}_n4w2x2u4", f"revision must be {REVISION} (got {REVISION + 1}); tune again"),
        ("rows_r0_n4w2x2u4", f"revision must be {REVISION} (got 0)"),
        (f"rows_r{REVISION}_n4w2x2u4_x", "no kernel"),
        (f"tiles_r{REVISION}_n4w2x2u4_c_s", "no kernel"),
        (f"wgmma_r{REVISION}_n1w4x4u1a4", "warps of a block must be at most 32 (got 64)"),
        (f"wgmma_r{REVISION}_n1w1x1u1a4_s", "no kernel"),
        (f"rows_r{REVISION}_n4w2x2u4 ", "no kernel"),
        ("sol2", "names look like rows_r"),
        ("", "names look like"),
    ],
)
def test_a_foreign_name_is_an_error(name: str, reason: str) -> None:
    """A name of another revision or of no kernel raises an error with the reason."""
    with pytest.raises(PluginError, match=re.escape(reason)):
        parse_name(name)


def test_rows_of_a_block() -> None:
    """The weight rows of a block are those of its warps along N."""
    assert (Rows(4, 2, 8, 1).per_block, Rows(4, 2, 8, 1).warps) == (8, 16)
    assert (Tiles(2, 4, 2, 1).per_block, Tiles(2, 4, 2, 1).warps) == (128, 8)
    assert (Wgmma(2, 2, 2, 1).per_block, Wgmma(2, 2, 2, 1).warps) == (256, 16)


#: SHA-256 of the sources without comments and spaces, by revision.
DIGESTS = {1: "23b2efb4a9366537"}


def _digest() -> str:
    text = "".join(file.read_text() for file in sorted(KERNELS.glob("*.h")))
    return hashlib.sha256("".join(re.sub(r"//[^\n]*", "", text).split()).encode()).hexdigest()[:16]


def test_changed_sources_have_a_new_revision() -> None:
    """Sources change only with their revision.

    Raise REVISION and add the digest; before the first release replace the digest alone.
    """
    assert DIGESTS.get(REVISION) == _digest()
