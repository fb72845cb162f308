"""Registration with torch's compiler: at once if it is loaded, else on load; the modules that it
loads see torch's functions."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

#: A routed model and one that is not, compiled; which ops of ours each graph has.
GRAPHS = """
import torch, tunedgemm
weight, other, x = torch.randn(16, 32), torch.randn(32, 16), torch.randn(4, 32)
def graphs(function):
    codes = []
    def keep(module, _):
        codes.append(module.code)
        return module.forward
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=keep, fullgraph=True, dynamic=True)(x)
    [code] = codes
    return code.count("tunedgemm.linear")
def linear(x): return torch.nn.functional.linear(x.sin(), weight)
def mm(x): return torch.mm(x.sin(), weight.t()) + torch.matmul(x.cos(), weight.t())
def addmm(x): return torch.addmm(weight[:, 0], x.sin(), weight.t())
def plain(x): return torch.mm(x.sin(), other)
def all_of_them(): return [graphs(function) for function in (linear, mm, addmm, plain)]
"""


@pytest.mark.parametrize("loaded", ["", "import torch._dynamo"], ids=["later", "before"])
def test_routed_functions_are_ops_of_the_graph_whenever_the_compiler_is_loaded(loaded: str, child) -> None:
    """Routed functions are ops of the graph whether the compiler loads before or after, and torch's
    own after unrouting."""
    printed = child(
        f"{loaded}\n{GRAPHS}\n"
        "import sys\n"
        "tunedgemm.patch()\n"
        "print('torch._dynamo' in sys.modules)\n"
        "print(all_of_them())\n"
        "tunedgemm.unpatch()\n"
        "print(all_of_them())\n"
    )
    assert printed.splitlines() == [str(bool(loaded)), "[1, 2, 1, 0]", "[0, 0, 0, 0]"]


@needs_compiler
def test_inductor_keeps_nothing_of_ours_for_later(child) -> None:
    """Inductor, loaded while functions are replaced,
    keeps torch's own as the kernels of later graphs."""
    printed = child(
        f"{GRAPHS}\n"
        "with tunedgemm.patched(), torch.no_grad():\n"
        "    torch.compile(plain, fullgraph=True)(x)\n"
        "import sys\n"
        "print('torch._inductor.kernel.mm' in sys.modules)\n"
        "print(torch.mm is torch._C._VariableFunctions.mm)\n"
        "from torch._inductor.select_algorithm import extern_kernels\n"
        "print(extern_kernels.mm is torch.mm, extern_kernels.addmm is torch.addmm)\n"
    )
    assert printed.splitlines() == ["True", "True", "True True"]


def test_a_module_that_fails_to_load_leaves_the_functions_routed(child) -> None:
    """The replaced functions are the same after a module of torch was loaded, missing or raised."""
    printed = child(
        "import importlib, torch, tunedgemm\n"
        "with tunedgemm.patched():\n"
        "    ours = torch.mm\n"
        "    importlib.import_module('torch.fx.experimental.merge_matmul')\n"
        "    try:\n"
        "        importlib.import_module('torch.no_such_module')\n"
        "    except ImportError:\n"
        "        print(torch.mm is ours)\n"
        "print(torch.mm is not ours)\n"
    )
    assert printed.splitlines() == ["True", "True"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates
def test_routing_recompiles_a_compiled_model_at_both_ends(numpys) -> None:
    """torch.compile before patch() works, and so does unpatch() afterwards."""
    import tunedgemm

    layer, x = torch.nn.Linear(32, 16).requires_grad_(False), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    counts = []
    for routed in (False, True, False):
        if routed:
            tunedgemm.patch()
        torch.testing.assert_close(compiled(x), torch._C._nn.linear(x, layer.weight, layer.bias))
        counts.append(len(numpys))
        if routed:
            tunedgemm.unpatch()

    assert counts == [0, 1, 1]
    assert "torch._dynamo" in sys.modules
