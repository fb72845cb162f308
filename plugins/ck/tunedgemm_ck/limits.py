"""Check whether a family supports a shape on a device."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Unsupported

from tunedgemm_ck.family import Family


def supports(family: Family, shape: Shape, device: Device) -> bool | Unsupported:
    """Return True, or why no instance takes the shape on the architecture."""
    if device.kind != family.kind:
        vendor = {"nvidia": "NVIDIA", "amd": "AMD"}[family.kind]
        return Unsupported(f"{family.libtype} supports only {vendor} GPUs (got {device.gfx})")
    if shape.op not in family.ops:
        return Unsupported(f"op {shape.op} is not supported; supported: {', '.join(family.ops)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    reason = family.unsupported(shape, device)
    return Unsupported(reason) if reason else True
