"""tuned_gemm: copies of instances."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import tunedgemm
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.ops import functions


def test_instances_copy_and_pickle() -> None:
    """`tgemm` is copied and pickled by reference; another instance with its settings and files."""
    assert copy.deepcopy(tunedgemm.tgemm) is copy.copy(tunedgemm.tgemm) is pickle.loads(pickle.dumps(tunedgemm.tgemm)) is tunedgemm.tgemm
    gemm = TunedGemm(settings=Settings(untuned=("fake",)))
    gemm.of("a16w16").above = (Path("a.csv"),)
    for copied in (copy.deepcopy(gemm), copy.copy(gemm), pickle.loads(pickle.dumps(gemm))):
        assert copied is not gemm and copied.of("a16w16").settings.untuned == ("fake",)
        assert copied.of("a16w16").above == (Path("a.csv"),)


def test_functions_of_the_default_instance_pickle() -> None:
    """Each spelling of each public function is pickled by reference, as part of a model is."""
    for name in functions():
        for function in (getattr(tunedgemm, name), getattr(tunedgemm.tgemm, name)):
            assert pickle.loads(pickle.dumps(function)) is copy.deepcopy(function) is function, name


def test_what_was_unpickled_is_traced(child: Callable[[str], str]) -> None:
    """A process that gets `tgemm` or a function in a pickle compiles its calls without a break."""
    source = f"""
import pickle, torch
for pickled in {[pickle.dumps(each) for each in (tunedgemm.tgemm.mm, tunedgemm.tgemm)]!r}:
    got = pickle.loads(pickled)
    mm = getattr(got, "mm", got)
    call = torch.compile(lambda x, w: mm(x, w), backend="eager", fullgraph=True)
    print(call(torch.ones(3, 32), torch.ones(16, 32)).sum().item())
"""
    assert child(source).split() == [str(3.0 * 16 * 32)] * 2
