"""Run the bring-up kit over the fake HIP runtime with planted faults: each is found and named."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.testing.bring_up import Examiner

#: A child whose launches hang after a second.
CHILD = "from tunedgemm.testing.bring_up import __main__ as child, bench; bench.LAUNCH_S = 1.0; child.main()"
BF16, INT8 = "bf16gemm_fp32bf16_tn_64x64_bshuffle_splitk_clean", "I8gemm_bf16_perTokenI8_BpreShuffle_128x128"
FP8 = "fp8gemm_bf16_blockscale_BpreShuffle_32x128"


@pytest.fixture(scope="module")
def ask(fake: ModuleType, tree: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that asks a new child over the fake with planted faults."""

    def ask(request: dict[str, Any], planted: dict[str, str]) -> dict[str, Any]:
        settings = {"FAKE_ASM_LIBRARY": str(fake.build()), "TUNEDGEMM_ASM_PACKS": f"{tree}:{tree}-own", "FAKE_GFX": "gfx942"}
        examiner = Examiner([sys.executable, "-c", CHILD])
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(Path(__file__).with_name("installed")))
            for name, value in {**settings, "OMP_NUM_THREADS": "1", **planted}.items():
                patch.setenv(name, value)
            try:
                answer = examiner.ask(request, time.monotonic() + 120)
            finally:
                examiner.stop()
        assert answer is not None
        return answer

    return ask


@pytest.fixture(scope="module")
def items(ask: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plan's items, which no planted fault changes."""
    return ask({"plan": "fakeasm"}, {})["items"]  # type: ignore[no-any-return]


@pytest.fixture
def verdict(ask: Callable[..., dict[str, Any]], items: list[dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the first item with some words in its name, in a child with a fault."""

    def run(words: str, **planted: str) -> dict[str, Any]:
        return ask(next(item for item in items if all(word in item["id"] for word in words.split())), planted)

    return run


PLAIN, INT, FLOAT = "kernels a16w16 aiter16x16", "kernels int8", "outputs fp8_e4m3fnuz"


@pytest.mark.parametrize(
    ("words", "planted", "status", "kernel", "detail"),
    [
        (PLAIN, {"FAKE_SWAPPED": BF16}, "wrong", BF16, "of elements off"),
        (INT, {"FAKE_MISSING": INT8}, "failed", INT8, "hipModuleGetFunction: named symbol not found"),
        (FLOAT, {"FAKE_FP8": FP8}, "wrong", FP8, "4 times the reference, as if fp8 were read as e4m3fn instead of e4m3fnuz"),
        (PLAIN, {"FAKE_HANG": BF16}, "hung", BF16, "did not end in time"),
        (PLAIN, {"FAKE_FAULT": BF16}, "crashed", BF16, "SIGSEGV in step launch"),
        (PLAIN, {"FAKE_LAUNCH_STATUS": "719"}, "failed", "asm", "unspecified launch failure"),
    ],
    ids=["argument order", "missing symbol", "fp8 format", "hang", "segfault", "launch failure"],
)
def test_a_planted_fault_is_named(
    verdict: Callable[..., dict[str, Any]], words: str, planted: dict[str, str], status: str, kernel: str, detail: str
) -> None:
    """The verdict has the kind of fault, the kernel, and what was wrong with it."""
    found = verdict(words, **planted)
    assert found["status"] == status and kernel in found["kernel"] and detail in found["detail"], found


def test_without_a_fault(verdict: Callable[..., dict[str, Any]]) -> None:
    """Every kernel of the packs that serves the shape runs, AITER's and the plugin's."""
    found = verdict(PLAIN)
    assert found["status"] == "ok" and found["measures"]["ran"] == found["measures"]["listed"] > 10, found
    assert any("_ZN5aiter" in name for name in found["measures"]["kernels"])
