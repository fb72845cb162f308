"""Misbehaving plugins: each costs itself alone, and the good one next to it is tuned.

They run as installed distributions in the processes of a real command line.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from tunedgemm.testing.siblings import module_at

HERE = Path(__file__).parents[1]


PLUGINS = module_at(HERE / "misbehaving")


def tune(folder: Path, libtype: str, *words: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Tune one shape with the plugins of a folder; paths are relative, as users give them."""
    (folder / "in.csv").write_text("M,N,K,bias,dtype,outdtype\n8,64,128,False,fp32,fp32\n")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tunedgemm", "tune", "-i", "in.csv", "-o", "out.csv", "--libtype", libtype, "--iters", "9", *words]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=timeout)


def winners(folder: Path) -> list[tuple[str, str]]:
    """Return the libtypes and units of the table's rows."""
    with (folder / "out.csv").open(newline="") as file:
        return [(row["libtype"], row["cu_num"]) for row in csv.DictReader(file)]


def statuses(folder: Path) -> dict[str, str]:
    """Return the status of each libtype's last trial."""
    trials = map(json.loads, (folder / "out.trials.jsonl").read_text().splitlines())
    return {trial["solution"]["libtype"]: trial["status"] for trial in trials if trial["kind"] == "trial"}


#: Plugins of the quick test, by kind, and the status or the words of the report that each gets.
QUICK = {
    "module-sys_exit": "",
    "module-chdir": "changed the working directory",
    "supports-exit_0": "supports() ended the worker: it called os._exit(0)",
    "supports-generator_exit": "",
    "library_version-segfault": "library_version() ended the worker: killed by SIGSEGV",
    "endless_equal_list": "lists more than 500000 solutions",
    "bind-num_threads": "failed",
    "call-sys_exit": "failed",
    "late-default_dtype": "failed",
    "mutates_weight_late": "wrong",
    "transposed": "wrong",
    "shared_buffer": "wrong",
    "ops_text": "",
}


def test_a_dozen_misbehaving_plugins_leave_the_good_one(tmp_path: Path) -> None:
    """One run has them all: each has its reason, and the row is of a good plugin on this device."""
    PLUGINS.install(tmp_path, good=PLUGINS.GOOD)
    libtypes = {name: f"bad{number}" for number, name in enumerate(QUICK)}
    for name, libtype in libtypes.items():
        text = PLUGINS.source(PLUGINS.cases()[name]).replace('Solution("bad"', f'Solution("{libtype}"')
        text = text.replace("Backend('bad'", f"Backend('{libtype}'")
        PLUGINS.install(tmp_path, **{libtype: text})

    done = tune(tmp_path, "all", "-v")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    ((winner, units),) = winners(tmp_path)
    assert winner not in libtypes.values() and units == "1"
    found = statuses(tmp_path)
    for name, expected in QUICK.items():
        libtype = libtypes[name]
        if " " in expected:
            assert any(expected in line and libtype in line for line in done.stderr.splitlines()), (name, done.stderr)
        elif expected:
            assert found.get(libtype) == expected, (name, found)
        else:
            assert libtype not in found
    assert found["good"] in ("ok", "screened")
