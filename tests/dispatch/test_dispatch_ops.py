"""Dispatch of every op: a third-party op with other operands and fields, and shuffled weights."""

from __future__ import annotations

import functools
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dispatch.wrappers import eager_only
from tunedgemm.errors import OperandError, TableError, UnknownOpError, UserError
from tunedgemm.ops import functions, op_named, ops
from tunedgemm.ops.formats.shuffle import ShuffledWeight, shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.scan import Reader
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry, with_hooks
from tunedgemm.testing.listed import listed
from tunedgemm.tuner import Options, tune

#: An op whose weight comes first, with a field that no operand implies, and with the name of a
#: function of a16w16.
FLIPPED = """
import attrs

from tunedgemm.ops.a16w16 import op as plain
from tunedgemm.shape import Shape


def of(shape, sign):
    return attrs.evolve(shape, op="flipped", extra={"sign": int(sign)})


def shape_of(weight, x, *, otype=None, sign=1):
    return of(plain.shape_of(x, weight, otype=otype), sign)


def unflipped(shape):
    return attrs.evolve(shape, op="a16w16", extra={})


columns = attrs.evolve(
    plain.columns,
    tuned_file="flipped_tuned.csv",
    untuned_file="flipped_untuned.csv",
    variable="FLIPPED",
    key=("M", "N", "K", "dtype", "sign"),
    own=(),
    parse=lambda row: of(plain.columns.parse({**row, "bias": "False"}), int(row.get("sign", "1"))),
    format=lambda shape: {
        "M": str(shape.m), "N": str(shape.n), "K": str(shape.k), "dtype": shape.dtype, "sign": str(shape["sign"]),
    },
)
op = attrs.evolve(
    plain,
    name="flipped",
    operands=("weight", "x"),
    weights=(0,),
    columns=columns,
    shape_of=shape_of,
    make_inputs=lambda shape, device, seed: plain.make_inputs(unflipped(shape), device, seed)[::-1],
    reference=lambda shape, operands: shape["sign"] * plain.reference(unflipped(shape), operands[::-1]),
    fake=lambda weight, x, otype=None: plain.fake(x, weight, otype=otype),
    fields=lambda shape: {"sign": shape["sign"]},
    problem=lambda shape: "",
)
op = attrs.evolve(op, some_rows=lambda shape, operands, indices: (operands[0], operands[1][indices]))
"""
W, X = torch.randn(16, 32), torch.randn(4, 32)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of these tests are on the CPU, so that is the default device of questions, too."""
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.current_device", lambda: device_of(-1))


@pytest.fixture
def flipped(importable: Path) -> Iterator[str]:
    """Somebody's distribution with the op, as pip would have installed it; its name."""
    (importable / "flipped_op.py").write_text(FLIPPED)
    info = importable / "flipped-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flipped\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.ops]\nflipped = flipped_op:op\n")
    ops.cache_clear()
    functions.cache_clear()
    yield "flipped"
    ops.cache_clear()
    functions.cache_clear()


def shape_of(sign: int = 1, m: int = 4) -> Shape:
    return Shape("flipped", m, 16, 32, dtype="fp32", extra={"sign": int(sign)})


def turbo(calls: list[str], **answers):
    """A backend that computes the reference of whichever op, and notes kernel and shape."""

    def call(solution, shape, *operands):
        calls.append(f"{solution.kernel_name} {shape['sign']:+d}")
        return exact(solution, shape, *operands)

    return fake_registry(fake_backend("turbo", ops=("flipped",), heuristic="fake", call=call, **answers))


def rows_of(path: Path, *rows: tuple[Shape, Solution]) -> Path:
    """A tuned file of these rows for the CPU."""
    here = device_of(-1)
    made = [Row(shape=s, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=sol, us=1.0) for s, sol in rows]
    write_rows(path, op_named(rows[0][0].op), made)
    return path


def close(out: torch.Tensor, sign: int = 1) -> None:
    torch.testing.assert_close(out, sign * torch.nn.functional.linear(X, W))


