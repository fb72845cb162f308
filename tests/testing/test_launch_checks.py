"""testing.launch_checks: faults of launchers over libraries, which compile late and keep state."""

import subprocess
import sys

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import device_of
from tunedgemm.shape import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.fakes import exact, fake_backend
from tunedgemm.testing.launching import output_of_side_stream

SHAPE = Shape("a16w16", 4, 32, 64)


class LateCompiler:
    """Compiles in another process at its first call."""

    compiled = False

    def __call__(self, solution, shape, *operands):
        if not self.compiled:
            self.compiled = True
            subprocess.run([sys.executable, "-c", ""], check=True)
        return exact(solution, shape, *operands)


class SharedOutput:
    """Writes each output into the same memory."""

    out = None

    def __call__(self, solution, shape, *operands):
        right = exact(solution, shape, *operands)
        self.out = right if self.out is None else self.out
        return self.out.copy_(right)


class Setting:
    """Has one setting for the process, which the last solution leaves changed."""

    changed = False

    def __call__(self, solution, shape, *operands):
        out = exact(solution, shape, *operands)
        out[0, 0] += self.changed and out.abs().max() / 256
        self.changed = self.changed or solution.kernel_name == "last"
        return out


def faults_of(call, monkeypatch):
    """Return the faults that the check of outputs finds in a backend of this call."""
    backend = fake_backend("mine", solutions=("first", "last"), call=call)

    class Planted(BackendConformance):
        libtype, shapes, device = "mine", (SHAPE,), device_of(-1)

    monkeypatch.setattr(Planted, "backend", classmethod(lambda cls: backend))
    try:
        Planted().test_outputs_match_the_reference("a16w16")
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (exact, ""),
        (LateCompiler(), "mine:first starts a process in its first call; compile in prepare() or bind()"),
        (SharedOutput(), "mine:first returns the memory of its last output again"),
        (Setting(), "mine:first gives another output after other solutions ran: it depends on a setting of the process"),
    ],
)
def test_the_check_of_outputs_finds_faults_of_libraries(call, fault, monkeypatch):
    """Each fault is named with its solution; a sound backend has none."""
    found = faults_of(call, monkeypatch)
    assert (fault in found) if fault else found == ""


@pytest.mark.gpu
def test_a_launch_on_another_stream_is_seen():
    """The output of a kernel that waits for the default stream is not there yet; a sound one is."""
    x, weight = torch.randn(64, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    right = x @ weight.t()

    def product(x, weight):
        return torch.mm(x, weight.t(), out=torch.empty(64, 32, device="cuda"))

    def elsewhere(x, weight):
        out = torch.empty(64, 32, device="cuda")
        with torch.cuda.stream(torch.cuda.default_stream()):
            return torch.mm(x, weight.t(), out=out)

    assert torch.allclose(output_of_side_stream(Launcher(product), (x, weight)), right, atol=1e-3)
    assert not torch.allclose(output_of_side_stream(Launcher(elsewhere), (x, weight)), right, atol=1e-3)
