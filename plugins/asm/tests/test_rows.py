"""Rows of libtype asm in AITER's tables: each finds its kernel, or is a miss with a reason."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
AITER = ROOT.parent / "shared" / "aiter"

BF16_HEAD = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
MANIFEST_HEAD = "knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n"
OTHERS = ("i8gemm_bf16_perTokenI8.csv", "f4gemm_bf16_per1x32Fp4.csv", "fp8gemm_bf16_blockscale.csv")


@pytest.fixture(scope="module")
def asm_rows() -> ModuleType:
    """Load the benchmark that counts rows."""
    spec = importlib.util.spec_from_file_location("aiter_tables", ROOT / "benchmarks" / "aiter_tables.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Write a table and manifests: kernel ``a`` for both architectures, ``old`` and ``new`` for one.

    The other manifests are empty.
    """
    (configs := tmp_path / "configs").mkdir()
    (manifests := tmp_path / "manifests").mkdir()
    for gfx, own in (("gfx942", "old"), ("gfx950", "new")):
        lines = "".join(f"{name},{name}.co,1,64,64,0,0,{int(name == 'a')},64,1\n" for name in ("a", own))
        (manifests / f"{gfx}_bf16gemm_fp32bf16.csv").write_text(MANIFEST_HEAD + lines)
        for name in OTHERS:
            (manifests / f"{gfx}_{name}").write_text("tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name")
    rows = [
        "gfx942,304,64,128,256,asm,4,9.5,a", "gfx942,304,65,128,256,asm,1,9.5,old", "gfx942,304,66,128,256,asm,1,9.5,new",
        "gfx942,304,67,128,256,asm,1,9.5,gone", "gfx942,304,68,96,256,asm,1,9.5,old", "gfx950,256,64,128,256,asm,1,9.5,new",
        "gfx950,256,65,128,256,triton,0,9.5,new", "gfx950,256,66,128,256,asm,1,0,new", "gfx90a,104,64,128,256,asm,1,9.5,a",
    ]  # fmt: skip
    filled = [row.split(",") for row in rows]
    text = "".join(
        f"{','.join(row[:5])},False,torch.bfloat16,torch.bfloat16,False,False,{row[5]},0,{row[6]},{row[7]},{row[8]},0,1,1\n"
        for row in filled
    )
    (configs / "bf16_tuned_gemm.csv").write_text(BF16_HEAD + text)
    return configs, manifests


def test_a_name_of_another_architecture_is_a_miss(asm_rows: ModuleType, files: tuple[Path, Path]) -> None:
    """Kernels of other architectures count apart from unknown names, and refusals have reasons.

    Other libtypes and rows that never win are not counted.
    """
    configs, manifests = files
    counted = {gfx: counts for _, _, gfx, counts in asm_rows.asm_lines(configs, asm_rows.asm_kernels(manifests))}

    seen = {gfx: (counts.rows, counts.found, counts.elsewhere, counts.taken) for gfx, counts in counted.items()}
    assert seen == {"gfx942": (5, 3, 1, 2), "gfx950": (1, 1, 0, 1), "gfx90a": (1, 0, 1, 0)}
    ((reason, times),) = counted["gfx942"].reasons.items()
    assert times == 1 and "N" in reason and "96" in reason


def test_the_page_is_complete(asm_rows: ModuleType, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has a line for each table and architecture, sums and reasons, or says it is empty."""
    options = ["--only", "asm"]
    assert asm_rows.main([*options, "--manifests", str(files[1]), "--configs", str(files[0]), "-o", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "asm.md").read_text()

    assert "| `bf16_tuned_gemm.csv` | `a16w16` | gfx942 | 5 | 3 | 1 | 1 | 2 | 1 |" in text
    assert "| all | | | 7 | 4 | 2 | 1 | 3 | 1 |" in text and "## Refused" in text
    assert asm_rows.main([*options, "--manifests", str(files[1]), "--configs", str(tmp_path / "absent")]) == 0
    assert "nothing was counted" in capsys.readouterr().out


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's tables are not here")
def test_every_real_row_resolves(asm_rows: ModuleType) -> None:
    """All rows of covered ops find a kernel of their architecture, within the kernel's limits.

    Of bf16 these are the rows of gfx950.
    """
    found = asm_rows.asm_kernels(AITER / "manifests")
    bf16, others = [], []
    for _, op, gfx, counts in asm_rows.asm_lines(AITER / "configs", found):
        if op != "fmoe":  # its kernels are in other manifests
            (bf16 if (op, gfx) == ("a16w16", "gfx950") else others).append(counts)

    assert [sum(counts.rows for counts in every) for every in (bf16, others)] == [226, 2055]
    for counts in (*bf16, *others):
        assert (counts.found, counts.elsewhere, counts.taken) == (counts.rows, 0, counts.rows), counts.reasons
