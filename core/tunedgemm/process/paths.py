"""Expand paths in variables and flags, and locate the user's folders."""

from __future__ import annotations

import os
from pathlib import Path

from tunedgemm.errors import UserError
from tunedgemm.process.variables import read

#: Stands in for the folder of a user without a home; it can be neither read nor written.
NO_HOME = Path(os.devnull, "no-home-folder")


def expanded(text: str | Path, name: str = "") -> Path:
    """Return the path that a text means, with ``~`` and ``~user`` replaced by home folders.

    Args:
        name: the variable that holds the text, for the error.

    Raises:
        UserError: the user is unknown, or the process has no home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        source = f"{name}: " if name else ""
        raise UserError(f"{source}no home folder is known for {Path(text).parts[0]} (got {str(text)!r}); write the whole path") from None


def user_folder(variable: str, kind: str) -> Path:
    """Return the folder that a variable names, else the user's folder of a kind; it need not exist.

    Args:
        kind: ``config`` or ``cache``, as platformdirs has them.
    """
    if override := read(variable):
        return expanded(override, variable)
    import platformdirs

    try:
        folder = Path(getattr(platformdirs, f"user_{kind}_dir")("tunedgemm", appauthor=False))
    except RuntimeError:
        return NO_HOME
    return folder if folder.is_absolute() else NO_HOME  # older platformdirs leave the ~ of an unknown home
