"""Check the layout: the order of the folders is the order of imports, and things stay short."""

import ast
import functools
import graphlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tunedgemm.libtypes import BUILTIN, RANK, WITHOUT_BACKEND

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "tunedgemm"

#: Below the root's files, which are below the other folders.
LOWEST = "text"
#: Lowest first: a module imports only from its folder and those before it.
ROOMS = ("process", "ops", "backends", "table", "workload", "tuner", "dispatch", "analysis", "integrations", "cli", "testing")
#: Menus, which re-export names of the rooms above.
MENUS = ("__init__", "__main__", "plugin", "tools")
#: Rooms whose packages are menus, too, for what is not a backend.
PACKAGE_MENUS = ("integrations", "analysis.results")
#: The module with another package's functions under the name that programs import.
FORWARDS = ("integrations.aiter",)
#: library -> the only modules and rooms that import it
ONLY_IN = {
    "pluggy": ("backends.contract", "backends.hookspecs"),
    "pandas": ("table.lookup", "tuner"),
    "triton": (),
    "pebble": ("tuner",),
    "ray": (),
}
#: lines of a core file, of any other file, and of a function
CORE_LINES, FILE_LINES, FUNCTION_LINES = 400, 450, 80
BANNED = ("utils", "util", "helpers", "helper", "common", "manager", "misc")


def sources(*folders: Path) -> list[Path]:
    """Return the Python files below some folders, in a fixed order."""
    return sorted(path for folder in folders for path in folder.rglob("*.py") if not {"build", "__pycache__"} & set(path.parts))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of each imported module, or of the name where the module is a package."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            package = ROOT / "core" / str(node.module).replace(".", "/")
            yield from [f"{node.module}.{alias.name}" for alias in node.names] if package.is_dir() else [str(node.module)]


def module_name(path: Path) -> str:
    """Return the dotted name of a core file below `tunedgemm`."""
    return ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    """Tell whether a name below `tunedgemm` is that of a module or package."""
    path = CORE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def floor(module: str) -> int:
    """Return the floor of a module below `tunedgemm`: its room's, 0 for the files of the root."""
    room = module.partition(".")[0]
    return -1 if room == LOWEST else ROOMS.index(room) + 1 if room in ROOMS else 0


CORE_FILES = sources(CORE)
_PACKAGES = (*CORE.parent.glob("tunedgemm_*"), *(ROOT / "plugins").glob("*/tunedgemm_*"))
#: Packages that are shipped with the core, or behind an extra, and import its menus alone.
BESIDE = sorted(path for path in _PACKAGES if path.is_dir() and not path.suffix)
EVERYTHING = sources(CORE.parent, ROOT / "plugins", ROOT / "examples", ROOT / "tests", ROOT / "benchmarks")


def faults(files: Iterable[Path], fault: Callable[[Path], object]) -> list[str]:
    """List the faults of each file."""
    return [f"{path.relative_to(ROOT)}: {found}" for path in files if (found := fault(path))]


def test_every_folder_has_a_purpose():
    """A new folder takes a place in the order of imports."""
    assert {path.name for path in CORE.iterdir() if list(path.glob("*.py"))} == {LOWEST, *ROOMS, "tools"}


