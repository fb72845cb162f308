"""Parse AMDGCN text of LLVM's assembly language, handwritten, compiled or disassembled."""

from __future__ import annotations

import ast
import re
import struct
from typing import Any

import attrs

from .fault import Fault

#: Numbers of the scalar registers that have names (CDNA3 ISA, "SGPR allocation"): first register
#: and how many.
NAMED = {
    "flat_scratch": (102, 2), "xnack_mask": (104, 2), "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1),
    "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
}  # fmt: skip
#: Registers of one key each: scalar ones by their number, then the vector and the accumulation
#: registers.
VECTOR, ACCUMULATION = 1000, 1256
_REGISTER = re.compile(r"^(v|s|a|ttmp)(?:(\d+)|\[([^\]:]+)(?::([^\]]+))?\])$")
_MODIFIER = re.compile(r"^([a-z_][a-z0-9_]*)(?::(.+))?$")
#: Words that follow operands and stand alone.
_FLAGS = {"off_lds", "offen", "idxen", "glc", "slc", "dlc", "sc0", "sc1", "nt", "lds", "gds", "clamp", "tfe", "high", "bound_ctrl", "done"}
_ENCODINGS = ("_e32", "_e64", "_sdwa", "_dpp", "_e64_dpp")
#: Instructions whose operand is not a list of registers.
_RAW = {"s_waitcnt", "s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32", "s_sendmsg"}
_OBJDUMP = re.compile(r"//\s*([0-9A-Fa-f]{8,}):((?:\s+[0-9A-Fa-f]{8})+)(?:\s+<([^>]*)>)?")
_OBJDUMP_LABEL = re.compile(r"^[0-9a-fA-F]{16} <([^>]+)>:$")


@attrs.frozen
class Register:
    """Adjacent registers: ``file`` v, s or a, first index, count, and float modifiers."""

    file: str
    first: int
    count: int = 1
    negative: bool = False
    absolute: bool = False

    def key(self, at: int = 0) -> int:
        """Return the key of one of the registers."""
        return self.first + at + {"s": 0, "v": VECTOR, "a": ACCUMULATION}[self.file]

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(self.key(at) for at in range(self.count))

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"{self.file}{self.first}" if self.count == 1 else f"{self.file}[{self.first}:{last}]"


@attrs.frozen
class Number:
    """A constant: an integer, or a float whose bits depend on the reader."""

    value: int | float
    negative: bool = False
    absolute: bool = False

    def bits(self, width: int = 32) -> int:
        """Return the bits of an operand of 16, 32 or 64 bits, sign-extended."""
        if isinstance(self.value, float):
            return int(
                struct.unpack({16: "<H", 32: "<I", 64: "<Q"}[width], struct.pack({16: "<e", 32: "<f", 64: "<d"}[width], self.value))[0]
            )
        return self.value & ((1 << width) - 1)


@attrs.frozen
class Name:
    """A label, or one of the words `off`, `null` and `scc`."""

    name: str


Operand = Register | Number | Name


@attrs.frozen(eq=False)
class Instruction:
    """One line: mnemonic without encoding, operands, modifiers and place."""

    mnemonic: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, Any]
    encoding: str
    line: int
    text: str
    raw: str = ""
    target: int = -1

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@attrs.frozen
class Program:
    """Instructions in order, labels, and the directives of kernel descriptors."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    descriptors: dict[str, dict[str, int]]


def _number(text: str) -> int | float | None:
    """Return the constant of a text, if it is one."""
    try:
        return int(text, 0)
    except ValueError:
        pass
    if re.fullmatch(r"[-+]?0\d+", text):
        return int(text)
    try:
        return float(text) if re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?|[-+]?\d+(\.\d*)?e[-+]?\d+|[-+]?\d+\.", text) else None
    except ValueError:
        return None


def evaluate(text: str, symbols: dict[str, int]) -> int:
    """Evaluate an integer expression of the assembler; raise ValueError for others."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int() as found):
                return found
            case ast.Name(id=name) if name in symbols:
                return symbols[name]
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=operation, right=right):
                first, second = value(left), value(right)
                table = {
                    ast.Add: first + second, ast.Sub: first - second, ast.Mult: first * second, ast.BitAnd: first & second,
                    ast.BitOr: first | second,
                }  # fmt: skip
                if type(operation) in table:
                    return table[type(operation)]
                if isinstance(operation, (ast.LShift, ast.RShift)) and second >= 0:
                    return first << second if isinstance(operation, ast.LShift) else first >> second
                if isinstance(operation, (ast.Div, ast.FloorDiv)):
                    return int(first / second)
            case ast.Call(func=ast.Name(id="max" | "min" as which), args=arguments):
                return (max if which == "max" else min)(value(argument) for argument in arguments)
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip().replace("$", "_"), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(text) from error


