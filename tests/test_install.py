"""Installing: which torch .venv gets, and that conflicts of requirements are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHOOSE = ROOT / ".ci" / "choose_torch.py"
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
#: stands for pip: lists these versions
LISTED = "Available versions: 2.99.0+cpu, 2.99.0, 2.98.0+rocm7.1, 2.98.0+cpu, 2.8.0+xpu"


@pytest.fixture
def choose(as_module, monkeypatch):
    """Return the script as a module, with an index that lists `LISTED`."""
    module = as_module(CHOOSE)
    answer = subprocess.CompletedProcess((), 0, LISTED, "")
    monkeypatch.setattr(module.subprocess, "run", lambda *words, **more: answer)
    return module


def environment_with(folder: Path, torch: str) -> Path:
    """Make an environment whose torch is of this version; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in ("torch", "triton"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").touch()
    if torch:
        (packages / "torch-1.dist-info").mkdir()
        (packages / "torch-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    return folder / "bin" / "python"


class TestChoice:
    @pytest.mark.parametrize(
        ("index", "vendor", "expected"),
        [
            (None, "NVIDIA", "torch>="),
            (None, "", "torch==2.99.0+cpu"),
            ("", "", "torch>="),
            ("", "AMD", "torch>="),
            ("https://a.example/whl/rocm7.1", "AMD", "torch==2.98.0+rocm7.1"),
            ("https://a.example/whl/cpu/", "NVIDIA", "torch==2.99.0+cpu"),
        ],
    )
    def test_the_build_fits_the_machine(self, choose, index, vendor, expected):
        """An index that is named decides, then the vendor of the GPU; without a GPU it is a CPU build."""
        assert choose.choose(index, vendor)[0].startswith(expected)

    @pytest.mark.parametrize(
        ("index", "vendor"), [(None, "AMD"), ("https://a.example/whl/cu99", "NVIDIA"), ("https://a.example/whl/xpu", "")]
    )
    def test_a_build_that_no_index_has_is_an_error(self, choose, index, vendor):
        """Another build never takes the place of the one that was asked for, or that a GPU needs."""
        with pytest.raises(SystemExit, match=r"^torch: .*\(got .*\); "):
            choose.choose(index, vendor)

    def test_without_a_cpu_build_the_plain_index_serves(self, choose, monkeypatch, capsys):
        """An index that cannot be reached costs a sentence."""
        monkeypatch.setattr(choose, "builds", lambda index: [])

        assert choose.choose(None, "") == (f"torch>={choose.least()}",)
        assert "no GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("torch", "kept"), [("2.9.1", True), ("2.14.1+cu130", True), ("2.10.0a0+git1", True), ("2.8.0", False), ("", False)]
)
def test_a_torch_of_the_python_is_kept_if_it_satisfies_the_range(tmp_path, torch, kept):
    """The environment imports that torch and Triton, and one out of the range is not on its path."""
    python = environment_with(tmp_path / "theirs", torch)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "ours"], check=True)
    ours = tmp_path / "ours" / "bin" / "python"

    script = f"import sys; sys.path.insert(0, {str(CHOOSE.parent)!r}); import choose_torch; print(bool(choose_torch.kept({str(python)!r})))"
    assert subprocess.run([ours, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == str(kept)
    answer = subprocess.run([ours, "-c", "import torch, triton; print(torch.__file__)"], capture_output=True, text=True, check=False)
    assert (str(tmp_path / "theirs") in answer.stdout) == kept


#: stands for pip in an environment: writes its words down, and fails if one of them is FAILS
PIP = f"""
import os, sys
print({LISTED!r} if "index" in sys.argv else "")
with open(os.environ["WORDS"], "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
sys.exit(os.environ["FAILS"] in sys.argv)
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the script in an environment; it returns the process and pip's words."""
    ours, words, programs = tmp_path / "ours", tmp_path / "words", tmp_path / "programs"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ours], check=True)
    pip = next(ours.glob("lib/python*/site-packages")) / "pip"
    pip.mkdir()
    (pip / "__main__.py").write_text(PIP)
    programs.mkdir()

    def run_script(
        torch: str = "", smi: str = "", fails: str = "-", **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        python = environment_with(tmp_path / "theirs", torch)
        if smi:
            (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (programs / "nvidia-smi").chmod(0o755)
        environment = {"PATH": str(programs), "WORDS": str(words), "FAILS": fails, **variables}
        command = [ours / "bin" / "python", CHOOSE, python, "-e", "."]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done, words.read_text().splitlines()

    return run_script


class TestRun:
    @pytest.mark.parametrize(
        ("machine", "installed", "said"),
        [
            ({"smi": "exit 0"}, "install torch>=", "3 GB to download, 5 GB on disk for CUDA"),
            ({}, "install torch==2.99.0+cpu ", "0.2 GB to download"),
            ({"smi": "exit 9"}, "install torch==2.99.0+cpu ", "0.2 GB to download"),
            ({"torch": "2.8.0"}, "install torch==2.99.0+cpu ", "0.2 GB to download"),
            ({"TORCH_INDEX": "https://a.example/whl/rocm7.1"}, "install torch==2.98.0+rocm7.1 ", "some GB to download"),
            ({"TORCH_INDEX": ""}, "install torch>=", "3 GB"),
            ({"torch": "2.11.0+cu130", "smi": "exit 0"}, "", "torch: keeps 2.11.0+cu130 in "),
        ],
    )
    @pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine has an AMD GPU")
    def test_a_machine_gets_its_torch_and_then_the_rest(self, run, machine, installed, said):
        """pip gets the words for the build, whose size is printed before, and the rest last."""
        done, words = run(**machine)

        torch = [line for line in words if line.startswith("install torch")]
        assert done.returncode == 0 and said in done.stdout, done.stderr
        assert [line.startswith(installed) for line in torch] == [True] * bool(installed)
        assert words[-1] == "install -q -e ."

    def test_a_failure_of_pip_names_the_way_without_a_network(self, run):
        """The Python that has torch is named, and the exit status is an error."""
        done, _ = run(torch="2.11.0", fails=".")

        assert done.returncode == 1
        assert done.stderr.strip().endswith(f"make install OFFLINE=1 PY={done.args[2]}")


class TestResolve:
    def test_every_distribution_and_extra_is_resolved(self, as_module):
        """No `pyproject.toml` of a distribution is left out, nor any of its extras."""
        lines = as_module(ROOT / ".ci" / "resolve.py").requirements(ROOT)

        assert {line.partition(" @ ")[2].removeprefix(ROOT.as_uri()).lstrip("/") for line in lines} == {
            "" if file.parent == ROOT else str(file.parent.relative_to(ROOT))
            for file in [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]
        }
        core = next(line for line in lines if line.startswith("tunedgemm["))
        assert {"all", "triton", "ray", "dev", "site"} <= set(core[core.index("[") + 1 : core.index("]")].split(","))

    @pytest.mark.skipif(not UV, reason="uv not found")
    @pytest.mark.parametrize(("pin", "conflicts"), [("library==1", False), ("library==2", True)])
    def test_a_pin_that_another_requirement_excludes_is_a_conflict(self, as_module, tmp_path, pin, conflicts):
        """uv's words name the library that was pinned and the project that excludes the pin."""
        for version in ("1", "2"):
            project = tmp_path / f"library-{version}"
            project.mkdir()
            (project / "pyproject.toml").write_text(f'[project]\nname = "library"\nversion = "{version}"\n')
        ours = tmp_path / "ours"
        ours.mkdir()
        (ours / "pyproject.toml").write_text('[project]\nname = "ours"\nversion = "1"\ndependencies = ["library<2"]\n')
        lines = [f"ours @ {ours.as_uri()}", f"library @ {(tmp_path / ('library-' + pin[-1])).as_uri()}"]

        status, fault = as_module(ROOT / ".ci" / "resolve.py").resolve(
            lines, "3.11", "x86_64-manylinux_2_28", "highest", "--no-index", "--no-binary", ":all:"
        )

        assert status == conflicts and ("library" in fault) == conflicts

    @pytest.mark.skipif(not UV, reason="uv not found")
    def test_an_index_that_does_not_answer_is_not_a_conflict(self, as_module):
        """Its exit status is another one, and uv names the address."""
        words = ("--default-index", "http://127.0.0.1:9/simple", "--no-cache")
        status, fault = as_module(ROOT / ".ci" / "resolve.py").resolve(["attrs"], "3.11", "x86_64-manylinux_2_28", "highest", *words)

        assert status == 2 and "127.0.0.1:9" in fault


def test_what_users_run_follows_no_pins():
    """The pins of CI's environment are for `.ci/run` alone."""
    assert not re.search(r"constraints?\b", (ROOT / "Makefile").read_text(), re.IGNORECASE)
