"""Decode gfx950 instructions that LLVM 19 does not know (CDNA4 ISA, "Microcode formats"), which
AITER's bf16 kernels of 256x256 use.
"""

from __future__ import annotations

import re
import struct
from io import BytesIO

from elftools.elf.elffile import ELFFile

_PRODUCT, _TO_BF16, _LOAD = 0xD3B5, 0xD268, 0xE05D
_SWAPS = {0x59: "v_permlane16_swap_b32", 0x5A: "v_permlane32_swap_b32"}
_NOP = struct.pack("<II", 0xBF800000, 0xBF800000)
_LINE = re.compile(r"^\s*(\S.*?)\s*// ([0-9A-F]{12}): ([0-9A-F]{8})")


def decoded(first: int, second: int) -> str | None:
    """Decode an instruction of two words, or return None."""
    sources = [second >> shift & 511 for shift in (0, 9, 18)]

    def registers(source: int, count: int, accumulation: int = 0) -> str:
        number = source - 256
        name = "a" if accumulation else "v"
        return f"{name}{number}" if count == 1 else f"{name}[{number}:{number + count - 1}]"

    if first >> 16 == _PRODUCT and not first >> 8 & 0x7F and not second >> 29:
        sums = first >> 15 & 1
        factors = [registers(source, 4, second >> bit & 1) for source, bit in zip(sources, (27, 28), strict=False)]
        return f"v_mfma_f32_16x16x32_bf16 {registers(256 + (first & 255), 4, sums)}, {', '.join(factors)}, {registers(sources[2], 4, sums)}"
    if first >> 16 == _TO_BF16 and not first >> 8 & 0xFF and not second >> 27:
        return f"v_cvt_pk_bf16_f32 v{first & 255}, {registers(sources[0], 1)}, {registers(sources[1], 1)}"
    if first >> 16 == _LOAD and second >> 24 == 0x80 and first >> 12 & 1:
        buffer = 4 * (second >> 16 & 31)
        return f"buffer_load_dwordx4 v{second & 255}, s[{buffer}:{buffer + 3}], 0 offen lds offset:{first & 0xFFF}"
    return None


def without(code: bytes) -> tuple[bytes, dict[int, str]]:
    """Replace these instructions by two `s_nop`; return the code object and the originals by
    address.
    """
    data, found = bytearray(code), {}
    section = ELFFile(BytesIO(code)).get_section_by_name(".text")
    start, at = section["sh_offset"], section["sh_offset"]
    while at + 8 <= start + section["sh_size"]:
        text = decoded(*struct.unpack_from("<II", data, at))
        if text:
            found[section["sh_addr"] + at - start] = text
            data[at : at + 8] = _NOP
        at += 8 if text else 4
    return bytes(data), found


def put_back(text: str, found: dict[int, str]) -> str:
    """Restore the instructions in the disassembly of `without`."""
    lines, skipped = [], {address + 4 for address in found}
    for line in text.splitlines():
        printed = _LINE.match(line)
        address, word = (int(printed[2], 16), int(printed[3], 16)) if printed else (-1, 0)
        behind = line[line.index("//") :] if printed else ""
        if address in found:
            lines.append(f"\t{found[address]} {behind}")
        elif printed and printed[1].startswith(".long") and word >> 25 == 0x3F and word >> 9 & 255 in _SWAPS:
            lines.append(f"\t{_SWAPS[word >> 9 & 255]} v{word >> 17 & 255}, v{(word & 511) - 256} {behind}")
        elif address not in skipped:
            lines.append(line)
    return "\n".join(lines)
