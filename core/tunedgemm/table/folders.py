"""Where tables lie: the user's folder, the paths of an op's environment variable, the shipped files; and their precedence."""

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
from tunedgemm.table.sheet import present

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

#: tables that come with the package; those of one model lie in `MODELS` below it
SHIPPED = Path(__file__).parent / "configs"
MODELS = "model_configs"
#: folders below it with the ``config.json`` of models, by name
MODEL_FOLDERS = "models"

#: the entry of a variable that puts the user's and the shipped tables back underneath
DEFAULT = "default"


@attrs.frozen
class Layer:
    """Files of one precedence: inside a layer the lowest time wins, between layers the earlier layer.

    Attributes:
        name: ``instance``, ``environment``, ``user``, ``model`` or ``shipped``.
        paths: the layer's files; only those of ``instance`` and ``environment`` must exist.
    """

    name: str
    paths: tuple[Path, ...]

    @property
    def asked_for(self) -> bool:
        """Whether somebody named these files, so that a missing one is worth a word."""
        return self.name in ("instance", "environment")


def home_folder() -> Path:
    """The user's folder for tables and captured shapes; it need not exist. ``TUNEDGEMM_HOME`` overrides it."""
    if override := os.environ.get("TUNEDGEMM_HOME"):
        return Path(override).expanduser()
    import platformdirs

    return Path(platformdirs.user_config_dir("tunedgemm", appauthor=False))


def tuned_path(op: Op) -> Path:
    """Where tuning writes when it is told nothing: the first path of the op's variable, else the user's table."""
    named, _ = _variable(op)
    return named[0] if named else home_folder() / op.columns.tuned_file


def untuned_path(op: Op) -> Path:
    """The user's file of captured shapes."""
    return home_folder() / op.columns.untuned_file


def named_file(text: str) -> Path:
    """The file that a user means by *text*: a path, or the bare name of a shipped file where no such path exists."""
    path = Path(text).expanduser()
    if path.name == text and not present(path):
        shipped = (SHIPPED / text, SHIPPED / MODELS / text)
        return next((file for file in shipped if file.is_file()), path)
    return path


def named_model(text: str) -> Path:
    """The folder of a model that a user means by *text*: a path, or the bare name of a shipped one where no such path exists.

    Raises:
        UserError: a bare name that is neither; the message lists those that are shipped.
    """
    path = Path(text).expanduser()
    if path.name != text or present(path):
        return path
    shipped = sorted(folder.parent for folder in (SHIPPED / MODEL_FOLDERS).glob("*/config.json"))
    for folder in shipped:
        if folder.name == text:
            return folder
    raise UserError(f"no such folder of a model: {text}; shipped: {', '.join(folder.name for folder in shipped) or 'none'}")


def table_layers(op: Op, above: Sequence[Path] = ()) -> list[Layer]:
    """The layers of an op's table, highest precedence first; reads the environment, opens no file.

    Args:
        above: files that rank above all others, such as those given to one `TunedGemm` instance.

    A set variable replaces the user's and the shipped tables; the word ``default`` among its
    entries, or a missing path that ends in ``aiter/configs/<default name>`` (what launch scripts
    written for AITER pass), puts them back.
    """
    named, defaults = _variable(op)
    layers = [Layer("instance", tuple(above)), Layer("environment", tuple(named))]
    if defaults:
        name = op.columns.tuned_file
        models = sorted(path for path in (SHIPPED / MODELS).glob("*.csv") if "untuned" not in path.name and is_table_name(path.name, op))
        layers += [Layer("user", (home_folder() / name,)), Layer("model", tuple(models)), Layer("shipped", (SHIPPED / name,))]
    return [layer for layer in layers if layer.paths]


def is_table_name(name: str, op: Op) -> bool:
    """Whether a file's name says that it is of this op, tuned or untuned: it holds the name of the op's file as whole words.

    ``dsv3_a8w8_bpreshuffle_tuned_gemm.csv`` is a table of a8w8_bpreshuffle alone: the longest name
    that fits decides.
    """
    own = (op.columns.tuned_file, op.columns.untuned_file)
    every = {*own, *(file for other in ops().values() for file in (other.columns.tuned_file, other.columns.untuned_file))}
    fitting = [file for file in every if _words(Path(file).stem).search(name)]
    return bool(fitting) and max(fitting, key=len) in own


@functools.cache
def _words(stem: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^\W_]){re.escape(stem)}(?![^\W_])")


def _variable(op: Op) -> tuple[list[Path], bool]:
    """The paths of the op's variable, and whether the layers below apply."""
    entries = [entry.strip() for entry in os.environ.get(op.columns.variable, "").split(os.pathsep) if entry.strip()]
    named: list[Path] = []
    defaults = not entries
    for entry in entries:
        path = Path(entry).expanduser()
        if entry == DEFAULT or (path.parts[-3:] == ("aiter", "configs", op.columns.tuned_file) and not present(path)):
            defaults = True
        else:
            named.append(path)
    return named, defaults
