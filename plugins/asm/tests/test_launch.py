"""Test launchers over the fake runtime: results, threads, workspaces, errors."""

from __future__ import annotations

import itertools
import weakref
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import LaunchError, Shape, Solution
from tunedgemm.testing.conformance import Poisoned
from tunedgemm.testing.stand_in import bind_driver
from tunedgemm.tools.launching import KernelFunction, Launch, LaunchPlan, launch_of, semaphores
from tunedgemm_asm import driver, launch, packs

gfx942 = pytest.mark.parametrize("asm", ["gfx942"], indirect=True)
gfx950 = pytest.mark.parametrize("asm", ["gfx950"], indirect=True)
PRODUCT = Shape("a16w16", 70, 128, 512)
INT8 = Shape("a8w8_bpreshuffle", 40, 256, 512, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16")
FP4 = Shape("a4w4_blockscale", 40, 512, 1024, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")


def name_of(fake: ModuleType, tile: int, **how: Any) -> str:
    """Return a bf16 kernel's name."""
    return fake.bf16(tile, **how)["knl_name"]


@gfx942
def test_ragged_rows_are_right(asm: Any, over: ModuleType, fake: ModuleType, failing: Any) -> None:
    """M around whole tiles is right, with splits, bias and shuffled weights."""

    def check(m: int) -> None:
        for layout, epilogue in (("row", "none"), ("aiter16x16", "bias")):
            shape, shuffled = attrs.evolve(PRODUCT, m=m, layout=layout, epilogue=epilogue), layout != "row"
            prefetch = 0 if shuffled else 3
            assert over.fault(asm, fake, shape, name_of(fake, 32, shuffled=shuffled, prefetch=prefetch), 1) == ""
            assert over.fault(asm, fake, shape, name_of(fake, 64, shuffled=shuffled, splits=True), 5) == ""

    assert not failing(check, itertools.product([1, 31, 32, 33, 64, 65, 97]))


@gfx950
def test_plain_fp4_weights_go_with_shuffled_scales(asm: Any, over: ModuleType, fake: ModuleType) -> None:
    """AITER's kernels for plain weights are right with shuffled scales, and refuse row-major ones."""
    name = fake.ROWS["f4gemm"][3]["knl_name"]
    shape = attrs.evolve(FP4, layout="row", extra={"scale_order": "aiter32x8"})
    assert "noBpreShuffle" in name
    assert over.fault(asm, fake, shape, name) == ""
    assert "reads scales in the order aiter32x8, not row" in over.fault(asm, fake, attrs.evolve(shape, extra=()), name)


@gfx942
def test_semaphores_are_the_cores(asm: Any, over: ModuleType, fake: ModuleType) -> None:
    """Counters are the core's and zero at each launch."""
    launcher, case = over.bound(asm, name_of(fake, 32, shuffled=False, splits=True), PRODUCT, 4), over.case(PRODUCT)
    counters = semaphores(1024, torch.device("cpu"))
    for _ in range(3):
        assert case.wrong(launcher.call(*case.plain), 4) == ""
        assert over.native(asm, fake).fake_last().contents.u64(0x150) == counters.data_ptr()
        assert not counters.any()
    counters[1] = 1
    try:
        with pytest.raises(LaunchError, match="hipModuleLaunchKernel: the launch timed out"):
            launcher.call(*case.plain)
    finally:
        counters.zero_()
    assert case.wrong(launcher.call(*case.plain), 4) == ""


@gfx942
def test_captured_graphs_have_separate_counters_and_scratch(
    asm: Any, over: ModuleType, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call requests workspace and counters and holds both until the launch."""
    asked: list[tuple[str, int]] = []
    given: list[weakref.ref[torch.Tensor]] = []
    launched = []

    def fresh(kind: str, dtype: torch.dtype) -> Any:
        def give(count: int, device: torch.device) -> torch.Tensor:
            asked.append((kind, count))
            given.append(weakref.ref(tensor := torch.zeros(count, dtype=dtype, device=device)))
            return tensor

        return give

    def watched(function: KernelFunction, plan: LaunchPlan) -> Launch:
        plain = launch_of(function, plan)

        def call(stream: int, *addresses: int) -> int:
            held = [tensor() for tensor in given[-2:]]
            launched.append([None if tensor is None else tensor.data_ptr() for tensor in held])
            assert launched[-1] == list(addresses[-2:])
            assert len(set(addresses)) == len(addresses)
            return plain(stream, *addresses)

        return call

    monkeypatch.setattr(launch, "semaphores", fresh("counters", torch.int32))
    monkeypatch.setattr(launch, "workspace", fresh("bytes", torch.uint8))
    monkeypatch.setattr(launch, "launch_of", watched)
    launcher, case = over.bound(asm, "tunedgemm_bf16_32x32_pf2_splitk", PRODUCT, 4), over.case(PRODUCT)
    for _ in range(2):
        assert case.wrong(launcher.call(*case.plain)) == ""
    assert asked == [("bytes", launcher.workspace_bytes), ("counters", 1024)] * 2
    assert len(launched) == 2
    assert [tensor() for tensor in given] == [None] * 4


@gfx942
def test_a_bias_that_is_absent_is_zeros(asm: Any, over: ModuleType, fake: ModuleType) -> None:
    """An absent bias is replaced by zeros that launchers share."""
    name = fake.ROWS["i8gemm"][0]["knl_name"]
    native, places = over.native(asm, fake), []
    for m in (3, 40):
        shape = attrs.evolve(INT8, m=m)
        assert not any(launch._zeros(n, torch.device("cpu")).any() for n in range(1, 200))
        assert over.fault(asm, fake, shape, name, 1) == ""
        places.append(native.fake_last().contents.u64(0x50))
    assert places[0] == places[1]
    biased = attrs.evolve(INT8, epilogue="bias", bias_dtype="fp32")
    assert over.fault(asm, fake, biased, name, 2) == ""
    assert native.fake_last().contents.u64(0x50) == over.case(biased).plain[4].data_ptr()


@gfx950
def test_fp4_outputs_have_groups_of_32_rows(asm: Any, over: ModuleType, fake: ModuleType) -> None:
    """The memory of fp4 outputs has whole groups of 32 rows."""
    launcher, case = over.bound(asm, fake.ROWS["f4gemm"][0]["knl_name"], FP4), over.case(FP4)
    with Poisoned() as poisoned:
        out = launcher.call(*case.plain)
    assert out.shape == (40, 512)
    assert out.untyped_storage().nbytes() >= 64 * 512 * 2
    assert not poisoned.overwritten()
    assert not out.isnan().any()


@gfx942
def test_a_launch_that_fails_names_the_kernel(asm: Any, over: ModuleType, fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed launch names kernel and driver error, and the next launch works."""
    name = name_of(fake, 32, shuffled=False, prefetch=3)
    launcher, case = over.bound(asm, name, PRODUCT, 1), over.case(PRODUCT)
    with monkeypatch.context() as failing:
        failing.setenv("FAKE_LAUNCH_STATUS", "719")
        with pytest.raises(LaunchError) as error:
            launcher.call(*case.plain)
    assert str(error.value) == f"asm {name}: hipModuleLaunchKernel: unspecified launch failure"
    assert case.wrong(launcher.call(*case.plain)) == ""
    with pytest.raises(LaunchError, match="illegal memory access"):
        over.bound(
            asm, name_of(fake, 32, shuffled=True, splits=False), attrs.evolve(PRODUCT, layout="aiter16x16", epilogue="bias"), 1
        ).call(*case.plain, torch.empty(0))


@gfx942
def test_a_driver_that_does_not_load_it_is_an_error(asm: Any, over: ModuleType, fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code object that does not load names kernel, architecture and driver error."""
    monkeypatch.setenv("FAKE_GFX", "gfx950")
    fresh = bind_driver(driver.HIP, str(fake.copy_of()))
    name = name_of(fake, 96, shuffled=True, splits=True)
    with pytest.raises(LaunchError, match=f"asm {name} on gfx942: hipModuleLoadData: no kernel image is available"):
        own = attrs.evolve(asm, hooks=attrs.evolve(asm.hooks, driver=lambda _: fresh))
        own.functions["bind"](Solution("asm", name, 2), attrs.evolve(PRODUCT, layout="aiter16x16"), over.CPU.limiting(asm.host))


@gfx942
def test_a_code_object_is_checked_before_it_is_loaded(
    asm: Any, over: ModuleType, fake: ModuleType, objects: ModuleType, tmp_path: Any
) -> None:
    """A truncated code object costs its kernel and never reaches the driver."""
    tree = fake.tree(tmp_path / "hsa", objects)
    row = fake.bf16(32, shuffled=False, prefetch=3)
    path = tree / "gfx942" / "bf16gemm" / row["co_name"]
    path.write_bytes(path.read_bytes()[:200])
    broken = over.backend(fake, tree, "gfx942")
    reason = "truncated: 200 bytes are fewer than its header says"
    assert over.refused(broken, row["knl_name"], PRODUCT) == f"pack aiter-gfx942-bf16gemm ({path.parent}): {path.name}: {reason}"
    assert over.native(broken, fake).fake_loads() == 0
    assert over.fault(broken, fake, PRODUCT, name_of(fake, 64, shuffled=False, prefetch=3), 1) == ""
    assert any(path.name in problem for problem in broken.hooks.catalog("gfx942").problems)
    assert isinstance(broken.hooks.catalog("gfx942"), packs.Catalog)
