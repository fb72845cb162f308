"""split: a bias that is added after a kernel that ran without one."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.backends import split_bias
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.choice import choose, offers
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.accuracy import errors
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import ADD, Solution, Unsupported
from tunedgemm.table.csvfile import read_rows, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.testing.fakes import FakeHooks, exact, fake_backend, fake_registry
from tunedgemm.tuner import Options, tune

BIASED = Shape("a16w16", 5, 48, 64, "bf16", epilogue="bias")
PLAIN = Shape("a16w16", 5, 48, 64, "bf16")
CPU = Device("cpu-avx2", 4)
KERNEL, SPLIT = Solution("mine", "k", 2), Solution("mine", "k+add", 2)


def no_bias(shape: Shape, device: Device) -> Unsupported | None:
    """Refuse a bias like a kernel without one."""
    return Unsupported("takes no bias") if shape.bias else None


def mine(**answers):
    return fake_backend("mine", **{"ops": tuple(ops()), "solutions": (KERNEL,), "supports": no_bias, **answers})


def test_a_split_solution_is_known_by_its_name():
    """The kernel's name with the ending; its other fields and claims stay."""
    claimed = attrs.evolve(KERNEL, batch_invariant=True, solidx=7)
    assert split_bias.with_add(KERNEL) == SPLIT and split_bias.without_add(SPLIT) == KERNEL == split_bias.without_add(KERNEL)
    assert split_bias.is_split(SPLIT) and not split_bias.is_split(KERNEL)
    assert split_bias.without_add(split_bias.with_add(claimed)).batch_invariant and split_bias.with_add(claimed).solidx == 7


def test_which_shapes_have_a_bias_that_stands_alone():
    """Shapes of a16w16 without scales, and of quantised products, have a bias that can be split off.

    A bias in another dtype than a 16-bit output needs the product in float32.
    """
    assert split_bias.unbiased_shape(BIASED) == PLAIN == split_bias.product_shape(BIASED)
    assert split_bias.product_shape(attrs.evolve(BIASED, bias_dtype="fp32")) == attrs.evolve(PLAIN, outdtype="fp32")
    wide = attrs.evolve(BIASED, outdtype="fp32")
    assert split_bias.product_shape(wide) == split_bias.unbiased_shape(wide) == attrs.evolve(PLAIN, outdtype="fp32")
    assert split_bias.product_shape(attrs.evolve(BIASED, outdtype="fp8_e4m3fn")) is None
    assert split_bias.unbiased_shape(PLAIN) is split_bias.unbiased_shape(attrs.evolve(BIASED, scale="tensor")) is None
    assert split_bias.unbiased_shape(attrs.evolve(BIASED, op="nobodys")) is None
    assert split_bias.unbiased_shape(Shape("a8w8", 5, 48, 64, "int8", "bf16", "bias", scale="row")).epilogue == "none"


@pytest.mark.parametrize(
    "shape",
    [
        BIASED,
        attrs.evolve(BIASED, bias_dtype="fp32"),
        attrs.evolve(BIASED, outdtype="fp32"),
        attrs.evolve(BIASED, layout="aiter16x16"),
        Shape("a8w8", 5, 48, 64, "int8", "fp16", "bias", scale="row"),
        Shape("a8w8_bpreshuffle", 5, 48, 64, "fp8_e4m3fn", "bf16", "bias", "fp32", "tensor", "aiter16x16"),
        *(shape for name in ("a4w4_blockscale", "a16w4_blockscale") for shape in op_named(name).examples if shape.bias),
    ],
    ids=str,
)
def test_the_bias_is_in_the_result(shape):
    """The sum of kernel and bias is right within the op's tolerance, in the output's dtype."""
    op, asked = op_named(shape.op), []

    def call(solution, plain, *operands):
        asked.append((solution, plain.bias, len(operands)))
        return exact(solution, plain, *operands)

    launcher = mine(call=call).bind(SPLIT, shape, CPU)
    assert isinstance(launcher, Launcher)
    operands = op.make_inputs(shape, torch.device("cpu"), 3)
    out = launcher.call(*operands)
    assert asked == [(KERNEL, False, len(operands) - 1)]
    assert out.dtype == torch_dtype(shape.outdtype)
    ratio, row = errors(out, op.reference(shape, operands), op.tolerance(shape))
    assert ratio == 0.0 and row <= op.tolerance(shape).row_error


