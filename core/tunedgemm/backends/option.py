"""Option: a backend's option of ``tunedgemm tune``: a flag and its environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

import attrs

from tunedgemm.errors import PluginError
from tunedgemm.text.printable import warn_once

_FLAG = re.compile(r"--[a-z][a-z0-9]*(-[a-z0-9]+)+")


def _flag(_: Option, __: attrs.Attribute[str], flag: str) -> None:
    if not (isinstance(flag, str) and _FLAG.fullmatch(flag)):
        raise PluginError(f"option {flag!r}: a backend's flag must be --NAME-WORD in lower case, such as --mine-space")


def _variable(option: Option, _: attrs.Attribute[str], variable: str) -> None:
    if variable != (wanted := f"TUNEDGEMM_{option.flag[2:].replace('-', '_').upper()}"):
        raise PluginError(f"option {option.flag}: its variable must be {wanted} (got {variable!r})")


def _help(option: Option, _: attrs.Attribute[str], text: str) -> None:
    if not (isinstance(text, str) and text.strip()):
        raise PluginError(f"option {option.flag}: its help must be one line (got {text!r})")


def _choices(option: Option, _: attrs.Attribute[tuple[str, ...]], choices: tuple[str, ...]) -> None:
    texts = isinstance(choices, tuple) and all(isinstance(choice, str) and choice == choice.strip() != "" for choice in choices)
    if not texts or len(set(choices)) < len(choices) or len(choices) == 1:
        raise PluginError(f"option {option.flag}: choices must be two or more different texts, or none to allow any text (got {choices!r})")


@attrs.frozen
class Option:
    """An option of ``tunedgemm tune``, which the backend reads from the variable in any process.

    Raises:
        PluginError: a field is invalid.

    Attributes:
        flag: ``--NAME-WORD...`` in lower case, where NAME is that of the backend or its package.
        variable: ``TUNEDGEMM_`` and the words of the flag in capitals.
        help: its effect in one line.
        choices: valid values, the default first; empty to allow any text, with the default "".
        kind: converts the flag's text to the value, and may raise `UserError`; not applied to the
            variable.
    """

    flag: str = attrs.field(validator=_flag)
    variable: str = attrs.field(validator=_variable)
    help: str = attrs.field(validator=_help)
    choices: tuple[str, ...] = attrs.field(default=(), validator=_choices)
    kind: Callable[[str], str] = str

    @property
    def default(self) -> str:
        """Return the default."""
        return self.choices[0] if self.choices else ""

    def value(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the current value; warn once about an invalid one and return the default."""
        text = environment.get(self.variable, "").strip() or self.default
        if not self.choices:
            return text
        chosen = [choice for choice in self.choices if choice.lower() == text.lower()]
        if not chosen:
            warn_once(f"{self.variable}: must be {' or '.join(self.choices)} (got {text!r}); {self.default} counts")
        return chosen[0] if chosen else self.default