def test_an_op_without_a_function_is_called_by_its_name(flipped: str) -> None:
    """A call by name takes operands in the op's order and fields by name; calls that differ in a
    field are cached apart."""
    calls: list[str] = []
    gemm = TunedGemm(turbo(calls), settings=Settings(untuned=("turbo",)))

    for _ in range(2):
        close(gemm.call(flipped, W, X))
        close(gemm.call(flipped, W, X, sign=-1), -1)
        close(gemm.call(flipped, W, X, None, sign=1))

    assert calls == ["fake +1", "fake -1", "fake +1"] * 2
    assert len(gemm.of(flipped).launchers) == 3
    with pytest.raises(UnknownOpError, match="unknown op 'folded'"):
        gemm.call("folded", W, X)


def test_a_call_by_name_keeps_the_rules_of_dispatch(flipped: str, tmp_path: Path) -> None:
    """A non-tensor, an unhashable field, strides, an empty batch and gradients give a named error
    or the right result."""
    calls: list[str] = []
    gemm = TunedGemm(turbo(calls), settings=Settings(untuned=("turbo",)))

    class Unhashable(int):
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(OperandError, match="flipped: x must be a tensor"):
        gemm.call(flipped, W, 3.0)
    with pytest.raises(OperandError, match="last dimension of x"):
        gemm.call(flipped, W, torch.randn(4, 31))
    close(gemm.call(flipped, W, X, sign=Unhashable(1)))
    close(gemm.call(flipped, W, X.t().contiguous().t()))
    assert gemm.call(flipped, W, X[:0]).shape == (0, 16)
    with pytest.raises(UserError, match=r"needs a gradient.*op flipped is not covered"):
        gemm.call(flipped, W.clone().requires_grad_(), X)
    assert calls == ["fake +1", "fake +1"]


def test_a_kernel_that_raises_is_demoted_with_its_fields(flipped: str, tmp_path: Path) -> None:
    """The next offer serves the same shape, field and all; it is captured as the one call that it is."""

    def call(solution, shape, *operands):
        if solution.kernel_name == "broken":
            raise RuntimeError("illegal instruction")
        return exact(solution, shape, *operands)

    backend = fake_backend("turbo", ops=("flipped",), solutions=("broken", "fake"), heuristic="fake", call=call)
    gemm = TunedGemm(fake_registry(backend), settings=Settings(capture=True, untuned=("turbo",)))
    gemm.load_config(rows_of(tmp_path / "t.csv", (shape_of(-1), Solution("turbo", "broken"))), flipped)

    close(gemm.call(flipped, W, X, sign=-1), -1)
    gemm.of(flipped)._capture.flush()

    explanation = gemm.of(flipped).explain(shape_of(-1))
    assert explanation.offer.solution.kernel_name == "fake"
    assert "illegal instruction" in str(explanation)
    [captured] = read_untuned(tmp_path / "home" / "flipped_untuned.csv", op_named(flipped))
    assert captured.calls == 1


