"""Compiling in processes while an engine loads."""

import io
import pickle
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Solution
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
    monkeypatch.setattr(ahead, "begin", lambda tasks, _ranks: begun.append(sorted({shape.m for _, shape, _ in tasks})))
    monkeypatch.setattr(routes, "rows_of", lambda _shape, _device: [1, 64])
    monkeypatch.setattr(routes, "untuned_sizes", lambda _shape, _device: [8])
    routes.compile_ahead(SHAPE, DEVICE)
    routes.compile_ahead(SHAPE, DEVICE)
    assert begun == [[1, 8, 64]]
    routes._begun.clear()
    routes.compile_ahead(SHAPE, DEVICE)
    assert begun == [[1, 8, 64]]
    routes.compile_ahead(SHAPE.with_m(2), attrs.evolve(DEVICE, index=-1))
    assert len(begun) == 1 and len(routes._begun) == 1
