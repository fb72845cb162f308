"""Platform: architectures that a backend supports, their requirements, and tested hardware."""

from __future__ import annotations

import re
from typing import Any

import attrs

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.device import Device
from tunedgemm.errors import PluginError

#: Kinds of devices, each of which stands for all of its architectures.
_KINDS = ("nvidia", "amd", "cpu")
_ARCHITECTURE = re.compile(r"sm_\d+|gfx[0-9a-f]+")


def _texts(platform: Platform, field: attrs.Attribute[Any], texts: tuple[str, ...]) -> None:
    lines = isinstance(texts, tuple) and all(isinstance(text, str) and text.isprintable() and text == text.strip() != "" for text in texts)
    if not lines or len(set(texts)) < len(texts):
        remedy = f"write ({texts!r},)" if isinstance(texts, str) else "write a tuple of different lines"
        raise PluginError(f"platform of {platform.devices!r}: {field.name} must be a tuple of texts (got {texts!r}); {remedy}")


def _devices(_: Platform, __: attrs.Attribute[Any], devices: tuple[str, ...]) -> None:
    named = isinstance(devices, tuple) and all(isinstance(name, str) for name in devices)
    if not named or not devices or not all(name in _KINDS or _ARCHITECTURE.fullmatch(name) for name in devices):
        raise PluginError(f"platform: devices must be a tuple of architectures, such as ('sm_90', 'gfx942'), or {_KINDS} (got {devices!r})")


@attrs.frozen
class Platform:
    """Architectures that a backend supports, with requirements and tested hardware.

    Raises:
        PluginError: a field is invalid.

    Attributes:
        devices: architectures, such as ``sm_90`` and ``gfx942``; ``nvidia``, ``amd`` and ``cpu``
            stand for all of a kind.
        needs: requirements beyond the distribution's dependencies, such as ``deep_gemm 2.1 to 2.3,
            or vLLM 0.20 to 0.33``.
        ran: hardware on which the kernels ran and were verified, such as ``H200``; empty if
            untested.
        ops: the ops supported there; empty for all ops of the backend.
        ranked: ops whose lists are in an order that measured times confirm there; a quick search
            tries their beginning. ``op:304`` is for devices with 304 units alone.
    """

    devices: tuple[str, ...] = attrs.field(validator=_devices)
    needs: tuple[str, ...] = attrs.field(default=(), validator=_texts)
    ran: tuple[str, ...] = attrs.field(default=(), validator=_texts)
    ops: tuple[str, ...] = attrs.field(default=(), validator=_texts)
    ranked: tuple[str, ...] = attrs.field(default=(), validator=_texts)

    def serves(self, op: str, device: Device) -> bool:
        """Check whether the platform includes the op, and the device or its family."""
        names = (device.kind, *ARCHITECTURES.stand_ins(device.gfx))
        return (op in self.ops or not self.ops) and any(name in self.devices for name in names)

    def is_ranked(self, op: str, device: Device) -> bool:
        """Check whether measured times confirm the order of an op's lists on the device."""
        return self.serves(op, device) and not {op, f"{op}:{device.cu_num}"}.isdisjoint(self.ranked)
