"""Option: a setting of a backend for one run of the tuner: an environment variable, and the flag that says it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

import attrs

from tunedgemm.errors import PluginError

_FLAG = re.compile(r"--[a-z][a-z0-9]*(-[a-z0-9]+)+")


def _flag(_: Option, __: attrs.Attribute[str], flag: str) -> None:
    if not (isinstance(flag, str) and _FLAG.fullmatch(flag)):
        raise PluginError(f"option {flag!r}: a backend's flag is --NAME-WORD in lower case, such as --mine-space")


def _variable(option: Option, _: attrs.Attribute[str], variable: str) -> None:
    if variable != (wanted := f"TUNEDGEMM_{option.flag[2:].replace('-', '_').upper()}"):
        raise PluginError(f"option {option.flag}: its variable must be {wanted} (got {variable!r})")


def _help(option: Option, _: attrs.Attribute[str], text: str) -> None:
    if not (isinstance(text, str) and text.strip()):
        raise PluginError(f"option {option.flag}: it needs a help of one line (got {text!r})")


def _choices(option: Option, _: attrs.Attribute[tuple[str, ...]], choices: tuple[str, ...]) -> None:
    texts = isinstance(choices, tuple) and all(isinstance(choice, str) and choice == choice.strip() != "" for choice in choices)
    if not texts or len(set(choices)) < len(choices) or len(choices) == 1:
        raise PluginError(f"option {option.flag}: choices are two texts or more, each once, or none for any text (got {choices!r})")


@attrs.frozen
class Option:
    """A setting that a user of ``tunedgemm tune`` chooses for a run. The variable is what the backend reads, in whichever process.

    Raises:
        PluginError: a field is not as said here.

    Attributes:
        flag: ``--NAME-WORD``, several words if need be, in lower case. NAME tells whose it is: the
            backend, or its package.
        variable: ``TUNEDGEMM_`` and the words of the flag, in capitals.
        help: what it does, one line.
        choices: its values, first the one that holds where the variable is unset or empty; none for
            any text, which is "" then.
        kind: from what a user typed to the value, where it is more than that; may raise
            `UserError`. It is not asked of the variable.
    """

    flag: str = attrs.field(validator=_flag)
    variable: str = attrs.field(validator=_variable)
    help: str = attrs.field(validator=_help)
    choices: tuple[str, ...] = attrs.field(default=(), validator=_choices)
    kind: Callable[[str], str] = str

    @property
    def default(self) -> str:
        """What holds where nothing is said."""
        return self.choices[0] if self.choices else ""

    def value(self, environment: Mapping[str, str] = os.environ) -> str:
        """What holds now."""
        return environment.get(self.variable, "").strip() or self.default
