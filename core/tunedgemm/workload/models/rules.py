"""Rules: a quantisation's lists of modules, matched as engines match them. Torch-free."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs


@attrs.frozen
class Verdict:
    """The quantisation of one layer.

    Attributes:
        scheme: one of `scheme.SCHEMES`; "" for 16 bits.
        refused: why the layer is left out, as the end of "left out, as …"; "" if it is not.
    """

    scheme: str = ""
    refused: str = ""


#: The file that lists a checkpoint's weights.
INDEX = "model.safetensors.index.json"
#: The verdict on a layer that is not quantised.
WIDE = Verdict()


@attrs.frozen
class Names:
    """All names of a module: in transformers, in the checkpoint and in vLLM.

    Attributes:
        own: its names.
        parts: the names of each of its products, where a checkpoint may hold them apart.
        fused: names of the engines' layer that it is fused into.
        siblings: names of all layers that are fused with it, its own too.
    """

    own: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...] = ()
    fused: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()


def entries_of(value: Any) -> tuple[str, ...]:
    """Return the names in a list, or a single name; () for anything else."""
    return (value,) if isinstance(value, str) else tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return an object of JSON; {} for anything else."""
    return value if isinstance(value, Mapping) else {}


def unread_in(group: Mapping[str, Any], known: set[str]) -> Verdict | None:
    """Return the verdict on layers whose group has an unread field, such as quantised outputs."""
    unread = [key for key, value in group.items() if key not in known and value]
    return Verdict(refused=f"a group has {', '.join(map(repr, unread))}, which may decide a dtype and is not read") if unread else None


def refuse(reason: str) -> Verdict:
    """Return the verdict on layers that no op has."""
    return Verdict(refused=f"no op has {reason}")


def _as_words(entry: str) -> str:
    words = re.escape(entry.strip("*.")).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
    return rf"{fnmatch.translate(entry)}|(?:.*\.)?{words}(?:\.|$)"


_NO_EXPERT = r"(?!.*\.experts\.\d)"
#: how engines match an entry that is not a name -> its regular expression, for the start of a name
_PATTERNS = {
    "exact": lambda entry: entry.removeprefix("re:"),
    "words": lambda entry: entry[3:] if entry.startswith("re:") else _as_words(entry),
    "glob": lambda entry: entry[3:] if entry.startswith("re:") else fnmatch.translate(entry),
    "substring": lambda entry: f".*{re.escape(entry)}",
    # vLLM asks for all experts of a layer at once, so that a router's "gate" is no "gate_proj"
    "of layers": lambda entry: f"{'' if 'expert' in entry else _NO_EXPERT}.*{re.escape(entry)}",
    "substring or glob": lambda entry: f".*{re.escape(entry)}|{fnmatch.translate(entry)}",
    "regex": lambda entry: re.sub("^[-+]:", "", entry),
}


@attrs.frozen(eq=False)
class Rule:
    """The verdict on layers that a list names.

    Attributes:
        field: the list's name in the file; "" for another list.
        entries: its entries.
        patterns: the regular expressions of those that may match other names than themselves.
        verdict: the verdict on layers that an entry matches.
    """

    field: str
    entries: Collection[str]
    patterns: Mapping[str, re.Pattern[str]]
    verdict: Verdict

    def matches(self, names: Iterable[str]) -> bool:
        """Tell whether an entry matches one of these names."""
        return any(name in self.entries or any(pattern.match(name) for pattern in self.patterns.values()) for name in names)

    def decides(self, names: Names) -> bool:
        """Tell whether an entry matches a module, or the engines' layer that it is fused into but no sibling."""
        return self.matches(names.own) or (self.matches(names.fused) and not self.matches(names.siblings))

    def unmatched(self, names: Collection[str]) -> list[str]:
        """Return the entries that match none of the names of a whole model."""
        patterns = self.patterns
        return [each for each in self.entries if not (each in names or (each in patterns and any(map(patterns[each].match, names))))]


def rules_of(field: str, entries: Iterable[str], verdict: Verdict, how: str) -> list[Rule]:
    """Return the rule of a list, matched in one of the ways of `_PATTERNS`; none for an empty list.

    An invalid regular expression leaves undecided what no other entry matches: a second rule leaves
    it out.
    """
    valid, patterns, broken = dict[str, None](), dict[str, re.Pattern[str]](), list[Rule]()
    for entry in entries:
        try:
            if how != "exact" or entry.startswith("re:"):
                patterns[entry] = re.compile(_PATTERNS[how](entry))
            valid[entry] = None
        except re.error as error:
            reason = f"{field!r} has an invalid regular expression (got {entry!r}: {error})"
            broken = [Rule("", (), {"": re.compile("")}, Verdict(refused=reason))]
    return [*([Rule(field, valid, patterns, verdict)] if valid else []), *broken]
