"""Run generated kernels on the emulator with the arguments of the launcher, from shape to product."""

import itertools
import zlib

import attrs
import numpy as np
import pytest
from tunedgemm.plugin import Shape
from tunedgemm_asm.abi import ABIS
from tunedgemm_asm.launch import arguments_of
from tunedgemm_asm.limits import unfit_config
from tunedgemm_asm.manifest import KernelConfig as PackedConfig
from tunedgemm_asm_gcn.kernel import stream_of, text_of
from tunedgemm_asm_gcn.names import KernelConfig
from tunedgemm_asm_gcn.space import CONFIGS
from tunedgemm_asm_gcn.stream import Op

pytestmark = pytest.mark.nightly

ABI = ABIS["tunedgemm-bf16"]
SMALL = [KernelConfig(gfx, 64, 64, 2 - shuffled, 2, bool(shuffled)) for gfx in ("gfx942", "gfx950") for shuffled in (0, 1)]
SPLIT = [attrs.evolve(config, split=True) for config in SMALL]


def named(config):
    return f"{config.gfx}-{config.name}"


def kernel_of(config):
    """Return the manifest's configuration of a generated kernel."""
    return PackedConfig(
        config.name,
        f"{config.name}.co",
        ABI.name,
        config.tile_m,
        config.tile_n,
        config.prefetch,
        config.shuffled,
        config.split,
        64,
        True,
        ("bf16", "fp32"),
    )


def compute(gcn, config, m, n, k, *, splits=1, outdtype="bf16", bias=True, order="up", x=None, weight=None, text=None, row=None):
    """Return output in fp32, x, weight and bias; check that split-K counters end at zero.

    Args:
        gcn: the emulator.
        config: the kernel.
        m, n, k, splits, outdtype, bias: the call.
        order: in which workgroups run.
        x, weight: operands, random where absent.
        text: another text of the kernel.
        row: elements from a row of x to the next.
    """
    kernel, numbers = kernel_of(config), gcn.numbers
    layout = "aiter16x16" if config.shuffled else "row"
    epilogue = {"epilogue": "bias", "bias_dtype": outdtype} if bias else {}
    shape = Shape("a16w16", m, n, k, outdtype=outdtype, layout=layout, **epilogue)
    assert not unfit_config(kernel, splits, shape)
    problem = arguments_of(kernel, splits, shape)
    draw = np.random.default_rng(zlib.crc32(f"{config.name}{m}{n}{k}".encode()))
    x = numbers.bf16(draw.standard_normal((m, k))) if x is None else x
    weight = numbers.bf16(draw.standard_normal((n, k))) if weight is None else weight
    added = draw.standard_normal(n).astype(np.float32)
    stored = numbers.bf16(added) if outdtype == "bf16" else added
    memory = gcn.Memory()
    wide = np.full((m, row or k), 0x7FC0, np.uint16)  # NaN between the rows
    wide[:, :k] = x
    given = {
        "a": wide,
        "b": numbers.shuffled(weight) if config.shuffled else weight,
        "bias": stored,
        "semaphore": np.zeros(problem.counters, np.uint32),
    }
    sizes = {"out": m * n * (2 if outdtype == "bf16" else 4), "workspace": problem.workspace}
    values = {**problem.values, "stride_a": 2 * (row or k)}
    values |= {name: memory.place(name, given[name] if name in given else sizes[name]) for name in problem.addresses}
    launched = gcn.kernels_of(text or text_of(config))[config.name]
    gcn.launch(launched, problem.grid, (ABI.threads, 1, 1), ABI.pack(values), memory, gcn.Rules(order=order))
    out = memory.read("out", np.uint16 if outdtype == "bf16" else np.float32).reshape(m, n)
    added = (numbers.fp32(stored) if outdtype == "bf16" else stored) if bias else None
    if splits > 1:
        assert not memory.read("semaphore", np.uint32).any()
    return numbers.fp32(out) if outdtype == "bf16" else out, x, weight, added


def right(gcn, config, m, n, k, **how):
    """Compute and compare with numpy: half a last place for bf16, plus the error of fp32 sums."""
    got, x, weight, bias = compute(gcn, config, m, n, k, **how)
    assert gcn.numbers.wrong(got, x, weight, bias, how.get("outdtype", "bf16")) <= 1
    return got


def test_one_tile(gcn, failing):
    """A tile with an even number of steps, and with one step, is right."""

    def check(config):
        right(gcn, config, 64, 64, 4 * 64)
        right(gcn, config, 64, 64, 64, outdtype="fp32", bias=False)

    assert not failing(check, itertools.product(SMALL))


def test_fewer_steps_than_are_loaded_ahead(gcn, failing):
    """Fewer steps than the prefetch are right."""

    def check(gfx, shuffled):
        config = KernelConfig(gfx, 32, 64, 1, 4, shuffled)
        for steps in (1, 2, 3, 5):
            right(gcn, config, 5, 64, 64 * steps, outdtype="fp32", bias=False)

    assert not failing(check, itertools.product(["gfx942", "gfx950"], [False, True]))


def test_tails(gcn, failing):
    """Tails neither read nor write outside the operands."""

    def check(config):
        right(gcn, config, 1, 80, 3 * 64)
        right(gcn, config, 65, 16 if config.shuffled else 4, 2 * 64, outdtype="fp32")
        right(gcn, config, 67, 64 + (48 if config.shuffled else 12), 64, bias=False)

    assert not failing(check, itertools.product(SMALL))


