"""``tunedgemm new-plugin``: write the package of a working backend, ready for a kernel."""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.backends.command import Command
from tunedgemm.errors import UserError
from tunedgemm.ops import DEFAULT_OP
from tunedgemm.process.paths import expanded

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

#: Most characters of a line of Python, and most arguments of a function, by our own style.
_LINE, _ARGUMENTS = 140, 7
#: Name of a template -> the file that it becomes, in the folder of the package.
FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "module.py.txt": "$module.py",
    "test.py.txt": "tests/test_$libtype.py",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the backend's libtype: lower-case letters, digits and underscores")
    parser.add_argument("--op", default=DEFAULT_OP, help="the op of its kernels; default: %(default)s")
    parser.add_argument(
        "--folder", type=expanded, default=Path(), metavar="DIR", help="parent of the package's folder; default: the working folder"
    )


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.ops import op_named

    name = _require_free_name(arguments.name)
    target = arguments.folder / f"tunedgemm-{name}"
    written = write(name, op_named(arguments.op), target)
    for path in written:
        print(path)
    shown = target if target.is_absolute() else f"./{target}"  # without the dot pip would look it up in its index
    print(f"next: pip install {shown}; tunedgemm plugins; python -m pytest {shown}/tests")
    return 0


def write(name: str, op: Op, target: Path) -> list[Path]:
    """Fill the templates for a libtype and an op into a new folder; return the files.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    from importlib.resources import files

    from tunedgemm.version import __version__

    words = {"libtype": name, "module": f"tunedgemm_{name}", "distribution": f"tunedgemm-{name}", "version": __version__}
    words |= {"op": op.name, "operands": ", ".join(op.operands), **_product(op)}
    templates = files("tunedgemm") / "templates" / "plugin"
    written = []
    try:
        target.mkdir(parents=True)
        for template, name_template in FILES.items():
            path = target / string.Template(name_template).substitute(words)
            path.parent.mkdir(exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            path.write_text(string.Template(text).substitute(words), encoding="utf-8")
            written.append(path)
    except FileExistsError:
        raise UserError(f"{target}: exists already; name another backend, or another --folder") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error
    return written


def _product(op: Op) -> dict[str, str]:
    """Return a product function's header, formatted, and the arguments that it passes on."""
    names = [operand.rstrip("?") for operand in op.operands]
    optional = {name: " | None = None" for name, operand in zip(names, op.operands, strict=True) if operand.endswith("?")}
    parameters = [f"{name}: torch.Tensor{optional.get(name, '')}" for name in names]
    line = f"        def product({', '.join(parameters)}) -> torch.Tensor:"
    if len(line) > _LINE:
        many = "  # noqa: PLR0913, PLR0917 - the op's operands" if len(names) > _ARGUMENTS else ""
        line = "\n".join(
            [f"        def product({many}", *(f"            {parameter}," for parameter in parameters), "        ) -> torch.Tensor:"]
        )
    return {"product": line, "arguments": ", ".join(names)}


def _require_free_name(name: str) -> str:
    """Return the name; raise UserError if it is invalid or taken."""
    from tunedgemm.backends.registry import Registry
    from tunedgemm.libtypes import ALIASES, STAND_INS, is_known

    if not (name.isascii() and name.isidentifier() and name == name.lower() and not name.startswith("_")):
        raise UserError(
            f"NAME: expected a lower-case letter, then lower-case letters, digits, _ (got {name!r}); it is part of a module's name"
        )
    if name in Registry():
        raise UserError(f"backend {name!r}: is installed already; `tunedgemm plugins` lists all")
    if is_known(name) or name in ALIASES or name in STAND_INS:
        raise UserError(f"libtype {name!r}: rows of existing tables use it for another backend; choose another name")
    return name


command = Command("new-plugin", "write the package of a new backend, with tests that pass", _add_arguments, _run)
