"""``tunedgemm doctor``: facts, faults with their remedies, exit codes, and the same in JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm import device
from tunedgemm.analysis.doctor import caches, environment, examined, installed, machine, self_test, tables
from tunedgemm.analysis.doctor.finding import Fact, Section
from tunedgemm.backends.registry import Registry
from tunedgemm.cli import main
from tunedgemm.device import Device, current_device
from tunedgemm.integrations import health
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry, with_hooks
from tunedgemm_engines.health import SGLANG, VLLM

SECTIONS = ["versions", "device", "backends", "toolchains", "caches", "tables", "environment", "routing"]
#: What the self-tests of these tests leave out.
OTHERS = [(op, "torch") for op in ops() if op != "a16w16"]
SHAPE = Shape("a16w16", 4, 32, 64, "fp32")


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run the command without a self-test; return its exit code and output."""
    for name in [name for name in os.environ if name.startswith("TUNEDGEMM_") and name not in ("TUNEDGEMM_HOME", "TUNEDGEMM_CACHE")]:
        monkeypatch.delenv(name)

    def run(*words: str) -> tuple[int, str]:
        code = main(["doctor", "--seconds", "0", *words])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.fixture
def user_table(tmp_path: Path) -> Callable[..., Path]:
    """Write the user's table of a16w16 with a row of the present device."""

    def write(libtype: str = "torch", libver: str = "") -> Path:
        here = current_device()
        row = Row(SHAPE, here.gfx, here.cu_num, "", Solution(libtype, "native"), us=1.0, libver=libver)
        (tmp_path / "home").mkdir(exist_ok=True)
        path = tmp_path / "home" / "bf16_tuned_gemm.csv"
        write_rows(path, op_named("a16w16"), [row])
        return path

    return write


def texts(section: Section) -> list[str]:
    return [str(fault) for fault in section.faults]


