"""Libraries that users install: each broken one costs its backend alone, and few processes load one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends.registry import GROUP

PLUGIN = Path(__file__).with_name("foreign_libraries")
#: package -> its source after the record; SO stands for the path of its shared object.
LIBRARIES = {
    "sound": "from torch.nn.functional import linear as product",
    "unused": "from torch.nn.functional import linear as product",
    "raises": "import a_dependency_that_is_absent",
    "damaged": "import ctypes; ctypes.CDLL(SO)",
    "other_abi": "import ctypes, os; ctypes.CDLL(SO, os.RTLD_NOW)",
    "aborts": "import os; os.abort()",
    "exits": "import os; os._exit(0)",
    "hangs": "import time; time.sleep(600)",
    "old": "raise AssertionError('imported')",
}
#: libtype -> the reason that users see, after the package's name
REASONS = {
    "foreign_absent": "not installed; pip install kernels_absent",
    "foreign_old": "must be 2.0 to 2.9 (got 1.9)",
    "foreign_raises": "does not load: ModuleNotFoundError: No module named 'a_dependency_that_is_absent'",
    "foreign_damaged": "does not load: OSError: ",
    "foreign_aborts": "does not load: loading it ends the process by SIGABRT",
    "foreign_exits": "does not load: loading it ends the process with status 0",
    "foreign_hangs": "does not load: it does not load within 1 s",
}
if shutil.which("cc"):
    REASONS["foreign_other_abi"] = "undefined symbol: of_another_torch"
SERVE = """
import json, torch, tunedgemm
from tunedgemm.shape import Shape
torch.manual_seed(0)
weight, answers = torch.randn(64, 128), {}
for m, libtype in enumerate(LIBTYPES, 1):
    x = torch.randn(m, 128)
    explanation = tunedgemm.explain(x, weight)
    right = torch.allclose(tunedgemm.gemm_a16w16(x, weight), x @ weight.t(), atol=1e-4)
    answers[libtype] = [explanation.offer.solution.libtype, [reason for _, reason in explanation.passed_over], right]
print(json.dumps(answers))
"""


@attrs.frozen
class Machine:
    """A folder with the plugin and its libraries as installed, a cache, and the table of its user."""

    folder: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python there; every command succeeds."""
        folders = {"PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)]), "RECORD": str(self.folder / "record")}
        own = {"TUNEDGEMM_HOME": str(self.folder / "home"), "TUNEDGEMM_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **folders, **own}
        done = subprocess.run([sys.executable, *words], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def imports(self) -> set[tuple[str, str]]:
        """Return the packages imported since the last question, each with its process."""
        record = self.folder / "record"
        lines = record.read_text().splitlines() if record.exists() else []
        record.unlink(missing_ok=True)
        return {tuple(line.split()) for line in lines}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Install the plugin and all libraries but the absent one."""
    folder = tmp_path_factory.mktemp("machine")
    shutil.copy(PLUGIN / "foreign_plugin.py", folder)
    names = [*LIBRARIES, "absent", "gpu"]
    _distribution(folder, "foreign-plugin", "1", f"[{GROUP}]\n" + "".join(f"foreign_{name} = foreign_plugin:{name}\n" for name in names))
    for name, source in LIBRARIES.items():
        library = folder / f"lib{name}.so"
        library.write_text("half of a download")
        recorded = f"import os\nwith open(os.environ['RECORD'], 'a') as file: print('{name}', os.getpid(), file=file)\n"
        (folder / f"kernels_{name}.py").write_text(recorded + source.replace("SO", repr(str(library))) + "\n")
        _distribution(folder, f"kernels_{name}", "1.9" if name == "old" else "2.5", "")
    if compiler := shutil.which("cc"):
        command = [compiler, "-shared", "-fPIC", "-xc", "-", "-o", folder / "libother_abi.so", "-Wl,-z,undefs"]
        source = "extern int of_another_torch(void); int f(void) { return of_another_torch(); }"
        subprocess.run(command, input=source, text=True, check=True)
    return Machine(folder)


def _distribution(folder: Path, name: str, version: str, entries: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)


def table_of(machine: Machine, *libtypes: str) -> None:
    """Write a row for each libtype, with M from 1 on, into the user's table."""
    from tunedgemm.device import device_of

    device = device_of(-1)
    rows = ["gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"]
    for m, libtype in enumerate(libtypes, 1):
        rows.append(f"{device.gfx},1,{m},64,128,False,torch.float32,torch.float32,False,False,{libtype},0,0,3.0,product,0.0,1,1")
    (machine.folder / "home").mkdir(exist_ok=True)
    (machine.folder / "home" / "bf16_tuned_gemm.csv").write_text("\n".join(rows) + "\n")


def served(machine: Machine, *libtypes: str) -> dict[str, list]:
    """Serve a call by each row of the table in a new process."""
    done = machine.run("-c", SERVE.replace("LIBTYPES", repr(libtypes)))
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def listed(machine: Machine) -> str:
    """Return what `tunedgemm plugins` shows, in one line; it asks a child about each library."""
    return " ".join(machine.run("-m", "tunedgemm", "plugins").stdout.replace("│", " ").split())


@pytest.fixture(scope="module")
def tuned(machine: Machine) -> str:
    """Tune a shape over every backend of the machine and torch; return the output, in one line."""
    (machine.folder / "in.csv").write_text("M,N,K,bias,dtype,outdtype\n8,64,128,False,fp32,fp32\n")
    libtypes = ",".join([*(f"foreign_{name}" for name in [*LIBRARIES, "absent", "gpu"]), "torch"])
    done = machine.run("-m", "tunedgemm", "tune", "-i", "in.csv", "-o", "out.csv", "--libtype", libtypes, "--iters", "5")
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("libtype", REASONS)
def test_the_list_shows_why_a_library_cannot_be_used(listed, libtype):
    """Each backend has its reason, and the list is complete."""
    assert REASONS[libtype] in listed and "foreign_sound" in listed


@pytest.mark.parametrize("libtype", REASONS)
def test_the_tuner_shows_why_a_library_cannot_be_used(tuned, libtype):
    """The summary names the backends for CPUs that refused every shape; the others are tuned."""
    assert f"backends that refused every shape: {len(REASONS)}" in tuned
    assert libtype in tuned and REASONS[libtype] in tuned
    assert "1 tuned, 0 failed" in tuned


def test_a_row_of_a_broken_library_costs_itself(machine, listed):
    """Torch serves it, and `explain` has the reason; a row of a sound library runs."""
    table_of(machine, *REASONS, "foreign_sound")
    answers = served(machine, *REASONS, "foreign_sound")
    assert answers.pop("foreign_sound")[0::2] == ["foreign_sound", True]
    assert {libtype: (server, right) for libtype, (server, _, right) in answers.items()} == dict.fromkeys(REASONS, ("torch", True))
    assert [libtype for libtype, reason in REASONS.items() if reason not in " ".join(answers[libtype][1])] == []


def test_a_process_loads_the_libraries_that_its_rows_name(machine, listed):
    """The list imports none, as the children's answers are known; serving imports that of its row."""
    machine.imports()
    machine.run("-m", "tunedgemm", "plugins")
    assert machine.imports() == set()
    table_of(machine, "torch", "foreign_sound")
    assert served(machine, "torch", "foreign_sound", "untuned")["foreign_sound"][0] == "foreign_sound"
    ((library, _),) = machine.imports()
    assert library == "sound"
