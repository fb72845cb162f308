"""StandInConformance: the conformance suite for a backend over fakes, without its hardware.

A stand-in is the plugin's own backend, under another libtype, over a fake of the runtime, library
or compiler that it calls. A distribution in a folder of the plugin's tests registers it. The
processes that the suite starts find it by its entry point, as they find an installed one. See
docs/writing-a-plugin.md, "Without the hardware".
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tunedgemm.backends.driver import bind_driver
from tunedgemm.device import Device, device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.testing.conformance import BackendConformance

__all__ = ["StandInConformance", "bind_driver", "installed"]


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Make a block in which this process, and those that it starts, find the distributions in a folder.

    Raises:
        FileNotFoundError: no distribution in the folder has entry points.
    """
    if not list(folder.glob("*.dist-info/entry_points.txt")):
        raise FileNotFoundError(f"{folder} holds no distribution of a stand-in: NAME-1.dist-info with METADATA and entry_points.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder.absolute()), *sys.path])
        yield


class StandInConformance(BackendConformance):
    """The checks of `BackendConformance` for a stand-in, on the CPU instead of the faked device.

    An autouse fixture of the subclass sets what the fakes and the processes over them read, such as
    environment variables.

    Attributes:
        folder: holds the stand-in's distribution.
        work: the most multiplications of a shape; larger shapes are left out, as fakes are slow.
        more: shapes of any size to check as well.
    """

    device: ClassVar[Device | None] = device_of(-1)
    folder: ClassVar[Path]
    work: ClassVar[int] = 1 << 21
    more: ClassVar[tuple[Shape, ...]] = ()

    @classmethod
    def loading(cls) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the distribution of `folder` is found."""
        return installed(cls.folder)

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return the shapes of the suite that are small enough, and `more`."""
        small = [shape for shape in super().every_shape() if op_named(shape.op).flops(shape) <= 2 * cls.work]
        return tuple(dict.fromkeys((*small, *cls.more)))

    @classmethod
    def served_shapes(cls) -> tuple[Shape, ...]:
        """Return all shapes: pytest collects before a fixture sets what the fakes read."""
        return cls.every_shape()

    def _is_declared(self, shape: Shape, device: Device) -> bool:
        """Tell whether the platforms allow the shape on a described GPU; any CPU stands for the faked device."""
        return device.kind == "cpu" or super()._is_declared(shape, device)

    def test_loading_needs_no_device_and_no_other_plugin(self) -> None:
        """Check that the stand-in loads without a visible device.

        The plugin's own class checks that it imports no other.
        """
        assert not self._answers_of_children()[0]["cuda"], f"{self.libtype} initialises the GPU to answer for a device that is absent"
