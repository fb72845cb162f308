"""Which Triton serves, and what is said of one that does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_triton import installed, triton
from tunedgemm_triton.families import family_of, unsupported
from tunedgemm_triton.names import parse_name


@pytest.fixture(autouse=True)
def _forget():
    """Ask anew, before and after."""
    caches = (installed.fault, installed.notice, installed.descriptor_fault)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("found", "version", "said"),
    [(None, "", "not installed"), (1, "3.5.1", "3.6 or later (got 3.5.1)"), (1, "3.6.0", ""), (1, "3.10.0+git1", ""), (1, "", "")],
)
def test_a_triton_that_is_absent_or_too_old_is_named(monkeypatch, found, version, said):
    """No kernel is offered, with the fault and the remedy as the reason."""
    monkeypatch.setattr(installed, "find_spec", lambda name: found)
    monkeypatch.setattr(installed, "version", lambda: version)

    answer = unsupported(Shape("a16w16", 16, 64, 64), Device("sm_90", 132))

    assert answer and said in answer and "; " in answer if said else not answer


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_tensor_descriptors_are_listed_where_triton_has_them(monkeypatch, tmp_path, has_descriptors):
    """A row or a guess that cannot be launched costs no compile, and the reason is named."""
    (tmp_path / "tools").mkdir()
    if has_descriptors:
        (tmp_path / "tools" / "tensor_descriptor.py").touch()
    monkeypatch.setattr(installed, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    shape, device = Shape("a16w16", 4096, 4096, 4096), Device("sm_90", 132)

    reason = triton.lacks(Solution("triton", "tma_r1_m128n128k64_g8_w4s4"), shape, device)

    assert bool(reason) is not has_descriptors and ("no tensor descriptors (got" in reason) is not has_descriptors
    listed = {solution.kernel_name for solution in triton.solutions(shape, device)}
    assert {name.partition("_")[0] for name in listed} == {"streamk", "gemm", *(["tma"] if has_descriptors else [])}
    plans = [family_of(shape.op).plan_of(parse_name(name), 1, shape, device) for name in listed if name.startswith("streamk")]
    assert all("tensordesc" in str(plan.steps) for plan in plans) is has_descriptors
    assert not triton.lacks(Solution("triton", "gemm_r1_m128n128k64_g8_w8s3"), shape, device)


@pytest.mark.parametrize(
    ("version", "said"), [("3.6.0", ""), ("3.9.2", ""), ("3.10.0", "triton 3.10.0: its code was not checked"), ("", "")]
)
def test_a_triton_that_is_newer_than_the_checked_ones_is_named(monkeypatch, version, said):
    """It serves, and what is not known is said."""
    monkeypatch.setattr(installed, "version", lambda: version)

    assert installed.notice().startswith(said) and bool(installed.notice()) is bool(said)
    assert not installed.fault()


def test_the_installed_triton_has_what_its_version_promises():
    """Tensor descriptors and each family are there for every version that is not too old."""
    assert not installed.fault() and not installed.notice() and not installed.descriptor_fault()