def test_a_bias_of_one_row_and_any_leading_dimensions():
    """A bias [1, N] is added as [N] is, also to the output of a vector."""
    weight, bias = torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16()
    for m, x in ((1, torch.randn(64)), (6, torch.randn(2, 3, 64))):
        launcher = mine().bind(SPLIT, attrs.evolve(BIASED, m=m), CPU)
        out = launcher.call(x.bfloat16(), weight, bias.view(1, -1))
        torch.testing.assert_close(out, torch.nn.functional.linear(x.bfloat16(), weight, bias), atol=5e-2, rtol=5e-2)
        assert out.shape == (*x.shape[:-1], 48)


@pytest.mark.parametrize(
    ("solution", "shape", "reason"),
    [
        (SPLIT, PLAIN, "+add needs a bias"),
        (SPLIT, attrs.evolve(BIASED, scale="tensor"), "+add needs a bias that is added last"),
        (Solution(BUILTIN, "mm+add"), BIASED, "torch adds a bias in its routes, not by +add"),
        (Solution("mine", "k+add+add", 2), BIASED, "+add needs a bias"),
    ],
)
def test_a_bias_that_cannot_be_split_has_a_reason(solution, shape, reason):
    """supports() and bind() refuse a missing bias, one inside the kernel, and torch's routes, by name."""
    backend = Registry(()).get(BUILTIN) if solution.libtype == BUILTIN else mine(supports=lambda *_: None)
    assert str(backend.bind(solution, shape, CPU)) == reason
    if ADD not in split_bias.without_add(solution).kernel_name:
        assert str(backend.refusal(shape, CPU, solution)) == reason
    backend.prepare(solution, shape, CPU)
    assert backend.refine(solution, shape, CPU) == []


def test_a_bias_of_another_dtype_wants_the_product_in_float32():
    """A kernel without float32 is refused with its own reason, as one rounding only is allowed."""

    def narrow(shape: Shape, device: Device) -> Unsupported | None:
        return None if shape.outdtype == "bf16" else Unsupported("writes bf16 alone")

    backend = mine(supports=narrow)
    assert backend.refusal(BIASED, CPU, SPLIT) is None
    assert str(backend.refusal(attrs.evolve(BIASED, bias_dtype="fp32"), CPU, SPLIT)) == "writes bf16 alone"


class Whole(FakeHooks):
    """A plugin with the optional hooks, which records its calls."""

    def __init__(self, **answers):
        super().__init__("mine", solutions=(KERNEL,), **answers)
        self.asked = []

    @hookimpl
    def prepare(self, solution, shape):
        self.asked.append(("prepare", solution, shape))

    @hookimpl
    def refine(self, solution, shape):
        self.asked.append(("refine", solution, shape))
        return [Solution("mine", "near")]

    @hookimpl
    def lacks(self, solution, shape):
        return f"no {solution.kernel_name} for {shape.epilogue}"


def test_plugins_are_asked_about_the_kernel_alone():
    """prepare, refine and lacks get the kernel and the unbiased shape; neighbours come back split."""
    plugin = Whole()
    backend = fake_backend("mine", hooks=plugin)
    backend.prepare(SPLIT, BIASED, CPU)
    assert backend.refine(SPLIT, BIASED, CPU) == [Solution("mine", "near+add")]
    assert backend.refine(KERNEL, BIASED, CPU) == [Solution("mine", "near")]
    assert plugin.asked == [("prepare", KERNEL, PLAIN), ("refine", KERNEL, PLAIN), ("refine", KERNEL, BIASED)]
    assert backend.lacks(SPLIT, BIASED, CPU) == "no k for none"


