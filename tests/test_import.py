"""The package's menu: quick to import, and everything on it exists."""

import json

import pytest
import tunedgemm

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


@pytest.mark.parametrize(
    "module", ["tunedgemm.plugin", "tunedgemm.backends.registry", "tunedgemm.table.lookup", "tunedgemm.workload.capture"]
)
def test_values_and_tables_need_no_torch(child, module):
    """Describing a plugin, reading a table and noting a shape do not load torch."""
    assert child(f"import sys, {module}\nprint('torch' in sys.modules, 'pandas' in sys.modules)") == "False False"


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
