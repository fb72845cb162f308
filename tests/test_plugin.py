"""plugin: the menu of a plugin's author, frozen by number."""

import inspect

import pytest
from tunedgemm import plugin

#: What `CONTRACT` = 1 promises. Taking a name away is a new contract.
WORDS = """
CONTRACT Columns Command Device Driver DriverInterface LaunchError Launcher Op Option Options OutOfResources Outcome Planned PluginError
Progress Row Shape Solution Table Tolerance TunedGemmError Unsupported UserError artifact bind_driver cache_folder console device_context
device_of dtype_bits home_folder first_usable hookimpl loaded_driver mapped_files named_file on_device op_named op_of_file ops parse_dtype
plain_weight read_log read_rows scratch semaphores shape_of_texts short_dtype shuffle_weight summary torch_dtype torch_launcher tune
unshuffle_weight upsert workspace
"""
MENU = set(WORDS.split())


def test_the_menu_is_complete():
    """All that contract 1 promised is there, and nothing is there that is not listed."""
    assert plugin.CONTRACT == 1
    assert set(plugin.__all__) == MENU
    visible = {name for name, value in vars(plugin).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert visible - MENU <= {"annotations", "Any"}


@pytest.mark.parametrize("name", sorted(MENU))
def test_every_name_is_real(name):
    """Each name can be imported."""
    assert getattr(plugin, name) is not None


def test_tune_is_late(child):
    """The tuner is loaded when it is asked for, not with the menu."""
    loaded = "'tunedgemm.tuner' in sys.modules"
    source = f"import sys\nfrom tunedgemm import plugin\nprint({loaded})\nprint(plugin.tune.__name__, {loaded})"
    assert child(source).splitlines() == ["False", "tune True"]


def test_other_names_are_attribute_errors():
    """What is not on the menu is no part of the contract."""
    with pytest.raises(AttributeError, match="no attribute 'Registry'"):
        getattr(plugin, "Registry")  # noqa: B009  what an author writes as an attribute
