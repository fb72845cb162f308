"""Batch-invariant mode: one class serves a weight at every M, or torch's call serves it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import tunedgemm
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from tunedgemm.backends.backend import Backend
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.choice import offers
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.offer import NATIVE
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry, with_hooks
from tunedgemm.text.printable import warn_once

OP, N, K = op_named("a16w16"), 64, 128
A, B = "a" * 16, "b" * 16
MODE = Settings(batch_invariant=True, untuned=("mine",))


@pytest.fixture(autouse=True)
def _warnings() -> None:
    warn_once.cache_clear()


def row(kernel: str, m: int, bit_class: str = A, us: float = 5.0, libtype: str = "mine", **more: Any) -> Row:
    here, shape = current_device(), Shape("a16w16", m, N, K, "fp32", **more)
    return Row(shape, here.gfx, here.cu_num, here.name, Solution(libtype, kernel), us, bit_class=bit_class)


def asked(m: int, **more: Any) -> Shape:
    return Shape("a16w16", m, N, K, "fp32", **more)


class Kernels:
    """The backend `mine` of some kernels, and the names of those that were launched."""

    def __init__(self, *names: str, **answers: Any) -> None:
        self.launched: list[str] = []
        self.backend = fake_backend("mine", solutions=names, call=self._call, **answers)

    def _call(self, solution: Solution, shape: Shape, *operands: Any) -> Any:
        self.launched.append(solution.kernel_name)
        if solution.kernel_name == "fails" or (solution.kernel_name == "one_row" and shape.m > 1):
            raise RuntimeError("no image")
        return exact(solution, shape, *operands)

    def dispatcher(self, *rows: Row, settings: Settings = MODE, backend: Backend | None = None) -> Dispatcher:
        return Dispatcher(OP, fake_registry(backend or self.backend), settings=settings, table=Table(OP, [rows]))


def called(dispatcher: Dispatcher, *sizes: int, bias: bool = False) -> None:
    for m in sizes:
        x, weight, given = torch.randn(m, K), torch.randn(N, K), torch.randn(N) if bias else None
        torch.testing.assert_close(dispatcher.call(x, weight, given), torch.nn.functional.linear(x, weight, given), rtol=1e-4, atol=1e-4)


def invariant_backend(names: dict[int, str], order: str = "k_ascending") -> Backend:
    """A backend whose hook answers with the kernel of the next M."""

    def invariant_fallback(shape: Shape) -> Solution | None:
        name = next((name for m, name in names.items() if shape.m <= m), None)
        return None if name is None else Solution("mine", name, sum_order=order)

    return with_hooks(fake_backend("mine", solutions=tuple(names.values())), invariant_fallback=invariant_fallback)


class TestRows:
    """Class rows serve."""

    def test_each_m_gets_the_fastest_of_the_class(self) -> None:
        """The exact M, a padded or the nearest one; never another class or a plain row."""
        kernels = Kernels("pin", "one", "sixteen", "other", "plain")
        dispatcher = kernels.dispatcher(
            row("pin", 0, us=9.0), row("one", 1), row("sixteen", 16), row("other", 64, B), row("plain", 100, "")
        )
        called(dispatcher, 1, 9, 16, 64, 100, 3000)
        assert kernels.launched == ["one", "sixteen", "sixteen", "sixteen", "sixteen", "sixteen"]
        assert dispatcher.bit_class(asked(7)) == A
        assert f"class {A}" in str(dispatcher.explain(asked(7)))

    def test_a_bias_is_in_all_kernels_or_added_after_all(self) -> None:
        """Rows with a bias serve if there is one with M = 0; else rows without one do at every M."""
        kernels = Kernels("pin", "one", "biased", "pin_bias")
        rows = row("pin", 0), row("one", 1), row("biased", 4, epilogue="bias")
        dispatcher = kernels.dispatcher(*rows)
        assert dispatcher.bit_class(asked(4, epilogue="bias")) == f"{A}+add"
        called(dispatcher, 1, 4, bias=True)
        assert kernels.launched == ["one", "one"]
        inside = kernels.dispatcher(*rows, row("pin_bias", 0, B, epilogue="bias"))
        assert inside.bit_class(asked(4, epilogue="bias")) == B and inside.bit_class(asked(4)) == A
        kernels.launched.clear()
        called(inside, 1, 4, bias=True)
        assert kernels.launched == ["pin_bias", "pin_bias"]

    def test_a_group_whose_pin_cannot_run_is_off(self, caplog: pytest.LogCaptureFixture) -> None:
        """Torch serves every M then, and says why once."""
        absent = row("pin", 0, libtype="absent")
        with_device = row("pin", 0)
        cases = {
            "libtype 'absent'": (Kernels("one"), absent, None),
            "gone": (Kernels("one"), with_device, {"lacks": lambda solution: "gone" if solution.kernel_name == "pin" else ""}),
            "measured with 1.0, now 2.0": (
                Kernels("pin", "one"),
                attrs.evolve(with_device, libver="1.0"),
                {"library_version": lambda: "2.0"},
            ),
            "must name its device": (Kernels("pin", "one"), attrs.evolve(with_device, gfx="", cu_num=0, device=""), None),
        }
        for reason, (kernels, pin, hooks) in cases.items():
            warn_once.cache_clear()
            caplog.clear()
            dispatcher = kernels.dispatcher(pin, row("one", 1), backend=with_hooks(kernels.backend, **hooks or {}))
            called(dispatcher, 1, 2, 300)
            assert not kernels.launched and not dispatcher.bit_class(asked(1)), reason
            text = str(dispatcher.explain(asked(1)))
            assert reason in text and "bits may depend on M" in text
            assert caplog.text.count("bits may depend on M") == 1, reason

    def test_a_row_of_another_version_leaves_its_m_to_the_pin(self) -> None:
        """The pin's bits are those of the class, so its group stays on."""
        kernels = Kernels("pin", "one")
        backend = with_hooks(kernels.backend, library_version=lambda: "2.0")
        called(kernels.dispatcher(row("pin", 0), attrs.evolve(row("one", 1), libver="1.0"), backend=backend), 1)
        assert kernels.launched == ["pin"]

    def test_torchs_call_serves_the_m_of_its_row_alone(self) -> None:
        """Its library chooses kernels by M, so that the bits at a padded M were not measured."""
        kernels = Kernels("pin")
        dispatcher = kernels.dispatcher(row("pin", 0), row("native", 16, libtype="torch"))
        assert [dispatcher.explain(asked(m)).offer.solution.kernel_name for m in (9, 15, 16)] == ["pin", "pin", "native"]

    def test_a_member_that_fails_leaves_its_m_to_the_pin(self) -> None:
        """A veto changes the kernel, not the class."""
        kernels = Kernels("pin", "fails")
        called(kernels.dispatcher(row("pin", 0), row("fails", 4)), 4, 4)
        assert kernels.launched == ["fails", "pin", "pin"]

    def test_a_pin_that_fails_turns_its_group_off(self, caplog: pytest.LogCaptureFixture) -> None:
        """Bound shapes of the group are served by torch from then on; a reload turns it on again."""
        kernels = Kernels("one_row", "fails")
        dispatcher = kernels.dispatcher(row("fails", 0), row("one_row", 1))
        called(dispatcher, 1, 5, 1, 7)
        assert kernels.launched == ["one_row", "one_row", "fails"]
        assert f"class {A} failed, so torch's call serves every M" in caplog.text
        assert "failed" in str(dispatcher.explain(asked(1))) and not dispatcher.bit_class(asked(1))
        dispatcher.reload()
        assert dispatcher.bit_class(asked(1)) == A

    def test_a_group_that_fails_while_a_shape_is_bound_is_off_for_it(self) -> None:
        """As by a call of another thread between the decision and the binding."""
        kernels, failing = Kernels("one_row", "fails"), [0]

        def lacks(solution: Solution) -> str:
            while solution.kernel_name == "one_row" and failing:
                called(dispatcher, failing.pop() + 5)
            return ""

        dispatcher = kernels.dispatcher(row("fails", 0), row("one_row", 1), backend=with_hooks(kernels.backend, lacks=lacks))
        called(dispatcher, 1, 1)
        assert kernels.launched == ["one_row", "fails", "one_row"] and not dispatcher.bit_class(asked(1))

    @pytest.mark.parametrize("seed", range(10))
    def test_any_table_serves_one_class(self, seed: int) -> None:
        """All M of a weight, with and without a bias, get offers of one class, then torch's call."""
        draw, kernels = random.Random(seed), Kernels(*(f"k{at}" for at in range(30)))
        rows = [
            row(f"k{at}", draw.choice((0, 1, 16, 64)), draw.choice((A, B, "")), draw.uniform(1, 9), epilogue=draw.choice(("none", "bias")))
            for at in range(draw.randrange(30))
        ]
        dispatcher = kernels.dispatcher(*rows)
        for epilogue in ("none", "bias"):
            listed = [
                list(offers(asked(m, epilogue=epilogue), current_device(), dispatcher.table, dispatcher.registry, ()))
                for m in (1, 5, 16, 99)
            ]
            assert all(each.pop().solution == NATIVE for each in listed)
            classes = {offer.bit_class for each in listed for offer in each}
            assert len(classes) <= 1 and "" not in classes and all(listed) == any(listed)
            assert classes <= {dispatcher.bit_class(asked(3, epilogue=epilogue))}