def _register(text: str, symbols: dict[str, int]) -> Register | None:
    if text in NAMED:
        first, count = NAMED[text]
        return Register("s", first, count)
    found = _REGISTER.match(text)
    if not found:
        return None
    file, single, first, last = found.groups()
    start = int(single) if single is not None else evaluate(first, symbols)
    count = 1 if single is not None or last is None else evaluate(last, symbols) - start + 1
    if count < 1:
        raise ValueError(text)
    return Register("s", 108 + start, count) if file == "ttmp" else Register(file, start, count)


def _operand(text: str, symbols: dict[str, int]) -> Operand:
    """Parse one operand; raise ValueError for others."""
    negative = absolute = False
    bare = text
    if bare.startswith("neg(") and bare.endswith(")"):
        negative, bare = True, bare[4:-1]
    elif bare.startswith("-") and _number(bare) is None:
        negative, bare = True, bare[1:]
    if len(bare) > 1 and bare.startswith("|") and bare.endswith("|"):
        absolute, bare = True, bare[1:-1]
    elif bare.startswith("abs(") and bare.endswith(")"):
        absolute, bare = True, bare[4:-1]
    register = _register(bare, symbols)
    if register is not None:
        return attrs.evolve(register, negative=negative, absolute=absolute)
    constant = _number(bare)
    if constant is not None:
        return Number(constant, negative, absolute)
    if bare.startswith("lit(") and bare.endswith(")"):
        return Number(evaluate(bare[4:-1], symbols))
    try:
        return Number(evaluate(bare, symbols), negative, absolute)
    except ValueError:
        pass
    if re.fullmatch(r"[.A-Za-z_$][\w.$@]*", bare):
        return Name(bare)
    raise ValueError(text)


def _modifier(text: str) -> tuple[str, Any] | None:
    """Return a modifier's name and value."""
    if text in _FLAGS:
        return text, True
    found = _MODIFIER.match(text)
    if not found or found[2] is None:
        return None
    value = found[2]
    if value.startswith("["):
        return found[1], [int(part, 0) for part in value.strip("[]").split(",")]
    constant = _number(value)
    return found[1], value if constant is None else constant


def _pieces(text: str) -> list[str]:
    """Split a line at commas and blanks outside brackets."""
    parts, depth, piece = [], 0, ""
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if depth == 0 and letter in ", \t":
            if piece:
                parts.append(piece)
            piece = ""
        elif letter not in " \t":
            piece += letter
    return [*parts, piece] if piece else parts


def _instruction(text: str, line: int, symbols: dict[str, int], target: int) -> Instruction:
    mnemonic, _, rest = text.partition(" ") if "\t" not in text else text.replace("\t", " ").partition(" ")
    rest = rest.strip()
    encoding = next((suffix for suffix in sorted(_ENCODINGS, key=len, reverse=True) if mnemonic.endswith(suffix)), "")
    bare = mnemonic[: len(mnemonic) - len(encoding)]
    if bare in _RAW:
        return Instruction(bare, (), {}, encoding, line, text, raw=rest)
    operands: list[Operand] = []
    modifiers: dict[str, Any] = {}
    try:
        for piece in _pieces(rest):
            modifier = _modifier(piece)
            if modifier:
                modifiers[modifier[0]] = modifier[1]
            else:
                operands.append(_operand(piece, symbols))
    except ValueError as error:
        raise Fault("syntax", f"line {line}: {text}: {error}") from error
    return Instruction(bare, tuple(operands), modifiers, encoding, line, text, target=target)


