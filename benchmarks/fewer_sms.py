"""Time untuned guesses on some of a GPU's SMs, as on products of the architecture with fewer.

    python benchmarks/fewer_sms.py --sms 78 114 --shapes layers --m 1 16 64 256 --race 8 -o sms

    python benchmarks/fewer_sms.py --op a8w8_blockscale --scale-order m_major_padded --arms deepgemm

All subjects run on the stream of a green context, which holds that many SMs: pairs of them, or
whole groups of eight where the number is a multiple of eight. Their graphs keep it. Guesses and
kernels are for a described product: this one with fewer SMs, the arithmetic in proportion, and the
whole memory and L2; see the printed rates. ``--name nvidia-h20`` describes that product instead,
whose tensor cores are slower: it shows what would answer there, not how fast.

torch is timed twice, once with a hint to cuBLAS how many SMs it has, and counts with its better
time. DeepGEMM gets the number, too. vLLM's CUTLASS takes none, and shares its tiles among all SMs.

``--race N`` times the first N of each backend's list in the same rounds: "loss" is the guess's time
over the fastest of all our kernels, less one.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from harness import add_rounds, add_shapes, geometric_mean, head, interval, parser_of, ratio, save, shapes_of
from peers import PEERS, deep_gemm, peer
from speed import ceilings
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices, untuned_libtypes
from tunedgemm.device import Device, current_device
from tunedgemm.ops import op_named
from tunedgemm.ops.scale_order import ORDERS, ROW, with_order
from tunedgemm.products import products
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.rounds import Workload
from tunedgemm.tuner.trial import Samples

TORCH, HINTED = Solution("torch", "native"), Solution("torch", "native-hinted")
#: cuda.h: a resource of SMs, splits that may part the SMs of a cluster, flags of contexts and
#: streams; bytes of a resource, with room to spare, and the offset of its count.
_OF_SMS, _UNGROUPED, _DEFAULT_STREAM, _NON_BLOCKING, _BYTES, _COUNT = 1, 1, 1, 1, 512, 96


def green_stream(sms: int, index: int) -> tuple[torch.cuda.Stream, int]:
    """Return a stream of a green context with this many SMs at least, and their number.

    Raises:
        SystemExit: the driver refuses.
    """
    library = ctypes.CDLL("libcuda.so.1")

    def ask(name: str, *arguments: Any) -> None:
        if status := getattr(library, name)(*arguments):
            raise SystemExit(f"{name} failed (got {status}); green contexts require CUDA 12.5 and its driver")

    whole, part, rest = (ctypes.create_string_buffer(_BYTES) for _ in range(3))
    groups, described, context, stream = ctypes.c_uint(1), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    ask("cuDeviceGetDevResource", index, whole, _OF_SMS)
    flags = _UNGROUPED if sms % 8 else 0
    ask("cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, rest, flags, sms)
    ask("cuDevResourceGenerateDesc", ctypes.byref(described), part, 1)
    ask("cuGreenCtxCreate", ctypes.byref(context), described, index, _DEFAULT_STREAM)
    ask("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
    return torch.cuda.ExternalStream(stream.value, device=index), ctypes.c_uint.from_buffer(part, _COUNT).value


def described(here: Device, sms: int, name: str) -> Device:
    """Return the named product with these SMs, or this one with fewer, which joins the known ones."""
    if not name and here.name in products():
        known, name = products()[here.name], f"{here.name}-{sms}"
        peak = known.peak_tflops * sms // known.units
        products()[name] = attrs.evolve(known, name=name, units=sms, peak_tflops=peak, untuned=False)
    return attrs.evolve(here, cu_num=sms, name=name)


def hinted(call: Callable[..., Any], left_out: int) -> Callable[..., Any]:
    """Return torch's call with a hint to cuBLAS how many SMs to leave out."""

    def hinting(*operands: Any) -> Any:
        torch._C._set_sm_carveout_experimental(left_out)
        try:
            return call(*operands)
        finally:
            torch._C._set_sm_carveout_experimental(None)

    return hinting


def bound(registry: Registry, solutions: Iterator[Solution], shape: Shape, device: Device) -> Iterator[tuple[Solution, Launcher]]:
    """Yield the solutions that bind, with their launchers."""
    for solution in solutions:
        backend = registry.get(solution.libtype)
        launcher = backend.bind(solution, shape, device) if isinstance(backend, Backend) else None
        if isinstance(launcher, Launcher):
            yield solution, launcher


def listed(registry: Registry, libtypes: list[str], shape: Shape, device: Device, count: int) -> Iterator[Solution]:
    """Yield the first solutions of each backend's list."""
    for libtype in libtypes:
        if isinstance(backend := registry.get(libtype), Backend):
            yield from itertools.islice(backend.iterate(shape, device), count)


