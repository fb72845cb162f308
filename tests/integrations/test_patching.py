"""patch, unpatch and patched: torch's functions use the tables, unknown calls pass through, and
unpatch restores all."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tunedgemm
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from tunedgemm import patch, patched, unpatch
from tunedgemm.errors import OperandError

TORCHS = {"linear": functional.linear, "mm": torch.mm, "addmm": torch.addmm, "matmul": torch.matmul}
pytestmark = pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:Accessing the data pointer of FakeTensor")


def there() -> dict[str, Callable[..., Any]]:
    """The functions that are in torch's places."""
    return {"linear": functional.linear, "mm": torch.mm, "addmm": torch.addmm, "matmul": torch.matmul}


@pytest.fixture(autouse=True)
def comes_back():
    """Each test leaves torch as it was."""
    yield
    assert there() == TORCHS


def changed() -> set[str]:
    return {name for name, function in there().items() if function is not TORCHS[name]}


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [({}, {"linear", "mm", "addmm", "matmul"}), ({"products": False}, {"linear"}), ({"linear": False}, {"mm", "addmm", "matmul"})],
    ids=["all", "linear", "products"],
)
def test_patch_replaces_what_is_asked_for_until_unpatch(asked: dict[str, bool], wanted: set[str]) -> None:
    """Each kind of function can be routed alone."""
    patch(**asked)
    try:
        assert changed() == wanted
    finally:
        unpatch()
    assert not changed()


def test_patches_are_counted_and_unpatch_without_one_does_nothing() -> None:
    """Two patches need two unpatches; a block inside them removes none of them."""
    unpatch()
    patch(products=False)
    patch(products=False)
    with patched():
        assert changed() == set(TORCHS)
        unpatch()
        assert changed() == set(TORCHS)
    assert changed() == {"linear"}
    unpatch()
    assert not changed()
    unpatch()


def test_blocks_of_several_threads_do_not_end_each_other() -> None:
    """A function is torch's again when the last block has ended, in any order."""
    inside, leave = threading.Barrier(2), threading.Event()
    seen: list[set[str]] = []

    def other() -> None:
        with patched():
            inside.wait()
            leave.wait()
            seen.append(changed())

    thread = threading.Thread(target=other)
    with patched():
        thread.start()
        inside.wait()
    assert changed() == set(TORCHS)
    leave.set()
    thread.join()
    assert seen == [set(TORCHS)]


def test_threads_that_enter_and_leave_at_once_leave_torch_behind() -> None:
    """No interleaving of blocks loses the original or counts wrong."""
    start = threading.Barrier(8)

    def many() -> None:
        start.wait()
        for _ in range(200):
            with patched():
                pass

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not changed()


def test_a_third_partys_replacement_is_kept_and_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A replacement made while a function is routed stays, and one warning says so."""
    with monkeypatch.context() as theirs:
        patch()

        def wrapped(*operands: Any) -> Any:
            return TORCHS["linear"](*operands)

        theirs.setattr(functional, "linear", wrapped)
        unpatch()
        assert functional.linear is wrapped and changed() == {"linear"}
        with patched():
            assert functional.linear is wrapped
        functional.linear = TORCHS["linear"]
    functional.linear = TORCHS["linear"]

    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == ["torch.nn.functional.linear"]


class Tagged(torch.Tensor):
    """A user's subclass that keeps its type."""


class Wrapper:
    """Not a tensor, but something with torch's protocol, as distributed and quantised tensors are."""

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        return function(*plain, **(kwargs or {})) + 1

    def t(self) -> Wrapper:
        return Wrapper(self.inner.t())


Product = Callable[[Any, Any], Any]
PRODUCTS: dict[str, Product] = {
    "linear": lambda x, weight: functional.linear(x, weight, None),
    "linear with bias": lambda x, weight: functional.linear(x, weight, weight[:, 0].contiguous()),
    "mm": lambda x, weight: torch.mm(x, weight.t()),
    "addmm": lambda x, weight: torch.addmm(weight[:, 0].contiguous(), x, weight.t()),
    "matmul": lambda x, weight: torch.matmul(x, weight.t()),
}


