"""What serving engines call: the M, and the order of scales."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.quant import per_1x128_quant, per_block_quant
from tunedgemm.ops.scale_order import field_of
from tunedgemm.shape import Shape
from tunedgemm.table.row import key_shape
from tunedgemm.table.untuned import Untuned, read_untuned, write_untuned
from tunedgemm.workload.models.engines import as_called, command_of, rows_of_engine

BLOCKS, H100 = op_named("a8w8_blockscale"), Device("sm_90", 132)


def test_vllm_runs_its_graph_sizes_and_prefill() -> None:
    """The M are 1, 2, 4, multiples of 8 below 256, then of 16 up to twice the sequences or 512.

    Powers of two follow, up to the tokens of a step.
    """
    rows = rows_of_engine("vllm", 256, 8192)
    assert rows[:5] == (1, 2, 4, 8, 16) and rows[-4:] == (1024, 2048, 4096, 8192)
    assert set(range(256, 513, 16)) <= set(rows) and 264 not in rows and len(rows) == 55


def test_a_few_sequences_need_few_graphs() -> None:
    """Graphs cover at most twice the sequences, and no M exceeds the tokens of a step."""
    assert rows_of_engine("vllm", 8, 100) == (1, 2, 4, 8, 16, 32, 64, 100)
    assert rows_of_engine("sglang", 16, 64) == (1, 2, 4, 8, 12, 16, 32, 64)


def test_bad_limits_are_named(faults_of):
    """An unknown engine and a limit below 1 are errors with the valid values."""

    def check(asked, told):
        with pytest.raises(UserError, match=told):
            rows_of_engine(*asked)

    assert not faults_of(
        check,
        [
            (("trtllm", 1, 1), r"--nsets: unknown engine \(got 'trtllm'\); use whole numbers as 1,16,256, or one of vllm, sglang"),
            (("vllm", 0, 1), r"--max-num-seqs: must be at least 1 \(got 0\)"),
            (("sglang", 1, -1), r"--max-num-batched-tokens: must be at least 1 \(got -1\)"),
        ],
    )


def test_the_command_line_has_the_same_limits() -> None:
    """The command printed with the shapes starts the engine that runs them."""
    assert command_of("vllm", "a model", 8, 64, 4096) == (
        "TUNEDGEMM_VLLM=1 vllm serve 'a model' --tensor-parallel-size 8 --max-num-seqs 64 --max-num-batched-tokens 4096"
    )
    assert "--cuda-graph-max-bs 64 --chunked-prefill-size 4096" in command_of("sglang", "m", 1, 64, 4096)


def by_block(m: int, n: int, k: int, outdtype: str = "bf16") -> Shape:
    return Shape(BLOCKS.name, m, n, k, "fp8_e4m3fn", outdtype=outdtype, scale="block")


#: Engine, architecture, sizes that decide, output dtype -> the order into which the engine
#: quantises x there.
CALLED = [
    ("vllm", "sm_90", 192, "bf16", "m_major_padded"),
    ("sglang", "sm_90", 192, "bf16", "m_major_padded"),
    ("vllm", "sm_90", 160, "bf16", "m_major"),
    ("vllm", "sm_90", 192, "fp16", "m_major"),
    ("sglang", "sm_90", 160, "bf16", "row"),
    ("sglang", "sm_90", 192, "fp16", "row"),
    ("vllm", "sm_89", 192, "bf16", "row"),
    ("vllm", "gfx942", 192, "bf16", "row"),
    ("vllm", "cpu-avx2", 192, "bf16", "row"),
]


def test_a_listed_shape_is_the_key_of_the_engines_call(tmp_path: Path, faults_of) -> None:
    """For any M and K, in memory and from a file, the key is that of a call with the engine's scales."""

    def check(called: tuple[str, str, int, str, str], m: int, k: int) -> None:
        engine, gfx, n, outdtype, order = called
        rows = {BLOCKS.name: (Untuned(by_block(m, n, k, outdtype)),)}
        [listed] = as_called(engine, rows, lambda: Device(gfx, 132))[0][BLOCKS.name]
        x, w = torch.randn(m, k), torch.randn(n, k)
        (q, x_scale), (weight, w_scale) = (
            per_1x128_quant(x, torch.float8_e4m3fn, order),
            per_block_quant(w, quant_dtype=torch.float8_e4m3fn),
        )
        otype = torch.bfloat16 if outdtype == "bf16" else torch.float16
        call = BLOCKS.shape_of(q, weight, x_scale, w_scale, otype=otype)
        assert key_shape(listed.shape) == key_shape(call)
        write_untuned(tmp_path / "l.csv", BLOCKS, [listed])
        assert key_shape(read_untuned(tmp_path / "l.csv", BLOCKS)[0].shape) == key_shape(call)

    assert not faults_of(check, itertools.product(CALLED, (1, 2, 3, 4, 5, 8, 10, 64), (64, 128, 256, 384)))


