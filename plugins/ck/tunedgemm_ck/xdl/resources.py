"""Compute the LDS of Composable Kernel's kernels."""

from __future__ import annotations

from tunedgemm_ck.xdl.names import FORMS, XdlInstance


def lds(instance: XdlInstance) -> int:
    """Return the bytes of LDS of the tiles.

    A shuffled weight goes to registers directly; pipeline v4 has two tiles of each operand.
    """
    rows = instance.m if "preshuffle" in instance.op or instance.op == "a4w4_blockscale" else instance.m + instance.n
    return rows * instance.k * FORMS[instance.op].bits // 8 * (2 if instance.pipeline == 4 else 1)
