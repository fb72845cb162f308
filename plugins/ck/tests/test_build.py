"""Check that an instance is compiled once per source, options and toolchain, and found again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
import pytest
from tunedgemm.plugin import LaunchError, PluginError
from tunedgemm_ck import toolchain
from tunedgemm_ck.build import CompiledObject, MissingError, build_object, find_object
from tunedgemm_ck.native import load_object

#: One bf16 product of 1 x 1 x 1.
SIZES = (1, 1, 1, 1, 1)


def works(made: CompiledObject) -> bool:
    """Return whether the bytes are an object that can be loaded."""
    return load_object(made.code).workspace_bytes(SIZES) == 0


def test_an_instance_is_compiled_once(fakes, target):
    """A second build reads the cache."""
    made = build_object(target)
    assert works(made)
    assert made.toolchain == "CUTLASS 4.2.0, nvcc 13.0.88"
    assert build_object(target).code == find_object(target).code == made.code
    assert len(fakes.compilations) == 1


def test_the_source_states_its_problem(target):
    """The source's first line is JSON, and call.h is inlined."""
    first, _, rest = target.source.partition("\n")
    header = json.loads(first.removeprefix("// tunedgemm "))
    assert header == {"instance": "tile64", **target.problem.fields()}
    assert "struct TunedGemmCall" in rest
    assert '#include "call.h"' not in rest


def test_a_source_without_the_call_is_refused(target):
    """A family whose source lacks the include raises an error."""
    family = attrs.evolve(target.family, render=lambda instance, problem: "int x;")
    with pytest.raises(PluginError, match=r"include call\.h once"):
        _ = attrs.evolve(target, family=family).source


@pytest.mark.parametrize("change", ["instance", "problem", "source", "flags", "compiler", "headers"])
def test_every_dependency_makes_another_object(fakes, target, stand_in, monkeypatch, change):
    """The cache key covers everything that a compilation depends on."""
    build_object(target)
    family, other = target.family, target
    if change == "instance":
        other = attrs.evolve(target, instance=stand_in.StandIn(128))
    elif change == "problem":
        other = attrs.evolve(target, problem=attrs.evolve(target.problem, outdtype="fp32"))
    elif change == "source":
        other = attrs.evolve(target, family=attrs.evolve(family, render=lambda i, p: family.render(i, p) + "\n"))
    elif change == "flags":
        other = attrs.evolve(target, family=attrs.evolve(family, flags=lambda i, p: ("-DTILE=64", "-DMORE")))
    elif change == "compiler":
        monkeypatch.setenv("FAKE_CK_VERSION", "13.1.5")
        fakes.install("nvcc")
    else:
        fakes.headers("cutlass", (4, 3, 0))
    build_object(other)
    assert len(fakes.compilations) == 2
    build_object(other)
    assert len(fakes.compilations) == 2


def test_a_missing_object_is_not_compiled(fakes, target):
    """Looking for a missing object compiles nothing and says how to build it."""
    with pytest.raises(
        MissingError, match=r"is not built: run `tunedgemm ck prebuild TABLE`, or set TUNEDGEMM_CK_COMPILE=1 to compile here"
    ):
        find_object(target)
    assert fakes.compilations == []


def test_a_machine_without_a_compiler_finds_built_objects(fakes, target, monkeypatch, tmp_path):
    """A copied cache serves without nvcc and without headers."""
    made = build_object(target)
    shutil.copytree(os.environ["TUNEDGEMM_CACHE"], tmp_path / "copy")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "copy"))
    monkeypatch.setenv("CUDACXX", str(tmp_path / "none"))
    assert find_object(target).code == made.code
    with pytest.raises(PluginError, match="nvcc not found"):
        build_object(target)


def test_without_compiler_and_cache_the_error_says_both(fakes, target, monkeypatch, tmp_path):
    """The error names the missing object and the missing compiler."""
    monkeypatch.setenv("CUDACXX", str(tmp_path / "none"))
    with pytest.raises(MissingError, match=r"standin tile64 for a16w16 bf16->bf16 on sm_90 is not built: nvcc not found"):
        find_object(target)


def test_after_an_upgrade_the_old_object_serves_until_rebuilt(fakes, target, monkeypatch):
    """After a compiler upgrade a lookup finds the old object and a build makes a new one."""
    old = build_object(target)
    monkeypatch.setenv("FAKE_CK_VERSION", "13.1.5")
    fakes.install("nvcc")
    assert find_object(target).toolchain == old.toolchain
    assert build_object(target).toolchain == "CUTLASS 4.2.0, nvcc 13.1.5"
    assert find_object(target).toolchain == "CUTLASS 4.2.0, nvcc 13.1.5"


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("fail", r"does not compile: exit code 2: instance\.cu\(7\): error: no such type$"),
        ("full", r"exit code 1: Fatal: instance\.so: No space left on device$"),
        ("die", r"the compiler was killed by SIGKILL, probably out of memory; reduce --jobs$"),
        ("empty", r"exit code 0: no output$"),
    ],
)
def test_a_failed_compilation_is_reported_and_retried(fakes, target, monkeypatch, does, says):
    """A failed compilation raises the compiler's output without temporary paths, and is retried."""
    monkeypatch.setenv("FAKE_CK_DOES", does)
    with pytest.raises(LaunchError, match=says):
        build_object(target)
    monkeypatch.delenv("FAKE_CK_DOES")
    assert works(build_object(target))
    assert not any(Path(each["folder"]).exists() for each in fakes.compilations), "temporary folders are gone"


