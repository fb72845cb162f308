"""Rows of AITER's tables: each has a libtype that a plugin serves, and AITER's function runs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Shape, Solution, device_of
from tunedgemm.testing.launching import plain_weight
from tunedgemm.tools.launching import torch_launcher
from tunedgemm.tools.tables import op_named, op_of_file, read_rows
from tunedgemm_aiter import aiter as aiter_backend
from tunedgemm_aiter import flydsl, gluon, limits, opus
from tunedgemm_aiter.names import parse, unfit

CONFIGS = Path(__file__).parents[4] / "shared" / "aiter" / "configs"
present = pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's tables are not here")

#: Op and libtype -> rows of AITER's tables, and the libtype of the plugin that serves them.
COUNTS = {
    ("a16w16", "asm"): (226, "asm"),
    ("a16w16", "flydsl"): (68, "flydsl"),
    ("a16w16", "opus"): (61, "opus"),
    ("a16w16", "skinny"): (2, "skinny"),
    ("a16w16", "torch"): (65, "torch"),
    ("a16w16", "triton"): (319, "triton"),
    ("a4w4_blockscale", "asm"): (1382, "asm"),
    ("a4w4_blockscale", "ck"): (118, "ck"),
    ("a8w8", "ck"): (579, "ck"),
    ("a8w8_blockscale", "ck"): (13948, "ck"),
    ("a8w8_blockscale", "cktile"): (149, "cktile"),
    ("a8w8_blockscale_bpreshuffle", "asm"): (605, "asm"),
    ("a8w8_blockscale_bpreshuffle", "ck"): (841, "ck"),
    ("a8w8_blockscale_bpreshuffle", "cktile"): (11, "cktile"),
    ("a8w8_blockscale_bpreshuffle", "triton"): (11, "triton"),
    ("a8w8_bpreshuffle", "asm"): (68, "asm"),
    ("a8w8_bpreshuffle", "ck"): (1573, "ck"),
    ("a8w8_bpreshuffle", "cktile"): (124, "cktile"),
    ("a8w8_bpreshuffle", "flydsl"): (353, "flydsl"),
    ("batched_a8w8", "ck"): (26, "ck"),
    ("batched_bf16", "ck"): (26, "ck"),
    ("fmoe", "asm"): (79, "aiter"),
    ("fmoe", "asm+ck"): (217, "aiter"),
    ("fmoe", "ck"): (716, "ck"),
    ("fmoe", "ck+flydsl"): (11, "aiter"),
    ("fmoe", "flydsl"): (72, "flydsl"),
    ("fmoe", "flydsl+ck"): (12, "aiter"),
}


@pytest.fixture(scope="module")
def rows():
    """Return all rows of AITER's tables."""
    files = [path for path in sorted(CONFIGS.rglob("*tuned*.csv")) if "untuned" not in path.name]
    return [row for path in files for row in read_rows(path, op_of_file(path))[0]]


@present
def test_every_row_has_a_libtype_that_a_plugin_serves(rows):
    """The counts by op and libtype; of the bf16 rows 129 name FlyDSL's and opus's kernels."""
    found = Counter((row.shape.op, row.solution.libtype) for row in rows)
    assert found == {key: count for key, (count, _) in COUNTS.items()}
    assert sum(found.values()) == 21662
    bf16 = {libtype: count for (op, libtype), count in found.items() if op == "a16w16"}
    assert sum(bf16.values()) == 741 and bf16["flydsl"] + bf16["opus"] == 129
    mine = {plugin.libtype: plugin for plugin in (flydsl, opus, gluon, aiter_backend)}
    for (op, libtype), (_, server) in COUNTS.items():
        if server in mine:
            assert op in mine[server].ops
            assert server == libtype or f"{op}:{libtype}" in mine[server].rows
    assert gluon.rows == ("a16w16:triton",)  # those of gfx1250