class TestBackends:
    """A weight without rows: a backend that declares its order of sums may serve."""

    def test_serves_every_m(self) -> None:
        """The class is the sum order, and a bias without an own answer is added after."""
        dispatcher = Kernels().dispatcher(backend=invariant_backend({16: "small", 1 << 20: "large"}))
        called(dispatcher, 1, 300)
        assert [dispatcher.explain(asked(m)).offer.solution.kernel_name for m in (1, 300)] == ["small", "large"]
        assert dispatcher.bit_class(asked(1)) == "k_ascending"

    def test_an_unlisted_backend_serves_nothing(self) -> None:
        """TUNEDGEMM_FALLBACK lists those that may."""
        settings = attrs.evolve(MODE, untuned=())
        assert not Kernels().dispatcher(backend=invariant_backend({1 << 20: "k"}), settings=settings).bit_class(asked(1))

    def test_one_that_stops_at_some_m_turns_its_group_off(self, caplog: pytest.LogCaptureFixture) -> None:
        """It breaks the hook's promise, which is found at the first such M."""
        dispatcher = Kernels().dispatcher(backend=invariant_backend({16: "small"}))
        called(dispatcher, 1)
        assert dispatcher.explain(asked(300)).offer.solution == NATIVE
        assert "class k_ascending cannot run here" in str(dispatcher.explain(asked(300)))
        called(dispatcher, 300)
        assert "class k_ascending failed, so torch's call serves every M, with other bits: no kernel of it serves M = 300" in caplog.text
        assert dispatcher.bit_class(asked(1)) == "" and dispatcher.bound(asked(1), current_device()).offer.solution == NATIVE

    def test_rows_come_first(self) -> None:
        """Also where their pin cannot run: another class would have other bits than on other hosts."""
        dispatcher = Kernels().dispatcher(row("pin", 0, libtype="absent"), backend=invariant_backend({1 << 20: "k"}))
        assert not dispatcher.bit_class(asked(1))


