"""testing.stand_in: the suite passes for a sound stand-in, and finds the faults of others."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tunedgemm.backends.registry import GROUP
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.testing.stand_in import StandInConformance, installed

MODULE = '''
"""Backends that compute on the CPU: two that are sound, and one for each fault."""

import os

from tunedgemm.plugin import Unsupported, hookimpl
from tunedgemm.testing.fakes import FakeHooks, exact, fake_backend

HIDDEN = os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def touch():
    """What initialises a GPU leaves behind, in the processes that must not."""
    import torch

    if HIDDEN:
        torch.cuda.is_initialized = lambda: True


def touched(shape, device):
    touch()


class Compiled(FakeHooks):
    @hookimpl
    def prepare(self):
        pass

    @hookimpl
    def lacks(self, solution, shape, device):
        answer = self.bind(solution, shape, device)
        return answer.reason if isinstance(answer, Unsupported) else ""


class Touching(FakeHooks):
    @hookimpl
    def prepare(self):
        touch()


mine = fake_backend("fakemine")
sound = fake_backend("fakesound", hooks=Compiled("fakesound", heuristic="fake"))
wrong = fake_backend("fakewrong", call=lambda *arguments: exact(*arguments) * 2)
eager = fake_backend("fakeeager", supports=touched)
touching = fake_backend("faketouching", hooks=Touching("faketouching"))
'''
TEST = """
from pathlib import Path

from tunedgemm.plugin import Shape
from tunedgemm.testing.stand_in import StandInConformance


class Planted(StandInConformance):
    folder = Path(__file__).with_name("installed")


class TestSound(Planted):
    libtype, work, more = "fakesound", 1, (Shape("a16w16", 4, 32, 64), Shape("a16w16", 4, 32, 64), Shape("a16w16", 0, 256, 512))


class TestWrong(Planted):
    libtype, shapes = "fakewrong", (Shape("a16w16", 4, 32, 64),)


class TestEager(Planted):
    libtype, shapes = "fakeeager", (Shape("a16w16", 4, 32, 64),)


class TestTouching(Planted):
    libtype, shapes = "faketouching", (Shape("a16w16", 4, 32, 64),)
"""
BACKENDS = ("mine", "sound", "wrong", "eager", "touching")
PAGE = Path(__file__).parents[2] / "docs" / "writing-a-plugin.md"

#: class -> the checks that fail
FAULTS = {
    "TestWrong": {"test_outputs_match_the_reference", "test_launchers_serve_two_threads", "test_rows_are_right_in_all_that_they_serve"},
    "TestEager": {"test_loading_needs_no_device_and_no_other_plugin"},
    "TestTouching": {"test_prepare_needs_no_device"},
}


def distribution(folder: Path) -> Path:
    """A folder with the backends, as pip would have left it."""
    information = folder / "fake_mine-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-mine\nVersion: 1\n")
    lines = [f"fake{name} = fake_mine:{name}" for name in BACKENDS]
    (information / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
    (folder / "fake_mine.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return pytest's outcomes of the classes above and of docs/writing-a-plugin.md: class -> test."""
    folder = tmp_path_factory.mktemp("package")
    tests = distribution(folder / "tests" / "installed").parent
    (tests / "test_planted.py").write_text(TEST)
    (block,) = [text for text in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL) if "StandIn" in text]
    (tests / "test_of_the_page.py").write_text(block)
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "TUNEDGEMM_HOME": str(folder / "home"), "TUNEDGEMM_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", "out.xml", "tests"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
        outcome = "".join(child.tag for child in case if child.tag in ("failure", "error", "skipped")) or "passed"
        found.setdefault(case.attrib["classname"].rpartition(".")[2], {})[case.attrib["name"]] = outcome
    return found


@pytest.mark.nightly
def test_a_sound_stand_in_passes(outcomes):
    """Every check but those of graphs passes; other processes list and prepare its solutions."""
    skipped = {name.partition("[")[0] for name, outcome in outcomes["TestSound"].items() if outcome == "skipped"}
    assert set(outcomes["TestSound"].values()) == {"passed", "skipped"}
    assert skipped == {"test_graphs_capture_what_claims_to_be_graph_safe"}


@pytest.mark.nightly
def test_a_fault_fails_its_check(outcomes):
    """Wrong numbers, and a GPU touched by loading or preparing, fail exactly their checks."""
    failed = {name: {test.partition("[")[0] for test, outcome in tests.items() if outcome == "failure"} for name, tests in outcomes.items()}
    assert {name: tests for name, tests in failed.items() if tests} == FAULTS


@pytest.mark.nightly
def test_the_class_of_the_documents_passes(outcomes):
    """The class of docs/writing-a-plugin.md has no check that fails."""
    assert set(outcomes["TestOverFake"].values()) == {"passed", "skipped"}


def test_shapes_are_limited_and_added_to(tmp_path):
    """`work` leaves out larger shapes of the suite, and `more` adds shapes of any size, each once."""

    class Limited(StandInConformance):
        libtype, folder, work = "fakemine", distribution(tmp_path), 1 << 20

    class Added(Limited):
        work, more = 1, (Shape("a16w16", 4, 32, 64), Shape("a16w16", 4, 32, 64), Shape("a16w16", 0, 256, 512))

    listed = shapes_of("a16w16")
    small = tuple(shape for shape in listed if op_named("a16w16").flops(shape) <= 2 << 20)
    assert 2 < len(small) < len(listed)
    assert Limited.every_shape() == small
    empty = [shape for shape in listed if shape.m == 0]
    assert set(Added.every_shape()) == {*empty, Shape("a16w16", 4, 32, 64)}
    assert len(Added.every_shape()) == len(empty) + 1


def test_a_stand_in_exists_only_inside_the_block(tmp_path):
    """Its entry point is found in the block alone, so the suite does not load it elsewhere."""

    class Without(BackendConformance):
        libtype = "fakemine"

    with installed(distribution(tmp_path)):
        assert [entry.value for entry in entry_points(group=GROUP, name="fakemine")] == ["fake_mine:mine"]
    assert not entry_points(group=GROUP, name="fakemine")
    assert str(tmp_path) not in sys.path
    with pytest.raises(pytest.fail.Exception, match="libtype 'fakemine': no backend of that name"):
        Without.backend()


def test_a_folder_without_a_distribution_is_an_error(tmp_path):
    """The error names a wrong folder and its required content."""

    class Misplaced(StandInConformance):
        libtype, folder = "fakemine", tmp_path / "instaled"

    with pytest.raises(FileNotFoundError, match=r"instaled holds no distribution of a stand-in: NAME-1\.dist-info with"):
        Misplaced.backend()
