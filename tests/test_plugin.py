"""plugin and tools: the menus of a plugin's author, frozen by number."""

from pathlib import Path

import pytest
from tunedgemm import plugin, tools

#: Names that `CONTRACT` = 1 promises. Removing one is a new contract.
WORDS = """
ARCHITECTURES Backend CONTRACT CallPlan Columns Command Device Driver DriverInterface ForkSafeLock JSON_MIB KernelFunction Launch
LaunchError LaunchPlan Launcher MapDescription Op Option Options OutOfResources Outcome Planned Platform PluginError
Progress Row Shape SignatureError Solution Table TensorMap Tolerance TunedGemmError Unsupported UntrustedError
UserError artifact bind_driver cache_folder call_of check_signature console device_context device_of
driver_interface dtype_bits environment_with expanded first_usable folder_of_entry home_folder hookimpl is_folder launch_of
load_fault load_function loaded_driver
make_private mapped_files may_guess named_file on_device op_named op_of_file open_regular ops package_folders parse_dtype plain_weight
private_folder read_log read_regular read_rows read_trusted replace_file scale_order scale_strides scratch
semaphores shape_of_texts short_dtype shuffle_weight signature_required summary switched_on torch_dtype torch_launcher
tune unshuffle_weight unusual_experts upsert warn_once workspace
"""
MENU = set(WORDS.split())


def test_the_menus_are_complete():
    """Contract and tools together offer each promised name once, and the contract stays short."""
    assert plugin.CONTRACT == 1
    assert {*plugin.__all__, *tools.__all__} == MENU
    assert not set(plugin.__all__) & set(tools.__all__)
    assert len(plugin.__all__) <= 20


def test_tune_is_late(child):
    """The tuner is loaded on first use, not with the menus."""
    loaded = "'tunedgemm.tuner' in sys.modules"
    source = f"import sys\nfrom tunedgemm import plugin, tools\nprint({loaded})\nprint(tools.tune.__name__, {loaded})"
    assert child(source).splitlines() == ["False", "tune True"]


@pytest.mark.parametrize("menu", [plugin, tools])
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
