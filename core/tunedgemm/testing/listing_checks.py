"""ListingChecks: the checks of the conformance suite that launch nothing."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import attrs
import pytest

from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import GROUP
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.ops import ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.cases import ConformanceCases, require_none
from tunedgemm.testing.child import ask_child
from tunedgemm.testing.shapes import DEVICES

#: Time limit of `supports` in seconds; a tuner calls it for thousands of shapes.
SUPPORTS_SECONDS = 1e-3
#: Rows of x, and those of a shape, for which batch-invariant mode chooses.
_ROWS = (1, 9, 64, 100, 200, 2000, 1 << 17)


class ListingChecks(ConformanceCases):
    """Checks of the contract, `supports`, the lists of solutions, loading and `prepare`."""

    def test_the_plugin_keeps_the_contract(self) -> None:
        """Check that the plugin loads, covers known ops, and has valid hooks and a one-line version."""
        unknown = set(self.backend().ops) - set(ops())  # the backend's constructor checked all else
        assert not unknown, f"ops names {unknown}, which no installed distribution defines"
        library_version = self.backend().functions.get("library_version", self.backend().library_version)
        for device in self._devices_to_ask():
            version = library_version(device)
            assert isinstance(version, str), f"library_version({device}) is {version!r}, not text"
            assert not set(version) & set("\r\n"), f"library_version({device}) has more than one line: {version!r}"

    def test_supports_is_pure_quick_and_gives_reasons(self, op_name: str) -> None:
        """Check that `supports` gives one answer, None or a reason, within a millisecond, for any device.

        It refuses architectures that the backend's platforms, where it has some, do not name.
        """
        refusal, faults = self.backend().refusal, list[str]()
        for shape, device in self._shapes_and_devices(op_name):
            call, first = f"supports({shape}, {device})", refusal(shape, device)
            if first is not None and (first.reason.startswith("its supports() ") or not first.reason.strip()):
                faults.append(f"{call} returned {first!r}, not None or a reason")
            if first is None and not self._is_declared(shape, device):
                faults.append(f"{call} returned None, but no platform serves {shape.op} on {device.gfx}")
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                again = refusal(shape, device)
                seconds.append(time.perf_counter() - start)
                if again != first:
                    faults.append(f"{call} answered {first!r}, then {again!r}")
                    break
            if min(seconds) >= SUPPORTS_SECONDS:
                faults.append(f"{call} takes {min(seconds) * 1e3:.2f} ms")
        require_none(faults)

    def _is_declared(self, shape: Shape, device: Device) -> bool:
        """Tell whether the platforms allow the shape on a described device; a present one may be emulated."""
        platforms = self.backend().platforms
        return not platforms or device not in DEVICES or any(platform.serves(shape.op, device) for platform in platforms)

    def test_solutions_are_unique_and_stable(self, op_name: str) -> None:
        """Check that lists are stable, without duplicates, and survive the trial log; so does the choice."""
        faults, stored = list[str](), set[Any]()
        for shape, device in self._shapes_and_devices(op_name):
            if not self.backend().refusal(shape, device):
                checks = self._faults_of_list(shape, device, stored), self._faults_of_heuristic(shape, device)
                found = itertools.chain(*checks, self._faults_of_invariant(shape, device))
                faults += [f"{shape} on {device}: {fault}" for fault in found]
        require_none(faults)

    def _faults_of_list(self, shape: Shape, device: Device, stored: set[Any]) -> Iterator[str]:
        """Yield the faults of a shape's solutions; *stored* ones already survived the trial log."""
        try:
            listed = list(self.backend().iterate(shape, device))
        except PluginError as error:
            yield str(error)
            return
        if nameless := [solution for solution in listed if not solution.kernel_name]:
            yield f"{nameless[0]!r} is not a named solution of {self.libtype!r}"
        if len(set(listed)) < len(listed):
            yield f"listed more than once: {', '.join(sorted({str(s) for s in listed if listed.count(s) > 1}))}"
        if listed != list(self.backend().iterate(shape, device)):
            yield "a second call lists other solutions"
        for solution in listed:
            fields = attrs.astuple(solution)
            if fields not in stored:
                back = Solution.from_dict(json.loads(json.dumps(solution.to_dict())))
                if attrs.astuple(back) == fields:
                    stored.add(fields)
                else:
                    yield f"{solution!r} comes back from its dict as {back!r}"

    def _faults_of_heuristic(self, shape: Shape, device: Device) -> Iterator[str]:
        hook, device = self.backend().functions.get("heuristic_fallback"), device.limiting(self.backend().host)
        choice = hook(shape, device) if hook is not None else None
        if choice is not None and not (isinstance(choice, Solution) and choice.libtype == self.libtype):
            yield f"heuristic_fallback() returned {choice!r}"
        if hook is not None and hook(shape, device) != choice:
            yield "heuristic_fallback() is not stable"

    def _faults_of_invariant(self, shape: Shape, device: Device) -> Iterator[str]:
        """Yield how the choices of batch-invariant mode for several M break their promise."""
        hook, limiting = self.backend().functions.get("invariant_fallback"), device.limiting(self.backend().host)
        if hook is None or not shape.m:
            return
        sizes = [other for m in (shape.m, *_ROWS) if not self.backend().refusal(other := attrs.evolve(shape, m=m), device)]
        choices = [hook(size, limiting) for size in sizes]
        if foreign := [choice for choice in choices if choice and not (isinstance(choice, Solution) and choice.libtype == self.libtype)]:
            yield f"invariant_fallback() returned {foreign[0]!r}"
            return
        if [hook(size, limiting) for size in sizes] != choices:
            yield "invariant_fallback() is not stable"
        if len(orders := {choice and choice.sum_order for choice in choices}) > 1 or "" in orders:
            answers = (f"M={size.m} {choice and choice.sum_order!r}" for size, choice in zip(sizes, choices, strict=True))
            yield f"invariant_fallback() must name one sum_order for every M, or choose none (got {', '.join(answers)})"

    @classmethod
    @functools.cache
    def _answers_of_children(cls) -> tuple[dict[str, Any], ...]:
        """Ask a process without visible devices about the described ones, and another about the GPU."""
        present = cls._device()
        hidden = DEVICES if present.kind != "cpu" else (*DEVICES, present)
        with cls.loading():
            answers = [ask_child(cls.libtype, cls.every_shape(), hidden, hidden=True) | {"devices": hidden}]
            if present.kind != "cpu":
                answers.append(ask_child(cls.libtype, cls.every_shape(), (present,), hidden=False) | {"devices": (present,)})
        return tuple(answers)

    def test_other_processes_list_the_same_solutions(self) -> None:
        """Check that a fresh process, with another hash seed, lists the same solutions in the same order."""
        faults: list[str] = []
        for answer in self._answers_of_children():
            questions = itertools.product(self.every_shape(), answer["devices"])
            for (shape, device), there in zip(questions, answer["solutions"], strict=True):
                refused = self.backend().refusal(shape, device)
                here = None if refused else [str(solution) for solution in self.backend().solutions(shape, device)]
                if here != there:
                    faults.append(f"{shape} on {device}: {str(here)[:200]} here, {str(there)[:200]} in another process")
        require_none(faults)

    def test_loading_needs_no_device_and_no_other_plugin(self) -> None:
        """Check that the plugin loads and answers without a visible device and without other plugins."""
        answer = self._answers_of_children()[0]
        assert not answer["cuda"], f"{self.libtype} initialises the GPU to answer for a device that is absent"
        own = self.backend().distribution
        others = {e.value.split(":")[0] for e in entry_points(group=GROUP) if e.dist is not None and e.dist.name != own}
        loaded = others & set(answer["modules"])
        assert not loaded, f"{self.libtype} imports other plugins: {', '.join(sorted(loaded))}"

    def test_prepare_needs_no_device(self) -> None:
        """Check that `prepare` compiles the first solution of each shape in a process without devices."""
        if "prepare" not in self.backend().functions:
            pytest.skip(f"{self.libtype} has no prepare()")
        shapes = [shape for shape in self.served_shapes() if self._binds_first(shape)]
        if not shapes:
            pytest.skip(f"no solution of {self.libtype} binds on {self._device()}")
        with self.loading():
            answer = ask_child(self.libtype, shapes, [self._device()], hidden=True, prepare=1)
        assert not answer["cuda"], "prepare() initialises the GPU"

    def _binds_first(self, shape: Shape) -> bool:
        backend, device = self.backend(), self._device()
        return any(isinstance(backend.bind(solution, shape, device), Launcher) for solution in backend.solutions(shape, device)[:1])
