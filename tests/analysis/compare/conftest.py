"""A backend whose kernels are right, wrong, raise or end their process, and times to go with them."""

from __future__ import annotations

import functools
import os
import random
import sys

import pytest
import torch
from tunedgemm.analysis import compare as module
from tunedgemm.analysis.compare.measuring import measuring
from tunedgemm.device import device_of
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.tuner import tune
from tunedgemm.tuner.trial import Samples

#: microseconds that a call of a kernel takes by `planted`
TIMES = {"slow": 30.0, "fast": 10.0, "twin": 10.0}

_ran: list[str] = []


def linear(solution, shape, x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)


def call(solution, shape, x, weight, bias=None):
    """Right, but for kernels whose names say otherwise; notes which one ran."""
    _ran.append(solution.kernel_name)
    if solution.kernel_name == "raises":
        raise RuntimeError("boom")
    out = linear(solution, shape, x, weight, bias)
    if solution.kernel_name == "zeros":
        return torch.zeros_like(out)
    if solution.kernel_name == "rough":  # about 7 % of the elements, each by little
        out[out.abs() < 1] += 0.15
    return out


def planted(op, shape, device):
    """Return a bench that runs the kernel but reports planted times with jitter;
    torch's own is 5 us."""
    operands, chance = op.make_inputs(shape, device.torch_device, 0), random.Random(shape.m)

    def timed(launcher, rounds):
        _ran.clear()
        launcher.call(*operands)
        us = TIMES.get(_ran[-1], 10.0) if _ran else 5.0
        return Samples(tuple(us * chance.gauss(1.0, 0.002) for _ in range(rounds)))

    return lambda launchers, rounds: {solution: timed(launcher, rounds) for solution, launcher in launchers.items()}


@pytest.fixture
def turbo():
    """Makes a registry of a backend turbo with kernels of these names."""
    return lambda *names, **more: fake_registry(fake_backend("turbo", solutions=names, call=call, **more))


@pytest.fixture
def row():
    """Makes a row of a table for the present CPU and a kernel of turbo."""

    def make(shape, kernel, us=5.0, **more):
        here = device_of(-1)
        fields = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name, "solution": Solution("turbo", kernel), **more}
        return Row(shape=shape, us=us, **fields)

    return make


@pytest.fixture
def here(monkeypatch):
    """Run `run_config` and `compare` in this process over given backends,
    with planted or real times."""

    def use(registry, bench=planted):
        monkeypatch.setattr(module, "measuring", functools.partial(measuring, registry=registry, bench=bench))
        monkeypatch.setattr(module, "tune", functools.partial(tune, registry=registry, bench=bench))

    return use


@pytest.fixture
def listed(tmp_path):
    """An untuned file of three shapes."""
    path = tmp_path / "shapes.csv"
    path.write_text(
        "M,N,K,bias,dtype,count\n1,64,128,False,torch.float32,1\n2,64,128,False,torch.float32,10\n4,64,128,False,torch.float32,1\n"
    )
    return path


PLUGIN = """
import os, sys, time
import torch
from tunedgemm.plugin import Backend, Launcher, Solution, hookimpl
@hookimpl
def supports(): return None
@hookimpl
def enumerate_solutions(): return [Solution("brittle", "good")]
@hookimpl
def bind(solution):
    def launch(x, weight):
        if solution.kernel_name == "dies": os.abort()
        if solution.kernel_name == "hangs": time.sleep(600)
        return torch.nn.functional.linear(x, weight)
    return Launcher(launch)
backend = Backend("brittle", sys.modules[__name__], ops=("a16w16",))
"""


@pytest.fixture
def brittle(tmp_path, monkeypatch):
    """An installed backend whose kernels may end their process."""
    folder = tmp_path / "site"
    (folder / "brittle_plugin-1.dist-info").mkdir(parents=True)
    (folder / "brittle_plugin.py").write_text(PLUGIN)
    (folder / "brittle_plugin-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle-plugin\nVersion: 1\n")
    (folder / "brittle_plugin-1.dist-info" / "entry_points.txt").write_text("[tunedgemm.backends]\nbrittle = brittle_plugin:backend\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), *sys.path])))
