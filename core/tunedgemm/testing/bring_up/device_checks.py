"""Checks of the device itself: 8-bit floats, orders of bytes, clocks, the host's cost of a call."""

from __future__ import annotations

import statistics
import timeit
from typing import Any

import torch

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.backends.launcher import Launcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import fp8_of, torch_dtype
from tunedgemm.ops.formats.scales import shuffle_scale
from tunedgemm.ops.formats.shuffle import plain_weight, shuffle_weight, unshuffled
from tunedgemm.process.plugin_guard import attempt
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.bring_up.bench import LAUNCH_S, Bench, Verdict
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.tuner.clocks import clocks as read_clocks

#: Microseconds of dispatch that are a fault; the budget of `make bench` is 1.2.
_DISPATCH_US = 10.0


def formats(bench: Bench) -> Verdict:
    """Compare all values of the 8-bit floats with the CPU's, and multiply by torch in the device's fp8."""
    bench.announce("launch", "torch", LAUNCH_S)
    at = bench.device.torch_device
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for name in ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz", "e8m0"):
        values = codes.view(torch_dtype(name))
        here, there = values.float(), attempt(lambda: values.to(at).float().cpu())[0]  # noqa: B023  called at once
        if there is not None and not torch.equal(here.nan_to_num(-1.0), there.nan_to_num(-1.0)):
            return Verdict("wrong", f"{name}: its 256 values differ from the CPU's", "torch")
    known = ARCHITECTURES[bench.device.gfx].fp8 if bench.device.gfx in ARCHITECTURES else ""
    if not known:
        return Verdict(detail="no fp8 product in the table of architectures")
    drawn = torch.randn(2, 64, 64, device=at, generator=torch.Generator(at).manual_seed(0))
    x, weight = (matrix.to(torch_dtype(known)) for matrix in drawn)
    one = torch.ones((), device=at)
    out, raised = attempt(lambda: torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    if raised:
        return Verdict("failed", f"{known}: torch raised {raised}", "torch")
    factor = float((out.double() / (x.double() @ weight.double().t())).median())
    same = abs(factor - 1) < 0.05
    return Verdict("ok" if same else "wrong", f"{known}" + ("" if same else f": products are {factor:.2g} times the right ones"), "torch")


def shuffles(bench: Bench) -> Verdict:
    """Compare shuffled weights and scales with the CPU's bit for bit, and AITER's where it is installed."""
    bench.announce("launch", "shuffle", LAUNCH_S)
    at, faults, compared = bench.device.torch_device, list[str](), 0
    weight = torch.arange(256 * 512, dtype=torch.int32).remainder(251).to(torch.uint8).view(256, 512)
    theirs = attempt(_aiter_shuffle)[0]
    for layout in ("aiter16x16", "aiter32x16", "aiter16x32", "columns128"):
        pair: Any = tuple(map(int, layout.removeprefix("aiter").split("x"))) if layout.startswith("aiter") else layout
        for dtype in (torch.bfloat16, torch_dtype(fp8_of(bench.device.gfx))):
            typed, compared = weight.view(dtype), compared + 1
            there = shuffle_weight(typed.to(at), pair)
            raw = plain_weight(there).cpu().view(torch.uint8)
            faults += [f"{layout} of {dtype}"] * (not torch.equal(raw, plain_weight(shuffle_weight(typed, pair)).view(torch.uint8)))
            faults += [f"{layout} of {dtype}, back"] * (not torch.equal(unshuffled(there).cpu().view(torch.uint8), weight))
            if theirs and isinstance(pair, tuple) and pair != (16, 32):
                compared, other = compared + 1, theirs(typed.to(at), layout=pair).cpu().view(torch.uint8)
                faults += [f"{layout} of {dtype}, against AITER's"] * (not torch.equal(raw, other))
    scale = weight[:, :16].contiguous()
    same = torch.equal(
        plain_weight(shuffle_scale(scale.to(at))).cpu().view(torch.uint8), plain_weight(shuffle_scale(scale)).view(torch.uint8)
    )
    faults += [] if same else ["scales"]
    return Verdict("wrong" if faults else "ok", ", ".join(faults), "", {"compared": compared + 1, "aiter": bool(theirs)})


def _aiter_shuffle() -> Any:
    from aiter.ops.shuffle import shuffle_weight  # type: ignore[import-not-found, unused-ignore]

    return shuffle_weight


def clocks(bench: Bench) -> Verdict:
    """Read the clock and the throttling reason of a busy device, as the tuner does."""
    bench.announce("launch", "torch", LAUNCH_S)
    matrix = torch.randn(4096, 4096, device=bench.device.torch_device, dtype=torch.bfloat16)
    for _ in range(200):
        torch.mm(matrix, matrix)
    mhz, throttled = read_clocks(bench.device)
    torch.cuda.synchronize()
    detail = throttled or ("" if mhz else "no clock; install nvidia-ml-py, or AMD SMI's Python package")
    return Verdict("ok" if mhz else "refused", detail, "", {"mhz": mhz})


def dispatch(bench: Bench) -> Verdict:
    """Time a hit of dispatch on the host, over a launcher that launches nothing."""
    bench.announce("launch", "preallocated", LAUNCH_S)
    x, weight, out = (torch.zeros(*sizes, dtype=torch.bfloat16, device=bench.device.torch_device) for sizes in ((4, 64), (32, 64), (4, 32)))
    backend = with_hooks(fake_backend("preallocated", heuristic="fake"), bind=lambda: Launcher(lambda *_: out))
    gemm = TunedGemm(fake_registry(backend), settings=Settings(untuned=("preallocated",)))
    launcher = backend.bind(Solution("preallocated", "fake"), Shape("a16w16", 4, 32, 64), bench.device)
    assert isinstance(launcher, Launcher)
    taxes, call, bare = [], gemm.gemm_a16w16, launcher.call
    with torch.no_grad():
        if call(x, weight).data_ptr() != out.data_ptr():
            return Verdict("wrong", "dispatch chose another backend than the one under test")
        for _ in range(15):
            ours, theirs = (min(timeit.repeat(lambda: given(x, weight), number=2000, repeat=2)) for given in (call, bare))  # noqa: B023
            taxes.append((ours - theirs) / 2000 * 1e6)
    us = statistics.median(taxes)
    return Verdict("ok" if us < _DISPATCH_US else "wrong", f"{us:.2f} us of the host", "", {"us": round(us, 3)})
