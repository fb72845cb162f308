"""Test untuned calls: shuffled weights and fitted classes get the first guess that runs."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_asm.cost import rank
from tunedgemm_asm.limits import unfit
from tunedgemm_asm.names import resolve

MI300X = Device("gfx942", 304, "amd-instinct-mi300x")
both = pytest.mark.parametrize("asm", ["gfx942", "gfx950"], indirect=True)
gfx942 = pytest.mark.parametrize("asm", ["gfx942"], indirect=True)
gfx950 = pytest.mark.parametrize("asm", ["gfx950"], indirect=True)
SHUFFLED = Shape("a16w16", 128, 4096, 4096, layout="aiter16x16")


def shapes(gfx: str) -> list[Shape]:
    """Return products of many sizes with shuffled weights."""
    fp8 = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn"}[gfx]
    sizes = list(itertools.product((1, 16, 100, 1024, 9000), (128, 1280, 32768), (128, 512, 8192)))
    return [
        *(Shape("a16w16", *size, outdtype=out, layout="aiter16x16") for size in sizes for out in ("bf16", "fp32")),
        *(Shape("a16w16", *size, epilogue="bias", layout="aiter16x16") for size in sizes),
        *(Shape("a8w8_bpreshuffle", *size, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16") for size in sizes),
        *(Shape("a8w8_blockscale_bpreshuffle", *size, dtype=fp8, outdtype="bf16", scale="block", layout="aiter16x16") for size in sizes),
    ]


@both
def test_shuffled_weights_get_a_kernel_that_runs(asm: Any) -> None:
    """Every supported shape gets a guess that fits."""
    gfx, device = asm.host.gfx, asm.host
    found = asm.hooks.catalog(gfx)
    for shape in shapes(gfx):
        guess = asm.heuristic_fallback(shape, device)
        assert (guess is None) is bool(asm.refusal(shape, device)), shape
        if guess is not None:
            kernel, splits = resolve(guess, shape, device, found)
            assert unfit(found.kernels[kernel.name], splits, shape) is None


@gfx942
def test_the_order_of_a_manifest_does_not_decide(asm: Any) -> None:
    """Guess and list do not depend on the order of kernels."""
    kernels, draw = list(asm.hooks.catalog("gfx942").kernels.items()), random.Random(1)
    for shape in shapes("gfx942")[::7]:
        wanted = asm.heuristic_fallback(shape, MI300X), list(asm.solutions(shape, MI300X))
        for _ in range(3):
            draw.shuffle(kernels)
            other = attrs.evolve(
                asm, hooks=attrs.evolve(asm.hooks, catalog=lambda _: attrs.evolve(asm.hooks.catalog("gfx942"), kernels=dict(kernels)))
            )
            assert (other.heuristic_fallback(shape, MI300X), list(other.solutions(shape, MI300X))) == wanted


@gfx942
def test_kernels_rank_as_in_aiters_launcher(asm: Any, fake: ModuleType) -> None:
    """Rounds, idle units, padded rows and tile decide in this order."""
    kernels = {name: loaded.kernel for name, loaded in asm.hooks.catalog("gfx942").kernels.items()}
    small, large = (kernels[fake.bf16(tile, shuffled=True)["knl_name"]] for tile in (32, 128))
    device = attrs.evolve(MI300X, cu_num=64)
    many = attrs.evolve(SHUFFLED, m=128)  # 256 workgroups in 4 rounds or 64 in one
    assert rank(large, 1, many, device) < rank(small, 1, many, device)
    idle = attrs.evolve(SHUFFLED, m=128, n=512)  # one round: 32 workgroups of 64 or 8
    assert rank(small, 1, idle, device) < rank(large, 1, idle, device)
    split = kernels[fake.bf16(32, shuffled=True, splits=True)["knl_name"]]
    ragged = attrs.evolve(SHUFFLED, m=33, n=64 * 8)
    assert rank(split, 4, ragged, device)[:3] == (1, 0, 31)
    equal = attrs.evolve(SHUFFLED, m=1 << 14, n=1 << 14)  # no idle units, no rows for nothing
    assert rank(large, 1, equal, device)[0] < rank(small, 1, equal, device)[0]


@gfx942
def test_plain_weights_get_no_guess(asm: Any) -> None:
    """torch serves plain weights."""
    assert asm.heuristic_fallback(attrs.evolve(SHUFFLED, layout="row"), MI300X) is None


@gfx942
def test_kernels_of_other_packs_serve_no_untuned_call(
    asm: Any, over: ModuleType, fake: ModuleType, objects: ModuleType, tmp_path: Path
) -> None:
    """Kernels of other packs are not guessed."""
    shape = attrs.evolve(SHUFFLED, n=4096 + 16)  # in no tile of AITER's
    assert asm.refusal(shape, MI300X) is None
    assert {solution.kernel_name[:10] for solution in asm.solutions(shape, MI300X)} == {"tunedgemm_"}
    assert asm.heuristic_fallback(shape, MI300X) is None
    assert isinstance(asm.heuristic_fallback(SHUFFLED, MI300X), Solution)
    fake.write(tmp_path / "mine", "m.csv", fake.ROWS["bf16gemm"], objects, "gfx942", 352)
    (tmp_path / "mine" / "pack.json").write_text(json.dumps({"abi": "aiter-bf16gemm", "gfx": "gfx942", "manifest": "m.csv"}))
    found = over.found_in("gfx942", tmp_path / "mine")
    theirs = attrs.evolve(asm, hooks=attrs.evolve(asm.hooks, catalog=lambda _: found))
    assert theirs.refusal(SHUFFLED, MI300X) is None
    assert theirs.heuristic_fallback(SHUFFLED, MI300X) is None


def test_an_unlaunchable_kernel_is_not_a_guess(over: ModuleType, fake: ModuleType, objects: ModuleType, tmp_path: Path) -> None:
    """Unfit kernels are skipped, and torch serves if all are unfit."""
    tree = fake.tree(tmp_path / "hsa", objects)
    seen = []
    while guess := (broken := over.backend(fake, tree, "gfx942")).heuristic_fallback(SHUFFLED, broken.host):
        assert guess.kernel_name not in seen
        over.bound(broken, guess.kernel_name, SHUFFLED, guess.split_k)
        seen.append(guess.kernel_name)
        broken.hooks.catalog("gfx942").kernels[guess.kernel_name].path.write_bytes(b"garbage")
    assert len(seen) > 3


@gfx950
def test_fp4_has_no_ragged_guess_of_128x512(asm: Any, over: ModuleType, fake: ModuleType) -> None:
    """The fp4 tile 128x512 is guessed only for whole tiles of N."""
    shape = Shape("a4w4_blockscale", 128, 3840, 4096, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
    [name] = [row["knl_name"] for row in fake.ROWS["f4gemm"] if "128x512" in row["knl_name"]]
    alone = attrs.evolve(
        asm,
        hooks=attrs.evolve(
            asm.hooks, catalog=lambda gfx: attrs.evolve(asm.hooks.catalog(gfx), kernels={name: asm.hooks.catalog(gfx).kernels[name]})
        ),
    )
    assert asm.heuristic_fallback(shape, asm.host).kernel_name != name
    assert alone.heuristic_fallback(shape, asm.host) is None
    assert alone.heuristic_fallback(attrs.evolve(shape, n=4096), asm.host).kernel_name == name
    assert {solution.kernel_name for solution in alone.solutions(shape, asm.host)} == {name}
