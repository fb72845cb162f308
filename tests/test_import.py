"""The package's menu: quick to import, and everything on it exists."""

import ast
import inspect
import json
from pathlib import Path

import pytest
import tunedgemm
from tunedgemm.ops import functions

LATE = ("torch", "pandas", "numpy", "triton", "pluggy", "attr", "rich", "tunedgemm.backends.registry", "tunedgemm_triton")


@pytest.mark.timing
def test_importing_the_package_loads_nothing(child):
    """`import tunedgemm` loads neither torch nor pandas nor pluggy nor a plugin, in a few milliseconds."""
    source = (
        "import sys, time, json\nbefore = set(sys.modules)\nstart = time.process_time()\nimport tunedgemm\n"
        "print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - before)]))"
    )
    seconds, modules = json.loads(child(source))
    assert not set(LATE) & set(modules)
    assert seconds < 0.2


def test_dispatch_needs_no_tuner(child):
    """Serving loads neither the tuner nor pandas nor the command line."""
    found = child(
        "import sys, tunedgemm.dispatch.tuned_gemm\n"
        "print(sorted({'tunedgemm.tuner', 'pandas', 'pebble', 'tunedgemm.cli'} & set(sys.modules)))"
    )
    assert found == "[]"


@pytest.mark.parametrize("name", tunedgemm.__all__)
def test_the_menu_is_real(name):
    """Every name of the menu exists and is listed by dir()."""
    assert getattr(tunedgemm, name) is not None
    assert name in dir(tunedgemm)


def test_other_names_are_attribute_errors():
    """A name that is not on the menu is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="module 'tunedgemm' has no attribute 'gemm_a17w17'"):
        getattr(tunedgemm, "gemm_a17w17")  # noqa: B009  what a user writes as an attribute


def test_importing_and_calling_change_nothing_of_torch(child):
    """Import, an eager call and a linear module leave Python's
    import system and torch's functions untouched."""
    found = child(
        "import sys, torch\n"
        "from torch.autograd import forward_ad\n"
        "def state():\n"
        "    graph = torch.cuda.CUDAGraph\n"
        "    functions = [torch.nn.functional.linear, torch.mm, torch.addmm, torch.matmul, torch.compile]\n"
        "    return [*sys.meta_path, *functions, graph.capture_begin, graph.capture_end, *vars(forward_ad).values()]\n"
        "before = state()\n"
        "import tunedgemm\n"
        "tunedgemm.gemm_a16w16(torch.ones(4, 8), torch.ones(2, 8))\n"
        "tunedgemm.linear(torch.ones(4, 8), torch.ones(2, 8))\n"
        "import tunedgemm.integrations.patching\n"
        "print(len(state()) == len(before), all(a is b for a, b in zip(state(), before)), 'torch._dynamo' in sys.modules)\n"
    )
    assert found == "True True False"


def test_type_checkers_see_the_menu():
    """The imports for type checkers are those that the menu makes, and the functions of ops."""
    block = next(node for node in ast.parse(Path(tunedgemm.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    written = {name: inspect.unwrap(getattr(tunedgemm, name)).__code__ for name in functions()}
    files = {name: f"tunedgemm.ops.{Path(code.co_filename).stem}" for name, code in written.items() if code.co_name == name}
    assert seen == tunedgemm._HOME | files
    others = {
        name.id for node in block.body if isinstance(node, ast.Assign) for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)
    }
    assert others == set(functions()) - set(files)
