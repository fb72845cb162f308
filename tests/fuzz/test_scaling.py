"""Files of megabytes that are made to be slow: every reader is done within its limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.errors import TunedGemmError
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.untuned import read_listed
from tunedgemm.tuner.log import History

OP = op_named("a16w16")
WIDE = ",".join(f"c{number}" for number in range(9000))
LINE = "gfx942,304,1,64,128,False,bf16,bf16,False,False,torch,0,0,5.0,native,0.0,1,1"
HEAD = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
RUN = '{"schema": 2, "kind": "run", "run": "%d", "op": "a16w16", "identity": {}, "resumes": ["1"]}'
ENTRY = '{"BLOCK_SIZE_M": 16}'


def _json_file(path: Path) -> None:
    files = pytest.importorskip("tunedgemm_triton.jsonfiles.files")
    files.read(path)


def _space(path: Path) -> None:
    space = pytest.importorskip("tunedgemm_triton.jsonfiles.space")
    space.space_of(str(path))


def _manifest(path: Path) -> None:
    manifest = pytest.importorskip("tunedgemm_asm.manifest")
    abi = pytest.importorskip("tunedgemm_asm.abi").ABIS["aiter-bf16gemm"]
    manifest.read(path, abi)


Read = Callable[[Path], Any]
CASES: dict[str, tuple[Read, Callable[[], str]]] = {
    "wide table": (lambda path: read_rows(path, OP), lambda: f"{HEAD},{WIDE}\n" + f"{LINE}\n" * 2000),
    "wide list": (lambda path: read_listed(path, OP), lambda: f"M,N,K,{WIDE}\n" + "1,64,128\n" * 5000),
    "long lines": (lambda path: read_rows(path, OP), lambda: f"{HEAD}\n" + ('"' * 65_000 + "\n") * 50),
    "runs": (History.read, lambda: "".join(f"{RUN % number}\n" for number in range(10_000))),
    "nested run": (History.read, lambda: '{"schema": 2, "run": ' + "[" * 2_000_000),
    "equal keys": (_json_file, lambda: "{" + ",".join(f'"{number}": {ENTRY}' for number in (*range(20_000), 19_999)) + "}"),
    "product": (_space, lambda: json.dumps({str(number): [1, 2, 3, 4] for number in range(5000)})),
    "comments": (_manifest, lambda: "/*" * 1_000_000),
    "equal kernels": (_manifest, lambda: "knl_name,co_name,tilem,tilen\n" + "k,k.co,64,64\n" * 20_000),
}


@pytest.mark.parametrize("case", CASES)
def test_large_files(guarded: Callable[..., None], tmp_path: Path, case: str) -> None:
    """Reading takes seconds at most, and ends in values or in the package's error."""
    read, text = CASES[case]
    path = tmp_path / "file"
    path.write_text(text())

    def check(_: bytes) -> None:
        try:
            read(path)
        except TunedGemmError as error:
            assert len(str(error)) < 2000

    guarded(check, b"")
