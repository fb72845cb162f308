"""Plain and shuffled copies of a weight: the tables, else M, decide which one a call gets."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from torch.autograd import forward_ad
from tunedgemm.device import device_of
from tunedgemm.dispatch.preshuffle import PRESHUFFLE_M_THRESHOLD
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.shuffle import shuffle_weight, unshuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry

OP = op_named("a16w16")
N, K = 32, 64
WEIGHT = torch.randn(N, K, dtype=torch.bfloat16)
SHUFFLED = shuffle_weight(WEIGHT)
LAYOUT = SHUFFLED.layout_name
FAST = PRESHUFFLE_M_THRESHOLD


@pytest.fixture
def layouts() -> list[str]:
    """The layouts of the weights that reach the backend, or of torch's own shapes."""
    return []


@pytest.fixture
def backend(layouts: list[str]):
    """A backend with kernels for plain and for shuffled weights."""

    def call(solution, shape, *operands):
        layouts.append(shape.layout)
        return exact(solution, shape, *operands)

    return fake_backend("turbo", heuristic="fake", call=call)


@pytest.fixture
def gemm(backend) -> TunedGemm:
    return TunedGemm(fake_registry(backend), settings=Settings(untuned=("turbo",)))


def x_of(*leading: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*leading, K, dtype=dtype)


def row(layout: str, us: float, m: int = 4, **changes) -> Row:
    here = device_of(-1)
    shape = Shape("a16w16", m, N, K, layout=layout)
    return attrs.evolve(
        Row(shape=shape, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=Solution("turbo", "fake"), us=us), **changes
    )


@pytest.mark.parametrize("leading", [(FAST,), (2, FAST // 2), (FAST - 1,), (1,), ()], ids=str)
def test_untuned_calls_choose_by_m(gemm: TunedGemm, layouts: list[str], leading: tuple[int, ...]) -> None:
    """M is the product of the leading dimensions;
    both weights give equal results, first and later."""
    x = x_of(*leading)
    for _ in range(2):
        out = gemm.gemm_a16w16(x, WEIGHT, shuffled_weight=SHUFFLED)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, WEIGHT))
    rows = x.numel() // K
    assert layouts == ["row" if rows < FAST else LAYOUT] * 2


def test_without_a_kernel_for_the_layout_the_plain_weight_serves() -> None:
    """Torch would put the shuffled weight in order at each call."""
    gemm = TunedGemm(fake_registry(), settings=Settings())
    gemm.gemm_a16w16(x_of(FAST), WEIGHT, shuffled_weight=SHUFFLED)
    [key] = gemm.dispatcher.launchers
    assert torch.Tensor in key and type(SHUFFLED) not in key


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([row("row", 1.0)], "row"),
        ([row(LAYOUT, 9.0)], LAYOUT),
        ([row("row", 2.0), row(LAYOUT, 1.0)], LAYOUT),
        ([row("row", 1.0), row(LAYOUT, 2.0)], "row"),
        ([row("row", 1.0, m=2 * FAST)], "row"),
        ([row("row", 2.0), row(LAYOUT, 1.0, device="another")], "row"),
    ],
    ids=["plain alone", "shuffled alone", "shuffled is faster", "plain is faster", "plain alone, many rows", "of another device"],
)
def test_rows_decide(backend, layouts: list[str], tmp_path: Path, rows: list[Row], wanted: str) -> None:
    """Where one of the two is tuned it serves, whatever M is; of two the faster on this device."""
    write_rows(tmp_path / "t.csv", OP, rows)
    gemm = TunedGemm(fake_registry(backend), settings=Settings(untuned=("turbo",)))
    gemm.load_config(tmp_path / "t.csv")
    gemm.gemm_a16w16(x_of(rows[0].shape.m), WEIGHT, shuffled_weight=SHUFFLED)
    assert layouts == [wanted]


