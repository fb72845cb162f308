"""The M of serving engines."""

from __future__ import annotations

import pytest
from tunedgemm.errors import UserError
from tunedgemm.workload.models.engines import command_of, rows_of_engine


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
