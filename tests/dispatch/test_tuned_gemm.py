"""tuned_gemm: copies of instances."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import tunedgemm
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm


def test_instances_copy_and_pickle() -> None:
    """`tgemm` is copied and pickled by reference; another instance with its settings and files."""
    assert copy.deepcopy(tunedgemm.tgemm) is copy.copy(tunedgemm.tgemm) is pickle.loads(pickle.dumps(tunedgemm.tgemm)) is tunedgemm.tgemm
    gemm = TunedGemm(settings=Settings(untuned=("fake",)))
    gemm.of("a16w16").above = (Path("a.csv"),)
    for copied in (copy.deepcopy(gemm), copy.copy(gemm), pickle.loads(pickle.dumps(gemm))):
        assert copied is not gemm and copied.of("a16w16").settings.untuned == ("fake",)
        assert copied.of("a16w16").above == (Path("a.csv"),)