@present
def test_the_rows_of_these_backends_fit_their_shapes(rows):
    """Each kernel's name is known, and neither it nor the limits refuse the row's shape and device."""
    served = Counter()
    for row in rows:
        family = COUNTS[row.shape.op, row.solution.libtype][1]
        if row.solution.libtype == "triton" and row.gfx == "gfx1250" and row.shape.op == "a16w16":
            family = "gluon"
        if family not in limits.LIMITS:
            continue
        device = Device(row.gfx, row.cu_num)
        assert not limits.unsupported(family, row.shape, device), row
        if row.shape.op != "fmoe":
            kernel = parse(family, row.shape.op, row.solution.kernel_name)
            assert unfit(kernel, row.solution.split_k, row.shape, device) == "", row
        served[family] += 1
    assert served == {"flydsl": 493, "opus": 61, "gluon": 234, "aiter": 319}


EXTRA = {"block_m": "32", "run_1stage": "0", "kernelName1": "one", "kernelName2": "two"}


def experts(**changes):
    """Return a shape of fused MoE as AITER's rows have it."""
    cells = {"token": "5", "model_dim": "256", "inter_dim": "128", "expert": "4", "topk": "2", "act_type": "ActivationType.Silu"}
    cells |= {"dtype": "torch.bfloat16", "q_dtype_a": "torch.float4_e2m1fn_x2", "q_dtype_w": "torch.float4_e2m1fn_x2"}
    cells |= {"q_type": "QuantType.per_1x32", "use_g1u1": "1", "doweight_stage1": "0", "layout": "aiter16x16", **changes}
    return op_named("fmoe").columns.parse(cells)


def plain_operands(operands):
    """Return operands as a launcher gets them: shuffled ones as their bytes are in memory."""
    return [operand if operand is None or type(operand) is torch.Tensor else plain_weight(operand) for operand in operands]


def run(plugin, solution, shape):
    """Bind a solution over the stand-in, and return its output with torch's."""
    cpu = device_of(-1)
    operands = op_named("fmoe").make_inputs(shape, torch.device("cpu"), 1)
    launcher = plugin.bind(solution, shape, cpu)
    return launcher.call(*plain_operands(operands)), torch_launcher(shape, cpu).call(*operands)


@pytest.mark.parametrize("libtype", ["asm", "asm+ck", "ck+flydsl", "flydsl+ck"])
def test_fused_moe_runs_the_kernels_of_its_row(stand_in, libtype):
    """AITER gets a table with exactly this row, under the key that it looks up."""
    import fake_aiter

    solution = Solution(libtype, "first+second", 3, extra=tuple(EXTRA.items()))
    shape = experts()
    out, expected = run(fake_aiter.aiter, solution, shape)
    assert torch.allclose(out.float(), expected.float(), rtol=0.1, atol=0.1 * expected.abs().max().item())
    import aiter.fused_moe

    row = aiter.fused_moe.rows_run[-1]
    assert (row["kernelName1"], row["kernelName2"], row["block_m"], row["token"]) == ("first", "second", "32", "8")


def test_a_kernel_of_one_stage(stand_in):
    """Its second name is AITER's "Null", and the further columns of the row are AITER's."""
    import fake_aiter

    extra = {**EXTRA, "run_1stage": "1", "kernelName2": "Null", "xbf16": "1"}
    fp8 = {"q_dtype_a": "torch.float8_e4m3fn", "q_dtype_w": "torch.float8_e4m3fn", "q_type": "QuantType.per_Token"}
    run(fake_aiter.aiter, Solution("asm", "only", extra=tuple(extra.items())), experts(**fp8))
    import aiter.fused_moe

    row = aiter.fused_moe.rows_run[-1]
    assert (row["kernelName1"], row["kernelName2"], row["run_1stage"], row["xbf16"]) == ("only", "Null", "1", "1")
    assert row["q_dtype_w"] == "torch.float8_e4m3fn" and row["q_type"] == "QuantType.per_Token"


def test_a_capture_does_not_compile(stand_in, monkeypatch):
    """Torch's call serves graphs until an eager call has run, in which AITER compiles."""
    import fake_aiter

    shape, solution = experts(), Solution("asm", "first+second", extra=tuple(EXTRA.items()))
    launcher = fake_aiter.aiter.bind(solution, shape, device_of(-1))
    operands = plain_operands(op_named("fmoe").make_inputs(shape, torch.device("cpu"), 1))
    import aiter.fused_moe

    capturing, before = [True], len(aiter.fused_moe.rows_run)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    out, ran = launcher.call(*operands), [len(aiter.fused_moe.rows_run) - before]
    assert torch.equal(out, torch_launcher(shape, device_of(-1)).call(*operands))
    for capturing[0] in (False, True):
        launcher.call(*operands)
        ran.append(len(aiter.fused_moe.rows_run) - before)
    assert ran == [0, 1, 2]


