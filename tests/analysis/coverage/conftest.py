"""Lists of shapes, tables and trials for what is asked of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm.device import Device, current_device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import trials_path

HEAD = "M,N,K,bias,dtype,outdtype,count,graph\n"
#: Torch's plain route, which no backend needs to be installed for.
NATIVE = Solution("torch", "native")


@pytest.fixture
def listed(tmp_path: Path) -> Callable[..., Path]:
    """Makes an untuned file of (M, count) or (M, count, graph) with N = 64 and K = 128."""

    def make(*calls: tuple[int, ...], name: str = "bf16_untuned_gemm.csv") -> Path:
        lines = (f"{m},64,128,False,fp32,fp32,{count},{graph[0] if graph else 0}\n" for m, count, *graph in calls)
        (tmp_path / name).write_text(HEAD + "".join(lines))
        return tmp_path / name

    return make


@pytest.fixture
def row() -> Callable[..., Row]:
    """Makes a row of the present device for such a shape."""

    def make(m: int, us: float = 10.0, n: int = 64, solution: Solution = NATIVE, **more: object) -> Row:
        here = current_device()
        place = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name, **more}
        return Row(shape=Shape("a16w16", m, n, 128, "fp32"), solution=solution, us=us, **place)

    return make


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Makes a tuned table of rows."""

    def make(*rows: Row, name: str = "table.csv") -> Path:
        write_rows(tmp_path / name, op_named("a16w16"), rows)
        return tmp_path / name

    return make


@pytest.fixture
def trial() -> Callable[..., None]:
    """Add a trial of a shape to the trial log of a table."""

    def put(path: Path, m: int, solution: Solution, us: float, device: Device | None = None) -> None:
        here = device or current_device()
        fields = json.loads(Timing(Shape("a16w16", m, 64, 128, "fp32"), solution, "ok", us=us).to_json())
        fields |= {"kind": "trial", "run": "r", "gfx": here.gfx, "cu_num": here.cu_num, "device": here.name}
        with trials_path(path).open("a") as file:
            file.write(json.dumps(fields) + "\n")

    return put