def test_a_plain_run_is_split_too():
    """A backend with run() alone launches its kernel without the bias."""

    class Runs:
        @hookimpl
        def supports(self, shape):
            return no_bias(shape, CPU)

        @hookimpl
        def enumerate_solutions(self):
            return [KERNEL]

        @hookimpl
        def run(self, solution, operands):
            assert solution == KERNEL
            x, weight = operands
            return torch.nn.functional.linear(x, weight)

    operands = op_named("a16w16").make_inputs(BIASED, torch.device("cpu"), 0)
    out = fake_backend("mine", hooks=Runs()).run(SPLIT, BIASED, CPU, operands)
    torch.testing.assert_close(out, torch.nn.functional.linear(*operands), atol=5e-2, rtol=5e-2)


def test_no_plugin_has_kernels_of_such_names():
    """A plugin's kernel name that ends in +add breaks the contract, because it would mean a split bias."""
    with pytest.raises(PluginError, match=r"mine:k\+add splitK=2; names that end in \+add are the core's"):
        mine(solutions=(SPLIT,)).solutions(PLAIN, CPU)


class TestRowsWithoutABias:
    """Calls with a bias over rows for the product without one."""

    op = op_named("a16w16")

    def row(self, solution: Solution, shape: Shape = PLAIN, us: float = 5.0, gfx: str = CPU.gfx, cu_num: int = 4) -> Row:
        return Row(shape=shape, gfx=gfx, cu_num=cu_num, device="", solution=solution, us=us)

    def chosen(self, backend, *rows: Row, shape: Shape = BIASED, untuned=()):
        registry = fake_registry(backend)
        found = offers(shape, CPU, Table(op_named(shape.op), [rows]), registry, untuned)
        return choose(found, shape, CPU, registry, lambda _: "")

    def test_a_kernel_that_takes_a_bias_gets_it(self):
        """The same solution fused comes before the add."""
        explanation, _ = self.chosen(mine(supports=lambda *_: None), self.row(KERNEL))
        assert explanation.offer.solution == KERNEL and explanation.offer.origin == "unbiased" and not explanation.tuned
        assert "a row without a bias" in explanation.offer.why and "add" not in explanation.offer.why

    def test_a_kernel_without_bias_is_followed_by_an_add(self):
        """A kernel without bias serves the call with an add, and explain tells both."""
        explanation, launcher = self.chosen(mine(heuristic="other"), self.row(KERNEL), untuned=("mine",))
        assert explanation.offer.solution == SPLIT and launcher is not None
        said = str(explanation)
        assert "runs mine:k+add splitK=2: " in said and "a row without a bias, and an add" in said
        assert "not mine:k splitK=2: takes no bias" in said

    def test_rows_with_the_bias_come_first(self):
        """A row for the shape itself wins, whatever the times; what it says is not offered again."""
        own = Solution("mine", "own")
        backend = mine(solutions=(KERNEL, own), supports=lambda *_: None)
        explanation, _ = self.chosen(backend, self.row(own, BIASED, 9.0), self.row(KERNEL, us=1.0))
        assert explanation.offer.solution == own and explanation.tuned
        table = Table(self.op, [[self.row(own, BIASED, 9.0), self.row(own, us=4.0), self.row(KERNEL)]])
        found = offers(BIASED, CPU, table, fake_registry(), ())
        told = [(offer.origin, str(offer.solution)) for offer in found]
        assert told == [
            ("table", "mine:own"), ("unbiased", "mine:own+add"), ("unbiased", "mine:k splitK=2"), ("unbiased", "mine:k+add splitK=2"),
            ("builtin", "torch:native"),
        ]  # fmt: skip

    def test_torchs_routes_take_the_bias_themselves(self):
        """A row of torch without a bias is its route with one, without a separate add."""
        explanation, _ = self.chosen(mine(), self.row(Solution(BUILTIN, "mm")))
        assert explanation.offer.solution == Solution(BUILTIN, "mm") and not explanation.passed_over

    def test_a_bias_of_another_dtype_uses_rows_in_float32(self):
        """The add follows the kernel of a float32 row; that of a bf16 row may take the bias itself."""
        shape, wide = attrs.evolve(BIASED, bias_dtype="fp32"), Solution("mine", "wide")
        rows = (self.row(KERNEL), self.row(wide, attrs.evolve(PLAIN, outdtype="fp32")))
        found = [str(offer.solution) for offer in offers(shape, CPU, Table(self.op, [rows]), fake_registry(), ())]
        assert found == ["mine:k splitK=2", "mine:wide+add", "torch:native"]

    def test_rows_of_no_device_say_a_part_of_the_name(self):
        """A part of a name matches kernels of the unbiased shape; an empty name is its heuristic's choice."""
        backend = mine(solutions=("tn_64", "tn_128"), heuristic="tn_128")
        for part, name in (("64", "tn_64+add"), ("", "tn_128+add")):
            explanation, _ = self.chosen(backend, self.row(Solution("mine", part), gfx="", cu_num=0))
            assert explanation.offer.solution == Solution("mine", name)

    def test_shuffled_weights_stay_shuffled(self):
        """The product is looked for in the weight's layout, and its launcher takes the shuffled weight."""
        shape = attrs.evolve(BIASED, layout="aiter16x16")
        explanation, launcher = self.chosen(
            mine(), self.row(KERNEL, attrs.evolve(PLAIN, layout="aiter16x16")), self.row(KERNEL), shape=shape
        )
        assert explanation.offer.solution == SPLIT
        x, weight, bias = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16()
        out = launcher.call(x, shuffle_weight(weight), bias)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias), atol=5e-2, rtol=5e-2)