def test_every_question_goes_to_the_op_of_its_shape(flipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """explain, is_tuned, prewarm, reload and fingerprint know all ops;
    operands need the op's name and fields."""
    before = tunedgemm.fingerprint()
    monkeypatch.setattr(tunedgemm.tgemm, "_configured", (turbo([]), None))
    monkeypatch.setattr(tunedgemm.tgemm, "_dispatchers", {})
    monkeypatch.setenv("FLIPPED", str(rows_of(tmp_path / "t.csv", (shape_of(-1), Solution("turbo", "fake")))))
    tunedgemm.reload()

    assert tunedgemm.is_tuned(shape_of(-1)) and not tunedgemm.is_tuned(shape_of(1))
    assert tunedgemm.is_tuned(W, X, op=flipped, sign=-1) and not tunedgemm.is_tuned(W, X, op=flipped)
    assert "t.csv:2" in str(tunedgemm.explain(W, X, op=flipped, sign=-1))
    assert not tunedgemm.is_tuned(X, W)
    assert tunedgemm.prewarm() == 1
    assert tunedgemm.prewarm([shape_of(-1), Shape("a16w16", 2, 16, 32)]) == 2
    assert tunedgemm.fingerprint() != before
    close(tunedgemm.call(flipped, W, X, sign=-1), -1)
    assert tunedgemm.dispatcher(flipped) is tunedgemm.tgemm.of(flipped)


def test_an_op_of_others_is_tuned_with_its_fields(flipped: str, tmp_path: Path) -> None:
    """Verification, batch invariance and timing pass operands in the op's order;
    the winner serves only its field."""
    calls: list[str] = []
    options = Options(libtype="turbo", iters=3, warmup=1, seconds=0.1, cache="hot", device="cpu", batch_invariant=True)
    report = tune(flipped, [shape_of(-1)], tmp_path / "t.csv", options, registry=turbo(calls))

    assert [outcome.winner is not None for outcome in report.outcomes] == [True], report.outcomes
    gemm = TunedGemm(turbo(calls))
    gemm.load_config(tmp_path / "t.csv", flipped)
    assert gemm.of(flipped).explain(shape_of(-1)).tuned and not gemm.of(flipped).explain(shape_of(1)).tuned
    with pytest.raises(TableError):
        gemm.load_config(tmp_path / "t.csv")


def test_shuffled_weights_find_their_own_rows_and_reach_kernels_plain(tmp_path: Path) -> None:
    """Plain and shuffled weights of one size run their own kernels in turn; launchers get plain
    tensors of shuffled bytes."""
    seen: list[tuple[str, type, torch.Tensor]] = []

    def call(solution, shape, x, weight):
        seen.append((solution.kernel_name, type(weight), weight))
        return exact(solution, shape, x, weight)

    plain = Shape("a16w16", 4, 32, 64)
    shuffled = attrs.evolve(plain, layout="aiter16x16")
    registry = fake_registry(fake_backend("turbo", solutions=("row", "tiled"), call=call))
    gemm = TunedGemm(registry)
    gemm.load_config(rows_of(tmp_path / "t.csv", (plain, Solution("turbo", "row")), (shuffled, Solution("turbo", "tiled"))))
    x, weight = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    tiled = shuffle_weight(weight)

    outs = [gemm.mm(x, one) for _ in range(2) for one in (weight, tiled)]
    outs.append(gemm.mm(x, torch.nn.Parameter(tiled, requires_grad=False)))
    wanting = x.clone().requires_grad_()
    gemm.mm(wanting, tiled).sum().backward()

    assert [name for name, _, _ in seen] == ["row", "tiled", "row", "tiled", "tiled"]
    torch.testing.assert_close(wanting.grad, weight.sum(0).expand(4, 64), rtol=0.02, atol=0.05)
    assert not any(issubclass(kind, ShuffledWeight) for _, kind, _ in seen)
    assert torch.equal(seen[1][2], tiled.plain)
    for out in outs:
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight))


def test_torchs_products_of_bytes_get_dense_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch multiplies fp8 on a GPU only from contiguous, aligned operands; others, including
    weights, are copied."""
    op, seen = op_named("a8w8"), []
    shape = Shape("a8w8", 4, 32, 64, "fp8_e4m3fn", "bf16", scale="row")
    x, weight, x_scale, w_scale = op.make_inputs(shape, torch.device("cpu"), 0)
    dispatcher = TunedGemm(fake_registry(), settings=Settings()).of("a8w8")
    native = dispatcher.torch_fallback(shape, device_of(-1))

    def watched(*operands):
        seen.append([operand.is_contiguous() and operand.data_ptr() % 16 == 0 for operand in operands])
        return native(*operands)

    monkeypatch.setattr(dispatcher, "torch_fallback", lambda shape, device: watched)
    wanted = dispatcher.call(x, weight, x_scale, w_scale)
    flipped = weight.view(torch.uint8).t().contiguous().t().view(weight.dtype)
    misaligned = torch.empty(x.numel() + 1, dtype=torch.uint8)[1:].view(x.dtype).view(x.shape).copy_(x)
    for operands in ((x, flipped), (misaligned, weight), (misaligned, flipped)):
        assert torch.equal(dispatcher.call(*operands, x_scale, w_scale), wanted)
    assert seen == [[True] * 4] * 3


@listed(
    ("name", "example", "place"),
    [("fmoe", {"q_type": "per_Token"}, 0), ("fmoe", {"q_type": "per_1x32"}, 0), ("fmoe", {"q_type": "per_1x128"}, 5)],
)
def test_a_gradient_that_would_be_lost_is_an_error(name: str, example: dict[str, str], place: int) -> None:
    """An operand that requires a gradient is an error rather than detached;
    without one the call is served."""
    op = op_named(name)
    shape = next(shape for shape in op.examples if shape.m and example.items() <= dict(shape.extra).items())
    operands = op.make_inputs(shape, torch.device("cpu"), 0)
    gemm = TunedGemm(fake_registry(), settings=Settings())
    wanted = gemm.call(name, *operands, **op.fields(shape))
    operands[place].requires_grad_()
    for _ in range(2):
        with pytest.raises(OperandError, match=rf"{name}: an operand requires a gradient, .*torch.no_grad"):
            gemm.call(name, *operands, **op.fields(shape))
    with torch.no_grad():
        assert torch.equal(gemm.call(name, *operands, **op.fields(shape)), wanted)


def test_a_launcher_unsafe_in_graphs_is_kept_out_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture leaves it out, also where it was bound before and serves other calls."""
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    call = eager_only(lambda x: "tuned", lambda x: "torch")
    assert call(X) == "tuned"
    capturing.append(True)
    assert call(X) == "torch"


