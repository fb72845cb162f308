"""The third-party example works as a wheel in a separate environment, without a change to the core."""

import csv
import os
import shutil
from pathlib import Path

import pytest

from .wheels import install, run

EXAMPLE = Path(__file__).parents[1] / "examples" / "thirdparty-plugin"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Make an environment with the running one's packages and the example's wheel; return its python."""
    folder = tmp_path_factory.mktemp("thirdparty")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    python, _ = install(source, folder)
    return python


def test_the_registry_finds_it(installed, tmp_path):
    """The libtype is listed before torch, and selected by its name."""
    source = (
        "from tunedgemm.backends.registry import Registry\n"
        "registry = Registry()\n"
        "(backend,) = registry.select('swapped')\n"
        "print(registry.libtypes.index('swapped') < registry.libtypes.index('torch'))\n"
        "print(backend.libtype, backend.distribution, backend.version, *backend.ops)\n"
    )
    assert run(installed, "-c", source, cwd=tmp_path).splitlines() == ["True", "swapped tunedgemm-swapped 0.1.0 a16w16"]


def test_it_passes_the_conformance_suite(installed, tmp_path):
    """The example's tests, which are four lines, pass where it is installed."""
    tests = shutil.copytree(EXAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    summary = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=tmp_path).splitlines()[-1]
    assert "passed" in summary
    assert "failed" not in summary


def test_it_is_tuned_by_name(installed, tmp_path):
    """The table written for ``--libtype swapped`` holds its rows, one for each shape."""
    (tmp_path / "shapes.csv").write_text("M,N,K\n4,64,128\n1,32,1024\n")
    environment = {**os.environ, "TUNEDGEMM_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": ""}
    command = [installed, "-m", "tunedgemm", "tune", "-i", "shapes.csv", "-o", "out.csv", "--libtype", "swapped"]
    run(*command, cwd=tmp_path, env=environment)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["M"], row["N"], row["K"]) for row in rows) == [("1", "32", "1024"), ("4", "64", "128")]
    assert {row["libtype"] for row in rows} == {"swapped"}
    assert {row["kernelName"] for row in rows} <= {"mm_v1", "bmm_v1"}
