"""platforms: a plugin states the architectures it serves, and the suite finds others it accepts."""

import pytest
from tunedgemm.backends.platforms import Platform
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.shape import Shape
from tunedgemm.solution import Unsupported
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.fakes import fake_backend, with_hooks
from tunedgemm.testing.shapes import DEVICES


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": "sm_90"},
        {"devices": ()},
        {"devices": ("H200",)},
        {"devices": ("sm_90", 7)},
        {"devices": ("sm_90",), "needs": "nvcc"},
        {"devices": ("sm_90",), "needs": ("two\nlines",)},
        {"devices": ("sm_90",), "ran": ("H200", "H200")},
        {"devices": ("sm_90",), "ran": (" ",)},
        {"devices": ("sm_90",), "ops": ("a16w16", None)},
    ],
    ids=str,
)
def test_a_wrong_field_is_an_error(fields):
    """Each field is a tuple of texts of one line; devices are architectures or kinds."""
    with pytest.raises(PluginError, match=r"must be a tuple of .*\(got "):
        Platform(**fields)


def test_an_architecture_or_its_kind_is_served():
    """A kind stands for all of its architectures; ops limit a platform."""
    platform = Platform(("sm_90", "amd"), ops=("a16w16",))
    assert platform.serves("a16w16", Device("sm_90", 132)) and platform.serves("a16w16", Device("gfx1201", 64))
    assert not platform.serves("a8w8", Device("sm_90", 132)) and not platform.serves("a16w16", Device("sm_80", 108))
    assert Platform(("cpu",)).serves("a8w8", Device("cpu-avx2", 8))


def test_an_order_may_be_that_of_devices_with_some_units():
    """`op:304` is ranked on 304 units alone, an op without units on all, and never elsewhere."""
    platform = Platform(("gfx942",), ranked=("a8w8:304", "a16w16"))
    assert platform.is_ranked("a8w8", Device("gfx942", 304)) and not platform.is_ranked("a8w8", Device("gfx942", 80))
    assert platform.is_ranked("a16w16", Device("gfx942", 80)) and not platform.is_ranked("a16w16", Device("gfx950", 256))


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        ((7,), "platforms must be a tuple of values of tunedgemm.plugin.Platform (got (7,)); write a tuple without repetitions"),
        (
            ("sm_90",),
            "platforms must be a tuple of values of tunedgemm.plugin.Platform (got ('sm_90',)); write a tuple without repetitions",
        ),
        ((Platform(("sm_90",), ops=("a8w8", "fmoe")),), "platforms and ops must name the same ops (differ in a16w16, fmoe)"),
        ((Platform(("sm_90",), ranked=("a8w8", "fmoe")),), "ranked must be among the ops of its platform (got fmoe)"),
    ],
)
def test_wrong_platforms_are_errors(stated, fault):
    """They are values of Platform, and name each op of the backend and no others."""
    with pytest.raises(PluginError) as caught:
        fake_backend("mine", ops=("a16w16", "a8w8"), platforms=stated)
    assert str(caught.value) == f"libtype 'mine': {fault}"


def test_the_suite_finds_an_architecture_that_is_not_named(monkeypatch):
    """`supports` must refuse the described devices that no platform names, of each op apart."""
    platforms = (Platform(("cpu", "sm_90")), Platform(("amd",), ops=("a8w8",)))
    backend = fake_backend("mine", ops=("a16w16", "a8w8"), platforms=platforms)

    class Planted(BackendConformance):
        libtype, shapes, device = "mine", (Shape("a16w16", 4, 32, 64), Shape("a8w8", 4, 32, 64)), DEVICES[-1]

    monkeypatch.setattr(Planted, "backend", classmethod(lambda cls: backend))
    with pytest.raises(AssertionError) as caught:
        Planted().test_supports_is_pure_quick_and_gives_reasons("a16w16")
    found = [line for line in str(caught.value).splitlines() if "returned None, but no platform serves a16w16" in line]
    assert [line.rsplit(" ", 1)[1] for line in found] == ["gfx942", "gfx950"]
    Planted().test_supports_is_pure_quick_and_gives_reasons("a8w8")
    backend = with_hooks(backend, supports=lambda device: None if device.gfx == "sm_90" else Unsupported("H200 only"))
    Planted().test_supports_is_pure_quick_and_gives_reasons("a16w16")


def test_the_built_in_backend_serves_every_device():
    """Its platforms name each kind of device, with each op and nothing to install."""
    backend = Registry().get(BUILTIN)
    assert {device for platform in backend.platforms for device in platform.devices} == {"nvidia", "amd", "cpu"}
    assert not any(platform.needs or platform.ops for platform in backend.platforms)