def test_a_higher_layer_decides_over_a_faster_row(backend, layouts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance's own table is above the variable's, also between the two weights; reload reads anew."""
    write_rows(tmp_path / "own.csv", OP, [row("row", 9.0)])
    write_rows(tmp_path / "named.csv", OP, [row(LAYOUT, 1.0)])
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "named.csv"))
    gemm = TunedGemm(fake_registry(backend), settings=Settings())
    gemm.gemm_a16w16(x_of(4), WEIGHT, shuffled_weight=SHUFFLED)
    gemm.load_config(tmp_path / "own.csv")
    gemm.gemm_a16w16(x_of(4), WEIGHT, shuffled_weight=SHUFFLED)
    assert layouts == [LAYOUT, "row"]


def test_bias_scales_and_otype_go_with_either(gemm: TunedGemm, layouts: list[str]) -> None:
    """All other arguments keep their meaning."""
    bias, half = torch.randn(N, dtype=torch.bfloat16), torch.tensor([0.5])
    for m in (4, FAST):
        x = x_of(m)
        wanted = gemm.gemm_a16w16(x, WEIGHT, bias, torch.float32, half)
        layouts.clear()
        out = gemm.gemm_a16w16(x, WEIGHT, bias, torch.float32, half, shuffled_weight=SHUFFLED)
        torch.testing.assert_close(out, wanted)
        assert layouts == [LAYOUT if m == FAST else "row"]


def test_a_kernel_that_fails_gives_way_to_the_plain_weight(layouts: list[str]) -> None:
    """The failed call is answered, and later ones are not served by torch's copy of the shuffled weight."""

    def call(solution, shape, *operands):
        layouts.append(shape.layout)
        if shape.layout != "row":
            raise RuntimeError("illegal instruction")
        return exact(solution, shape, *operands)

    gemm = TunedGemm(fake_registry(fake_backend("turbo", heuristic="fake", call=call)), settings=Settings(untuned=("turbo",)))
    x = x_of(FAST)
    for _ in range(2):
        torch.testing.assert_close(gemm.gemm_a16w16(x, WEIGHT, shuffled_weight=SHUFFLED), torch.nn.functional.linear(x, WEIGHT))
    assert layouts == [LAYOUT, "row"]


def test_gradients_and_tangents_take_the_plain_weight(gemm: TunedGemm, layouts: list[str]) -> None:
    """A shuffled weight has no derivative."""
    x = x_of(FAST).requires_grad_()
    gemm.gemm_a16w16(x, WEIGHT, shuffled_weight=SHUFFLED).sum().backward()
    assert x.grad is not None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        assert forward_ad.unpack_dual(gemm.gemm_a16w16(dual, WEIGHT, shuffled_weight=SHUFFLED)).tangent is not None
    assert layouts == []
    with torch.no_grad():
        gemm.gemm_a16w16(x, WEIGHT, shuffled_weight=SHUFFLED)
    assert layouts == [LAYOUT]


def test_an_empty_batch_is_empty(gemm: TunedGemm) -> None:
    """Neither weight is read."""
    assert gemm.gemm_a16w16(x_of(0), WEIGHT, shuffled_weight=SHUFFLED).shape == (0, N)


def test_a_capture_binds_nothing(gemm: TunedGemm, layouts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """During a capture the plain weight serves an unbound call, and the choice is not kept."""
    state = [True]
    monkeypatch.setattr("tunedgemm.dispatch.call.in_capture", lambda operand: state[0])
    x = x_of(FAST)
    gemm.gemm_a16w16(x, WEIGHT, shuffled_weight=SHUFFLED)
    assert layouts == [] and not gemm.dispatcher.preferences
    assert list(gemm.dispatcher.unbound) == [Shape("a16w16", FAST, N, K)]
    state[0] = False
    gemm.gemm_a16w16(x, WEIGHT, shuffled_weight=SHUFFLED)
    state[0] = True
    gemm.gemm_a16w16(x_of(2, FAST // 2), WEIGHT, shuffled_weight=SHUFFLED)
    assert len(layouts) == 1 and len(gemm.dispatcher.unbound) == 1


OTHER = torch.randn(N, 2 * K, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("weight", "shuffled", "message"),
    [
        (WEIGHT, WEIGHT, "shuffled_weight must come from shuffle_weight .*got Tensor"),
        (WEIGHT, 3, "shuffled_weight must come from shuffle_weight .*got int"),
        (SHUFFLED, SHUFFLED, "the weight must be the plain one"),
        (None, SHUFFLED, "the weight must be the plain one .*got NoneType"),
        (WEIGHT, shuffle_weight(OTHER), r"two orders \(got \(32, 64\) .* and \(32, 128\)"),
        (WEIGHT, shuffle_weight(WEIGHT.half()), "bfloat16 on cpu and .*float16"),
    ],
)
def test_mismatched_weights_are_refused(gemm: TunedGemm, weight, shuffled, message: str) -> None:
    """Each error names the given value."""
    with pytest.raises(OperandError, match=message):
        gemm.gemm_a16w16(x_of(FAST), weight, shuffled_weight=shuffled)


def test_an_outdated_copy_raises(gemm: TunedGemm) -> None:
    """A weight that has changed since it was shuffled is never multiplied by its old values."""
    weight = WEIGHT.clone()
    shuffled, kept, x = shuffle_weight(weight), shuffle_weight(weight), x_of(FAST)
    gemm.gemm_a16w16(x, weight, shuffled_weight=shuffled)
    weight[0].mul_(2)
    for _ in range(2):
        with pytest.raises(OperandError, match=r"weight has changed since shuffle_weight read it \(version 0, now 1\)"):
            gemm.gemm_a16w16(x, weight, shuffled_weight=shuffled)
    gemm.gemm_a16w16(x_of(1), weight, shuffled_weight=shuffled)  # takes the plain one
    kept.data = shuffle_weight(weight)
    shuffled.copy_(kept)
    for copy in (kept, shuffled, shuffle_weight(weight)):
        torch.testing.assert_close(gemm.gemm_a16w16(x, weight, shuffled_weight=copy), torch.nn.functional.linear(x, weight))
    with torch.inference_mode():
        uncounted = WEIGHT.clone()
        gemm.gemm_a16w16(x, uncounted, shuffled_weight=shuffle_weight(uncounted))


def test_operands_that_do_not_fit_give_the_usual_error(gemm: TunedGemm) -> None:
    """The messages of the plain call."""
    with pytest.raises(OperandError, match="last dimension of x"):
        gemm.gemm_a16w16(torch.ones(4, K + 1, dtype=torch.bfloat16), WEIGHT, shuffled_weight=SHUFFLED)
    with pytest.raises(OperandError, match="x must be a tensor"):
        gemm.gemm_a16w16(3, WEIGHT, shuffled_weight=SHUFFLED)
    assert torch.equal(unshuffle_weight(SHUFFLED), WEIGHT)
