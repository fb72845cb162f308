"""Compare what a launch needs beyond arguments, whose bytes `test_arguments_matter` has."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import Shape
from tunedgemm_asm.launch import ADDRESSES, arguments_of

gfx950 = pytest.mark.parametrize("asm", ["gfx950"], indirect=True)


@gfx950
def test_what_is_needed_beside_operands(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """Workspace, counters, zeroing and padded rows are those of each layout."""
    kernels = {name: loaded.kernel for name, loaded in asm.hooks.catalog("gfx950").kernels.items()}
    product = Shape("a16w16", 70, 128, 512)
    own = arguments_of(kernels["tunedgemm_bf16_64x64_pf2_splitk"], 2, product)
    assert (own.workspace, own.counters, own.zeroed, own.rows) == (4 * 2 * 4 * 64 * 64, 1024, False, 70)
    bf16 = arguments_of(kernels[fake.bf16(64, shuffled=False, splits=True)["knl_name"]], 2, product)
    assert (bf16.workspace, bf16.counters, bf16.zeroed) == (0, 1024, False)
    fp4 = Shape("a4w4_blockscale", 70, 528, 1024, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
    for splits in (1, 4):
        told = arguments_of(kernels[fake.ROWS["f4gemm"][1]["knl_name"]], splits, fp4)
        assert (told.rows, told.zeroed, told.counters) == (96, splits > 1, 0)
    for each in (own, bf16, told):
        assert [name for name in ADDRESSES if name in each.addresses] == list(each.addresses)
