"""``tunedgemm new-plugin``: the package that it writes is complete, and its tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm import __version__
from tunedgemm.backends import builtin, registry
from tunedgemm.cli import main
from tunedgemm.cli.new_plugin import FILES
from tunedgemm.ops import op_named, ops
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import torch_launcher

ROOT = Path(__file__).parents[2]

#: Commands as a user has them, for a process that must not change the environment that it runs in.
COMMANDS = {
    "python": 'exec "{python}" "$@"',
    "pip": 'exec "{python}" -m pip -q --disable-pip-version-check "$@" --no-index --no-deps --no-build-isolation --target "{site}"',
    "tunedgemm": 'exec "{python}" -m tunedgemm "$@"',
}


def ran(tmp_path: Path, script: str) -> str:
    """Return a successful script's output; `COMMANDS` and what pip installs are on its path."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\n{text.format(python=sys.executable, site=tmp_path / 'site')}\n")
        command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.no_cover
@pytest.mark.parametrize("op", ["a16w16", "a8w8", "a8w8_blockscale", "batched_bf16", "fmoe"])
def test_a_backend_of_any_op_passes_its_tests(tmp_path, op):
    """Written for the op and installed, the package passes its tests, some of which launch it."""
    script = f"tunedgemm new-plugin mine --op {op}\npip install ./tunedgemm-mine\npython -m pytest -v -rN tunedgemm-mine/tests"

    out = ran(tmp_path, script)

    assert re.search(rf"test_outputs_match_the_reference\[{op}\] PASSED", out)
    assert re.search(r"\d+ passed", out) and "failed" not in out


def test_a_third_party_op_is_computed_by_its_reference(monkeypatch, cpu):
    """For an unknown op torch's backend runs the reference in
    the output's dtype and shape, or gives a reason."""
    known = op_named("a16w16")
    monkeypatch.setattr(builtin, "op_named", lambda _: known)
    shape = Shape("another", 3, 32, 64, outdtype="fp32")
    x, weight = known.make_inputs(attrs.evolve(shape, op="a16w16"), torch.device("cpu"), 0)

    out = torch_launcher(shape, cpu).call(x.view(3, 1, 64), weight, None)

    assert (out.dtype, out.shape) == (torch.float32, (3, 1, 32))
    assert torch.allclose(out.view(3, 32), x.float() @ weight.float().t(), atol=1e-4)
    assert "no call for op 'another'" in str(torch_launcher(attrs.evolve(shape, layout="aiter16x16"), cpu))


def test_an_unknown_op_is_a_usage_error(tmp_path, capsys):
    """One line lists the known ops, and nothing is written."""
    assert main(["new-plugin", "fast8", "--op", "a99w99", "--folder", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert "unknown op 'a99w99'; registered: a16w16, " in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_template_is_a_file_of_the_package(tmp_path, capsys):
    """All templates are used, no name is left to fill in, and the paths are printed."""
    assert main(["new-plugin", "fast8", "--folder", str(tmp_path / "new")]) == 0

    folder = tmp_path / "new" / "tunedgemm-fast8"
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert written == ["README.md", "pyproject.toml", "tests/test_fast8.py", "tunedgemm_fast8.py"]
    assert sorted(FILES) == sorted(path.name for path in (ROOT / "core" / "tunedgemm" / "templates" / "plugin").iterdir())
    for path in written:
        text = (folder / path).read_text()
        assert "fast8" in text and "$" not in text
    assert f'"tunedgemm>={__version__}"' in (folder / "pyproject.toml").read_text()
    out = capsys.readouterr().out
    assert all(str(folder / path) in out for path in written)


@pytest.mark.parametrize("op", sorted(ops()))
def test_the_written_package_passes_ruff(tmp_path, op):
    """The package passes this repository's linter and formatter."""
    pytest.importorskip("ruff", reason="needs ruff, of the development tools")
    main(["new-plugin", "fast8", "--op", op, "--folder", str(tmp_path)])
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path / "tunedgemm-fast8")]

    for words in (["check", "--config", "lint.isort.known-first-party=['tunedgemm_fast8']"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *settings], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch", "backend 'torch': is installed already"),
        ("flydsl", "libtype 'flydsl': rows of existing tables use it"),
        ("rocblas", "libtype 'rocblas': rows of existing tables use it"),
        ("Fast", "lower-case letter"),
        ("8fast", "lower-case letter"),
        ("fast-8", "lower-case letter"),
        ("a+b", "lower-case letter"),
        ("_fast", "lower-case letter"),
    ],
)
def test_invalid_names_are_refused(tmp_path, capsys, monkeypatch, name, message):
    """A libtype that is taken or does not fit a module name is refused in one line;
    nothing is written."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [])  # whatever is installed
    assert main(["new-plugin", name, "--folder", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.glob("tunedgemm-*")) == []


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    """An existing folder stays unchanged, and a path that is a file is an error."""
    (tmp_path / "tunedgemm-fast8").mkdir()
    (tmp_path / "file").touch()

    assert main(["new-plugin", "fast8", "--folder", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list((tmp_path / "tunedgemm-fast8").iterdir()) == []
    assert main(["new-plugin", "fast8", "--folder", str(tmp_path / "file")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_it_names_a_path_to_pip(tmp_path, capsys, monkeypatch):
    """The pip hint starts a relative path with a dot,
    because pip takes a bare name for a package."""
    monkeypatch.chdir(tmp_path)

    assert main(["new-plugin", "fast8"]) == 0
    assert "pip install ./tunedgemm-fast8;" in capsys.readouterr().out
