"""``tunedgemm asm build`` finds the generator."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tunedgemm.plugin import UserError
from tunedgemm_asm.command import command


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str]]:
    """Run the command; return its exit code and output lines."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args([*map(str, words)], argparse.Namespace(verbose=False)))
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.nightly
@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
def test_build_writes_a_pack_that_passes(gfx: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`asm build` writes a pack that `asm check` accepts."""
    try:
        code, out = run(capsys, "build", "--gfx", gfx, "-o", tmp_path / gfx)
    except UserError as error:
        if "assembl" not in str(error):
            raise
        pytest.skip(str(error))

    assert code == 0 and out[-1] == f"{tmp_path / gfx}: no fault"
    assert f"kernels for {gfx}, assembled by" in out[0]


def test_build_refuses_unknown_architectures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`asm build` rejects an unknown architecture."""
    with pytest.raises(UserError, match="asm build: no generated kernels for 'gfx1100'; supported: gfx942, gfx950"):
        run(capsys, "build", "--gfx", "gfx1100", "-o", tmp_path)
