"""plugins --matrix: what backends state, as a table, in Markdown and in JSON; the committed page."""

import json
import re
from pathlib import Path

import pytest
from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.backends import registry
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.platforms import Platform
from tunedgemm.cli import main, matrix
from tunedgemm.device import Device
from tunedgemm.libtypes import ALL, WITHOUT_BACKEND
from tunedgemm.ops import ops
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

ROOT = Path(__file__).parents[2]
#: line of the root's extras -> its name and the distribution that it installs
EXTRA = re.compile(r'^(\w+) = \["(tunedgemm-[\w-]+)>=0\.1"\]$', re.MULTILINE)


def backend(libtype, platforms, covered=("a16w16", "a8w8")):
    return fake_backend(libtype, ops=covered, platforms=platforms, distribution=f"tunedgemm-{libtype}")


@pytest.fixture
def script(as_module):
    return as_module(ROOT / ".ci" / "backends.py")


@pytest.fixture
def installed(monkeypatch):
    """Install two backends: one for two kinds of device, one that states no platforms."""
    platforms = (
        Platform(("sm_90", "sm_100"), needs=("a | b 2.1", "nvcc"), ran=("H100", "H200")),
        Platform(("nvidia", "cpu"), ops=("a16w16",)),
    )
    registry = fake_registry(backend("mine", platforms), backend("vague", ()), backend("whole", (Platform(("amd",)),), tuple(ops())))
    monkeypatch.setattr(matrix, "Registry", lambda: registry)
    monkeypatch.setattr("tunedgemm.backends.registry.Registry", lambda: registry)
    monkeypatch.setattr(matrix, "owners", lambda: {"absent": "tunedgemm-absent"})
    monkeypatch.setattr(matrix, "pip_hint", lambda libtype: f"pip install tunedgemm[{libtype}]")


