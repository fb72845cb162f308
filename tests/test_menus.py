"""integrations and analysis.results: the menus of packages that are not backends."""

import ast
from pathlib import Path

import pytest
from tunedgemm import integrations
from tunedgemm.analysis import results
from tunedgemm_aiter_names.names import SERVED

ROOT = Path(__file__).parents[1]
FOLDERS = (*(ROOT / "core").glob("tunedgemm_*"), *(ROOT / "plugins").glob("*/tunedgemm_*"))


def imported(module: str) -> set[str]:
    """Return the names that the packages import from a menu, or serve from it."""
    trees = [ast.parse(path.read_text()) for folder in FOLDERS for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    served = {name for names in SERVED.values() for home, name in names.values() if home == module}
    return served | {alias.name for node in nodes for alias in node.names}


@pytest.mark.parametrize("menu", [integrations, results], ids=["integrations", "results"])
def test_each_name_is_there_and_has_a_user(menu):
    """A menu offers what a package imports, and nothing else."""
    assert set(menu.__all__) == imported(menu.__name__)
    assert all(getattr(menu, name) is not None for name in menu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Dispatcher'"):
        menu.Dispatcher  # noqa: B018  as an author writes it


def test_type_checkers_see_the_names_that_are_loaded():
    """The imports for type checkers are those of the table by which names load."""
    nodes = ast.walk(ast.parse(Path(integrations.__file__).read_text()))
    typed = {alias.name: node.module for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name: home for name, home in typed.items() if home.startswith("tunedgemm.")} == integrations._HOME


def test_the_menu_of_engines_loads_nothing(child):
    """Engines import their plugins in every process: neither torch nor the tuner comes with the menu."""
    assert child("import sys, tunedgemm.integrations\nprint({'torch', 'tunedgemm.tuner'} & set(sys.modules))") == "set()"
