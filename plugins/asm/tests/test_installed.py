"""Install the example pack as a wheel in a fresh environment, and find its kernels."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.testing.siblings import module_at

wheels = module_at(Path(__file__).parents[3] / "tests" / "wheels")
EXAMPLE = Path(__file__).parents[3] / "examples" / "asm-pack"
pytestmark = pytest.mark.slow

MANIFEST = "knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n{0},{0}.co,1,64,64,2,0,0,64,1\n"


@pytest.fixture(scope="module")
def installed(objects: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the python of an environment with the example pack, one kernel for each architecture."""
    folder = tmp_path_factory.mktemp("pack")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "example_asm_pack"))
    for gfx in ("gfx942", "gfx950"):
        (pack := source / "example_asm_pack" / gfx).mkdir(parents=True)
        (pack / "pack.json").write_text(
            json.dumps({"abi": "tunedgemm-bf16", "gfx": gfx, "manifest": "manifest.csv", "name": f"example-{gfx}"})
        )
        (pack / "manifest.csv").write_text(MANIFEST.format(f"example_{gfx}"))
        (pack / f"example_{gfx}.co").write_bytes(objects.made([f"example_{gfx}"], gfx, 96))
    python, wheel = wheels.install(source, folder)
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".py", ".so", ".pth"))], "data alone"
    return python


def run(*command: Any, cwd: Path) -> str:
    """Run a command without the packs of this machine."""
    variables = {key: value for key, value in os.environ.items() if key not in ("TUNEDGEMM_ASM_PACKS", "AITER_ASM_DIR")}
    return str(wheels.run(*command, cwd=cwd, env=variables))


def test_the_plugin_finds_its_kernels(installed: Path, tmp_path: Path) -> None:
    """`asm list` shows the wheel's packs without refusals."""
    listed = run(installed, "-m", "tunedgemm", "asm", "list", "-v", cwd=tmp_path)

    for gfx in ("gfx942", "gfx950"):
        (line,) = [line for line in listed.splitlines() if line.startswith(f"  pack example-{gfx} (")]
        assert "by example-asm-pack): 1 kernels of tunedgemm-bf16, sha256 " in line and f"    example_{gfx}: 64x64, prefetch 2" in listed
    assert "refused: pack example" not in listed