def test_deepgemm_multiplies_whole_blocks_of_k() -> None:
    """Another K is CUTLASS's in vLLM, and row-major in SGLang."""
    rows = {BLOCKS.name: (Untuned(by_block(6, 192, 320)),)}
    found = [as_called(engine, rows, lambda: H100)[0][BLOCKS.name][0].shape for engine in ("vllm", "sglang")]
    assert [field_of(shape) for shape in found] == ["m_major", "row"]


def test_an_engine_without_a_kernel_has_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own switch turns DeepGEMM off; notes name the order, the reason and the products."""
    rows = {"a16w16": (Untuned(Shape("a16w16", 8, 64, 128)),), BLOCKS.name: tuple(Untuned(by_block(8, n, 256)) for n in (192, 160))}
    _, notes = as_called("vllm", rows, lambda: H100)
    assert notes == (
        "a8w8_blockscale: x's scales are listed as m_major_padded for vllm on sm_90, which DeepGEMM reads: N x K = 192 x 256",
        "a8w8_blockscale: x's scales are listed as m_major for vllm on sm_90, which CUTLASS reads: N x K = 160 x 256",
    )
    for engine, variable, order in (("vllm", "VLLM_USE_DEEP_GEMM", "m_major"), ("sglang", "SGLANG_ENABLE_JIT_DEEPGEMM", "row")):
        monkeypatch.setenv(variable, "0")
        listed, notes = as_called(engine, rows, lambda: H100)
        assert len(notes) == 1 and f"listed as {order} for {engine}" in notes[0]
        assert listed["a16w16"] == rows["a16w16"]


def test_other_products_have_no_order() -> None:
    """Shapes of other ops, experts and scales by row among them, are listed unchanged, without a note."""
    rows = {
        name: (Untuned(shape),)
        for name, shape in (
            ("a16w16", Shape("a16w16", 1, 64, 128)),
            ("a8w8", Shape("a8w8", 1, 64, 128, "int8", outdtype="bf16", scale="row")),
        )
    }
    assert as_called("vllm", rows, lambda: H100) == (rows, ())


def test_mxfp4_weights_alone_are_what_the_plugin_calls() -> None:
    """vLLM's lists have them as a format of a16wn, next to other formats; SGLang's keep their op."""
    shape = op_named("a16w4_blockscale").columns.parse({"M": "4", "N": "64", "K": "256", "x_dtype": "bf16"})
    rows = {"a16w4_blockscale": (Untuned(shape, 3),)}
    [row] = as_called("vllm", rows, lambda: H100)[0]["a16wn"]
    assert (row.count, row.shape.m, row.shape["w_format"], row.shape["w_group"]) == (3, 4, "mxfp4", 32)
    assert op_named("a16wn").problem(row.shape) == "" and as_called("sglang", rows, lambda: H100)[0] == rows