def test_the_page_shows_the_rooms():
    """The page lists the rooms in the order of imports, and every file that it names is there."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [LOWEST, *ROOMS]
    assert not [name for name in re.findall(r"`?(\b\w+/[\w/]*\.py)", page) if not (CORE / name).is_file()]


def test_imports_go_down():
    """No module imports from a room above its own, none but a menu the root, and dispatch no tuner."""

    def upward(path: Path) -> set[str]:
        own = module_name(path)
        targets = {name.removeprefix("tunedgemm.") for name in imports(path) if name.startswith("tunedgemm.")}
        banned = {"__version__", *(name for name in targets if own.startswith("dispatch.") and name.startswith("tuner"))}
        return {name for name in targets if floor(name) > floor(own) or name in banned}

    assert not faults([path for path in CORE_FILES if module_name(path).partition(".")[0] not in MENUS], upward)


def test_no_modules_import_each_other():
    """Neither when they load, nor later, nor for their types alone: a reader can begin at the lowest."""
    modules = {f"tunedgemm.{module_name(path)}": path for path in CORE_FILES if module_name(path) not in MENUS}
    left = {name: set(imports(path)) & set(modules) - {name} for name, path in modules.items()}
    while lowest := [name for name, imported in left.items() if not imported & set(left)]:
        for name in lowest:
            del left[name]
    assert not {name: sorted(imported & set(left)) for name, imported in left.items()}


def test_libraries_stay_in_their_places():
    """Few modules know each of these libraries; no module knows Triton."""

    def misplaced(path: Path) -> set[str]:
        used = {name.split(".")[0] for name in imports(path)}
        return {library for library, places in ONLY_IN.items() if library in used and not module_name(path).startswith((*places, "-"))}

    assert not faults(CORE_FILES, misplaced)


def test_no_code_names_a_backend():
    """Names of backends are data in libtypes.py; no code branches on one."""

    def named(path: Path) -> set[str]:
        nodes = list(ast.walk(parsed(path)))
        literals = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        leaves = (leaf for node in nodes if isinstance(node, ast.Compare) for leaf in ast.walk(node))
        return literals & set(RANK) | {BUILTIN} & {leaf.value for leaf in leaves if isinstance(leaf, ast.Constant)}

    assert not faults([path for path in CORE_FILES if path.name != "libtypes.py" and "builtin" not in path.parts], named)


def test_public_code_has_docstrings():
    """Each module, public class, function and method has a docstring."""

    def undocumented(path: Path) -> list[str]:
        tree = parsed(path)
        scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))]
        defined = [node for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        public = [node.name for node in defined if not node.name.startswith("_") and not ast.get_docstring(node)]
        return public if ast.get_docstring(tree) else ["the module", *public]

    assert not faults([path for path in CORE_FILES if path.read_text()], undocumented)


def test_packages_beside_the_core_import_its_menus_only():
    """Tests of a backend also import `testing` and the root's modules; the core imports none of them."""

    def strange(path: Path) -> set[str]:
        known = {name.removeprefix("tunedgemm.") for name in imports(path) if name.startswith("tunedgemm.")}
        known -= {name for name in known if name in PACKAGE_MENUS or (name.rpartition(".")[0] in PACKAGE_MENUS and not is_module(name))}
        private = {name for name in known if is_module(name.partition(".")[0])}
        test = {"tests", "test_conformance.py"} & set(path.parts)
        if test and path.relative_to(ROOT).parts[1] in WITHOUT_BACKEND:
            return set()
        public = {name for name in private if name.startswith("testing") or floor(name) == 0} if test else set()
        return {name for name in private - public if name.partition(".")[0] not in MENUS}

    def outside(path: Path) -> set[str]:
        forwarded = {"tunedgemm_aiter_names"} if module_name(path) in FORWARDS else set()
        return {name.partition(".")[0] for name in imports(path)} & {package.name for package in BESIDE} - forwarded

    assert not faults(sources(*BESIDE, ROOT / "plugins", ROOT / "examples" / "thirdparty-plugin"), strange)
    assert not faults(CORE_FILES, outside)


def test_no_import_circles_in_packages_of_the_wheel():
    """Their modules have an order, although engines import some of them late."""
    for package in (path for path in BESIDE if path.parent == CORE.parent):
        names = {path: ".".join(path.relative_to(CORE.parent).with_suffix("").parts) for path in sources(package)}
        graphlib.TopologicalSorter({name: {*imports(path)} & {*names.values()} for path, name in names.items()}).prepare()


def test_files_and_functions_are_short():
    """Core files have at most 400 lines, others 450, functions 80; kernels may be as long as they must."""

    def long(path: Path) -> list[str]:
        nodes = [] if "kernels" in path.parts else ast.walk(parsed(path))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        whole = ["the file"] if path.read_text().count("\n") > (CORE_LINES if CORE in path.parents else FILE_LINES) else []
        return whole + [node.name for node in functions if node.end_lineno - node.lineno >= FUNCTION_LINES]

    assert not faults(EVERYTHING, long)


def test_no_catch_all_modules():
    """No file has a name that fits any content, and no package shadows a plugin's library."""
    assert not [path for path in EVERYTHING if path.stem in BANNED or path.stem.startswith("base_")]
    assert not [*(ROOT / "plugins").glob("__init__.py"), *(ROOT / "plugins").glob("*/__init__.py")]
