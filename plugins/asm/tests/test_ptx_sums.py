"""Equal names of orders of sums stand for equal bits, on the emulator; choices of untuned calls."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm_asm import asm
from tunedgemm_asm.ptx import invariant
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import KernelConfig, parse_name
from tunedgemm_asm.ptx.sums import order_of, solution_of

H200 = Device("sm_90", 132, "nvidia-h200")
BF16 = Shape("a16w16", 20, 24, 328, outdtype="fp32")
ROW = Shape("a8w8", 20, 24, 400, "fp8_e4m3fn", "fp32", scale="row")
BLOCK = attrs.evolve(ROW, op="a8w8_blockscale", scale="block")
TENSOR, BIASED, INT8 = attrs.evolve(ROW, scale="tensor"), attrs.evolve(ROW, epilogue="bias"), attrs.evolve(ROW, dtype="int8")
#: One, two and three warpgroups, either operand first, clusters; then what may be added.
PLAIN = (
    KernelConfig(64, 24, 2, 1), KernelConfig(128, 32, 3), KernelConfig(24, 64, 3, 1, swapped=True), KernelConfig(64, 32, 3, 1, 2),
)  # fmt: skip
EXACT = [attrs.evolve(config, promoted=True) for config in PLAIN]
EXACT += [attrs.evolve(config, overlapped=True) for config in EXACT if config.tile_b == 32]
STAGED = [attrs.evolve(config, staged=True) for config in EXACT]
FOLDED = [attrs.evolve(config, folded=True) for config in PLAIN]
CASES = {
    "bf16": (BF16, PLAIN, 1),
    "parts": (BF16, (*PLAIN, *FOLDED), 3),
    "other parts": (BF16, (*PLAIN[:2], *FOLDED[:2]), 2),
    "by row": (ROW, EXACT, 1),
    "by row, parts": (ROW, EXACT, 2),
    "by tensor": (TENSOR, EXACT, 1),
    "bias": (BIASED, EXACT, 1),
    "by block": (BLOCK, STAGED, 1),
    "int8": (INT8, PLAIN, 1),
}


def rows_of(ptx: ModuleType, shape: Shape, config: KernelConfig, splits: int) -> Any:
    """Return the output for numbers of many magnitudes, whose sums are rounded."""

    class Rough(ptx.Bench):
        def _scales(self, chance: np.random.Generator) -> list[np.ndarray]:
            return [(each * chance.uniform(1, 2, each.shape)).astype("f4") for each in super()._scales(chance)]

    chance, blocks, far = np.random.default_rng(5), -(-shape.k // 64), 12 if shape.dtype == "bf16" else 5
    given = [
        chance.integers(-3, 4, (rows, shape.k)) * (2.0 ** chance.integers(-far, far, (rows, blocks))).repeat(64, 1)[:, : shape.k]
        for rows in (20, shape.n)
    ]
    if shape.dtype == "int8":
        given = [chance.integers(-127, 128, each.shape) for each in given]
    return Rough(attrs.evolve(shape, m=20), config, splits, 2, given=tuple(given)).output()[0]


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_one_order_of_sums_give_equal_bits(ptx: ModuleType, name: str) -> None:
    """Tiles, stages, clusters, operand order, overlap, and parts in one CTA or several change no bit."""
    shape, configs, splits = CASES[name]
    assert not [reason for config in configs if (reason := unfit(config, splits, shape))]
    assert len({order_of(config, splits, shape) for config in configs}) == 1
    first, *others = [rows_of(ptx, shape, config, splits) for config in configs]
    assert np.isfinite(first).all()
    assert all(np.array_equal(first, other) for other in others)


def test_other_orders_give_other_bits(ptx: ModuleType) -> None:
    """The numbers of these tests tell one part from two and three, so that equal bits mean something."""
    outs = [rows_of(ptx, BF16, PLAIN[0], splits) for splits in (1, 2, 3)]
    assert not any(np.array_equal(outs[a], outs[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(
    ("config", "splits", "shape", "order"),
    [
        (PLAIN[0], 1, BF16, "wgmma-k16"),
        (PLAIN[0], 3, BF16, "wgmma-k16-s128"),
        (FOLDED[0], 3, BF16, "wgmma-k16-s128"),
        (KernelConfig(64, 24, 2, 1, stream=True), 1, BF16, ""),
        (PLAIN[0], 1, ROW, "wgmma-k32-x-w"),
        (EXACT[0], 2, BIASED, "wgmma-k32-p128-s256-x-w"),
        (STAGED[0], 1, BLOCK, "wgmma-k32-p128"),
        (KernelConfig(64, 24, 2, 1, stream=True), 1, INT8, "exact-x-w"),
        (PLAIN[0], 2, INT8, "exact-x-w"),
    ],
)
def test_the_name_of_an_order_has_what_changes_bits(config: KernelConfig, splits: int, shape: Shape, order: str) -> None:
    """Instruction, promotion, parts of K and order of scales; nothing where M decides."""
    found = solution_of("asm", config, splits, shape)
    assert (found.sum_order, found.batch_invariant) == (order, bool(order))


def test_parts_in_one_cta_exclude_what_they_cannot_be_added_with(failing: Any) -> None:
    """Promotion, ping-pong and stream-K have no such kernels, nor do 8-bit operands and single parts."""
    for other in ("promoted", "turns", "stream"):
        with pytest.raises(PluginError, match="exclude"):
            KernelConfig(128, 64, 3, folded=True, **{other: True})
    assert "splitK 2 or more" in str(unfit(FOLDED[0], 1, BF16)) and "16-bit" in str(unfit(FOLDED[0], 2, ROW))
    assert parse_name(FOLDED[0].name) == FOLDED[0] and FOLDED[0].name.endswith("_f_r1")


LIKE = {
    "bf16": Shape("a16w16", 1, 4096, 4096),
    "fp16 with bias": Shape("a16w16", 1, 6144, 4096, "fp16", "fp16", epilogue="bias"),
    "narrow": Shape("a16w16", 1, 1280, 8192),
    "narrowest": Shape("a16w16", 1, 256, 7168),
    "by row": Shape("a8w8", 1, 1280, 8192, "fp8_e4m3fn", "bf16", scale="row"),
    "by tensor": Shape("a8w8", 1, 4096, 4096, "fp8_e4m3fn", "bf16", scale="tensor"),
    "int8": Shape("a8w8", 1, 1280, 8192, "int8", "bf16", scale="row"),
    "by block": Shape("a8w8_blockscale", 1, 7168, 2048, "fp8_e4m3fn", "bf16", scale="block"),
    "by block, M-major": Shape("a8w8_blockscale", 1, 576, 7168, "fp8_e4m3fn", "bf16", scale="block", extra={"scale_order": "m_major"}),
}
ORDERS = {"narrow": "wgmma-k16-s2048", "narrowest": "wgmma-k16-s896", "int8": "exact-x-w"}


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels that add parts of K in registers serve untuned calls."""
    monkeypatch.setattr(invariant, "FOLDED_SERVES", True)
    caches = invariant._parts_of, invariant._judged, invariant._guess
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_parts_of_k_serve_no_untuned_call_yet() -> None:
    """Kernels that add them in registers have not run on a GPU."""
    chosen = [asm.invariant_fallback(attrs.evolve(LIKE["narrow"], m=m), H200) for m in (1, 64, 8192)]
    assert {each.sum_order for each in chosen if each} == {"wgmma-k16"}


