"""Generated kernels compute what they should, on the emulator, which forgives less than hardware: see `gcn`.

Arguments are those that the launcher passes (``problem.problem_of``, ``abi``), so this is the way from a shape to its result.
"""

import importlib.util
import sys
import zlib
from pathlib import Path

import attrs
import numpy as np
import pytest
from tunedgemm.plugin import Shape
from tunedgemm_asm.abi import ABIS
from tunedgemm_asm.gcn.kernel import stream_of, text_of
from tunedgemm_asm.gcn.pack import PLANS
from tunedgemm_asm.gcn.plan import Plan
from tunedgemm_asm.gcn.stream import Op
from tunedgemm_asm.limits import refusal
from tunedgemm_asm.manifest import Kernel
from tunedgemm_asm.problem import problem_of

ABI = ABIS["tunedgemm-bf16"]
SMALL = [Plan(gfx, 64, 64, 2 - shuffled, 2, bool(shuffled)) for gfx in ("gfx942", "gfx950") for shuffled in (0, 1)]
SPLIT = [attrs.evolve(plan, split=True) for plan in SMALL]


def emulator():
    """The package beside this file: pytest imports tests by path."""
    name = "tunedgemm_asm_tests_gcn"
    if name not in sys.modules:
        folder = Path(__file__).with_name("gcn")
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def named(plan):
    return f"{plan.gfx}-{plan.name}"


def kernel_of(plan):
    """What a manifest says of a plan."""
    return Kernel(
        plan.name,
        f"{plan.name}.co",
        ABI.name,
        plan.tile_m,
        plan.tile_n,
        plan.prefetch,
        plan.shuffled,
        plan.split,
        64,
        True,
        ("bf16", "fp32"),
    )


