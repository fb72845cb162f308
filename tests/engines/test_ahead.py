"""Compiling in processes while an engine loads."""

import io
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Backend, Device, Shape, Solution, Unsupported, hookimpl
from tunedgemm_engines import ahead, routes

DEVICE = Device("sm_90", 132, "nvidia-h200", index=0)
SHAPE = Shape("a16w16", 1, 256, 512, "bf16")


@pytest.fixture(autouse=True)
def nothing_begun(monkeypatch) -> None:
    """Begin nothing before a test."""
    monkeypatch.setattr(ahead, "_processes", [])
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(routes, "_begun", set())


def test_processes_end_after_their_tasks(monkeypatch) -> None:
    """Real processes start, read their tasks, and are awaited; an absent backend stops nothing."""
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(4)))
    ahead.begin((DEVICE, SHAPE, Solution("absent", name)) for name in "abcd")
    processes = list(ahead._processes)
    ahead.finish()
    assert 1 <= len(processes) <= 2 and all(process.returncode == 0 for process in processes)
    assert not ahead._processes


def test_the_engine_does_not_wait_for_a_process_that_does_not_read(monkeypatch) -> None:
    """More tasks than a pipe holds are handed over at once; a process may end without reading them."""
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(2)))
    monkeypatch.setattr(ahead.sys, "path", [Path("/of another type"), *ahead.sys.path])
    for program, code in (("import time; time.sleep(60) # {path}", -9), ("raise SystemExit(3) # {path}", 3), (ahead._PROGRAM, 0)):
        monkeypatch.setattr(ahead, "_PROGRAM", program)
        monkeypatch.setattr(ahead, "_SECONDS", 60.0 if code >= 0 else 0.1)
        began = time.monotonic()
        ahead.begin((DEVICE, SHAPE.with_m(m), Solution(f"absent{code}", "a")) for m in range(1, 3000))
        [process] = ahead._processes
        assert time.monotonic() - began < 20
        ahead.finish()
        assert process.returncode == code


def test_a_kernel_of_several_m_is_in_one_process(monkeypatch) -> None:
    """Tasks of one solution come one after the other, so that the second finds the first's."""
    shares: list[list[ahead.Task]] = []
    monkeypatch.setattr(ahead, "_start", shares.append)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(12)))
    for _ in range(2):
        ahead.begin((DEVICE, SHAPE.with_m(m), Solution("toy", name)) for m in (1, 2) for name in "abcdefgh")
    assert 1 < len(shares) <= 6
    assert all(sum(task[2] == share[0][2] for task in share) == 2 for share in shares)

    ahead.begin([(DEVICE, SHAPE, Solution("toy", "i"))], ranks=8)
    assert not any(task[2].kernel_name == "i" for share in shares for task in share)


def test_a_process_prepares_for_an_absent_device(monkeypatch) -> None:
    """A task that fails does not stop the next, and no device is used."""
    prepared: list[tuple[str, int]] = []

    @attrs.frozen
    class Toy(ahead.Backend):  # type: ignore[misc]
        libtype: str = "toy"

        def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
            prepared.append((solution.kernel_name, device.index))
            if solution.kernel_name == "bad":
                raise ValueError(f"{shape} does not compile")

    toy = object.__new__(Toy)
    monkeypatch.setattr(ahead, "Registry", lambda: SimpleNamespace(get=lambda _: toy))
    tasks = [(DEVICE, SHAPE, Solution("toy", name)) for name in ("bad", "good")]
    monkeypatch.setattr(ahead.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps(tasks))))
    ahead.main()
    assert prepared == [("bad", -1), ("good", -1)]


def test_a_shape_is_begun_once_and_not_at_the_next_start(monkeypatch, tmp_path) -> None:
    """Kernels of all timed M begin at the first start; a later one finds the note in the cache."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    begun: list[Any] = []
    monkeypatch.setattr(ahead, "begin", lambda tasks, _ranks: begun.extend(shape.m for _, shape, _ in tasks))
    monkeypatch.setattr(routes, "rows_of", lambda _shape, _device: [1, 64])
    monkeypatch.setattr(routes, "untuned_sizes", lambda _shape, _device: [8])
    routes.compile_ahead(SHAPE, DEVICE)
    routes.compile_ahead(SHAPE, DEVICE)
    assert begun == [1, 64, 8]
    routes._begun.clear()
    routes.compile_ahead(SHAPE, DEVICE)
    assert begun == [1, 64, 8]
    routes.compile_ahead(SHAPE.with_m(2), attrs.evolve(DEVICE, index=-1))
    assert len(begun) == 3 and len(routes._begun) == 1
    routes.compile_ahead(SHAPE, DEVICE, prefill=True)
    assert begun == [1, 64, 8, 1, 64, 8, *routes.PREFILL_M]


class Prebuilt:
    """Hooks that refuse all kernels but one as not compiled, as those of DeepGEMM and CK do."""

    @hookimpl
    def supports(self) -> None:
        """Take every shape."""

    @hookimpl
    def enumerate_solutions(self) -> list[Solution]:
        """List nothing."""
        return []

    @hookimpl
    def lacks(self, solution: Solution, device: Device) -> str:
        """Refuse on a present device alone."""
        return "not compiled" if device.is_present and solution.kernel_name != "m1" else ""

    @hookimpl
    def bind(self, solution: Solution) -> Unsupported:
        """Refuse."""
        return Unsupported(f"{solution} is not compiled")


def begun(monkeypatch) -> list[ahead.Task]:
    """Compile ahead for M of 1 and 2, each of which has a kernel of `Prebuilt`; return the tasks."""
    tasks: list[ahead.Task] = []
    backends = {"prebuilt": Backend("prebuilt", Prebuilt(), ops=("a16w16",))}
    monkeypatch.setattr(ahead, "begin", lambda found, _ranks: tasks.extend(found))
    monkeypatch.setattr(routes, "rows_of", lambda _shape, _device: [1, 2])
    monkeypatch.setattr(routes, "untuned_sizes", lambda _shape, _device: [])
    table, settings = SimpleNamespace(fingerprint=lambda: ""), SimpleNamespace(untuned=(), batch_invariant=False)
    monkeypatch.setattr(routes, "dispatcher", lambda _: SimpleNamespace(registry=backends, table=table, settings=settings))

    def explained(_: Any, shape: Shape, device: Device) -> Any:
        assert not device.is_present
        return SimpleNamespace(shape=shape, offer=SimpleNamespace(solution=Solution("prebuilt", f"m{shape.m}")))

    monkeypatch.setattr(routes, "explain_row", explained)
    routes.compile_ahead(SHAPE, DEVICE)
    return tasks


def test_what_a_first_call_would_refuse_is_not_compiled(monkeypatch, tmp_path) -> None:
    """A backend that compiles for minutes refuses what is not compiled, at start-up, too."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    assert [solution.kernel_name for _, _, solution in begun(monkeypatch)] == ["m1"]


def test_nothing_begins_where_the_cache_cannot_be_written(monkeypatch, tmp_path) -> None:
    """Processes could not hand over what they compile, and start-up would wait for them in vain."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "file"))
    assert begun(monkeypatch) == []
