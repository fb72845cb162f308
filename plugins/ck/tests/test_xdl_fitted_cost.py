"""Check the order and the untuned answers that were fitted to AITER's tables."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import Rates, Work, predict_us
from tunedgemm_ck import ck, cktile
from tunedgemm_ck.tile import FAMILY as TILE
from tunedgemm_ck.tile import space as tile_space
from tunedgemm_ck.xdl import FAMILY, fitted_cost, space

OP = "a8w8_blockscale"
MI300X, MI355X, MI308X = Device("gfx942", 304), Device("gfx950", 256), Device("gfx942", 80)
LAYERS = [(7168, 2048), (7168, 4096), (1536, 7168), (32768, 512), (2112, 7168), (8192, 28672)]


def shape_of(m: int, n: int, k: int, device: Device = MI300X, op: str = OP) -> Shape:
    """Return a product of an op in the fp8 of a device."""
    dtype = "fp4x2" if op == "a4w4_blockscale" else "fp8_e4m3fn" if device.gfx == "gfx950" else "fp8_e4m3fnuz"
    layout = "aiter16x16" if "preshuffle" in op or dtype == "fp4x2" else "row"
    return Shape(op, m, n, k, dtype=dtype, outdtype="bf16", scale="block" if "block" in op else "row", layout=layout)


def cost_of(instance: object, split: int, shape: Shape, device: Device) -> float:
    """Return the predicted microseconds of an instance of ``ck``."""
    predicted = fitted_cost.predictor("ck", fitted_cost.described, shape, device)
    assert predicted is not None
    return predicted(instance, split, shape, device)


@pytest.mark.parametrize(("libtype", "op", "gfx", "units"), sorted(fitted_cost.all_rates()))
def test_lists_are_ordered_by_predicted_times(libtype: str, op: str, gfx: str, units: int) -> None:
    """On fitted devices a list begins with the lowest predicted time, never falls, and is short."""
    family, describe = (FAMILY, fitted_cost.described) if libtype == "ck" else (TILE, tile_space.described)
    device = Device(gfx, units)
    for n, k in LAYERS:
        for m in (1, 48, 300, 4096):
            shape = shape_of(m, n, k, device, op)
            predicted = fitted_cost.predictor(libtype, describe, shape, device)
            assert predicted is not None
            listed = list(family.enumerate_instances(shape, device, True))
            times = [predicted(instance, split, shape, device) for instance, split in listed]
            assert all(before <= after for before, after in pairwise(times))
            assert times[:1] > [fitted_cost.all_rates()[libtype, op, gfx, units].launch] or not times
            short = list(family.enumerate_instances(shape, device, False))
            assert short == [each for each in listed if each in short]
            assert len({instance for instance, _ in short}) <= 24


@pytest.mark.parametrize("device", [MI300X, MI355X])
def test_times_grow_with_each_size(device: Device) -> None:
    """Twice the rows, columns or K takes no less time with one instance, and more in the end."""
    for instance in space.listed_instances(OP):
        for field in "mnk":
            shapes = [attrs.evolve(shape_of(128, 1024, 1024, device), **{field: 1024 << step}) for step in range(6)]
            times = [cost_of(instance, 0, shape, device) for shape in shapes]
            assert all(before <= after for before, after in pairwise(times))
            assert times[-1] > 1.1 * times[0]


def test_factors_belong_to_listed_instances() -> None:
    """Each factor is that of a listed instance, and near 1; margins are above 1."""
    listed = {"ck": (space.listed_instances, fitted_cost.described), "cktile": (tile_space.listed_instances, tile_space.described)}
    for (libtype, op, *_), rates in fitted_cost.all_rates().items():
        instances, describe = listed[libtype]
        assert set(rates.factors) <= {describe(each)[2] for each in instances(op)}
        assert all(0.2 < factor < 5 for factor in rates.factors.values())
        assert 1.05 <= rates.margin < 1.5


@pytest.mark.parametrize("device", [MI300X, MI355X])
def test_untuned_answers_beat_the_least_time_of_torch(device: Device) -> None:
    """An answer is on the list, does not split K, and beats torch's least time with a margin."""
    answers = 0
    for n, k in LAYERS:
        for m in (1, 16, 64, 1024, 8192):
            shape = shape_of(m, n, k, device)
            chosen = ck.heuristic_fallback(shape, device)
            if chosen is None:
                continue
            answers += 1
            instance = FAMILY.parse(chosen.kernel_name, shape.op)
            assert (instance, 0) in list(FAMILY.enumerate_instances(shape, device, False))
            assert (chosen.split_k, chosen.deterministic) == (0, True)
            us = cost_of(instance, 0, shape, device)
            rates = fitted_cost.rates_of("ck", shape, device)
            assert rates is not None
            assert rates.margin * us < fitted_cost.torch_least_us(rates, shape, device)
    assert answers > 5


def test_other_devices_and_ops_have_no_untuned_answer() -> None:
    """A device with other units, another op, and a large product on MI300X are left to torch."""
    few = shape_of(16, 7168, 4096)
    assert ck.heuristic_fallback(few, MI300X) is not None
    assert ck.heuristic_fallback(few, MI308X) is None
    assert ck.heuristic_fallback(shape_of(16384, 8192, 28672), MI300X) is None
    assert ck.heuristic_fallback(attrs.evolve(few, op="a8w8", scale="row"), MI300X) is None
    assert fitted_cost.rates_of("ck", few, MI308X) is None


def test_a_present_device_answers_with_a_built_object_alone(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Without stored objects an untuned call stays with torch, and nothing is compiled."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    for variable in ("TUNEDGEMM_CK_COMPILE", "AITER_REBUILD"):
        monkeypatch.delenv(variable, raising=False)
    present = attrs.evolve(MI300X, index=0)
    assert present.is_present
    shape = shape_of(16, 7168, 4096)
    assert ck.functions["heuristic_fallback"](shape, present) is None
    monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")
    assert ck.functions["heuristic_fallback"](shape, present) == ck.heuristic_fallback(shape, MI300X)


def test_a_time_computed_by_hand() -> None:
    """Two rounds of four steps bound by loads; parts of K add blocks and their sums."""
    rates = Rates(
        launch=1, start=2, latency=0.5, clear=4, latency_byte=0, products=1e6, cached=1e4, stored=1e4,
        read=1e6, written=1e6, added=1e6, serial=0, overlap=0, whole=1, factors={},
    )  # fmt: skip
    work = Work(256, 256, 512, 128, 128, 128, parts=1, units=2, resident=1, factor=1)
    assert predict_us(rates, work) == pytest.approx(1 + 2 * (2 + 4 * 3.2768 + 3.2768))
    split = 1 + 4 * (2 + 2 * 3.2768 + 3.2768) + 4 + 3 * 0.131072
    assert predict_us(rates, attrs.evolve(work, parts=2)) == pytest.approx(split)
    both = 1 + 2 * (2 + 4 * 2 * 3.2768 + 2 * 3.2768)
    assert predict_us(rates, attrs.evolve(work, n=512, resident=2)) == pytest.approx(both)


@pytest.mark.parametrize(("libtype", "op", "gfx", "units"), sorted(fitted_cost.all_rates()))
def test_ranked_ops_have_rates(libtype: str, op: str, gfx: str, units: int) -> None:
    """A quick search trusts the order where the first 24 hold 95 % of the winners: not of a8w8."""
    backend = ck if libtype == "ck" else cktile
    assert backend.is_ranked(op, Device(gfx, units)) == (op != "a8w8")
    assert not backend.is_ranked(op, Device(gfx, units + 1))
