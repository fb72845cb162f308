"""Rows of other versions of libraries and drivers: they serve or are refused as their plugin says."""

from __future__ import annotations

import logging
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.folders import TableLayer
from tunedgemm.table.lookup import Table
from tunedgemm.table.published import Provenance, published_text
from tunedgemm.table.row import Row
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks

OP = op_named("a16w16")
H200 = Device("sm_90", 132, "nvidia-h200")


def row(solution: Solution, device: Device) -> Row:
    return Row(Shape("a16w16", 1, 64, 128), device.gfx, device.cu_num, device.name, solution, 5.0)


#: Kernels of the real plugin's revision for M=1 N=1280 K=8192 on an H200, and of none.
KNOWN, UNKNOWN = "gemv_r1_m1n2k4096u1_w8s1", "gemv_r99_m1n2k4096u1_w8s1"


@pytest.mark.parametrize("libver", ["triton 1.0.0", ""])
def test_a_table_of_another_driver_or_triton_serves_as_its_plugin_says(tmp_path: Path, libver: str) -> None:
    """Rows of another Triton or driver serve, and `explain` says so; another revision is a miss."""
    registry, shape = Registry(), Shape("a16w16", 1, 1280, 8192)
    now = registry.get("triton").library_version(H200)
    assert now.startswith("triton ") and now != "triton 1.0.0"
    for kernel in (KNOWN, UNKNOWN):
        found = attrs.evolve(row(Solution("triton", kernel), H200), shape=shape, libver=libver)
        write_rows(tmp_path / "plain.csv", OP, [found])
        path = tmp_path / f"{kernel}.csv"
        path.write_text(published_text(Provenance(OP.name, {"driver": "NVIDIA 1.2.3"}), (tmp_path / "plain.csv").read_text()))
        table = Table.load(OP, layers=[TableLayer("user", (path,))])
        said = Dispatcher(OP, registry, settings=Settings(untuned=()), table=table).explain(shape, H200)
        if kernel == KNOWN:
            assert said.tuned and (f"; tuned with triton 1.0.0, now {now}" in said.offer.why) is bool(libver)
        else:
            assert said.libtype == "torch" and "r99" in said.passed_over[0][1]


def test_versions_of_others_tables_name_their_own_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of the package do not warn, and those of a distribution have a remedy that keeps it."""
    alpha = with_hooks(fake_backend("alpha"), library_version=lambda: "2")
    here, shape = device_of(-1), Shape("a16w16", 1, 16, 32, dtype="fp32")
    for number, (name, origin) in enumerate([("shipped", ""), ("distribution", "acme-tables 1.2"), ("user", "")]):
        path = tmp_path / f"{number}.csv"
        write_rows(path, OP, [attrs.evolve(row(Solution("alpha", "fake"), here), shape=shape, libver="1")])
        table = Table.load(OP, layers=[TableLayer(name, (path,), origin)])
        with caplog.at_level(logging.INFO):
            caplog.clear()
            said = Dispatcher(OP, fake_registry(alpha), table=table).explain(shape, here)
        assert said.offer.why.endswith("; tuned with 1, now 2") and f"({(origin and f'{name} {origin}') or name})" in said.offer.why
        (record,) = [record for record in caplog.records if "were tuned with" in record.getMessage()]
        assert record.levelno == (logging.INFO if name == "shipped" else logging.WARNING)
        assert record.getMessage().endswith(f"`tunedgemm tune {'--stale' if name == 'user' else f'-i {path}'}` tunes them again")
