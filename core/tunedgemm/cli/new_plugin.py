"""``tunedgemm new-plugin``: write the package of a backend that works, to put one's own kernel into."""

from __future__ import annotations

import argparse
import string
from pathlib import Path

from tunedgemm.command import Command
from tunedgemm.errors import UserError

#: Name of a template -> the file that it becomes, in the folder of the package.
FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "module.py.txt": "$module.py",
    "test.py.txt": "tests/test_$libtype.py",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the backend's libtype: lower-case letters, digits and underscores")
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help="where to put the package's folder; default: here")


def _run(arguments: argparse.Namespace) -> int:
    name = _free(arguments.name)
    target = arguments.folder / f"tunedgemm-{name}"
    written = write(name, target)
    for path in written:
        print(path)
    shown = target if target.is_absolute() else f"./{target}"  # without the dot pip would take it for a name of its index
    print(f"next: pip install {shown}; tunedgemm plugins; python -m pytest {shown}/tests")
    return 0


def write(name: str, target: Path) -> list[Path]:
    """Fill the templates for a libtype into a new folder; returns the files.

    Raises:
        UserError: the folder is there already, or cannot be written.
    """
    from importlib.resources import files

    from tunedgemm import __version__

    words = {"libtype": name, "module": f"tunedgemm_{name}", "distribution": f"tunedgemm-{name}", "version": __version__}
    templates = files("tunedgemm") / "templates" / "plugin"
    written = []
    try:
        target.mkdir(parents=True)
        for template, place in FILES.items():
            path = target / string.Template(place).substitute(words)
            path.parent.mkdir(exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            path.write_text(string.Template(text).substitute(words), encoding="utf-8")
            written.append(path)
    except FileExistsError:
        raise UserError(f"{target} is there already; name another backend, or another --folder") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    return written


def _free(name: str) -> str:
    """The name, which nobody has; raises UserError for one that is no name, or is taken."""
    from tunedgemm.libtypes import ALIASES, STAND_INS, known
    from tunedgemm.registry import Registry

    if not (name.isascii() and name.isidentifier() and name == name.lower() and not name.startswith("_")):
        raise UserError(f"NAME is the libtype and part of a module's name: a lower-case letter, then letters, digits, _ (got {name!r})")
    if name in Registry():
        raise UserError(f"a backend {name!r} is installed already; `tunedgemm plugins` lists them all")
    if known(name) or name in ALIASES or name in STAND_INS:
        raise UserError(f"tables of AITER or of ours have rows of {name!r}, which another backend would answer for; choose another name")
    return name


command = Command("new-plugin", "write the package of a new backend, with tests that pass", _add_arguments, _run)