def drawn(*sizes: int, **kinds: Any) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)), **kinds)


def of(make: Callable[[torch.Tensor], Any]) -> Callable[[Product], Any]:
    """A case whose operands are both made of plain ones."""
    return lambda product: product(make(drawn(4, 32)), make(drawn(16, 32)))


def of_input(make: Callable[[torch.Tensor], Any]) -> Callable[[Product], Any]:
    """A case whose weight is plain."""
    return lambda product: product(make(drawn(4, 32)), drawn(16, 32))


def under_fakes(product: Product) -> Any:
    with FakeTensorMode() as mode:
        out = product(mode.from_tensor(drawn(4, 32)), mode.from_tensor(drawn(16, 32)))
    return tuple(out.shape), type(out)


def under_autocast(product: Product) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return product(drawn(4, 32), drawn(16, 32))


def of_duals(product: Product) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(product(forward_ad.make_dual(drawn(4, 32), drawn(4, 32) + 1), drawn(16, 32))).tangent.clone()


def gradient(product: Product) -> Any:
    x, weight = drawn(4, 32).requires_grad_(), drawn(16, 32).requires_grad_()
    with torch.enable_grad():
        product(x, weight).square().sum().backward()
    return x.grad, weight.grad


def of_rows(layout: torch.layout) -> Callable[[Product], Any]:
    """A case of an input whose rows come in two unequal parts."""

    def case(product: Product) -> Any:
        nested = torch.nested.nested_tensor([drawn(2, 32), drawn(3, 32)], layout=layout)
        return [part.clone() for part in product(nested, drawn(16, 32)).unbind()]

    return case


WEIGHT, TANGENT = drawn(16, 32), drawn(4, 32)
CASES: dict[str, Callable[[Product], Any]] = {
    "float64": of(torch.Tensor.double),
    "integers": of(lambda tensor: tensor.to(torch.int64)),
    "complex": of(lambda tensor: tensor.to(torch.complex64)),
    "two dtypes": of_input(torch.Tensor.double),
    "meta": of(lambda tensor: tensor.to("meta")),
    "meta input": of_input(lambda tensor: tensor.to("meta")),
    "fake": under_fakes,
    "no rows": of_input(lambda tensor: tensor[:0]),
    "1-D weight": lambda product: product(drawn(4, 32), drawn(32)),
    "sizes that do not fit": lambda product: product(drawn(4, 31), drawn(16, 32)),
    "jagged": of_rows(torch.jagged),
    "nested": of_rows(torch.strided),
    "subclass": of(lambda tensor: tensor.as_subclass(Tagged)),
    "no tensor": of_input(Wrapper),
    "None": of_input(lambda _: None),
    "autocast": under_autocast,
    "gradient": gradient,
    "duals": of_duals,
    "vmap": lambda product: torch.vmap(lambda x: product(x, WEIGHT))(drawn(3, 4, 32)),
    "grad": lambda product: torch.func.grad(lambda x: product(x, WEIGHT).square().sum())(drawn(4, 32)),
    "jvp": lambda product: torch.func.jvp(lambda x: product(x, WEIGHT), (drawn(4, 32),), (TANGENT,)),
    "jacrev": lambda product: torch.func.jacrev(lambda x: product(x, WEIGHT))(drawn(2, 32)),
}


