"""JSON files of Triton kernels behind calls: when a new one counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.table.lookup import Table

pytest.importorskip("tunedgemm_triton")

from tunedgemm_triton.author import TunedKernel
from tunedgemm_triton.jsonfiles import files


def test_reload_picks_up_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run what a file says; a bound shape keeps its choice until `reload`, and a new shape
    uses the present file.
    """
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
    monkeypatch.delenv(files.VARIABLE, raising=False)
    ran: list[int] = []

    def launch(values: Mapping[str, int], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ran.append(values["BLOCK"])
        return torch.nn.functional.linear(x, weight)

    kernel = TunedKernel("mine", "a16w16", {"BLOCK": (16, 32)}, launch, takes=lambda *_: None)
    registry = Registry(())
    registry.add(kernel.backend)
    dispatcher = Dispatcher(op_named("a16w16"), registry, settings=Settings(untuned=("mine",)), table=Table.load(op_named("a16w16")))
    weight, path = torch.ones(32, 64), files.user_folder() / files.Name(device_of(-1).gfx, "GEMM-MINE").text

    def called(m: int) -> list[int]:
        ran.clear()
        assert dispatcher.call(torch.ones(m, 64), weight).shape == (m, 32)
        return list(ran)

    assert called(3) == []
    files.write(path, {"any": {"BLOCK": 16}})
    assert (called(3), called(4)) == ([], [16])
    files.write(path, {"any": {"BLOCK": 32}})
    assert (called(4), called(5)) == ([16], [32])
    dispatcher.reload()
    assert (called(3), called(4)) == ([32], [32])
