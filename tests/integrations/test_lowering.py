"""Inductor's code for our ops: calls of the functions themselves, whenever it is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tunedgemm
from torch.nn import functional
from tunedgemm.integrations.patching import patched

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler uses much that torch deprecates
]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, nor in Inductor's caches."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad():
        yield


def written(function: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The output of a compiled function, and the calls that Inductor wrote for it."""
    from torch._inductor.utils import run_and_get_code

    out, [code] = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=False), *operands)
    return out, code


def test_a_routed_call_is_called_straight(fresh: None) -> None:
    """Compiled code calls the function without torch's dispatcher or checks of its output."""
    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    with patched():
        out, code = written(lambda x: torch.relu(functional.linear(x, weight)), x)

    torch.testing.assert_close(out, torch.relu(x @ weight.t()))
    assert code.count("torch.ops.tunedgemm.linear_straight(") == 1
    assert "tunedgemm.linear.default" not in code


def test_every_way_of_giving_an_ops_operands_is_served(fresh: None) -> None:
    """Absent, named and shuffled operands and fields give the outputs of an uncompiled call."""
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randint(-9, 9, (rows, 64), generator=draw, dtype=torch.int8) for rows in (4, 32))
    x_scale, w_scale, bias = (torch.rand(size, generator=draw) for size in ((4, 1), (32, 1), (32,)))
    plain, shuffled = torch.randn(4, 64).bfloat16(), tunedgemm.shuffle_weight(torch.randn(32, 64).bfloat16())

    def model(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            tunedgemm.gemm_a8w8(x, weight, x_scale, w_scale),
            tunedgemm.gemm_a8w8(x, weight, x_scale, w_scale, bias.bfloat16(), torch.float16),
            tunedgemm.gemm_a16w16(plain, shuffled),
            tunedgemm.gemm_a16w16(plain, weight.bfloat16(), otype=torch.float32),
        )

    expected = model()
    found, code = written(lambda given: (*model(), given + 1), x)
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other)
    assert code.count("_straight(") == len(expected)


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["torch._inductor.lowering", "tunedgemm.dispatch.tuned_gemm"])
def test_inductor_is_patched_whenever_it_loads(first: str, child, tmp_path: Path) -> None:
    """Inductor calls ops straight, whether it loads first or last,
    and so does cached code in a new process."""
    source = (
        f"import os; os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r}\n"
        f"import importlib, {first}\n"
        "import torch, tunedgemm\n"
        "from torch._inductor.utils import run_and_get_code\n"
        "weight, x = torch.ones(16, 32), torch.ones(4, 32)\n"
        "with tunedgemm.patched(), torch.no_grad():\n"
        "    out, [code] = run_and_get_code(torch.compile(lambda x: torch.nn.functional.linear(x, weight)), x)\n"
        "print(code.count('linear_straight('), int(out.sum()))\n"
    )
    assert [child(source) for _ in range(2)] == ["1 2048", "1 2048"]


@pytest.mark.nightly
def test_code_in_cpp_keeps_to_the_dispatcher(fresh: None) -> None:
    """It finds ops there and nowhere else, and so it runs, with the same result."""
    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    with torch._inductor.config.patch(cpp_wrapper=True), patched():
        out, code = written(lambda x: functional.linear(x, weight), x)

    torch.testing.assert_close(out, x @ weight.t())
    assert "straight" not in code
