"""A kernel that starts failing on a GPU, met by sixteen threads, each with its stream."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.driver import driver_interface, load_function, loaded_driver
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.ops import op_named
from tunedgemm.plugin import Launcher, Shape, Solution, Unsupported
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import with_hooks

pytestmark = pytest.mark.gpu

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 16, 512, 4096)
THREADS, CALLS, ENOUGH = 16, 300, 100
#: A kernel whose launch the driver refuses: no device has blocks of 4096 threads.
PTX = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n"
PAIRS = (("triton", "asm"), ("asm", "skinny"), ("skinny", "cublaslt"), ("cublaslt", "triton"), ("triton", "torch"))


def refused_launch(device: Device) -> None:
    """Launch a kernel that the driver refuses.

    Raises:
        LaunchError: always, with the driver's message.
    """
    driver = loaded_driver(driver_interface("test", "nvidia"))
    function = load_function(driver, PTX, "nothing", device.index)
    stream = torch.cuda.current_stream().cuda_stream
    driver.call("launch", function.address, 1, 1, 1, 4096, 1, 1, 0, stream, None, None, index=device.index)


def failing_from(backend: Backend, failing: threading.Event) -> Backend:
    """Return the backend with launchers whose launches are refused from an event on."""
    bind = backend.functions["bind"]

    def bound(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        launcher = bind(solution, shape, device)
        if not isinstance(launcher, Launcher):
            return launcher
        call = launcher.call

        def run(*operands: Any) -> Any:
            if failing.is_set():
                refused_launch(device)
            return call(*operands)

        return attrs.evolve(launcher, call=run)

    return with_hooks(backend, bind=bound)


def row_of(backend: Backend, device: Device, us: float) -> Row:
    """Make a row of a backend's first solution that binds."""
    solution = next(each for each in backend.solutions(SHAPE, device) if isinstance(backend.bind(each, SHAPE, device), Launcher))
    return Row(shape=SHAPE, gfx=device.gfx, cu_num=device.cu_num, device=device.name, solution=solution, us=us)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_sixteen_threads_meet_a_kernel_that_starts_failing(
    first: str, second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No call fails or is wrong, the second row takes over, and one warning has the driver's message."""
    device, registry, failing = device_of(0), Registry(), threading.Event()
    backends = [registry.get(first), registry.get(second)]
    for backend in backends:
        if device.kind != "nvidia" or not isinstance(backend, Backend) or backend.refusal(SHAPE, device):
            pytest.skip(f"{first} and {second} do not both serve {SHAPE} on {device}")
    path = tmp_path / "tuned.csv"
    rows = [row_of(backend, device, us) for us, backend in enumerate(backends, 1)]
    write_rows(path, OP, rows)
    registry.add(failing_from(backends[0], failing))
    dispatcher = Dispatcher(OP, registry, above=(path,))
    operands = OP.make_inputs(SHAPE, device.torch_device, 0)
    expected = OP.reference(SHAPE, operands).float()
    x, weight = operands
    assert dispatcher.bound(SHAPE, device).offer.solution == rows[0].solution
    hot = dispatcher.op.entry(dispatcher)["gemm_a16w16"]
    torch.cuda.synchronize()
    running = threading.Barrier(THREADS, action=failing.set, timeout=60)
    faults: list[str] = []

    def serve(number: int) -> None:
        form = x if number % 2 else x.view(2, 8, -1)
        call = hot if number % 4 < 2 else dispatcher.call
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for index in range(CALLS):
                    if index == ENOUGH:
                        running.wait()
                    out = call(form, weight)
                    if index % 50 == 0 or index == CALLS - 1:
                        torch.testing.assert_close(out.view(16, -1).float(), expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))
        except BaseException as error:
            faults.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert faults == []
    assert dispatcher.bound(SHAPE, device).offer.solution == rows[1].solution
    warnings = [record.message for record in caplog.records if "will not be used" in record.message]
    assert len(warnings) == 1 and "invalid argument" in warnings[0] and str(rows[0].solution) in warnings[0]