def test_prewarm_makes_the_rows_of_this_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other architectures stay lines of their file."""
    here, made = device_of(-1), []
    shapes = [Shape("a16w16", m, 16, 32, "fp32") for m in (1, 2, 3)]
    rows = [Row(shape=s, gfx=here.gfx, cu_num=here.cu_num, device="", solution=Solution("torch", "native"), us=1.0) for s in shapes[:2]]
    rows += [attrs.evolve(rows[0], gfx="gfx942", cu_num=304, shape=s) for s in shapes]
    write_rows(tmp_path / "bf16_tuned_gemm.csv", op_named("a16w16"), rows)
    read = Reader.rows
    monkeypatch.setattr(Reader, "rows", lambda self, numbers, lines: made.extend(numbers) or read(self, numbers, lines))
    gemm = TunedGemm(fake_registry(), settings=Settings())
    gemm.load_config(tmp_path / "bf16_tuned_gemm.csv")
    made.clear()
    assert gemm.dispatcher.prewarm() == 2
    assert sorted(made) == [2, 3]


def test_the_functions_of_ops_are_on_the_menu_and_belong_to_the_first(flipped: str) -> None:
    """Every op's function is in the package and in a TunedGemm; a later op cannot replace one."""
    for name, op in functions().items():
        assert callable(getattr(tunedgemm, name)) and name in dir(tunedgemm) and name in dir(tunedgemm.tgemm)
        assert getattr(TunedGemm(fake_registry()), name).__name__ in op.functions
        assert op.name != flipped
    assert {name for op in ops().values() for name in op.functions} == set(functions())
    with pytest.raises(AttributeError, match=re.escape("'gemm_a17w17'; no op has a function of this name")):
        TunedGemm(fake_registry()).gemm_a17w17  # noqa: B018


def test_thousands_of_rows_of_a_few_layers_take_little_memory(tmp_path: Path) -> None:
    """A thousand M of four layers are bound once each and take
    at most 3 kB of Python memory per launcher."""
    bound: list[int] = []

    def empty(shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.new_empty(shape.m, shape.n)

    def bind(shape: Shape) -> Launcher:
        bound.append(shape.m)
        return Launcher(functools.partial(empty, shape))

    backend = with_hooks(fake_backend("turbo"), bind=bind)
    here, sizes = device_of(-1), [(16, 32), (32, 32), (48, 32), (64, 32)]
    rows = [
        Row(
            shape=Shape("a16w16", 1 << power, n, k), gfx=here.gfx, cu_num=here.cu_num, device="", solution=Solution("turbo", "fake"), us=1.0
        )
        for n, k in sizes
        for power in range(14)
    ]
    write_rows(tmp_path / "t.csv", op_named("a16w16"), rows)
    gemm = TunedGemm(fake_registry(backend), settings=Settings())
    gemm.load_config(tmp_path / "t.csv")
    x, weights = torch.zeros(8192, 32, dtype=torch.bfloat16), [torch.zeros(n, k, dtype=torch.bfloat16) for n, k in sizes]
    gemm.gemm_a16w16(x, weights[0])
    tracemalloc.start()
    try:
        for m in range(1, 8192, 8):
            for weight in weights:
                for _ in range(2):
                    gemm.gemm_a16w16(x[:m], weight)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(gemm.dispatcher.launchers) == len(bound) == 1024 * len(sizes) + 1
    assert grown < 3072 * len(bound), f"{grown / len(bound):.0f} bytes a shape"
