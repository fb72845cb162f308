"""Locations of tables and their precedence: variable, user folder, distributions, package."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import UserError
from tunedgemm.ops import ops
from tunedgemm.process.paths import expanded, user_folder
from tunedgemm.table.distributions import distributions
from tunedgemm.table.sheet import present

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

#: Folder of the shipped tables; those of single models are in `MODELS` below it.
SHIPPED = Path(__file__).parent / "configs"
MODELS = "model_configs"
#: Name of the lowest layer, and of both layers of shipped tables in messages.
SHIPPED_WORD = "shipped"
#: Name of the layers of installed distributions.
DISTRIBUTION = "distribution"
#: Subfolder with the ``config.json`` of models, by name.
MODEL_FOLDERS = "models"

#: Subfolder with the user's tables of batch-invariant mode.
CLASS_FOLDER = "batch_invariant"

#: Entry in a variable that keeps the user's and the shipped tables as lower layers.
DEFAULT = "default"


@attrs.frozen
class TableLayer:
    """Files of equal precedence. Within a layer the fastest row wins; earlier layers beat later ones.

    Attributes:
        name: ``instance``, ``environment``, ``user``, ``distribution``, ``model`` or ``shipped``.
        paths: the layer's files; only those of ``instance`` and ``environment`` must exist.
        origin: name and version of the distribution with the files; else "".
    """

    name: str
    paths: tuple[Path, ...]
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.origin}" if self.origin else SHIPPED_WORD if self.is_shipped else self.name

    @property
    def is_shipped(self) -> bool:
        """Check whether the tables are shipped with the package."""
        return self.name in ("model", SHIPPED_WORD)

    @property
    def named_by_user(self) -> bool:
        """Check whether the user named these files, so that a missing one is a warning."""
        return self.name in ("instance", "environment")


def home_folder() -> Path:
    """Return the user's folder of tables and captured shapes (``TUNEDGEMM_HOME``).

    It need not exist.
    """
    return user_folder("TUNEDGEMM_HOME", "config")


def tuned_path(op: Op, *, invariant: bool = False) -> Path:
    """Return the default output table: the first path of the op's variable, else the user's table.

    Args:
        invariant: whether it is that of batch-invariant mode.
    """
    named, _ = _variable(op)
    return named[0] if named else user_table(op, invariant=invariant)


def user_table(op: Op, *, invariant: bool = False) -> Path:
    """Return the table in the user's folder; arguments as for `tuned_path`."""
    return home_folder() / (CLASS_FOLDER if invariant else "") / op.columns.tuned_file


def untuned_path(op: Op) -> Path:
    """Return the user's file of captured shapes."""
    return home_folder() / op.columns.untuned_file


def named_file(text: str) -> Path:
    """Resolve a path, or the bare name of a shipped or installed file.

    Raises:
        UserError: the text is empty.
    """
    if not text.strip():
        raise UserError(f"the name of a file is empty (got {text!r}); name a table or a list of shapes")
    path = expanded(text)
    if path.name == text and not present(path):
        installed = [file for found in distributions() for _, file in found.paths if file.name == text]
        return next((file for file in (SHIPPED / text, SHIPPED / MODELS / text, *installed) if present(file)), path)
    return path


def table_paths(tables: Path | Sequence[Path] | None) -> tuple[Path, ...]:
    """Return the paths of one table or several; () for None."""
    return () if tables is None else (tables,) if isinstance(tables, Path) else tuple(tables)


def named_model(text: str) -> Path:
    """Resolve a path of a model folder, or the bare name of a shipped model.

    Raises:
        UserError: neither exists; the message lists the shipped models.
    """
    path = expanded(text)
    if path.name != text or present(path):
        return path
    shipped = sorted(folder.parent for folder in (SHIPPED / MODEL_FOLDERS).glob("*/config.json"))
    for folder in shipped:
        if folder.name == text:
            return folder
    raise UserError(f"{text}: no such model folder; shipped: {', '.join(folder.name for folder in shipped) or 'none'}")


def table_layers(op: Op, above: Sequence[Path] = (), *, invariant: bool = False) -> list[TableLayer]:
    """Return the layers of an op's table, highest precedence first, without opening files.

    Args:
        above: files that rank above all others, such as those of a `TunedGemm` instance.
        invariant: whether the user's table is that of batch-invariant mode.

    A set variable replaces the layers below it. It keeps them if it contains the entry ``default``,
    or a missing path that ends in ``aiter/configs/<default name>``, as AITER's scripts set.
    """
    named, defaults = _variable(op)
    layers = [TableLayer("instance", tuple(above)), TableLayer("environment", tuple(named))]
    if defaults:
        layers.append(TableLayer("user", (user_table(op, invariant=invariant),)))
        layers += [TableLayer(DISTRIBUTION, found.of(op.name), found.label) for found in distributions()]
        layers += shipped_layers(op)
    return [layer for layer in layers if layer.paths]


def shipped_layers(op: Op) -> list[TableLayer]:
    """Return the layers of shipped tables, regardless of variables."""
    models = sorted(path for path in (SHIPPED / MODELS).glob("*.csv") if "untuned" not in path.name and is_table_name(path.name, op))
    return [TableLayer("model", tuple(models)), TableLayer(SHIPPED_WORD, (SHIPPED / op.columns.tuned_file,))]


def is_table_name(name: str, op: Op) -> bool:
    """Check whether a file name belongs to this op, tuned or untuned.

    It must contain the op's file name as whole words, and the longest match wins:
    ``dsv3_a8w8_bpreshuffle_tuned_gemm.csv`` belongs to a8w8_bpreshuffle only.
    """
    own = (op.columns.tuned_file, op.columns.untuned_file)
    every = {*own, *(file for other in ops().values() for file in (other.columns.tuned_file, other.columns.untuned_file))}
    fitting = [file for file in every if _words(Path(file).stem).search(name)]
    return bool(fitting) and max(fitting, key=len) in own


@functools.cache
def _words(stem: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^\W_]){re.escape(stem)}(?![^\W_])")


def _variable(op: Op) -> tuple[list[Path], bool]:
    """Return the paths of the op's variable, and whether lower layers apply."""
    entries = [entry.strip() for entry in os.environ.get(op.columns.variable, "").split(os.pathsep) if entry.strip()]
    named: list[Path] = []
    defaults = not entries
    for entry in entries:
        path = expanded(entry, op.columns.variable)
        if entry == DEFAULT or (path.parts[-3:] == ("aiter", "configs", op.columns.tuned_file) and not present(path)):
            defaults = True
        else:
            named.append(path)
    return named, defaults
