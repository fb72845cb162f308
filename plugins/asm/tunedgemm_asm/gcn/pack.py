"""Packs of generated kernels."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from tunedgemm_asm.gcn.assembler import assembler_for
from tunedgemm_asm.gcn.frame import ABI
from tunedgemm_asm.gcn.kernel import text_of
from tunedgemm_asm.gcn.plan import STEP, Plan
from tunedgemm_asm.gcn.targets import TARGETS, target_of

MANIFEST = "manifest.csv"
#: Tiles: rows, columns, waves along M for a plain weight, steps loaded ahead for a plain weight and for a shuffled one.
#:
#: A small tile has few products to hide memory's latency behind and so looks further ahead. For gfx942 what is on its way takes registers,
#: for gfx950 with a plain weight LDS: where looking further ahead leaves room for one workgroup instead of two, both are there to be tuned.
#: A shuffled weight is no matter of LDS: there the four waves stand along N, and each loads its own columns.
_TILES = {
    "gfx942": (
        (32, 64, 1, (4,), (4,)),
        (32, 128, 1, (3,), (4,)),
        (64, 64, 2, (3,), (4,)),
        (64, 128, 2, (2,), (3,)),
        (96, 64, 2, (3,), (3,)),
        (96, 128, 2, (2,), (2,)),
        (128, 64, 4, (2,), (3,)),
        (128, 128, 2, (2,), (2,)),
        (160, 128, 2, (2,), (2,)),
        (128, 256, 2, (2,), (2,)),
        (256, 128, 2, (2,), (2,)),
        (256, 256, 2, (1,), (1,)),
    ),
    "gfx950": (
        (32, 64, 1, (4,), (4,)),
        (32, 128, 1, (3,), (4,)),
        (64, 64, 2, (3, 6), (4,)),
        (64, 128, 2, (2,), (3,)),
        (96, 64, 2, (3,), (3,)),
        (96, 128, 2, (1, 3), (2,)),
        (128, 64, 4, (2,), (3,)),
        (128, 128, 2, (1, 3), (2,)),
        (160, 128, 2, (2,), (2,)),
        (128, 256, 2, (2,), (2,)),
        (256, 128, 2, (2,), (2,)),
        (256, 256, 2, (1,), (1,)),
    ),
}
#: Elements of a tile at most that several workgroups share: K is split where there are few tiles, and large ones leave more to add up.
_SPLIT_MOST = 128 * 128


@attrs.frozen
class Built:
    """A pack that was written: its kernels' names, and who assembled them."""

    names: tuple[str, ...]
    assembler: str


def plans(gfx: str) -> Iterator[Plan]:
    """All kernels of an architecture.

    Raises:
        PluginError: none are generated for it.
    """
    target_of(gfx)
    for tile_m, tile_n, waves_m, *depths in _TILES[gfx]:
        for split in (False, True) if tile_m * tile_n <= _SPLIT_MOST else (False,):
            for shuffled, ahead in zip((False, True), depths, strict=True):
                yield from (Plan(gfx, tile_m, tile_n, 1 if shuffled else waves_m, steps, shuffled, split) for steps in ahead)


#: All kernels of all architectures.
PLANS = tuple(plan for gfx in TARGETS for plan in plans(gfx))


def build(gfx: str, folder: Path, chosen: Sequence[Plan] = ()) -> Built:
    """Writes manifest, descriptor and code objects of kernels for an architecture.

    Args:
        gfx: the architecture.
        folder: where to; made if it is not there.
        chosen: the kernels; all if none are named.

    Raises:
        PluginError: none are generated for it, or no assembler knows it.
    """
    made = tuple(chosen) or tuple(plans(gfx))
    assembler = assembler_for(gfx)
    folder.mkdir(parents=True, exist_ok=True)
    assembler.assemble({f"{plan.name}.co": text_of(plan) for plan in made}, folder)
    rows = [
        {"knl_name": plan.name, "co_name": f"{plan.name}.co", "tn": 1, "tileM": plan.tile_m, "tileN": plan.tile_n, "pf": plan.prefetch,
         "bPreshuffle": int(plan.shuffled), "splitK": int(plan.split), "subK": STEP, "bias": 1}
        for plan in made
    ]  # fmt: skip
    with (folder / MANIFEST).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    described = {"name": f"tunedgemm-{gfx}", "abi": ABI.name, "gfx": gfx, "manifest": MANIFEST}
    (folder / "pack.json").write_text(json.dumps(described, indent=2) + "\n")
    return Built(tuple(plan.name for plan in made), assembler.name)
