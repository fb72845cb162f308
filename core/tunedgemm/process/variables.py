"""Environment variables of the core, their kinds, and the one function that reads them.

Those of tables are fields of the ops (`Columns.variable`), and plugins declare theirs. An invalid
value never raises: it is warned about once, and the default is used. `tunedgemm doctor` lists all.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.libtypes import ALL, BUILTIN, GROUPS, UNTUNED, is_known
from tunedgemm.text.number import whole_number
from tunedgemm.text.printable import warn_once

#: Words for on and off; numbers are valid, too.
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class BadValue(ValueError):
    """An invalid value of a variable; the message states the valid ones.

    Attributes:
        counts: the value used instead; None for the default.
    """

    counts: Any = None


def _one_of(words: tuple[str, ...], text: str, allowed: str) -> BadValue:
    near = difflib.get_close_matches(text.lower(), words, 1, 0.75)
    return BadValue(f"{allowed} (got {text!r})" + (f"; did you mean {near[0]}?" if near else ""))


@attrs.frozen
class Kind:
    """A kind of variable: any text.

    Attributes:
        default: the value of an unset, empty or invalid variable.
    """

    default: Any = ""

    def parse(self, text: str) -> Any:
        """Return the value of a text that is not empty.

        Raises:
            BadValue: the kind does not allow it.
        """
        return text


@attrs.frozen
class Switch(Kind):
    """On or off: a word, or a number, any of which but 0 is on.

    Attributes:
        others: further words, which are values themselves.
    """

    default: Any = False
    others: tuple[str, ...] = ()

    def parse(self, text: str) -> bool | str:
        """Return True, False, or one of the other words."""
        word = text.lower()
        if word in self.others:
            return word
        if word in (*ON, *OFF):
            return word in ON
        try:
            return float(word) != 0.0
        except ValueError:
            allowed = ", ".join(("1", "0", *self.others)[:-1]) + f" or {('0', *self.others)[-1]}"
            raise _one_of((*ON, *filter(None, OFF), *self.others), text, f"must be {allowed}") from None


@attrs.frozen
class Number(Kind):
    """A finite number.

    Attributes:
        unit: what it counts.
        least: the smallest; with *open*, it must be larger.
        whole: whether it has no fraction.
    """

    unit: str = ""
    least: float = 0.0
    open: bool = False
    whole: bool = False

    def parse(self, text: str) -> float | int:
        """Return the number."""
        try:
            number = int(text) if self.whole else float(text)
        except ValueError:
            number = math.nan
        if not (number > self.least if self.open else number >= self.least) or number > 1e9:
            bound = f"above {self.least:g}" if self.open else f"of at least {self.least:g}"
            whole = "whole " if self.whole else ""
            unit = f" of {self.unit}" if self.unit else ""
            raise BadValue(f"must be a {whole}number{unit} {bound} (got {text!r})")
        return number


@attrs.frozen
class Share(Kind):
    """A number from 0 to 1."""

    default: Any = 0.0

    def parse(self, text: str) -> float:
        """Return the number."""
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise BadValue(f"must be a share from 0 to 1, such as 1e-6 (got {text!r})")
        return share


@attrs.frozen
class Bytes(Kind):
    """A size in bytes, such as ``8GiB``; 0 for none."""

    default: Any = 0

    def parse(self, text: str) -> int:
        """Return the number of bytes."""
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?(?:([KMGT]?)i?B)?", text, re.IGNORECASE)
        unit = match[2] or "" if match else ""
        if match is None or (unit and "ib" not in text.lower()):
            raise BadValue(f"must be a number of bytes, KiB, MiB, GiB or TiB, such as 8GiB (got {text!r})")
        return int(float(match[1]) * 1024 ** " KMGT".index(unit.upper() or " "))


@attrs.frozen
class Words(Kind):
    """Comma-separated words of a closed list; none means all.

    Attributes:
        words: that list.
    """

    default: Any = ()
    words: tuple[str, ...] = ()

    def parse(self, text: str) -> tuple[str, ...]:
        """Return the words."""
        found = tuple(word.strip().lower() for word in text.split(",") if word.strip())
        if unknown := [word for word in found if word not in self.words]:
            raise _one_of(self.words, ",".join(unknown), f"must be a comma list of {', '.join(self.words)}")
        return found


@attrs.frozen
class Libtypes(Kind):
    """Comma-separated libtypes, installed or known.

    Attributes:
        is_selection: whether it is a ``--libtype`` text, whose value is that text, and may be
            ``all``; a tuple of names otherwise.
    """

    is_selection: bool = False

    def parse(self, text: str) -> str | tuple[str, ...]:
        """Return the list."""
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        installed = tuple(entry_points(group="tunedgemm.backends").names)
        words = (*((ALL, *GROUPS) if self.is_selection else ()), BUILTIN, *installed)
        for name in names:
            if name not in words and not is_known(name):
                error = _one_of((*words, *UNTUNED), name, f"must be libtypes, such as {', '.join(UNTUNED[:2])}")
                known = [each for each in names if each in words or is_known(each)]
                error.counts = names if known and not self.is_selection else None  # the other names still count
                raise error
        return text if self.is_selection else names


@attrs.frozen
class Folder(Kind):
    """A path, which need not exist; ``~`` is a home folder."""

    def parse(self, text: str) -> str:
        """Return the text; its user must be known."""
        try:
            Path(text).expanduser()
        except RuntimeError:
            raise BadValue(f"no home folder is known for {Path(text).parts[0]} (got {text!r}); write the whole path") from None
        return text


@attrs.frozen
class Numbers(Kind):
    """Comma-separated positive integers."""

    def parse(self, text: str) -> str:
        """Return the text."""
        if not all(whole_number(part) for part in text.split(",")):
            raise BadValue(f"must be whole numbers above 0, separated by commas (got {text!r})")
        return text


_SECONDS_OF_START = Number(8.0, "seconds")

#: Each variable and its kind.
KINDS: Mapping[str, Kind] = {
    "AITER_BF16_FP8_MOE_BOUND": Number(256, "tokens", whole=True),
    "AITER_FORCE_A8W4": Switch(),
    "AITER_GEMM_UNSUPPORTED_CSV": Kind(),
    "AITER_LOG_TUNED_CONFIG": Switch(),
    "AITER_ONLINE_TUNE": Switch(),
    "AITER_SITUV2_A4W4": Switch(),
    "AITER_SITUV2_A8W4": Switch(),
    "AITER_TUNE_GEMM": Switch(),
    "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": Number(256, "tokens", whole=True),
    "GTUNE_BATCH_SIZE": Number(1, least=1, whole=True),
    "GTUNE_INPUT": Kind(),
    "GTUNE_MODEL": Kind(),
    "GTUNE_TP": Numbers("1"),
    "GTUNE_TUNED": Kind(),
    "HIP_ONLINE_TUNING": Switch(),
    "TUNEDGEMM_BATCH_INVARIANT": Switch(),
    "TUNEDGEMM_CACHE": Folder(),
    "TUNEDGEMM_DENY": Kind(),
    "TUNEDGEMM_DEQUANTISED_BYTES": Bytes(),
    "TUNEDGEMM_FALLBACK": Libtypes(UNTUNED),
    "TUNEDGEMM_HOME": Folder(),
    "TUNEDGEMM_MAX_FILE_MIB": Number(0, "MiB", least=1, whole=True),
    "TUNEDGEMM_METRICS": Switch(),
    "TUNEDGEMM_METRICS_DIR": Folder(),
    "TUNEDGEMM_ONLINE": Switch(others=("background",)),
    "TUNEDGEMM_ONLINE_LIBTYPE": Libtypes(ALL, is_selection=True),
    "TUNEDGEMM_ONLINE_SECONDS": Number(30.0, "seconds", open=True),
    "TUNEDGEMM_REQUIRE_SIGNED": Switch(True),  # a word that is neither on nor off requires signatures
    "TUNEDGEMM_SGLANG": Switch(),
    "TUNEDGEMM_SGLANG_SECONDS": _SECONDS_OF_START,
    "TUNEDGEMM_SHARED_CACHE": Folder(),
    "TUNEDGEMM_TEST_DEVICE": Kind(),
    "TUNEDGEMM_TRUSTED_KEYS": Folder(),
    "TUNEDGEMM_VERIFY": Share(),
    "TUNEDGEMM_VLLM": Switch(others=("unpacked",)),
    "TUNEDGEMM_VLLM_LAYERS": Words(
        words=("unquantized", "fp8_w8a8", "fp8_block_w8a8", "int8_w8a8", "mixed_precision", "nvfp4", "mxfp8", "mxfp4", "experts")
    ),
    "TUNEDGEMM_VLLM_SECONDS": _SECONDS_OF_START,
}

#: AITER's variables that resemble these, and that tunedgemm does not read.
AITERS_OWN = ("AITER_CONFIG_FHMOE", "AITER_CONFIG_GROUPED_FMOE")

#: Reserved prefixes: an unknown variable with one of them is a mistake.
RESERVED = ("TUNEDGEMM_", "GTUNE_")

#: Variables of other software that select devices, compilers or libraries.
MACHINE = (
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "GPU_ARCHS", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "OMP_NUM_THREADS", "ROCM_PATH", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip


def read(name: str, environment: Mapping[str, str] = os.environ, kind: Kind | None = None) -> Any:
    """Return a variable's value; warn once about an invalid one and return the default.

    Args:
        kind: the kind of a variable that is not in `KINDS`, such as a plugin's.
    """
    kind = kind or KINDS[name]
    if not (text := environment.get(name, "").strip()):
        return False if isinstance(kind, Switch) else kind.default
    try:
        return kind.parse(text)
    except BadValue as error:
        counted = kind.default if error.counts is None else error.counts
        warn_once(f"{name}: {error}; {_shown(counted)} counts")
        return counted


def switched_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a switch is on: the one rule for the core's and the plugins' variables."""
    return bool(read(name, environment, KINDS.get(name, Switch())))


def read_switch(name: str) -> str:
    """Return what a switch says: "" for off, "1" for on, or its other word."""
    value = read(name)
    return value if isinstance(value, str) else "1" if value else ""


def fault_of(name: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return why a variable's value is invalid and what is used instead; ("", "") if it is valid."""
    kind, text = KINDS.get(name, Kind()), environment.get(name, "").strip()
    try:
        if text:
            kind.parse(text)
    except BadValue as error:
        return str(error), f"correct it; until then {_shown(kind.default if error.counts is None else error.counts)} counts"
    return "", ""


def _shown(default: Any) -> str:
    """Return a default in words."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default) or "all"
    return str(default) if default else "its default"