def _uncommented(line: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", re.split(r";|//", line, maxsplit=1)[0]).strip()


def parse(text: str) -> Program:
    """Parse a text; a Fault names the invalid line."""
    reader = _Reader()
    metadata = False
    for number, line in enumerate(text.splitlines(), 1):
        metadata = (metadata or ".amdgpu_metadata" in line) and ".end_amdgpu_metadata" not in line
        if not metadata:
            reader.read(number, line)
    return reader.program()


class _Reader:
    """State of the parser."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.descriptors: dict[str, dict[str, int]] = {}
        self.symbols: dict[str, int] = {}
        #: Places of instructions by the addresses that a disassembler prints.
        self.addresses: dict[int, int] = {}
        self.descriptor: dict[str, int] | None = None

    def read(self, number: int, line: str) -> None:
        """Parse one line."""
        printed = _OBJDUMP_LABEL.match(line.strip())
        if printed:
            self.labels[printed[1]] = len(self.instructions)
            return
        bare = _uncommented(line)
        while found := re.match(r"^([.A-Za-z_$][\w.$]*):\s*", bare):
            self.labels[found[1]] = len(self.instructions)
            bare = bare[found.end() :]
        if bare.startswith(".") and _OBJDUMP.search(line):
            raise Fault("unsupported", f"line {number}: the disassembler knows no such instruction: {line.strip()}")
        if bare.startswith("."):
            self._directive(bare)
        elif re.match(r"^[a-z]+_[a-z0-9_]+", bare):
            self.instructions.append(_instruction(bare, number, self.symbols, self._address(line, bare)))
        elif found := re.match(r"^([.\w$]+)\s*=\s*(.+)$", bare):
            _try_set(self.symbols, found[1], found[2])

    def _directive(self, bare: str) -> None:
        """Parse `.set` and kernel descriptors; ignore other directives."""
        words = bare.replace("\t", " ").split(None, 1)
        argument = words[1] if len(words) > 1 else ""
        if words[0] == ".amdhsa_kernel":
            self.descriptor = self.descriptors.setdefault(argument.strip(), {})
        elif words[0] == ".end_amdhsa_kernel":
            self.descriptor = None
        elif words[0] in (".set", ".equ"):
            name, _, expression = argument.partition(",")
            _try_set(self.symbols, name.strip(), expression)
        elif self.descriptor is not None and words[0].startswith(".amdhsa_"):
            _try_set(self.descriptor, words[0][len(".amdhsa_") :], argument, self.symbols)

    def _address(self, line: str, bare: str) -> int:
        """Record a disassembler's address; return the target of a branch, else -1."""
        printed = _OBJDUMP.search(line)
        if not printed:
            return -1
        at = int(printed[1], 16)
        self.addresses[at] = len(self.instructions)
        if not bare.startswith(("s_branch", "s_cbranch")):
            return -1
        offset = int(printed[2].split()[0], 16) & 0xFFFF
        return at + 4 + 4 * (offset - ((offset & 0x8000) << 1))

    def program(self) -> Program:
        """Return the program with resolved branches."""
        resolved = tuple(
            attrs.evolve(each, target=self.addresses.get(each.target, -2) if each.target >= 0 else _labelled(each, self.labels))
            for each in self.instructions
        )
        return Program(resolved, self.labels, self.descriptors)


def _labelled(instruction: Instruction, labels: dict[str, int]) -> int:
    """Return the place of a branch's label."""
    if not instruction.mnemonic.startswith(("s_branch", "s_cbranch")):
        return -1
    match instruction.operands:
        case (Name(name),) if name in labels:
            return labels[name]
    raise Fault("syntax", f"{instruction}: no such label")


def _try_set(table: dict[str, int], name: str, expression: str, symbols: dict[str, int] | None = None) -> None:
    """Record a symbol's value if it is an integer expression."""
    try:
        table[name] = evaluate(expression, table if symbols is None else symbols)
    except ValueError:
        table.pop(name, None)
