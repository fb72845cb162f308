"""torch.mm, torch.addmm and torch.matmul: products with a transposed weight are served, others are
torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tunedgemm import patched

X, WEIGHT, BIAS = torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)
SERVED: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: torch.mm(X, WEIGHT.t()),
    "mm of a strided input": lambda: torch.mm(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)).t(), WEIGHT.t()),
    "addmm": lambda: torch.addmm(BIAS, X, WEIGHT.t()),
    "matmul": lambda: torch.matmul(X, WEIGHT.t()),
    "matmul of 3-D": lambda: torch.matmul(X.view(2, 2, 32), WEIGHT.t()),
    "a parameter": lambda: torch.mm(X, torch.nn.Parameter(WEIGHT).t()),
}
TORCHS: dict[str, Callable[[], Any]] = {
    "a [K, N] weight": lambda: torch.mm(X, WEIGHT.t().contiguous()),
    "a weight of a wider one": lambda: torch.mm(X, torch.randn(16, 64, generator=torch.Generator().manual_seed(1))[:, ::2].t()),
    "out": lambda: torch.mm(X, WEIGHT.t(), out=torch.empty(4, 16)),
    "out of addmm": lambda: torch.addmm(BIAS, X, WEIGHT.t(), out=torch.empty(4, 16)),
    "out of matmul": lambda: torch.matmul(X, WEIGHT.t(), out=torch.empty(4, 16)),
    "beta": lambda: torch.addmm(BIAS, X, WEIGHT.t(), beta=0.5),
    "alpha": lambda: torch.addmm(BIAS, X, WEIGHT.t(), alpha=2),
    "beta and alpha of one": lambda: torch.addmm(BIAS, X, WEIGHT.t(), beta=1, alpha=1),
    "a whole matrix to add": lambda: torch.addmm(torch.ones(4, 16), X, WEIGHT.t()),
    "one value to add": lambda: torch.addmm(torch.ones(1), X, WEIGHT.t()),
    "a bias of another dtype": lambda: torch.addmm(BIAS.double(), X, WEIGHT.t()),
    "batches": lambda: torch.matmul(X.view(2, 2, 32), WEIGHT.view(2, 8, 32).transpose(1, 2)),
    "heads": lambda: torch.matmul(X.view(1, 2, 2, 32), WEIGHT.view(1, 2, 8, 32).transpose(2, 3)),
    "a vector": lambda: torch.matmul(X, WEIGHT[0]),
    "a vector before": lambda: torch.matmul(X[0], WEIGHT.t()),
    "3-D mm": lambda: torch.mm(X.view(2, 2, 32), WEIGHT.t()),
    "operators": lambda: X @ WEIGHT.t(),
    "methods": lambda: X.mm(WEIGHT.t()),
}


@pytest.mark.parametrize("case", SERVED)
def test_a_product_with_a_weights_transpose_is_served(case: str, numpys: list[tuple[int, ...]]) -> None:
    """It is a16w16, at the first call and after; its value is torch's."""
    with torch.no_grad():
        expected = SERVED[case]()
        with patched():
            found = [SERVED[case]() for _ in range(3)]

    assert len(numpys) == 3
    for one in found:
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("case", TORCHS)
def test_any_other_product_is_torchs(case: str, numpys: list[tuple[int, ...]]) -> None:
    """Values and errors are torch's own, and no kernel of ours runs."""

    def outcome() -> Any:
        try:
            return TORCHS[case]()
        except Exception as error:  # whatever torch raises, or whatever we do
            return type(error)

    with torch.no_grad():
        expected = outcome()
        with patched():
            found = [outcome() for _ in range(2)]

    assert numpys == []
    for one in found:
        assert one is expected or torch.equal(one, expected)


def test_keywords_are_torchs_names() -> None:
    """Calls that name the operands mean the same."""
    with patched(), torch.no_grad():
        torch.testing.assert_close(torch.mm(input=X, mat2=WEIGHT.t()), X @ WEIGHT.t())
        torch.testing.assert_close(torch.matmul(X, other=WEIGHT.t()), X @ WEIGHT.t())
        torch.testing.assert_close(torch.matmul(input=X, other=WEIGHT.t()), X @ WEIGHT.t())
        torch.testing.assert_close(torch.addmm(input=BIAS, mat1=X, mat2=WEIGHT.t()), X @ WEIGHT.t() + BIAS)
        compiled = torch.compile(lambda x, weight: torch.matmul(x, other=weight.t()), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(X, WEIGHT), X @ WEIGHT.t())


def calls_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t())


def test_a_launcher_that_calls_the_patched_product_gets_torchs_own(routed) -> None:
    """A backend whose kernel is torch.mm, like one of torch's routes, does not recurse."""
    calls = routed(calls_mm)
    with patched(), torch.no_grad():
        for product in (torch.mm, torch.matmul):
            for _ in range(2):
                torch.testing.assert_close(product(X, WEIGHT.t()), X @ WEIGHT.t())

    assert calls == ["fake"] * 4