class TestCommand:
    """`tunedgemm plugins --matrix` and its forms."""

    def test_markdown_has_a_row_for_each_platform(self, installed, capsys):
        """A kind stands for the other architectures; bars in a cell are escaped."""
        assert main(["plugins", "--matrix", "--markdown"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[2:5] == [
            r"| `mine` | tunedgemm-mine | `a16w16`, `a8w8` | `sm_90`, `sm_100` | a \| b 2.1; nvcc | H100, H200 |",
            "| `mine` | tunedgemm-mine | `a16w16` | other NVIDIA GPU, any CPU | nothing else | never run |",
            "| `vague` | tunedgemm-vague | `a16w16`, `a8w8` |  | states no platforms |  |",
        ]
        assert "| `whole` | tunedgemm-whole | every op | any AMD GPU | nothing else | never run |" in lines
        assert lines[-1] == "| `absent` | tunedgemm-absent |  |  | not installed; pip install tunedgemm[absent] |  |"

    def test_json_has_the_statements_themselves(self, installed, capsys):
        """Nothing is shortened, and names are not quoted."""
        assert main(["plugins", "--matrix", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        first, *_, last = document["rows"]
        assert (document["schema"], document["version"]) == ("tunedgemm.plugins.matrix", 1)
        assert first == {
            "libtype": "mine", "distribution": "tunedgemm-mine", "ops": ["a16w16", "a8w8"], "devices": ["sm_90", "sm_100"],
            "needs": ["a | b 2.1", "nvcc"], "ran": ["H100", "H200"], "problem": "",
        }  # fmt: skip
        assert last["problem"].startswith("not installed")
        assert document["served"]["sm_100"]["a16w16"] == document["served"]["sm_90"]["a16w16"] == ["mine"]
        assert document["served"]["sm_90"]["fmoe"] == [] and document["served"]["gfx942"]["fmoe"] == ["whole"]

    def test_the_terminal_has_the_same_table(self, installed, capsys):
        """Every cell is shown, folded where it is long."""
        assert main(["plugins", "--matrix"]) == 0
        out = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "mine tunedgemm-mine a16w16, a8w8 sm_90, sm_100 a | b 2.1; nvcc H100, H200" in out

    def test_by_architecture(self, installed, capsys):
        """Each known architecture has a line with the backends of each op."""
        assert main(["plugins", "--matrix", "--by-gfx"]) == 0
        out = capsys.readouterr().out
        assert all(gfx in out for gfx in ARCHITECTURES) and "mine" in out and "whole" in out and "torch " not in out.split("\n", 1)[1]

    @pytest.mark.parametrize("flags", [["--markdown"], ["--by-gfx"], ["--matrix", "--json", "--markdown"]])
    def test_forms_without_the_matrix_are_an_error(self, flags, capsys):
        """Markdown needs the matrix, and there is one form at a time."""
        assert main(["plugins", *flags]) == 2
        assert re.search("requires --matrix|not allowed with", capsys.readouterr().err)

    def test_a_backend_that_does_not_load_has_its_reason(self, fake_plugins, capsys):
        """It is one row with the reason, and the others are complete."""
        assert main(["plugins", "--matrix", "--json"]) == 0
        rows = {row["libtype"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        assert "cannot be imported" in rows["fake_unimportable"]["problem"] and not rows["fake_unimportable"]["ops"]
        assert not rows["torch"]["problem"]


class TestPage:
    """docs/backends.md and the extras name the plugins of this repository."""

    def test_the_page_is_current(self, script):
        """The table is that of the plugins in plugins/, each with its platforms."""
        page = script.PAGE.read_text()
        assert page == script.current(page), "run `python .ci/backends.py`"
        folders = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml") if registry.GROUP in path.read_text()}
        named = {row.distribution.removeprefix("tunedgemm-") for row in matrix.rows_of(script.registry()) if not row.problem}
        assert named == {"tunedgemm", *folders}

    def test_no_plugin_serves_an_architecture_that_it_does_not_state(self, script):
        """On each known architecture, and an unknown one of a family, served ops are stated ops."""
        backends = [backend for libtype in script.registry().libtypes if isinstance(backend := script.registry().get(libtype), Backend)]
        unstated = [
            f"{backend.libtype}: {op} on {gfx}"
            for backend in backends
            for gfx in (*ARCHITECTURES, "sm_122", "gfx1103", "gfx906")
            for op in backend.ops
            if not any(platform.serves(op, Device(gfx, 100)) for platform in backend.platforms)
            and any(backend.refusal(shape, Device(gfx, 100)) is None for shape in shapes_of(op))
        ]
        assert len(backends) > 10 and not unstated

    def test_a_plugin_without_platforms_fails(self, script, monkeypatch):
        """Plugins of this repository state where they run."""
        monkeypatch.setattr(script, "registry", lambda: fake_registry(backend("vague", ())))
        with pytest.raises(SystemExit, match="vague: states no platforms"):
            script.current(script.PAGE.read_text())

    def test_each_libtype_has_its_extra(self, script):
        """`pip install tunedgemm[LIBTYPE]` installs the plugin of each libtype, `[all]` every one."""
        text = (ROOT / "pyproject.toml").read_text()
        extras = {extra: owner for extra, owner in EXTRA.findall(text) if extra not in WITHOUT_BACKEND}
        owned = {row.libtype: row.distribution for row in matrix.rows_of(script.registry()) if row.ops and row.distribution != "tunedgemm"}
        assert owned == extras
        (everything,) = re.findall(rf'^{ALL} = \["tunedgemm\[([\w,]+)\]"\]$', text, re.MULTILINE)
        assert sorted(extras[libtype] for libtype in everything.split(",")) == sorted(set(extras.values()))


#: Imports torch, then lists the backends; prints the seconds of both, the list and heavy packages.
COST = """
import contextlib, io, json, sys, time
start = time.process_time()
import torch
torch_seconds, output = time.process_time() - start, io.StringIO()
from tunedgemm.cli import main
with contextlib.redirect_stdout(output):
    assert main(["plugins"]) == 0
heavy = {"triton", "vllm", "deep_gemm", "quack", "cutlass", "aiter", "humming"} & set(sys.modules)
print(json.dumps([torch_seconds, time.process_time() - start, output.getvalue(), sorted(heavy)]))
"""


@pytest.mark.timing
def test_the_list_is_quick_with_every_plugin_installed(script, child, tmp_path):
    """It takes 2 s at most, of which torch's import is the larger part; it imports no library."""
    script.register(tmp_path)
    libtypes = script.registry().libtypes  # imports all plugins, which compiles their sources
    torch_seconds, seconds, listed, heavy = json.loads(child(COST, tmp_path))
    assert all(f" {libtype} " in listed for libtype in libtypes)
    assert heavy == []
    assert seconds < max(2.0, torch_seconds + 1.0), f"{seconds:.2f} s, of which torch {torch_seconds:.2f} s"