class TestCalls:
    """Calls that torch serves outside the mode."""

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_gradient_keeps_the_bits_of_the_class(self, dtype: torch.dtype, bias: bool) -> None:
        """The forward pass launches the class's kernel; the backward pass is torch's products."""
        kernels = Kernels("pin")
        dispatcher = kernels.dispatcher(*[attrs.evolve(row("pin", 0), shape=attrs.evolve(asked(0), dtype=str(dtype)[6:], outdtype=""))])
        operands = [torch.randn(3, 5, K, dtype=dtype), torch.randn(N, K, dtype=dtype), *([torch.randn(N, dtype=dtype)] if bias else [])]
        forward = dispatcher.call(*operands)
        ours, torchs = ([each.clone().requires_grad_() for each in operands] for _ in range(2))
        out = dispatcher.call(*ours)
        assert torch.equal(out, forward) and kernels.launched == ["pin", "pin"]
        gradient = torch.randn_like(out)
        out.backward(gradient)
        torch.nn.functional.linear(*torchs).backward(gradient)
        for mine, other in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=2e-2, atol=2e-2)
        assert "gradients by torch's products" in str(_explained(dispatcher, ours))

    def test_gradients_can_be_differentiated(self) -> None:
        """A frozen weight gets none, and second derivatives are torch's."""
        dispatcher = Kernels("pin").dispatcher(row("pin", 0))
        x, weight = torch.randn(3, K, requires_grad=True), torch.randn(N, K)
        [first] = torch.autograd.grad(dispatcher.call(x, weight).square().sum(), x, create_graph=True)
        [second] = torch.autograd.grad(first.sum(), x)
        assert second.abs().sum() > 0 and weight.grad is None

    @pytest.mark.parametrize("early_stop", [False, True])
    def test_an_activation_checkpoint_vetoes_no_kernel(self, early_stop: bool) -> None:
        """Its hooks end the second forward pass by an exception after the kernel has run."""
        kernels, x, weight = Kernels("pin"), torch.randn(3, K, requires_grad=True), torch.randn(N, K)
        dispatcher = kernels.dispatcher(row("pin", 0))
        with set_checkpoint_early_stop(early_stop):
            for _ in range(2):
                checkpoint(lambda x: dispatcher.call(x, weight), x, use_reentrant=False).sum().backward()
        torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(3, K), rtol=1e-4, atol=1e-4)
        assert kernels.launched == ["pin"] * 4 and dispatcher.bit_class(asked(3)) == A

    def test_an_output_with_a_gradient_can_be_overwritten(self) -> None:
        """As that of torch, by an activation in place; backends may return views of their outputs."""
        x, weight = torch.randn(2, 3, K, requires_grad=True), torch.randn(N, K)
        out = Kernels("pin").dispatcher(row("pin", 0)).call(x, weight).relu_()
        out.sum().backward()
        torch.testing.assert_close(x.grad, (out > 0).float() @ weight, rtol=1e-4, atol=1e-4)

    def test_gradients_of_a_wider_output_are_not_rounded_first(self) -> None:
        """They are those of torch's call, bit for bit."""
        kernels, gradient = Kernels("pin"), torch.randn(3, N)
        wide = attrs.evolve(row("pin", 0), shape=attrs.evolve(asked(0), dtype="bf16", outdtype="fp32"))
        values, found = [torch.randn(size, K, dtype=torch.bfloat16) for size in (3, N)], []
        for dispatcher in (kernels.dispatcher(wide), kernels.dispatcher(settings=Settings(untuned=()))):
            x, weight = (each.clone().requires_grad_() for each in values)
            dispatcher.call(x, weight, otype=torch.float32).backward(gradient)
            found.append((x.grad, weight.grad))
        assert kernels.launched == ["pin"] and all(map(torch.equal, *found))

    def test_a_gradient_without_a_class_is_torchs(self, caplog: pytest.LogCaptureFixture) -> None:
        """As outside the mode, with a warning in it."""
        dispatcher = Kernels("k").dispatcher()
        x = torch.randn(3, K, requires_grad=True)
        dispatcher.call(x, torch.randn(N, K)).sum().backward()
        assert x.grad is not None
        assert "the call needs a gradient, so torch's call serves: its bits may depend on M" in caplog.text
        caplog.clear()
        warn_once.cache_clear()
        Kernels("k").dispatcher(settings=Settings(untuned=())).call(x, torch.randn(N, K))
        assert not caplog.text

    def test_strided_operands_are_copied(self) -> None:
        """Weights, too, which torch would serve outside the mode."""
        kernels, x, weight = Kernels("pin"), torch.randn(K, 3).t(), torch.randn(K, N).t()
        out = kernels.dispatcher(row("pin", 0)).call(x, weight)
        assert kernels.launched == ["pin"] and torch.allclose(out, x @ weight.t(), atol=1e-4)
        plain = kernels.dispatcher(row("pin", 0), settings=Settings())
        plain.call(x, weight)
        assert kernels.launched == ["pin"]

    def test_another_type_of_tensor_is_torchs_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        """Its bits differ from the class's."""

        class Tagged(torch.Tensor):
            pass

        kernels = Kernels("pin")
        kernels.dispatcher(row("pin", 0)).call(torch.randn(3, K).as_subclass(Tagged), torch.randn(N, K))
        assert not kernels.launched and f"its bits may differ from those of class {A}" in caplog.text

    def test_m_does_not_choose_the_layout(self) -> None:
        """A model with both layouts uses the shuffled weight if only that one has a class."""
        kernels, weight = Kernels("pin"), torch.randn(N, K, dtype=torch.bfloat16)
        shape = attrs.evolve(asked(0), dtype="bf16", outdtype="")
        shuffled = attrs.evolve(row("pin", 0), shape=attrs.evolve(shape, layout="aiter16x16"))
        faster = attrs.evolve(shuffled, shape=shuffled.shape.with_m(1), us=1.0)
        for rows, is_shuffled in (((shuffled,), True), ((shuffled, faster, attrs.evolve(row("pin", 0), shape=shape)), False), ((), False)):
            dispatcher, copy = kernels.dispatcher(*rows), shuffle_weight(weight)
            chosen = [dispatcher.preferred(torch.randn(m, K, dtype=torch.bfloat16), weight, copy) for m in (1, 500)]
            assert [each is copy for each in chosen] == [is_shuffled] * 2