def bf16(values):
    """Nearest bf16, ties to even, as 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def fp32(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def shuffled(weight):
    """As AITER's `shuffle_weight` with layout (16, 16) lays it."""
    n, k = weight.shape
    return np.ascontiguousarray(weight.reshape(n // 16, 16, k // 8, 8).transpose(0, 2, 1, 3)).reshape(n, k)


def compute(plan, m, n, k, *, splits=1, outdtype="bf16", bias=True, order="up", x=None, weight=None, text=None, row=None):
    """The output as fp32, what it should be, and the memory of the launch.

    Args:
        plan: the kernel.
        m, n, k, splits, outdtype, bias: the call.
        order: in which workgroups run.
        x, weight: operands, random where absent.
        text: another text of the kernel.
        row: elements from a row of x to the next.
    """
    tools = emulator()
    kernel = kernel_of(plan)
    layout = "aiter16x16" if plan.shuffled else "row"
    epilogue = {"epilogue": "bias", "bias_dtype": outdtype} if bias else {}
    shape = Shape("a16w16", m, n, k, outdtype=outdtype, layout=layout, **epilogue)
    assert not refusal(kernel, splits, shape)
    problem = problem_of(kernel, splits, shape)
    draw = np.random.default_rng(zlib.crc32(f"{plan.name}{m}{n}{k}".encode()))
    x = bf16(draw.standard_normal((m, k))) if x is None else x
    weight = bf16(draw.standard_normal((n, k))) if weight is None else weight
    added = draw.standard_normal(n).astype(np.float32)
    stored = bf16(added) if outdtype == "bf16" else added
    memory = tools.Memory()
    wide = np.full((m, row or k), 0x7FC0, np.uint16)  # NaN between the rows
    wide[:, :k] = x
    given = {
        "a": wide,
        "b": shuffled(weight) if plan.shuffled else weight,
        "bias": stored,
        "semaphore": np.zeros(problem.counters, np.uint32),
    }
    sizes = {"out": m * n * (2 if outdtype == "bf16" else 4), "workspace": problem.workspace}
    values = {**problem.values, "stride_a": 2 * (row or k)}
    values |= {name: memory.place(name, given[name] if name in given else sizes[name]) for name in problem.addresses}
    launched = tools.kernels_of(text or text_of(plan))[plan.name]
    tools.launch(launched, problem.grid, (ABI.threads, 1, 1), ABI.pack(values), memory, tools.Rules(order=order))
    out = memory.read("out", np.uint16 if outdtype == "bf16" else np.float32).reshape(m, n)
    wanted = fp32(x).astype(np.float64) @ fp32(weight).T.astype(np.float64)
    if bias:
        wanted = wanted + (fp32(stored) if outdtype == "bf16" else stored)
    if splits > 1:
        assert not memory.read("semaphore", np.uint32).any()
    return fp32(out) if outdtype == "bf16" else out, wanted


def right(plan, m, n, k, **how):
    """Computes, and compares: bf16 to half a last place and what fp32's sums may be off; fp32 to that alone."""
    got, wanted = compute(plan, m, n, k, **how)
    slack = 2.0**-20 * np.sqrt(k) * 4
    half = 2.0**-8 if how.get("outdtype", "bf16") == "bf16" else 0
    assert (np.abs(got - wanted) <= half * np.abs(wanted) + slack).all()
    return got


@pytest.mark.parametrize("plan", SMALL, ids=named)
def test_one_tile(plan):
    """A whole tile and an even number of steps; then a single step."""
    right(plan, 64, 64, 4 * 64)
    right(plan, 64, 64, 64, outdtype="fp32", bias=False)


@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_fewer_steps_than_are_loaded_ahead(gfx, shuffled):
    """Loads beyond K meet empty buffers, and a wave ends when the last has come."""
    plan = Plan(gfx, 32, 64, 1, 4, shuffled)
    for steps in (1, 2, 3, 5):
        right(plan, 5, 64, 64 * steps, outdtype="fp32", bias=False)


@pytest.mark.parametrize("plan", SMALL, ids=named)
def test_tails(plan):
    """Rows and columns that a tile has and the output does not are neither read nor written: memory around them is none."""
    right(plan, 1, 80, 3 * 64)
    right(plan, 65, 16 if plan.shuffled else 4, 2 * 64, outdtype="fp32")
    right(plan, 67, 64 + (48 if plan.shuffled else 12), 64, bias=False)


@pytest.mark.parametrize("plan", SMALL[:1] + SMALL[3:], ids=named)
def test_rows_of_x_may_lie_apart(plan):
    """What lies between them is NaN, and not read."""
    right(plan, 70, 64, 128, row=192)


@pytest.mark.parametrize("plan", SPLIT, ids=named)
@pytest.mark.parametrize("order", ["up", "down", 3])
def test_split_k_does_not_depend_on_who_is_last(plan, order):
    """The same bits in every order of workgroups; the counters are zero afterwards (`compute`); the last part may be shorter."""
    got = right(plan, 66, 80, 64 * 8, splits=3, outdtype="fp32", order=order)
    assert (got == compute(plan, 66, 80, 64 * 8, splits=3, outdtype="fp32")[0]).all()


def test_a_panel_of_tiles_is_covered():
    """More tiles than a panel holds, and than chiplets deal evenly: every tile is computed, none twice (bytes of the output would race)."""
    plan = Plan("gfx942", 32, 64, 1, 1)
    right(plan, 32 * 10 + 1, 64 * 3, 64)
    right(plan, 32 * 8, 64 * 2, 64)


@pytest.mark.parametrize("plan", SMALL, ids=named)
def test_numbers_that_are_none(plan):
    """A NaN or an infinity stays in its row of x, and is one in bf16; rounding is to nearest, ties to even."""
    x = bf16(np.ones((64, 64)))
    x[3, 7], x[5, 9] = 0x7FFF, 0x7F80
    weight = np.zeros((64, 64), np.uint16)
    weight[:, :] = bf16(np.ones(64))
    got, _ = compute(plan, 64, 64, 64, x=x, weight=weight, bias=False)
    assert np.isnan(got[3]).all()
    assert np.isposinf(got[5]).all()
    assert (np.delete(got, (3, 5), 0) == 64).all()
    x, weight = bf16(np.zeros((64, 64))), bf16(np.zeros((64, 64)))
    x[:, 0], x[:, 1] = bf16(1), bf16(1)
    weight[:, 0] = bf16(1 + np.arange(64) / 64)
    weight[:, 1] = bf16(2.0**-8)  # a tie with the neighbours of some of them
    got, wanted = compute(plan, 64, 64, 64, x=x, weight=weight, bias=False)
    assert (got == fp32(bf16(wanted))).all()


def test_large_k_stride():
    """A tile's base has 64 bits: rows far apart are found."""
    plan = Plan("gfx942", 32, 64, 1, 1)
    right(plan, 40, 64, 64, row=64 + 8 * 1024)


@pytest.mark.parametrize("kind", ["wait", "nop"])
def test_the_emulator_misses_what_is_taken_away(kind):
    """Without some wait, or some wait states, it refuses a kernel: what it passes is no accident."""
    plan = SMALL[0]
    stream, _ = stream_of(plan)
    name = {"wait": "s_waitcnt", "nop": "s_nop"}[kind]
    lines = text_of(plan).splitlines()
    found = [at for at, line in enumerate(lines) if line.strip().startswith(name)]
    assert len(found) == sum(isinstance(item, Op) and item.name == name for item in stream)
    refused = 0
    chosen = found[:: max(1, len(found) // 8)]
    for at in chosen:
        try:
            compute(plan, 64, 64, 4 * 64, text="\n".join(lines[:at] + lines[at + 1 :]))
        except emulator().Fault:
            refused += 1
    assert refused >= len(chosen) - 1  # the wait for the other form of the output is not met


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=named)
def test_every_kernel(plan):
    """Each with several tiles, tails both ways, all sets of its registers in use; forms of the output, bias and order take turns."""
    turn = PLANS.index(plan)
    splits = 3 if plan.split else 1
    steps = splits * (2 * plan.unrolled + 1) - (splits > 1)
    how = {"outdtype": ("bf16", "fp32")[turn % 2], "bias": bool(turn // 2 % 2), "order": ("up", "down", turn)[turn % 3]}
    m, n = plan.tile_m + 1 + 7 * turn % plan.tile_m, plan.tile_n + 16 * (1 + turn % 3)
    right(plan, m, n, 64 * steps, splits=splits, row=64 * steps + 8 * (turn % 2), **how)