class TestCalls:
    """The whole way: from rows to results."""

    here = device_of(-1)
    operands = op_named("a16w16").make_inputs(BIASED, torch.device("cpu"), 4)

    def linear(self, solution, shape, x, weight):
        return torch.nn.functional.linear(x, weight)

    def instance(self, path: Path, backend, *rows: Row) -> TunedGemm:
        if rows:
            write_rows(path, op_named("a16w16"), rows)
        gemm = TunedGemm(fake_registry(backend))
        gemm.load_config(path)
        return gemm

    def test_a_call_with_a_bias_runs_the_row_without_one(self, tmp_path):
        """A row's kernel and an add serve every call; after a failure torch does, and the row is dropped."""
        asked = []

        def call(solution, shape, x, weight):
            asked.append(shape.m)
            if x[0, 0] == 77:
                raise RuntimeError("boom")
            return self.linear(solution, shape, x, weight)

        row = Row(shape=PLAIN, gfx=self.here.gfx, cu_num=self.here.cu_num, device="", solution=KERNEL, us=2.0)
        gemm = self.instance(tmp_path / "t.csv", mine(call=call), row)
        x, weight, bias = self.operands
        for _ in range(2):
            torch.testing.assert_close(gemm.mm(x, weight, bias), torch.nn.functional.linear(x, weight, bias), atol=5e-2, rtol=5e-2)
        assert asked == [5, 5]
        x = x.clone()
        x[0, 0] = 77
        for _ in range(2):
            torch.testing.assert_close(gemm.mm(x, weight, bias), torch.nn.functional.linear(x, weight, bias), atol=5e-1, rtol=5e-2)
        assert asked == [5, 5, 5]
        assert "not mine:k+add splitK=2: failed in this process: RuntimeError: boom" in str(gemm.dispatcher.explain(BIASED, self.here))

    def test_a_call_runs_the_tuners_winner(self, tmp_path):
        """A kernel that takes no bias wins as its split solution, whose row is found for the shape by name."""
        path, backend = tmp_path / "t.csv", mine(call=self.linear)
        tune(shapes=[BIASED], output=path, options=Options(libtype="mine", iters=5, warmup=1), registry=fake_registry(backend))
        [row] = read_rows(path, op_named("a16w16"))[0]
        assert (row.solution, row.shape) == (SPLIT, BIASED)
        gemm = self.instance(path, backend)
        out = gemm.mm(*self.operands)
        torch.testing.assert_close(out, torch.nn.functional.linear(*self.operands), atol=5e-2, rtol=5e-2)
        explanation = gemm.dispatcher.explain(BIASED, self.here)
        assert explanation.offer.solution == SPLIT and explanation.tuned