def _explained(dispatcher: Dispatcher, operands: list[torch.Tensor]) -> Any:
    before = tgemm._dispatchers["a16w16"]
    tgemm._dispatchers["a16w16"] = dispatcher
    try:
        return tunedgemm.explain(*operands)
    finally:
        tgemm._dispatchers["a16w16"] = before


class TestMode:
    """Turning the mode on and off."""

    def test_outside_the_mode_nothing_changes(self) -> None:
        """Class rows are rows, pins come first, and `bit_class` is empty."""
        kernels = Kernels("pin", "one")
        dispatcher = kernels.dispatcher(row("pin", 0), row("one", 1), settings=Settings())
        called(dispatcher, 1)
        assert kernels.launched == ["pin"] and not dispatcher.bit_class(asked(1))

    def test_the_fingerprint_has_the_mode(self) -> None:
        """Ranks in and outside the mode make other choices."""
        kernels = Kernels("pin")
        first, second = (
            kernels.dispatcher(row("pin", 0), settings=settings).fingerprint() for settings in (MODE, Settings(untuned=("mine",)))
        )
        assert first != second

    def test_nothing_is_tuned_online(self) -> None:
        """A row that comes while calls are served would change their bits."""
        asking = Settings(online=True, background=True, online_moe=True)
        assert asking.tunes_online("fmoe") and not attrs.evolve(asking, batch_invariant=True).tunes_online("fmoe")

    def test_a_renewed_table_stays_in_the_mode(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mode may be turned on while a call waits for its shape to be tuned, which ends in `renew`."""
        monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
        dispatcher = Dispatcher(OP, fake_registry(Kernels("pin").backend), settings=MODE)
        before = dispatcher.table
        dispatcher.renew()
        assert dispatcher.table is not before and dispatcher.table.invariant

    def test_in_this_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A function and a block of routed calls turn it on for tgemm; launchers are dropped."""
        monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
        monkeypatch.setenv("TUNEDGEMM_BATCH_INVARIANT", "0")
        (tmp_path / "batch_invariant").mkdir()
        write_rows(tmp_path / "batch_invariant" / "bf16_tuned_gemm.csv", OP, [row("linear", 0, libtype="torch")])
        tunedgemm.reload()
        weight, x = torch.randn(N, K), torch.randn(3, K)
        tunedgemm.linear(x, weight)
        assert tgemm.dispatcher.launchers and not tgemm.dispatcher.settings.batch_invariant
        with tunedgemm.patched(batch_invariant=True):
            assert tgemm.dispatcher.settings.batch_invariant and not tgemm.dispatcher.launchers
            with tunedgemm.patched(batch_invariant=True):
                assert tunedgemm.dispatcher("a16w16").bit_class(asked(3)) == A
            assert tgemm.dispatcher.settings.batch_invariant
        assert not tgemm.dispatcher.settings.batch_invariant
        tunedgemm.set_batch_invariant(True)
        try:
            assert tgemm.dispatcher.table.invariant
        finally:
            tunedgemm.set_batch_invariant(False)
        assert not tgemm.dispatcher.settings.batch_invariant


def test_a_block_ends_though_its_variable_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the block replaces the environment."""
    monkeypatch.delenv("TUNEDGEMM_BATCH_INVARIANT", raising=False)
    with tunedgemm.patched(batch_invariant=True):
        monkeypatch.delenv("TUNEDGEMM_BATCH_INVARIANT")
    assert not Settings.from_environment().batch_invariant and not tgemm.dispatcher.settings.batch_invariant


def test_an_absent_device_is_explained() -> None:
    """Its library's version is unknown, and turns nothing off."""
    away = Device("gfx942", 304, "mi300x")
    pin = attrs.evolve(row("pin", 0), gfx=away.gfx, cu_num=away.cu_num, device=away.name, libver="1")
    dispatcher = Kernels("pin").dispatcher(pin)
    assert dispatcher.bit_class(asked(5), away) == A and dispatcher.explain(asked(5), away).offer.bit_class == A


def test_fp32_names_the_switches() -> None:
    """TF32 changes torch's bits, not those of a class."""
    dispatcher = Kernels("pin", supports=lambda shape, device: Unsupported("never")).dispatcher()
    assert "on torch's TF32 switches" in str(dispatcher.explain(asked(5), Device("sm_90", 132)))