def outcome(case: Callable[[Product], Any], product: Product) -> Any:
    """Return the outcome of a case, which must be the same twice: a value, or the type of an error."""
    try:
        out = case(product)
    except Exception as error:  # whatever torch raises, or whatever we do
        return type(error)
    return out


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("case", CASES)
def test_calls_unknown_to_the_tables_pass_through(name: str, case: str, numpys: list[tuple[int, ...]]) -> None:
    """Values, dtypes, types, gradients and errors are torch's, even if a backend takes every shape
    and its kernel is bound."""
    product = PRODUCTS[name]
    with torch.no_grad():
        expected = outcome(CASES[case], product)
        with patched():
            for x in (drawn(4, 32), drawn(2, 32), drawn(4, 64)[:, 32:]):
                product(x, drawn(16, 32))
            served = len(numpys)
            found = [outcome(CASES[case], product) for _ in range(2)]

    assert served == 3 and len(numpys) == served
    for one in found:
        assert type(one) is type(expected)
        if isinstance(expected, torch.Tensor) and (expected.is_meta or type(expected) is not torch.Tensor):
            assert (one.shape, one.dtype, one.device) == (expected.shape, expected.dtype, expected.device)
        elif isinstance(expected, type) or case == "fake":
            assert one == expected
        else:
            torch.testing.assert_close(one, expected)


def test_the_menu_has_them() -> None:
    """They are attributes of the package itself."""
    assert {"linear", "patch", "patched", "unpatch"} <= set(dir(tunedgemm))


class Products(torch.nn.Module):
    """One call of each routed function, with parameters and with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.constant = torch.nn.Linear(32, 32), [torch.randn(32, 32)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, constant = self.layer.weight, self.layer.bias, self.constant[0]
        x = self.layer(x) + torch.nn.functional.linear(x, weight) + torch.nn.functional.linear(x, constant, bias)
        x = torch.mm(x, weight.t()) + torch.matmul(x, constant.t()) + torch.addmm(bias, x, weight.t())
        return torch.matmul(constant.t(), x.t()).t()


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_symbolic_trace_has_torchs_own_calls_and_no_others(converted: bool, grad: bool) -> None:
    """torch.fx.symbolic_trace of a routed model gives the graph of the model that is not routed."""
    model, x = Products(), torch.randn(4, 32)
    wanted = model(x)
    plain = torch.fx.symbolic_trace(copy.deepcopy(model)).code
    if converted:
        tunedgemm.convert(model)
    with patched(), torch.set_grad_enabled(grad):
        traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), wanted)
    assert not any(word in traced.code for word in ("data_ptr", "is_contiguous", "get_device", "tunedgemm"))
    assert converted or traced.code.replace(", None)", ")") == plain
    with pytest.raises(OperandError, match="a16w16: x must be a tensor"):
        torch.fx.symbolic_trace(lambda x: tunedgemm.gemm_a16w16(x, torch.randn(16, 32)))


def test_scripts_have_torchs_operators(child, tmp_path):
    """A script of a routed function or a converted layer calls torch's own operator."""
    source = """
import torch, tunedgemm, torch.nn.functional as F
def linear(x: torch.Tensor, w: torch.Tensor): return F.linear(x, w)
def mm(x: torch.Tensor, w: torch.Tensor): return torch.mm(x, w.t())
def matmul(x: torch.Tensor, w: torch.Tensor): return torch.matmul(x, w.t())
def addmm(x: torch.Tensor, w: torch.Tensor): return torch.addmm(x[0], x, w.t())
def own(x: torch.Tensor, w: torch.Tensor): return tunedgemm.linear(x, w)
x, w = torch.randn(4, 4), torch.randn(4, 4)
tunedgemm.patch()
for unpatched in (False, True):
    for function in (linear, mm, matmul, addmm, own):
        script = torch.jit.script(function)
        name = "linear" if function is own else function.__name__
        assert f"aten::{name}" in str(script.graph) and torch.allclose(script(x, w), function(x, w), atol=1e-5), function
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).requires_grad_(False).eval()
    for options in ({}, {"shuffle": True, "keep_plain": True}):
        with tunedgemm.convert(model, **options):
            expected = model(x)
            for made in (torch.jit.script(model), torch.jit.freeze(torch.jit.script(model)), torch.jit.trace(model, x, check_trace=False)):
                assert torch.allclose(made(x), expected, atol=1e-5)
    tunedgemm.unpatch()
print("scripted")
"""
    (tmp_path / "scripted.py").write_text(source)  # TorchScript reads files
    assert child("import warnings; warnings.simplefilter('ignore'); import scripted", tmp_path) == "scripted"