@pytest.mark.usefixtures("folded")
@pytest.mark.parametrize("name", LIKE)
def test_untuned_calls_in_the_mode_have_one_order_for_every_m(name: str) -> None:
    """Each M has a kernel that serves it; narrow 16-bit weights of large K have parts, fp8 is promoted."""
    like = LIKE[name]
    for m in (1, 2, 7, 8, 16, 17, 31, 64, 65, 100, 128, 129, 200, 256, 300, 1000, 4096, 10000, 1 << 17, 1 << 22):
        shape = attrs.evolve(like, m=m)
        found = asm.invariant_fallback(shape, H200)
        assert found and not asm.lacks(found, shape, H200)
        scales = "-x-w" if like.scale in ("row", "tensor") else ""
        usual = f"wgmma-k32-p128{scales}" if like.dtype.startswith("fp8") else "wgmma-k16"
        assert found.sum_order == ORDERS.get(name, usual)


@pytest.mark.usefixtures("folded")
def test_partials_of_many_rows_stay_in_registers() -> None:
    """Parts of K of many rows of x are added in one CTA, which needs no workspace."""
    chosen = {m: asm.invariant_fallback(attrs.evolve(LIKE["narrow"], m=m), H200) for m in (8, 8192)}
    assert [parse_name(each.kernel_name).folded for each in chosen.values() if each] == [False, True]
    assert {each.split_k for each in chosen.values() if each} == {4}


def test_other_architectures_have_no_choice_in_the_mode() -> None:
    """AITER's kernels add in unknown orders."""
    assert asm.invariant_fallback(LIKE["bf16"], Device("gfx942", 304)) is None
