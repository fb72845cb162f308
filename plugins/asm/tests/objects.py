"""Make code objects: ELF files with all that a loader reads, written after LLVM's AMDGPU user guide
and the ELF specification. Their code is one instruction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import pytest

msgpack = pytest.importorskip("msgpack", reason="reading code objects requires msgpack and pyelftools")
pytest.importorskip("elftools", reason="reading code objects requires msgpack and pyelftools")

#: EF_AMDGPU_MACH and its features xnack and sramecc as "any".
FLAGS = {"gfx90a": 0x53F, "gfx942": 0x54C, "gfx950": 0x54F, "gfx1100": 0x41}
_END_PROGRAM = struct.pack("<I", 0xBF810000)
_PAGE = 0x1000


def made(
    kernels: Iterable[str],
    gfx: str = "gfx942",
    kernarg_bytes: int = 352,
    lds_bytes: int = 65536,
    workgroup: int = 256,
    args: Iterable[Mapping[str, Any]] = (),
    *,
    target: str | None = None,
    changes: Mapping[str, Any] | None = None,
    machine: int = 224,
    exported: Iterable[str] | None = None,
    descriptor_bytes: int | None = None,
) -> bytes:
    """Return a code object with these kernels.

    Args:
        kernels: their symbols.
        gfx: architecture of the ELF header.
        kernarg_bytes, lds_bytes, workgroup, args: what the metadata says of each, *args* with keys
            of the user guide (``.offset`` …).
        target: that of the metadata; None for *gfx*, "" for none.
        changes: keys of each kernel's metadata put in place of the others; None as a value removes
            the key.
        machine: of the ELF header; 224 is an AMD GPU.
        exported: symbols of the descriptors without ``.kd``; those of *kernels* if absent.
        descriptor_bytes: size of the arguments in the descriptors; *kernarg_bytes* if absent.
    """
    names = list(kernels)
    symbols = list(exported) if exported is not None else names
    metadata: dict[str, Any] = {
        "amdhsa.version": [1, 2],
        "amdhsa.kernels": [_kernel(name, kernarg_bytes, lds_bytes, workgroup, args, changes or {}) for name in names],
    }
    if target != "":
        metadata["amdhsa.target"] = f"amdgcn-amd-amdhsa--{target or gfx}"
    in_descriptor = kernarg_bytes if descriptor_bytes is None else descriptor_bytes
    described = struct.pack("<IIIIq20xIIIHH4x", lds_bytes, 0, in_descriptor, 0, 0, 0, 0, 0, 8, 0)
    strings, starts = _strings([part for name in symbols for part in (name, f"{name}.kd")])
    note = _note(msgpack.packb(metadata))
    sections = [
        _Section(".note", 7, 2, note, align=4),
        _Section(".dynsym", 11, 2, b"", align=8, link=3, info=1, entry=24),
        _Section(".dynstr", 3, 2, strings),
        _Section(".rodata", 1, 2, described * len(symbols), align=64),
        _Section(".text", 1, 6, _END_PROGRAM * max(len(symbols), 1), align=256),
    ]
    sections[1].content = b"\0" * 24 * (1 + 2 * len(symbols))
    _place(sections)
    rodata, text = sections[3].offset, sections[4].offset
    table = bytearray(24)
    for index, name in enumerate(symbols):  # code starts a page, as linkers place it; descriptors keep their offsets in the file
        table += struct.pack("<IBBHQQ", starts[name], 0x12, 3, 5, text + 4 * index, 4)
        table += struct.pack("<IBBHQQ", starts[f"{name}.kd"], 0x11, 3, 4, rodata + 64 * index, 64)
    sections[1].content = bytes(table)
    return _file(sections, FLAGS[gfx], machine)


def named(field: str, offset: int, size: int, *, pointer: bool) -> dict[str, Any]:
    """Return an argument for the metadata of a kernel."""
    kind = {".value_kind": "global_buffer", ".address_space": "global"} if pointer else {".value_kind": "by_value"}
    return {".name": field, ".offset": offset, ".size": size, **kind}


def _kernel(
    name: str, kernarg: int, lds: int, workgroup: int, args: Iterable[Mapping[str, Any]], changes: Mapping[str, Any]
) -> dict[str, Any]:
    metadata = {
        ".name": name,
        ".symbol": f"{name}.kd",
        ".args": [dict(arg) for arg in args],
        ".kernarg_segment_size": kernarg,
        ".kernarg_segment_align": 16,
        ".group_segment_fixed_size": lds,
        ".private_segment_fixed_size": 0,
        ".max_flat_workgroup_size": workgroup,
        ".wavefront_size": 64,
        ".sgpr_count": 96,
        ".vgpr_count": 256,
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


@attrs.define
class _Section:
    name: str
    kind: int
    flags: int
    content: bytes
    align: int = 1
    link: int = 0
    info: int = 0
    entry: int = 0
    offset: int = 0


def _place(sections: list[_Section]) -> None:
    offset = 64 + 2 * 56
    for section in sections:
        section.offset = offset = -(-offset // section.align) * section.align
        offset += len(section.content)


def _strings(names: list[str]) -> tuple[bytes, dict[str, int]]:
    table, starts = bytearray(1), {}
    for name in names:
        starts[name] = len(table)
        table += name.encode() + b"\0"
    return bytes(table), starts


def _note(description: bytes) -> bytes:
    padded = description + b"\0" * (-len(description) % 4)
    return struct.pack("<III", 7, len(description), 32) + b"AMDGPU\0\0" + padded


def _file(sections: list[_Section], flags: int, machine: int) -> bytes:
    names, starts = _strings([section.name for section in sections] + [".shstrtab"])
    sections = [*sections, _Section(".shstrtab", 3, 0, names)]
    _place(sections)
    end = sections[-1].offset + len(sections[-1].content)
    headers = -(-end // 8) * 8
    content = bytearray(headers)
    for section in sections:
        content[section.offset : section.offset + len(section.content)] = section.content
    note, loaded = sections[0], sections[-1].offset
    ident = b"\x7fELF\x02\x01\x01\x40\x02" + b"\0" * 7
    content[:64] = ident + struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, headers, flags, 64, 56, 2, 64, len(sections) + 1, len(sections)
    )
    content[64:120] = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, loaded, loaded, _PAGE)
    size = len(note.content)
    content[120:176] = struct.pack("<IIQQQQQQ", 4, 4, note.offset, note.offset, note.offset, size, size, 4)
    content += b"\0" * 64
    for section in sections:
        address = section.offset if section.flags else 0
        content += struct.pack(
            "<IIQQQQIIQQ",
            *(starts[section.name], section.kind, section.flags, address, section.offset, len(section.content)),
            *(section.link, section.info, section.align, section.entry),
        )
    return bytes(content)
