"""benchmarks/aiter_fit.py: planted rates found again, folds, and the shipped rates on AITER's tables."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from tunedgemm.device import Device
from tunedgemm.shape import Shape

from tests.benchmarks.loading import ROOT, as_module

pytest.importorskip("tunedgemm_ck")
DEVICE = Device("gfx942", 304)
