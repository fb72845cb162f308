"""Names: round trips, unknown names, and revisions of the kernels' sources."""

from __future__ import annotations

import hashlib
import io
import tokenize
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_triton.families import family_of
from tunedgemm_triton.moe import names as moe
from tunedgemm_triton.names import REVISIONS, Gemm, Gemv, Streamk, Tma
from tunedgemm_triton.packed.names import Mx, Wn, Wnv

KERNELS = Path(str(find_spec("tunedgemm_triton").origin)).parent / "kernels"  # type: ignore[union-attr]

_TILES = moe.Tile(32, 128, 2, 5), moe.Tile(256, 64, 8, 3)
EVERY_FIELD: dict[str, list[Any]] = {
    "a16w16": [
        Gemv(3, 2, 1024, 7, 4, 3),
        Gemm(64, 128, 64, 8, 4, 3, True, 16, 2, 3),
        Gemm(16, 32, 64, 1, 2, 5),
        Gemm(64, 128, 64, 8, 4, 3, False, 16, 2, 3, True),
        Tma(128, 128, 64, 8, 4, 3, True, False),
        Tma(128, 128, 64, 8, 4, 3, False, True),
        Streamk(128, 128, 64, 8, 4, 3),
    ],
    "a4w4_blockscale": [Mx(64, 128, 256, 8, 4, 3, True, True), Mx(16, 32, 64, 1, 2, 5)],
    "a16wn": [Wn(64, 128, 256, 8, 4, 3, True), Wn(16, 32, 32, 1, 2, 5), Wnv(2, 4, 1024, 8, 16)],
    "fmoe": [moe.Moe(64, 8, *_TILES, *(flag == index for flag in range(3))) for index in range(3)],
}


def test_every_field_survives_the_name() -> None:
    """A name has every parameter of its kernel."""
    kernels = [(op, kernel) for op, kernels in EVERY_FIELD.items() for kernel in kernels]
    assert [family_of(op).parse_name(kernel.name) for op, kernel in kernels] == [kernel for _, kernel in kernels]


def test_flags_of_a_name_keep_their_order() -> None:
    """Tables have names with several flags, which later versions write and read in the same order."""
    gemm, tma = Gemm(64, 128, 64, 8, 4, 3, True, 16, 2, 3), Tma(128, 128, 64, 8, 4, 3, True, True)
    assert gemm.name == f"gemm_r{REVISIONS['gemm']}_m64n128k64_g8_w4s3_t_i16_p2_e3"
    assert tma.name == f"tma_r{REVISIONS['tma_halves']}_m128n128k64_g8_w4s3_t_ws"


def test_an_unknown_name_is_an_error_with_a_reason() -> None:
    """A name of another version, or of no kernel, never runs another kernel."""
    cases = [
        ("a16w16", "gemm_r1_m17n64k64_g8_w4s3", "power of two"),
        ("a16w16", "gemv_r1_m9n2k1024u2_w4s1", "in 1..4"),
        ("a16w16", "gemm_r99_m16n64k64_g8_w4s3", "revision must be 1"),
        ("a16w16", "gemm_r1_m16n64k64_g8_w4s3_x", "unknown triton kernel"),
        ("a16w16", "sol0", "names look like"),
        ("fmoe", "moe_r99_m64g8_n128k64w8s4_n128k64w8s4", "revision must be 1"),
        ("fmoe", "moe_r1_m48g8_n128k64w8s4_n128k64w8s4", "power of two"),
        ("fmoe", "gemm_r1_m64n128k64_g8_w4s3", "names look like"),
        ("fmoe", "moe_r1_m16g1_n64k128w4s9_n64k128w4s3", "stages must be in 1..8"),
        ("a4w4_blockscale", "mx_r1_m64n128k128_g8_w4s9", "stages must be in 1..8"),
        ("a4w4_blockscale", "mx_r99_m64n128k128_g8_w4s3", "revision must be 1"),
        ("a4w4_blockscale", "mx_r1_m64n128k16_g8_w4s3", "power of two"),
        ("a4w4_blockscale", "mx_r1_m64n128k128_g8_w4s3_x", "names look like"),
        ("a16wn", "wn_r1_m64n128k16_g8_w4s3", "power of two"),
        ("a16wn", "wn_r99_m64n128k128_g8_w4s3", "revision must be 1"),
        ("a16wn", "wnv_r1_m8n4k1024u1_w4", "power of two in 1..4"),
    ]
    for op, name, reason in cases:
        with pytest.raises(PluginError, match=reason):
            family_of(op).parse_name(name)


#: Family -> revision, SHA-256 of its code without comments and docstrings, and the files of that
#: code.
_SHARED = ("arrival.py", "gemm.py", "tile.py")
SOURCES = {
    "gemv": (REVISIONS["gemv"], "73e0cd68d7b16727", ("arrival.py", "gemv.py")),
    "gemm": (REVISIONS["gemm"], "64ea4637733fb052", ("arrival.py", "tile.py", "gemm.py")),
    "tma": (REVISIONS["tma"], "544c6b90b818f3d5", ("arrival.py", "tile.py", "persistent.py")),
    "tma_halves": (REVISIONS["tma_halves"], "d92146e5dff76959", ("arrival.py", "tile.py", "persistent.py", "halves.py")),
    "streamk": (REVISIONS["streamk"], "3813768fbe7f6958", ("arrival.py", "tile.py", "gemm.py", "streamk.py")),
    "mx": (REVISIONS["mx"], "9edf0b62be453f64", ("mx.py", *_SHARED)),
    "wn": (REVISIONS["wn"], "721c43b23e8b9347", ("wn.py", *_SHARED)),
    "wnv": (REVISIONS["wnv"], "611495f0d0d67a65", ("wnv.py", "wn.py", *_SHARED)),
    "moe": (REVISIONS["moe"], "603759527a5ac66f", ("mx.py", "moe.py", "moe_quantise.py", "moe_sort.py", *_SHARED)),
}


def test_a_changed_kernel_has_a_new_revision() -> None:
    """The source behind a tuned row's revision does not change; raise the revision, then note it
    and the digest here.
    """
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    digests = {}
    for family, (_, _, files) in SOURCES.items():
        texts = [
            token.string
            for file in files
            for token in tokenize.generate_tokens(io.StringIO((KERNELS / file).read_text()).readline)
            if token.type not in skipped and not token.string.startswith('"""')
        ]
        digests[family] = (2 if family == "tma_halves" else 1, hashlib.sha256(" ".join(texts).encode()).hexdigest()[:16])
    assert digests == {family: (revision, digest) for family, (revision, digest, _) in SOURCES.items()}