def test_a_healthy_machine(
    doctor: Callable[..., tuple[int, str]], user_table: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sections are printed and nothing is to mend; the table counts as the user's."""
    path = user_table()
    monkeypatch.setattr(machine, "GPU_FILES", (tmp_path, ()))
    (tmp_path / "cache").mkdir(mode=0o700)
    code, out = doctor()
    assert code == 0
    assert [line for line in out.splitlines() if line in SECTIONS] == SECTIONS
    assert f"a16w16: {path} (layer user, readable yes, rows 1, rows_here 1, stale 0, unserved 0, compared_all yes, age_days 0)" in out
    assert "to mend" not in out and out.endswith("healthy\n")


def test_json_has_the_facts_of_the_text(doctor: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fact and fault of the JSON form is a line of the text, and the other way round."""
    monkeypatch.setenv("AITER_TUNE_GEM", "1")
    text, (code, printed) = doctor()[1], doctor("--json")
    read = json.loads(printed)
    assert code == 1 and read["schema"] == "tunedgemm.doctor" and read["healthy"] is False
    assert list(read["sections"]) == SECTIONS
    facts = [Fact(fact.pop("name"), fact.pop("value"), fact) for facts in read["sections"].values() for fact in facts]
    faults = [fault["text"] for fault in (*read["notes"], *read["problems"])]
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    assert lines == [*map(str, facts), *faults]


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU is healthy; one whose GPU torch does not see is not."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machine, "GPU_FILES", (tmp_path, ("nvidia[0-9]*", "kfd")))
    (without,) = machine.devices().faults
    assert without.harmless and str(without).startswith("GPU: none on this machine (got torch ")
    (tmp_path / "kfd").touch()
    (unseen,) = machine.devices().faults
    assert not unseen.harmless and f"torch sees none (got {tmp_path / 'kfd'}, torch " in str(unseen) and "; install a torch" in str(unseen)


def test_the_version_of_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's version comes from the kernel module's file."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC version: 12.2.0\n")
    monkeypatch.setattr(device, "DRIVERS", {"NVIDIA": tmp_path / "version", "AMD": tmp_path / "absent"})
    assert Fact("driver of NVIDIA", "570.86.15") in machine.devices().facts


def test_an_unreadable_table(doctor: Callable[..., tuple[int, str]], user_table: Callable[..., Path]) -> None:
    """A table that is not text is named with its remedy; a damaged line is named with its number."""
    path = user_table()
    content = path.read_bytes()
    path.write_bytes(b"\xff\xfe\x00nonsense")
    code, out = doctor()
    assert code == 1 and f"{path}: a table that is not used (got: " in out and "; mend it, or move it away\n" in out
    path.write_bytes(content + content.splitlines()[-1].replace(b",4,", b",four,") + b"\n")
    code, out = doctor()
    assert code == 1 and f"{path}: 1 line not used (got, in line 3: " in out and f"; `tunedgemm table check {path}` lists them" in out


def test_a_named_table_that_is_missing(doctor: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that a variable names must exist."""
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(tmp_path / "none.csv"))
    code, out = doctor()
    assert code == 1 and f"{tmp_path / 'none.csv'}: no such file; write it with `tunedgemm tune --op fmoe -o " in out


def test_a_named_table_of_another_device(
    doctor: Callable[..., tuple[int, str]], user_table: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its devices stand under what is to know, which changes no verdict."""
    path, here = user_table(), current_device()
    path.write_text(path.read_text().replace(f"{here.gfx},{here.cu_num},", f"{here.gfx},{here.cu_num + 1},"))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(path))
    _, out = doctor()
    assert f"{path}: no row for {here} (got rows for {here.gfx}/{here.cu_num + 1})" in out.partition("to know\n")[2].partition("to mend")[0]


def test_stale_rows(user_table: Callable[..., Path], cpu: Device) -> None:
    """A row of another library version, or of an absent backend, is a fault with its remedy."""
    now = Registry().get("torch").library_version(cpu)  # type: ignore[union-attr]
    path = user_table(libver="0.1")
    section = tables.tables(Registry(), cpu)
    remedy = f"`tunedgemm tune --op a16w16 -o {path} --stale` tunes them again"
    assert texts(section) == [f"{path}: 1 row of torch tuned with another version of its library (got 0.1, now {now}); {remedy}"]
    assert section.facts[0].more["stale"] == 1
    user_table(libver=now)
    assert not texts(tables.tables(Registry(), cpu))
    user_table("nosuch")
    (fault,) = texts(tables.tables(Registry(), cpu))
    assert fault.startswith(f"{path}: 1 row of nosuch that never serve (got: no backend of that name") and "--all" in fault


def test_age_counts_days(user_table: Callable[..., Path], cpu: Device) -> None:
    """The age of a table is that of its last change."""
    path = user_table()
    section = tables.tables(Registry(), cpu, now=path.stat().st_mtime + 3.5 * 24 * 3600)
    assert section.facts[0].more["age_days"] == 3


@pytest.mark.parametrize(("place", "mode"), [("cache", 0o777), ("cache", 0o1777), ("cache/ab", 0o777)])
def test_a_cache_that_others_may_write(doctor: Callable[..., tuple[int, str]], tmp_path: Path, place: str, mode: int) -> None:
    """A world-writable cache, or a folder in it, is named with its mode and remedy, and stays unchanged."""
    folder = tmp_path / place
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    folder.chmod(mode)
    (folder / "file").write_bytes(b"12345")
    code, out = doctor()
    assert (
        code == 1
        and f"{folder}: writable by others (got mode {mode:04o}); it is not used until you mend owner and mode (`chmod go-w`)" in out
    )
    assert "5 bytes, files 1, counted_all yes, mode " in out
    assert folder.stat().st_mode & 0o7777 == mode


def test_folders_that_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in place of a folder, and a shared cache that is absent, are faults."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("TUNEDGEMM_SHARED_CACHE", str(tmp_path / "absent"))
    assert texts(caches.caches()) == [
        f"{tmp_path / 'cache'}: not a folder (got {tmp_path / 'cache'}); name another with TUNEDGEMM_CACHE",
        f"{tmp_path / 'absent'}: no such folder; name a folder of root's or yours with TUNEDGEMM_SHARED_CACHE, or unset it",
    ]


def test_broken_plugins(fake_plugins: Path, cpu: Device) -> None:
    """A plugin that does not load, raises or has a rival is named with its remedy; a whole one is not."""
    registry = Registry()
    registry.add(fake_backend("moody", supports=raising))
    found = texts(installed.backends(registry, cpu))
    assert any(text.startswith("libtype fake_unimportable: does not load (got: fake-plugin cannot be imported: ") for text in found)
    assert any(text.startswith("libtype moody: breaks the contract (got: its supports() raised ValueError: on purpose") for text in found)
    assert any(text.startswith("libtype fake: claimed twice (got: fake-plugin-rival also claims ") for text in found)
    assert all("; " in text for text in found) and not [text for text in found if text.startswith("libtype asm")]


def test_toolchains_are_the_plugins_words(cpu: Device) -> None:
    """Lines of `details` are facts; a `details` that raises is a fault."""

    def broken(device: Device) -> list[str]:
        raise OSError("no compiler")

    good = with_hooks(fake_backend("good"), details=lambda: ("nvcc 13.0: /usr/bin/nvcc",))
    bad = with_hooks(fake_backend("bad"), details=broken)
    section = installed.toolchains(fake_registry(good, bad), cpu)
    assert Fact("good", "nvcc 13.0: /usr/bin/nvcc") in section.facts
    remedy = "install another version of fake-bad, or uninstall it"
    assert texts(section) == [f"libtype bad: breaks the contract (got: its details() raised OSError: no compiler); {remedy}"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("AITER_TUNE_GEM", "1", "not a variable that tunedgemm reads (got AITER_TUNE_GEM=1); did you mean AITER_TUNE_GEMM?"),
        ("TUNEGEMM_HOME", "/x", "not a variable that tunedgemm reads (got TUNEGEMM_HOME=/x); did you mean TUNEDGEMM_HOME?"),
        ("tunedgemm_cache", "/x", "not a variable that tunedgemm reads (got tunedgemm_cache=/x); did you mean TUNEDGEMM_CACHE?"),
        ("TUNEDGEMM_FAKE_SPACES", "full", "did you mean TUNEDGEMM_FAKE_SPACE?"),
        ("TUNEDGEMM_QQQQ", "1", "(got TUNEDGEMM_QQQQ=1); unset it, or install the plugin that reads it"),
        ("AITER_TUNE_GEMM", "enable", "must be 1 or 0 (got 'enable')"),
        ("TUNEDGEMM_FALBACK", "triton", "did you mean TUNEDGEMM_FALLBACK?"),
        ("TUNEDGEMM_FALLBACK", "tirton", "did you mean triton?"),
        ("TUNEDGEMM_FAKE_SPACE", "ful", "not one of its values (got 'ful'); use small or full"),
        ("TUNEDGEMM_ONLINE_SECONDS", "soon", "must be a number of seconds above 0 (got 'soon')"),
    ],
)
def test_misspelt_variables(fake_plugins: Path, name: str, value: str, expected: str) -> None:
    """A misspelt name and a value without effect are named with what to write."""
    (fault,) = texts(environment.environment(Registry(), {name: value}))
    assert fault.startswith(f"{name}: ") and expected in fault


@pytest.mark.parametrize(
    "name", ["AITER_LOG_LEVEL", "AITER_CONFIG_FHMOE", "AITER_META_DIR", "AITER_TUNE_GEMM", "CUDA_HOME", "PATH", "TUNEDGEMM_VLLM_SECONDS"]
)
def test_variables_of_others_are_no_mistakes(name: str) -> None:
    """AITER's own variables and the machine's raise no alarm."""
    assert not environment.environment(fake_registry(), {name: "1"}).faults


def test_the_engines_of_the_installed_packages_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their packages are found by entry points, in order of names; one that fails is a fault."""
    assert health.engines() == ([SGLANG, VLLM], [])
    monkeypatch.setattr(health, "entry_points", lambda **_: [EntryPoint("mine", "absent_engine:ENGINE", health.GROUP)])
    found, (fault,) = health.engines()
    assert not found and str(fault).startswith("absent_engine:ENGINE: is not an engine (got ModuleNotFoundError: No module named")


def test_a_switch_without_engines_is_a_fault(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    """A tunedgemm that is imported through a path has no entry points, and would route nothing in silence."""
    monkeypatch.setattr(health, "entry_points", lambda **_: [])
    assert not health.routing(cpu, 3).faults
    monkeypatch.setenv("TUNEDGEMM_VLLM", "1")
    (fault,) = health.routing(cpu, 3).faults
    assert str(fault).startswith("engines: none can be routed (got no entry point 'tunedgemm.engines'); install tunedgemm with pip")


def test_vllm_that_would_not_route(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    """Each reason why vLLM keeps its kernels is named where the plugin is switched on."""
    fact, fault = _answer(cpu, 3)
    assert fact.value == "no: vLLM is not installed" and fault is None
    monkeypatch.setattr(health, "_version", lambda _: "0.25.1")
    assert _answer(cpu, 3)[0].value == "no: TUNEDGEMM_VLLM is not set; set it to 1"
    monkeypatch.setenv("TUNEDGEMM_VLLM", "1")
    gpu = Device("sm_90", 132)
    monkeypatch.setattr(health.metadata, "entry_points", lambda **_: [])
    assert "tunedgemm has no installed entry point" in str(_answer(gpu, 3)[1])
    point = attrs.make_class("Point", ["name"])("tunedgemm")
    monkeypatch.setattr(health.metadata, "entry_points", lambda **_: [point])
    assert _answer(gpu, 3) == (Fact("vLLM would route", "yes", {"version": "0.25.1"}), None)
    assert "vLLM packs weights for this CPU" in str(_answer(cpu, 3)[1])
    assert "no table has a row for sm_90, 132 SMs); capture the shapes" in str(_answer(gpu, 0)[1])
    monkeypatch.setenv("VLLM_PLUGINS", "lora,other")
    assert "VLLM_PLUGINS leaves it out (it is 'lora,other')); add tunedgemm to VLLM_PLUGINS" in str(_answer(gpu, 3)[1])
    monkeypatch.setenv("VLLM_PLUGINS", "lora, tunedgemm")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert _answer(gpu, 3) == (Fact("vLLM would route", "yes", {"version": "0.25.1"}), None)
    monkeypatch.setenv("TUNEDGEMM_BATCH_INVARIANT", "0")
    assert "VLLM_BATCH_INVARIANT is set, and TUNEDGEMM_BATCH_INVARIANT=0 leaves all layers" in str(_answer(gpu, 3)[1])
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    monkeypatch.setattr(health, "_version", lambda _: "0.9.0")
    assert "unknown version of vLLM (got 0.9.0); known are 0.20 to" in str(_answer(gpu, 3)[1])
    monkeypatch.setenv("TUNEDGEMM_VLLM", "sure")
    assert _answer(gpu, 3)[0].value == "no: TUNEDGEMM_VLLM is not set; set it to 1"


def test_an_sglang_that_leaves_the_plugin_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's list of plugins is read as vLLM's."""
    from tunedgemm.dispatch.settings import Settings

    monkeypatch.setattr(health, "_version", lambda _: "0.5.23")
    monkeypatch.setattr(health.metadata, "entry_points", lambda **_: [attrs.make_class("Point", ["name"])("tunedgemm")])
    monkeypatch.setenv("TUNEDGEMM_SGLANG", "1")
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    _, fault = health.answer(SGLANG, Device("sm_90", 132), 3, Settings())
    assert "SGLANG_PLUGINS leaves it out (it is 'other')); add tunedgemm to SGLANG_PLUGINS" in str(fault)


def _answer(device: Device, rows: int) -> tuple[Fact, Any]:
    from tunedgemm.dispatch.settings import Settings

    return health.answer(VLLM, device, rows, Settings())


def wrong(solution: Solution, shape: Shape, *operands: Any) -> Any:
    """Return a product whose last row is off."""
    out = exact(solution, shape, *operands)
    out[-1] += 1.0
    return out


def raising(*arguments: Any) -> Any:
    """Raise whatever is asked."""
    raise ValueError("on purpose")


def results(*backends: Any) -> dict[str, self_test.Result]:
    """Return the result of each libtype in this process."""
    sink = io.StringIO()
    self_test.run(fake_registry(*backends), current_device(), sink, OTHERS)
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert lines[-1] == {"end": True}
    return {line["libtype"]: self_test.Result(**line) for line in lines if "status" in line and line["op"] == "a16w16"}


def test_the_self_test_finds_a_wrong_product() -> None:
    """A wrong product and a raising call are faults; a right product and a refusal are not."""
    found = results(
        fake_backend("good"), fake_backend("bad", call=wrong), fake_backend("raises", call=raising), fake_backend("empty", solutions=())
    )
    assert {libtype: result.status for libtype, result in found.items()} == {
        "good": "right",
        "bad": "wrong",
        "raises": "failed",
        "empty": "refused",
        "torch": "right",
    }
    assert found["good"].fact().more["speed"] == pytest.approx(found["good"].torch_us / found["good"].us, abs=1e-3)
    assert found["torch"].us > 0 and "speed" not in found["torch"].fact().more
    assert found["good"].fault() is None and found["empty"].fault() is None
    fault = str(found["bad"].fault())
    assert (
        fault.startswith("libtype bad: a wrong result of bad:fake for a16w16 M=64 N=1024 K=1024 ") and "; report it to the authors" in fault
    )
    assert "on purpose" in str(found["raises"].fault())


def test_the_self_test_says_what_an_empty_list_needs() -> None:
    """A backend that lists nothing is refused; its reason is that of a row without a name."""
    (found,) = [
        each
        for libtype, each in results(with_hooks(fake_backend("bare", solutions=()), lacks=lambda: "no nvcc")).items()
        if libtype == "bare"
    ]
    assert (found.status, found.detail, found.fault()) == ("refused", "no nvcc", None)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("one_wrong_row", "libtype faulty: a wrong result of faulty:one_wrong_row", marks=pytest.mark.nightly),
        ("segfaults", "libtype faulty: a call that died of a solution for a16w16 (got: signal SIGSEGV"),
    ],
)
def test_the_self_test_survives_a_faulty_backend(
    faulty_plugin: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch, kind: str, expected: str
) -> None:
    """A wrong or crashing backend of another distribution is named; those after it are still tested."""
    monkeypatch.setenv("FAULTY_KINDS", kind)
    section = self_test.self_test(60.0, OTHERS)
    (fault,) = texts(section)
    assert fault.startswith(expected) and "; report it to the authors of faulty-backend" in fault
    assert len(section.facts) == 2 and str(section.facts[1]).startswith("a16w16 torch: right (shape a16w16 M=64 ")


@pytest.mark.nightly
def test_a_hanging_backend_ends_in_time(faulty_plugin: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hang ends with the seconds of the self-test, and is named."""
    monkeypatch.setenv("FAULTY_KINDS", "hangs")
    monkeypatch.setenv("FAULTY_MARK", str(tmp_path / "mark"))
    section = self_test.self_test(8.0)
    assert "a16w16 faulty: not finished in time" in map(str, section.facts)


def test_a_section_that_raises_is_a_fault() -> None:
    """An exception of an examination is a fault of its section, without a traceback."""

    def broken() -> Section:
        raise OSError("disk on fire")

    (fault,) = texts(examined("caches", broken))
    assert fault == "caches: could not be examined (got OSError: disk on fire); report this with the whole output"


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_seconds_that_are_not(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A wrong number is a usage error."""
    assert main(["doctor", f"--seconds={text}"]) == 2
    assert f"--seconds: must be 0 to 3600 (got '{text}')" in capsys.readouterr().err


def test_wrong_variables_hide_no_section(tmp_path: Path) -> None:
    """Variables that end other commands, or an import, are faults once each, and all sections are there."""
    wrong = {"TUNEDGEMM_ONLINE_SECONDS": "soon", "TUNEDGEMM_HOME": "~nosuch/x", "AITER_CONFIG_FMOE": "~nosuch/a.csv"}
    command = [sys.executable, "-m", "tunedgemm", "doctor", "--seconds", "0", "--json"]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, env={**os.environ, **wrong, "PYTHONPATH": path}, capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert (done.returncode, list(document["sections"])) == (1, SECTIONS)
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == ["TUNEDGEMM_HOME", "TUNEDGEMM_ONLINE_SECONDS"]
    things = [fault["thing"] for fault in document["problems"] if fault["thing"] != "GPU"]  # one that torch may not use
    assert sorted(things) == sorted(wrong)
    home = "TUNEDGEMM_HOME: no home folder is known for ~nosuch (got '~nosuch/x'); write the whole path"
    assert any(fault["text"].startswith(home) for fault in document["problems"])


def test_the_list_of_variables_is_whole() -> None:
    """Every variable in the sources of the core and of the plugins is understood."""
    import re

    root = Path(__file__).parents[2]
    sources = [*root.glob("core/**/*.py"), *root.glob("plugins/*/tunedgemm_*/**/*.py")]
    named = {
        name for file in sources for name in re.findall(r'"((?:TUNEDGEMM|AITER|GTUNE|HIP_ONLINE|GPTOSS)_[A-Z0-9_]+)"', file.read_text())
    }
    known = set(environment.understood(Registry()))
    assert named - known == {"AITER_CONFIGS", "AITER_CONFIG_FHMOE", "AITER_CONFIG_GROUPED_FMOE"} - known
    assert known - named == set()