def test_a_cache_that_cannot_be_written_is_an_error(fakes, target, monkeypatch, tmp_path):
    """A build into a cache that cannot be written raises an error."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PluginError, match=r"the artifact cache cannot be written \(.*Not a directory.*\); set TUNEDGEMM_CACHE"):
        build_object(target)


def test_a_damaged_object_is_compiled_again(fakes, target, cache):
    """A truncated file counts as absent."""
    build_object(target)
    for file in cache.rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MissingError):
        find_object(target)
    assert works(build_object(target))


def test_fresh_compiles_again(fakes, target):
    """``fresh`` compiles a stored object again."""
    build_object(target)
    build_object(target, fresh=True)
    assert len(fakes.compilations) == 2


#: A process that builds or finds the target of these tests.
_ELSEWHERE = """
import sys
import tempfile
sys.path[:0] = [sys.argv[1]]
import stand_in
from tunedgemm_ck import toolchain
from tunedgemm_ck.build import Target, build_object, find_object
from tunedgemm_ck.problem import Problem
target = Target(stand_in.family("standin", "nvidia"), stand_in.StandIn(64), Problem("a16w16", "sm_90", "bf16", "bf16"), toolchain.cuda)
print(len({"built": build_object, "found": find_object}[sys.argv[2]](target).code))
"""


def elsewhere(does: str, **environment: str) -> subprocess.Popen[str]:
    """Start another process that builds or finds the target."""
    words = [sys.executable, "-c", _ELSEWHERE, str(Path(__file__).parent), does]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def begun(fakes) -> None:
    """Wait until a compiler runs."""
    deadline = time.monotonic() + 120
    while not fakes.compilations:
        assert time.monotonic() < deadline, "no compiler began"
        time.sleep(0.05)


def test_two_processes_compile_one_instance_once(fakes, target, monkeypatch, tmp_path):
    """The second process waits for the first one's object."""
    monkeypatch.setenv("FAKE_CK_DOES", "wait")
    monkeypatch.setenv("FAKE_CK_WAITS", str(tmp_path / "go"))
    children = [elsewhere("built") for _ in range(2)]
    begun(fakes)
    time.sleep(1.0)  # the other has begun as well, mostly
    (tmp_path / "go").touch()
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert len(fakes.compilations) == 1
    assert works(find_object(target))


def test_a_process_killed_while_it_compiles_leaves_no_lock(fakes, target, monkeypatch, tmp_path):
    """After the compiling process was killed, another one compiles at once."""
    monkeypatch.setenv("FAKE_CK_DOES", "wait")
    monkeypatch.setenv("FAKE_CK_WAITS", str(tmp_path / "go"))
    child = elsewhere("built")
    begun(fakes)
    child.kill()
    child.communicate(timeout=120)
    (tmp_path / "go").touch()
    assert works(build_object(target))


def test_the_key_needs_no_compiler(fakes, target):
    """A process without a toolkit finds a stored object."""
    size = len(build_object(target).code)
    child = elsewhere("found", CUDACXX="/nowhere", CUTLASS_INCLUDE="/nowhere", PATH="/nowhere")
    out, error = child.communicate(timeout=120)
    assert out.strip() == str(size), error


def test_the_finder_gets_the_problem(target):
    """The finder gets the problem, which may have a specific compiler."""
    asked = []

    def finder(problem):
        asked.append(problem)
        raise PluginError("none")

    with pytest.raises(PluginError, match="none"):
        build_object(attrs.evolve(target, finder=finder))
    assert asked == [target.problem]
    assert toolchain.cuda is not finder


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_an_object_of_another_user_is_not_loaded(fakes, target, monkeypatch):
    """A shared object that another user puts into a cache that all may write is missing, not loaded."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(folder / "cache"))
    code = build_object(target).code
    assert find_object(target).code == code
    for path in (folder / "cache", *(folder / "cache").rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    planted = (
        "import hashlib, os, pathlib, sys\n"
        "os.setgid(54321); os.setuid(54321)\n"
        "for file in [*pathlib.Path(sys.argv[1]).glob('[0-9a-f][0-9a-f]/*')]:\n"
        "    payload = file.read_bytes()[32:]\n"
        "    file.unlink()\n"
        "    payload = payload.replace(b'tunedgemm_launch', b'tunedgemm_planted')\n"
        "    file.write_bytes(hashlib.sha256(payload).digest() + payload)\n"
    )
    try:
        subprocess.run([sys.executable, "-c", planted, str(folder / "cache")], check=True)
        with pytest.raises(MissingError, match="is not built"):
            find_object(target)
        for path in (folder / "cache").rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o644)
        (folder / "cache").chmod(0o700)
        with pytest.raises(MissingError, match="is not built"):  # the files are still the other user's
            find_object(target)
        assert build_object(target).code == find_object(target).code == code
    finally:
        shutil.rmtree(folder)
