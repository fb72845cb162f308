"""plugin and tools: the menus of a plugin's author, frozen by number."""

from pathlib import Path

import pytest
from tunedgemm import plugin
from tunedgemm.tools import files, launching, tables

#: Names that `CONTRACT` = 1 promises, by menu.
MENUS = {
    plugin: """
Backend CONTRACT Columns Command Device LaunchError Launcher Op Option OutOfResources Platform PluginError Shape Solution Tolerance
TunedGemmError Unsupported UserError device_of hookimpl
""",
    launching: """
ARCHITECTURES CallPlan Driver DriverInterface ForkSafeLock KernelFunction Launch LaunchPlan MapDescription TensorMap call_of
device_context driver_interface dtype_bits environment_with first_usable launch_of load_fault load_function loaded_driver mapped_files
may_guess on_device parse_dtype scale_order scale_strides scratch semaphores switched_on torch_dtype torch_launcher unusual_experts
warn_once workspace
""",
    files: """
SignatureError artifact cache_folder check_signature expanded folder_of_entry home_folder private_folder read_regular read_trusted
replace_file signature_required
""",
    tables: """
Options Outcome Planned Progress Row Table console named_file op_named op_of_file ops read_log read_rows shape_of_texts shuffle_weight
summary tune upsert
""",
}


@pytest.mark.parametrize(("menu", "words"), MENUS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_the_menus_are_complete(menu, words):
    """Each menu offers its promised names and no others, none of them twice, and the contract stays short."""
    assert set(menu.__all__) == set(words.split()) and len(menu.__all__) == len(words.split())
    assert all(getattr(menu, name, None) is not None for name in menu.__all__)
    assert plugin.CONTRACT == 1 and len(plugin.__all__) <= 20
    assert all(set(menu.__all__).isdisjoint(other.__all__) for other in MENUS if other is not menu)


def test_tune_is_late(child):
    """The tuner is loaded on first use, not with the menus."""
    loaded = "'tunedgemm.tuner' in sys.modules"
    source = f"import sys\nfrom tunedgemm.tools import files, launching, tables\nprint({loaded})\nprint(tables.tune.__name__, {loaded})"
    assert child(source).splitlines() == ["False", "tune True"]


@pytest.mark.parametrize("menu", MENUS)
def test_other_names_are_attribute_errors(menu):
    """A name outside the menus raises AttributeError."""
    with pytest.raises(AttributeError, match="no attribute 'Registry'"):
        getattr(menu, "Registry")  # noqa: B009  what an author writes as an attribute


def test_a_third_partys_plugin_loads(child):
    """A plugin written to the documentation of the contract is found, takes shapes and computes."""
    source = """
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
(backend,) = Registry().select("upcast")
shape, device = Shape("a16w16", m=4, n=32, k=64, outdtype="fp32"), device_of(-1)
(solution,) = backend.solutions(shape, device)
op = op_named("a16w16")
operands = op.make_inputs(shape, device.torch_device, 0)
error = (backend.bind(solution, shape, device).call(*operands) - op.reference(shape, operands)).abs().max()
print(backend.distribution, bool(error < 1e-3))
"""
    assert child(source, Path(__file__).with_name("thirdparty")) == "tunedgemm-upcast True"