def judge(registry: Registry, shape: Shape, device: Device, arguments: Any, stream: torch.cuda.Stream) -> dict[str, Any]:
    """Time torch, the guess, the peers and the raced kernels on one shape."""
    left_out = torch.cuda.get_device_properties(device.index).multi_processor_count - device.cu_num
    own = next(bound(registry, iter([TORCH]), shape, device))[1]
    launchers = {TORCH: own, HINTED: attrs.evolve(own, call=hinted(own.call, left_out))}
    guess = next(bound(registry, choices(shape, device, registry, untuned_libtypes()), shape, device), None)
    raced = dict(bound(registry, listed(registry, arguments.libtypes, shape, device, arguments.race), shape, device))
    raced |= dict([guess] if guess else [])
    answers = {name: peer(name, shape) for name in arguments.arms}
    launchers |= {Solution("peer", name): answer for name, answer in answers.items() if isinstance(answer, Launcher)} | raced
    workload = Workload(op_named(shape.op), shape, device, seed=1)
    workload._stream = stream  # captured kernels keep the SMs of this stream
    workload(launchers, 3)
    samples = {key: answer.us for key, answer in workload(launchers, arguments.rounds).items() if isinstance(answer, Samples)}
    us = {key: interval(values)[0] for key, values in samples.items()}
    baseline = min((key for key in (TORCH, HINTED) if key in us), key=us.__getitem__)
    row: dict[str, Any] = {"sms": device.cu_num, "M": shape.m, "N": shape.n, "K": shape.k, "torch_us": us[baseline]}
    row |= {f"{name}_us": us.get(Solution("peer", name), 0.0) for name in arguments.arms}
    if guess and guess[0] in us:
        row |= {"guess": str(guess[0]), "guess_us": us[guess[0]], "gain": ratio(samples[baseline], samples[guess[0]])}
    if ours := [key for key in raced if key in us]:
        best = min(ours, key=us.__getitem__)
        loss = {"loss": us[guess[0]] / us[best] - 1} if guess and guess[0] in us else {}
        row |= {"best": str(best), "best_us": us[best], **loss}
    return row | {"samples": {str(key): [round(value, 3) for value in values] for key, values in samples.items()}}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each number of SMs and M."""
    lines = []
    for sms, m in sorted({(row["sms"], row["M"]) for row in rows}):
        here = [row for row in rows if (row["sms"], row["M"]) == (sms, m)]
        gains, losses = [row["gain"][0] for row in here if "gain" in row], [row["loss"] for row in here if "loss" in row]
        line = f"{sms} SMs, M={m}: {len(gains)} guesses of {len(here)} shapes"
        line += f", over torch {geometric_mean(gains):.3f}, least {min(gains):.3f}" if gains else ""
        lines.append(line + (f", loss {sum(losses) / len(losses):.3f}, most {max(losses):.3f}" if losses else ""))
    return lines


def main(words: list[str] | None = None) -> int:
    """Time the shapes on each number of SMs."""
    parser = parser_of(__doc__)
    parser.add_argument("--sms", type=int, nargs="+", default=[78, 114], help="numbers of SMs (default: 78 114)")
    parser.add_argument("--name", default="", help="product to describe (default: this one with fewer SMs)")
    add_shapes(parser, "layers", op=True)
    parser.add_argument("--m", type=int, nargs="+", default=[], metavar="M", help="only these M")
    parser.add_argument("--scale-order", default=ROW, choices=ORDERS, help="of block scales of x (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", default=[], choices=list(PEERS), help="kernels of other projects")
    parser.add_argument("--race", type=int, default=0, metavar="N", help="first kernels of each list to time (default: none)")
    parser.add_argument("--libtypes", nargs="+", default=["asm", "triton", "skinny"], help="backends that race")
    add_rounds(parser, 15)
    arguments = parser.parse_args(words)
    registry, here, rows = Registry(), current_device(), []
    shapes = [shape for _, shape in shapes_of(arguments.shapes, arguments.op) if not arguments.m or shape.m in arguments.m]
    about = head("fewer_sms", op=arguments.op, rates={})
    for wanted in arguments.sms:
        stream, sms = green_stream(wanted, here.index)
        device = described(here, sms, arguments.name)
        if "deepgemm" in arguments.arms:
            deep_gemm().set_num_sms(sms)
        with torch.cuda.stream(stream):
            about["rates"][sms] = ceilings()
            print(device, about["rates"][sms], flush=True)
            for shape in shapes:
                rows.append(judge(registry, with_order(shape, arguments.scale_order), device, arguments, stream))
                print(*(f"{name}={value}" for name, value in rows[-1].items() if name != "samples"), flush=True)
                save(arguments.output, {**about, "summary": summary(rows), "rows": rows})
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