@pytest.mark.parametrize("config", SMALL[:1] + SMALL[3:], ids=named)
def test_rows_of_x_may_have_gaps(gcn, config):
    """Padding between rows of x is not read."""
    right(gcn, config, 70, 64, 128, row=192)


def test_split_k_does_not_depend_on_the_last_workgroup(gcn, failing):
    """Split-K gives the same bits in every order of workgroups."""

    def check(config, order):
        got = right(gcn, config, 66, 80, 64 * 8, splits=3, outdtype="fp32", order=order)
        assert (got == compute(gcn, config, 66, 80, 64 * 8, splits=3, outdtype="fp32")[0]).all()

    assert not failing(check, itertools.product(SPLIT, ["up", "down", 3]))


def test_a_panel_of_tiles_is_covered(gcn):
    """More tiles than a panel holds are computed once each."""
    config = KernelConfig("gfx942", 32, 64, 1, 1)
    right(gcn, config, 32 * 10 + 1, 64 * 3, 64)
    right(gcn, config, 32 * 8, 64 * 2, 64)


def test_nan_and_infinity_stay_in_their_row(gcn, failing):
    """NaN and infinity stay in their row."""

    def check(config):
        x = gcn.numbers.bf16(np.ones((64, 64)))
        weight = x.copy()
        x[3, 7], x[5, 9] = 0x7FFF, 0x7F80
        got, *_ = compute(gcn, config, 64, 64, 64, x=x, weight=weight, bias=False)
        assert np.isnan(got[3]).all()
        assert np.isposinf(got[5]).all()
        assert (np.delete(got, (3, 5), 0) == 64).all()

    assert not failing(check, itertools.product(SMALL))


def test_rounding_is_to_nearest_ties_to_even(gcn, failing):
    """Ties round to even bf16 values."""

    def check(config):
        x, weight, steps = np.zeros((64, 64)), np.zeros((64, 64)), np.arange(64)
        x[:, :2], weight[:, 0], weight[:, 1] = 1, 1 + steps / 128, 1 / 256
        got, *_ = compute(gcn, config, 64, 64, 64, x=gcn.numbers.bf16(x), weight=gcn.numbers.bf16(weight), bias=False)
        assert (got == 1 + (steps + steps % 2) / 128).all()

    assert not failing(check, itertools.product(SMALL))


def test_parts_are_handed_over_by_the_memory_model(gcn, failing):
    """Partials without device scope, or counted too early, fail on the emulator."""

    def check(config, taken, why):
        lines = text_of(config).splitlines()
        counted = next(at for at, line in enumerate(lines) if "global_atomic_inc" in line)
        if taken == "wait":
            at = max(at for at in range(counted) if "vmcnt(0)" in lines[at])
            assert "s_barrier" in lines[at + 1] + lines[at + 2]
            changed = lines[:at] + lines[at + 1 :]
        else:
            changed = [line.replace(" sc1", "") if f"buffer_{taken}_dwordx4" in line else line for line in lines]
            assert changed != lines
        with pytest.raises(gcn.Fault, match=why):
            compute(gcn, config, 66, 80, 64 * 8, splits=3, outdtype="fp32", text="\n".join(changed))

    assert not failing(
        check,
        [
            (case0, *case1)
            for case0 in SPLIT
            for case1 in [
                ("store", "without sc1 and no buffer_wbl2"),
                ("load", "this load has no sc1"),
                ("wait", "nothing orders this load"),
            ]
        ],
    )


@pytest.mark.parametrize("kind", ["wait", "nop"])
def test_the_emulator_refuses_a_missing_wait(gcn, kind):
    """Kernels without a wait or wait state fail on the emulator."""
    config = SMALL[0]
    stream, _ = stream_of(config)
    name = {"wait": "s_waitcnt", "nop": "s_nop"}[kind]
    lines = text_of(config).splitlines()
    found = [at for at, line in enumerate(lines) if line.strip().startswith(name)]
    assert len(found) == sum(isinstance(item, Op) and item.name == name for item in stream)
    refused = 0
    chosen = found[:: max(1, len(found) // 8)]
    for at in chosen:
        try:
            compute(gcn, config, 64, 64, 4 * 64, text="\n".join(lines[:at] + lines[at + 1 :]))
        except gcn.Fault:
            refused += 1
    assert refused >= len(chosen) - 1  # the wait for the other form of the output is not met


@pytest.mark.slow
def test_every_kernel(gcn, failing):
    """Every kernel computes several tiles with tails."""

    def check(config):
        turn = CONFIGS.index(config)
        splits = 3 if config.split else 1
        steps = splits * (2 * config.unrolled + 1) - (splits > 1)
        how = {"outdtype": ("bf16", "fp32")[turn % 2], "bias": bool(turn // 2 % 2), "order": ("up", "down", turn)[turn % 3]}
        m, n = config.tile_m + 1 + 7 * turn % config.tile_m, config.tile_n + 16 * (1 + turn % 3)
        right(gcn, config, m, n, 64 * steps, splits=splits, row=64 * steps + 8 * (turn % 2), **how)

    assert not failing(check, itertools.product(CONFIGS))
