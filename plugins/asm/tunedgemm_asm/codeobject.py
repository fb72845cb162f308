"""Read the metadata of AMD code objects (ELF files) without running them.

Sources: LLVM's AMDGPU user guide (ELF header flags, code object metadata V3 to V6, kernel
descriptor).
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm_asm.manifest import PackError

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

#: EF_AMDGPU_MACH of the ELF header's flags -> architecture.
MACHINES = MappingProxyType(
    {
        0x2F: "gfx906",
        0x30: "gfx908",
        0x3F: "gfx90a",
        0x40: "gfx940",
        0x41: "gfx1100",
        0x46: "gfx1101",
        0x48: "gfx1200",
        0x49: "gfx1250",
        0x4B: "gfx941",
        0x4C: "gfx942",
        0x4E: "gfx1201",
        0x4F: "gfx950",
    }
)
#: Threads of a wave; most threads of a workgroup.
WAVE, MAX_THREADS = 64, 1024

_AMDGPU, _HSA, _NOTE = 224, 64, 32
_DESCRIPTOR_BYTES = 64
_POINTERS = ("global_buffer", "dynamic_shared_pointer")


@attrs.frozen
class Argument:
    """One argument in the metadata of a kernel.

    Attributes:
        name: its name in the source; mostly absent.
        offset, bytes: its place in the argument segment.
        pointer: whether it is an address in global memory.
    """

    name: str
    offset: int
    bytes: int
    pointer: bool


@attrs.frozen
class Metadata:
    """Metadata of one kernel.

    Attributes:
        kernarg_bytes: bytes of the argument segment.
        lds_bytes: LDS bytes of a workgroup.
        scratch_bytes: private bytes of a thread.
        vgprs: vector registers of a thread, including *agprs* where the code object counts them so.
        agprs: accumulation registers of a thread, 0 where unstated.
        sgprs: scalar registers of a wave.
        spills: registers spilled to memory.
        workgroup: most threads of a workgroup.
        required: required size of a workgroup; empty where any up to *workgroup* is allowed.
        wavefront: threads of a wave.
        args: arguments in order; empty where none are listed.
    """

    kernarg_bytes: int
    lds_bytes: int
    scratch_bytes: int
    vgprs: int
    agprs: int
    sgprs: int
    spills: int
    workgroup: int
    required: tuple[int, ...]
    wavefront: int
    args: tuple[Argument, ...]


@attrs.frozen
class CodeObject:
    """Metadata of a code object.

    Attributes:
        gfx: its architecture.
        kernels: metadata by symbol, without the ``.kd`` of kernel descriptors.
        sha256: SHA-256 of its bytes, in hexadecimal.
    """

    gfx: str
    kernels: Mapping[str, Metadata] = attrs.field(converter=MappingProxyType, hash=False)
    sha256: str


def read(content: bytes) -> CodeObject:
    """Parse the bytes of a code object.

    Raises:
        PackError: the bytes are not an AMD code object, or are truncated or corrupt.
    """
    if content[:4] != b"\x7fELF":
        raise PackError(f"not an ELF file: it begins with {content[:4].hex() or 'nothing'}")
    from elftools.elf.elffile import ELFFile  # takes 40 ms, which no other command should wait for

    try:
        gfx, kernels = _read(ELFFile(io.BytesIO(content)), content)
    except PackError:
        raise
    except Exception as error:  # the bytes are untrusted: the parsers may raise anything
        raise PackError(f"corrupt or truncated ({type(error).__name__}: {str(error)[:120]})") from error
    return CodeObject(gfx, kernels, hashlib.sha256(content).hexdigest())


def _read(elf: ELFFile, content: bytes) -> tuple[str, dict[str, Metadata]]:
    _check_header(elf, content)
    gfx = MACHINES.get(elf["e_flags"] & 0xFF, f"machine 0x{elf['e_flags'] & 0xFF:x}")
    metadata = _metadata(elf)
    target = str(metadata.get("amdhsa.target", ""))
    if target and target.partition(":")[0].rpartition("-")[2] != gfx:
        raise PackError(f"header and metadata disagree (got {gfx} and {target})")
    return gfx, dict(_kernels(elf, content, metadata))


def _check_header(elf: ELFFile, content: bytes) -> None:
    ident = elf["e_ident"]
    if elf.elfclass != 64 or not elf.little_endian:
        raise PackError(f"expected a 64-bit little-endian ELF file (got {elf.elfclass} bits)")
    if struct.unpack_from("<H", content, 18)[0] != _AMDGPU or content[7] != _HSA:
        raise PackError(f"ELF file for another machine (got {elf['e_machine']}, {ident['EI_OSABI']}); expected AMD GPUs under HSA")
    if elf["e_type"] != "ET_DYN":
        raise PackError(f"not linked: expected type ET_DYN (got {elf['e_type']})")
    tables = [(elf["e_phoff"], elf["e_phentsize"] * elf["e_phnum"]), (elf["e_shoff"], elf["e_shentsize"] * elf["e_shnum"])]
    parts = [(part["p_offset"], part["p_filesz"]) for part in elf.iter_segments()] if _inside(tables, content) else []
    parts += [(part["sh_offset"], part["sh_size"]) for part in elf.iter_sections() if part["sh_type"] != "SHT_NOBITS"] if parts else []
    if not parts or not _inside(parts, content):
        raise PackError(f"truncated: {len(content)} bytes are fewer than its header says")


def _inside(parts: list[tuple[int, int]], content: bytes) -> bool:
    return all(offset + size <= len(content) for offset, size in parts)


def _metadata(elf: ELFFile) -> dict[str, Any]:
    """Return the map of the note NT_AMDGPU_METADATA."""
    import msgpack

    for part in (*elf.iter_segments(), *elf.iter_sections()):
        if part.header.get("p_type", part.header.get("sh_type")) in ("PT_NOTE", "SHT_NOTE"):
            for note in part.iter_notes():
                if note["n_name"] == "AMDGPU" and note["n_type"] in (_NOTE, "NT_AMDGPU_METADATA"):
                    metadata = msgpack.unpackb(note["n_desc"])
                    if isinstance(metadata, dict):
                        return metadata
    raise PackError("no AMDGPU metadata")


def _kernels(elf: ELFFile, content: bytes, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Metadata]]:
    table = elf.get_section_by_name(".dynsym")
    if table is None:
        raise PackError("no exported symbols")
    exported = {symbol.name: symbol for symbol in table.iter_symbols()}
    for kernel in metadata["amdhsa.kernels"]:
        symbol = kernel[".symbol"]
        if symbol not in exported or not symbol.endswith(".kd"):
            raise PackError(f"metadata names {symbol}, which is not exported")
        seen = _metadata_of(kernel)
        _check_descriptor(elf, content, exported[symbol], seen)
        yield symbol.removesuffix(".kd"), seen


def _check_descriptor(elf: ELFFile, content: bytes, symbol: Any, seen: Metadata) -> None:
    """Check that the kernel descriptor agrees with the metadata.

    The hardware reads the descriptor, the runtime the metadata. An argument size of 0 is unstated.
    """
    offsets = list(elf.address_offsets(symbol["st_value"], _DESCRIPTOR_BYTES))
    if not offsets:
        raise PackError(f"kernel descriptor {symbol.name} is outside the file")
    lds, scratch, kernarg = struct.unpack_from("<III", content, offsets[0])
    if lds != seen.lds_bytes or scratch != seen.scratch_bytes or kernarg not in (0, seen.kernarg_bytes):
        raise PackError(f"descriptor and metadata of {symbol.name.removesuffix('.kd')} disagree on LDS, scratch or arguments")


def _metadata_of(kernel: Mapping[str, Any]) -> Metadata:
    return Metadata(
        kernarg_bytes=_number(kernel[".kernarg_segment_size"]),
        lds_bytes=_number(kernel[".group_segment_fixed_size"]),
        scratch_bytes=_number(kernel[".private_segment_fixed_size"]),
        vgprs=_number(kernel[".vgpr_count"]),
        agprs=_number(kernel.get(".agpr_count", 0)),
        sgprs=_number(kernel[".sgpr_count"]),
        spills=_number(kernel.get(".vgpr_spill_count", 0)) + _number(kernel.get(".sgpr_spill_count", 0)),
        workgroup=_number(kernel[".max_flat_workgroup_size"]),
        required=tuple(_number(size) for size in kernel.get(".reqd_workgroup_size", ())),
        wavefront=_number(kernel[".wavefront_size"]),
        args=tuple(
            Argument(str(arg.get(".name", "")), _number(arg[".offset"]), _number(arg[".size"]), arg[".value_kind"] in _POINTERS)
            for arg in kernel.get(".args", ())
        ),
    )


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise PackError(f"metadata: expected a number (got {str(value)[:40]!r})")
    return value