def test_zeros_that_do_not_fit_refuse_no_row(stand_in, monkeypatch):
    """Without memory for a call at bind the first call outside of graphs compiles."""
    import fake_aiter

    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        there = attrs.evolve(fake_aiter.gluon, host=Device("gfx1250", 256))
        launcher = there.bind(Solution("triton", "auto"), Shape("a16w16", 4, 48, 128), device_of(-1))
    x, weight = torch.randn(4, 128).bfloat16(), torch.randn(48, 128).bfloat16()
    assert launcher, launcher
    assert torch.allclose(launcher.call(x, weight).float(), x.float() @ weight.float().t(), rtol=2**-7, atol=0.1)


def test_a_row_without_block_m_is_refused(stand_in):
    """AITER sorts tokens into blocks of that size."""
    import fake_aiter

    reason = fake_aiter.aiter.lacks(Solution("asm", "only"), experts(), device_of(-1))
    assert reason == "the row of 'only' needs AITER's column block_m"


def test_the_callers_weights_keep_their_attributes(stand_in):
    """AITER's mark of shuffled bytes is on a view alone."""
    import fake_aiter

    shape = experts()
    launcher = fake_aiter.aiter.bind(Solution("asm", "only", extra=tuple(EXTRA.items())), shape, device_of(-1))
    operands = plain_operands(op_named("fmoe").make_inputs(shape, torch.device("cpu"), 1))
    launcher.call(*operands)
    assert not any(hasattr(operand, "is_shuffled") for operand in operands[1:3])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "row"}, "layout must be aiter16x16"),
        ({"gate_mode": "interleave"}, "takes no gate_mode"),
        (
            {"q_dtype_w": "torch.float8_e4m3fnuz", "q_dtype_a": "torch.float8_e4m3fnuz", "q_type": "QuantType.per_Token"},
            "weights must be fp8_e4m3fn",
        ),
    ],
)
def test_experts_that_no_row_names_are_refused(changes, reason):
    """The limits of fused MoE, each with its reason."""
    assert reason in str(aiter_backend.refusal(experts(**changes), Device("gfx950", 256)))
    assert not aiter_backend.refusal(experts(), Device("gfx950", 256))


def test_triton_rows_on_gfx1250_are_gluons(stand_in):
    """AITER's Triton product is a Gluon kernel there, which the plugin ``triton`` does not compile."""
    import fake_aiter

    gluon_there = attrs.evolve(fake_aiter.gluon, host=Device("gfx1250", 256))
    shape = Shape("a16w16", 4, 48, 128)
    launcher = gluon_there.bind(Solution("triton", "auto"), shape, device_of(-1))
    x, weight = torch.randn(2, 2, 128).bfloat16(), torch.randn(48, 128).bfloat16()
    out = launcher.call(x, weight)
    assert out.shape == (2, 2, 48) and torch.allclose(out.float(), x.float() @ weight.float().t(), rtol=2**-7, atol=0.1)


def test_opus_by_blocks_on_gfx942(stand_in):
    """The one kernel of that op gets its number and both scales."""
    import fake_aiter

    there = attrs.evolve(fake_aiter.opus, host=Device("gfx942", 304))
    shape = Shape("a8w8_blockscale_bpreshuffle", 4, 128, 256, dtype="fp8_e4m3fnuz", outdtype="bf16", scale="block", layout="aiter16x16")
    name = "opus_gemm_gfx942_a8w8_bs_bpreshuf_sb_tailm_v16_512x128x128x128_2x4_16x16x32_0x0x0"
    launcher = there.bind(Solution("opus", name), shape, device_of(-1))
    zeros = [torch.zeros(rows, 256).to(torch.float8_e4m3fnuz) for rows in (4, 128)]
    assert launcher.call(*zeros, torch.ones(4, 2), torch.ones(1, 2)).shape == (4, 128)
