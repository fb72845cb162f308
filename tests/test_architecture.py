"""The layout as data: which module may import which, where names may stand, how long things may be."""

import ast
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import tunedgemm
from tunedgemm.libtypes import BUILTIN, RANK

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "tunedgemm"

#: Lowest first. A module imports from its own layer and those below; a folder is one name.
LAYERS = {
    "values": ("errors", "dtype", "shape", "solution", "timing", "device", "launcher", "libtypes", "settings", "sheet"),
    "contract": (
        "ops",
        "option",
        "hookspecs",
        "plugin",
        "artifact",
        "driver",
        "workspace",
        "command",
        "accuracy",
        "weights",
        "contents",
        "quant",
    ),
    "backends": ("registry", "torch_backend", "split"),
    "flow": (
        "columns",
        "folders",
        "row",
        "csvfile",
        "index",
        "scan",
        "indexfile",
        "table",
        "capturefile",
        "capture",
        "choice",
        "duals",
        "calls",
        "serving",
        "hot",
        "preshuffle",
        "dispatch",
        "tuned_gemm",
        "questions",
        "prewarming",
        "tuner",
    ),
    "edge": (
        "cli",
        "asked",
        "integrations",
        "compare",
        "coverage",
        "report",
        "online",
        "models",
        "flags",
        "optionflags",
        "testing",
        "__init__",
        "__main__",
    ),
}
PLACE = {module: place for place, layer in enumerate(LAYERS.values()) for module in layer}

#: importing modules -> what none of them may import, over and above the layers
NEVER = {
    (
        "tuned_gemm",
        "dispatch",
        "questions",
        "prewarming",
        "preshuffle",
        "serving",
        "calls",
        "choice",
        "table",
        "csvfile",
        "row",
        "sheet",
        "folders",
        "settings",
        "capture",
        "capturefile",
    ): (
        "tuner",
        "report",
        "compare",
        "online",
    ),
    ("tuner",): ("tuned_gemm", "dispatch", "calls", "choice"),
}
#: library -> the only modules of the core that import it
ONLY_IN = {
    "pluggy": ("hookspecs", "registry"),
    "pandas": ("table", "tuner", "report"),
    "triton": (),
    "pebble": ("tuner",),
    "ray": ("tuner",),
}

#: module of the tuner -> the others that it may import; a stage knows the values in `trial` and no other stage
TUNER = {
    "__init__": ("executors", "plan", "processes", "select", "store", "trial"),
    "executors": ("compilers", "lane", "remote", "session", "trial", "worker"),
    "lane": ("compilers", "measure", "remote", "roofline", "screen", "select", "trial", "worker"),
    "remote": ("roofline", "trial", "worker"),
    "worker": ("processes", "session", "trial"),
    "compilers": ("processes",),
    "session": ("candidates", "trial", "verify", "workload"),
    "store": ("log", "trial"),
    "plan": ("roofline", "trial"),
    "workload": ("roofline", "trial"),
    "trial": (),
}
STAGES_SHARE = ("trial",)
FILE_LINES, FUNCTION_LINES = 450, 80
BANNED = ("utils", "util", "helpers", "helper", "common", "manager", "misc")


def sources(*folders: Path) -> list[Path]:
    """The Python files below some folders, in a fixed order."""
    return sorted(path for folder in folders for path in folder.rglob("*.py") if not {"build", "__pycache__"} & set(path.parts))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def loaded_by_path(path: Path) -> bool:
    """Whether a file is of a package below a plugin's tests, which has no name of its own: pytest imports tests by path."""
    parts = path.relative_to(ROOT).parts
    return parts[0] == "plugins" and parts[2] == "tests" and (path.parent / "__init__.py").exists()


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file, once for each statement."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1 and loaded_by_path(path):
                continue
            assert not node.level, f"{label(path)}:{node.lineno}: relative import"
            yield from [f"tunedgemm.{alias.name}" for alias in node.names] if node.module == "tunedgemm" else [str(node.module)]


def home(path: Path) -> str:
    """The name of a core file in `LAYERS`."""
    parts = path.relative_to(CORE).with_suffix("").parts
    return parts[0]


def targets(path: Path) -> set[str]:
    """The names in `LAYERS` that a core file imports; names of the package itself (its version) are no module."""
    parts = (name.split(".") for name in imports(path) if name.startswith("tunedgemm."))
    return {part[1] for part in parts if (CORE / part[1]).is_dir() or (CORE / f"{part[1]}.py").exists()}


CORE_FILES = sources(CORE)
OTHERS = sources(ROOT / "plugins", ROOT / "examples" / "thirdparty-plugin")
EVERYTHING = sources(CORE, ROOT / "plugins", ROOT / "examples", ROOT / "tests", ROOT / "benchmarks")


def faults(files: Iterable[Path], fault: Callable[[Path], object]) -> list[str]:
    """What is wrong, with the file before it, so that one test names all."""
    return [f"{label(path)}: {found}" for path in files if (found := fault(path))]


class TestCore:
    """Every file of the core."""

    def test_has_a_layer(self):
        """A new module says where it stands."""
        assert not [label(path) for path in CORE_FILES if home(path) not in PLACE], "put it into LAYERS"

    def test_imports_downwards(self):
        """Imports go to the same layer or a lower one."""
        assert not faults(CORE_FILES, lambda path: {target for target in targets(path) if PLACE[target] > PLACE[home(path)]})

    def test_imports_nothing_forbidden(self):
        """Serving code stays clear of the tuner, the tuner of dispatch."""

        def forbidden(path: Path) -> set[str]:
            return targets(path) & {name for modules, names in NEVER.items() if home(path) in modules for name in names}

        assert not faults(CORE_FILES, forbidden)

    def test_libraries_stay_in_their_places(self):
        """Each of these libraries is known to few modules; Triton to none."""

        def misplaced(path: Path) -> set[str]:
            used = {name.split(".")[0] for name in imports(path)}
            return {library for library, places in ONLY_IN.items() if library in used and home(path) not in places}

        assert not faults(CORE_FILES, misplaced)

    def test_names_no_libtype(self):
        """Names of our backends are data in libtypes.py; no code branches on one."""

        def named(path: Path) -> set[str]:
            nodes = list(ast.walk(parsed(path)))
            literals = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            leaves = (leaf for node in nodes if isinstance(node, ast.Compare) for leaf in ast.walk(node))
            compared = {leaf.value for leaf in leaves if isinstance(leaf, ast.Constant)}
            return literals & set(RANK) | {BUILTIN} & compared

        elsewhere = [path for path in CORE_FILES if path.name != "libtypes.py" and home(path) != "torch_backend"]
        assert not faults(elsewhere, named)

    def test_is_documented(self):
        """The module, its public classes, functions and methods have docstrings."""

        def undocumented(path: Path) -> list[str]:
            tree = parsed(path)
            scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))]
            defined = [node for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            public = [node.name for node in defined if not node.name.startswith("_") and not ast.get_docstring(node)]
            return public if ast.get_docstring(tree) else ["the module", *public]

        assert not faults([path for path in CORE_FILES if path.read_text()], undocumented)


def test_stages_do_not_know_each_other():
    """`tuner/__init__` orders a run, `lane` a shape, `session` what is done on a device; the stages know values only."""

    def known(path: Path) -> set[str]:
        own = path.relative_to(CORE / "tuner").with_suffix("").parts[0]
        others = {name.split(".")[2] for name in imports(path) if name.startswith("tunedgemm.tuner.")} - {own}
        return others - set(TUNER.get(own, STAGES_SHARE))

    assert not faults(sources(CORE / "tuner"), known)


def test_plugins_import_the_menu_only():
    """A plugin sees `tunedgemm.plugin`, its tests `tunedgemm.testing` and the user's menu besides; no plugin sees another."""

    def strange(path: Path) -> set[str]:
        own = ROOT.joinpath(*path.relative_to(ROOT).parts[:2])
        siblings = {folder.name for folder in own.iterdir() if (folder / "__init__.py").exists()} | {file.stem for file in own.glob("*.py")}
        known = {name for name in imports(path) if name.split(".")[0].startswith("tunedgemm") and name.split(".")[0] not in siblings}
        testing = {name for name in known if (name.startswith("tunedgemm.testing") or name == "tunedgemm") and "tests" in path.parts}
        return known - testing - {"tunedgemm.plugin"}

    assert not faults(OTHERS, strange)


def test_files_and_functions_are_short():
    """No file beyond 450 lines, no function beyond 80; kernels are as long as they have to be."""

    def long(path: Path) -> list[str]:
        kernels = "kernels" in path.parts
        functions = [] if kernels else [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        whole = ["the file"] if path.read_text().count("\n") > FILE_LINES else []
        return whole + [node.name for node in functions if node.end_lineno - node.lineno >= FUNCTION_LINES]

    assert not faults(EVERYTHING, long)


def test_no_drawers():
    """No file is named after nothing in particular."""
    assert not [label(path) for path in EVERYTHING if path.stem in BANNED or path.stem.startswith("base_")]


def test_plugin_folders_are_no_packages():
    """An __init__.py beside or in a plugin's folder would make `plugins/triton` shadow the real Triton."""
    assert not list((ROOT / "plugins").glob("__init__.py"))
    assert not list((ROOT / "plugins").glob("*/__init__.py"))


OP = '''
"""relu16: a16w16 with negative outputs cut off."""

import attrs

from tunedgemm.ops.a16w16 import op as plain

columns = attrs.evolve(plain.columns, tuned_file="relu_tuned.csv", parse=lambda row: attrs.evolve(plain.columns.parse(row), op="relu16"))
op = attrs.evolve(
    plain,
    name="relu16",
    columns=columns,
    shape_of=lambda *operands, **fields: attrs.evolve(plain.shape_of(*operands, **fields), op="relu16"),
    reference=lambda shape, operands: plain.reference(shape, operands).relu(),
)
'''
PLUGIN = '''
"""The backend fresh: relu16 by torch."""

from tunedgemm.plugin import Solution, Unsupported, hookimpl

OPS = ("relu16",)


@hookimpl
def supports(shape):
    return True if shape.outdtype == shape.dtype and shape.bias_dtype in ("", shape.dtype) else Unsupported("one dtype")


@hookimpl
def enumerate_solutions():
    return [Solution("fresh", "relu_v1")]


@hookimpl
def run(operands):
    import torch

    return torch.nn.functional.linear(*operands).relu_()
'''
TEST = """
from tunedgemm.testing.conformance import BackendConformance


class TestFresh(BackendConformance):
    libtype = "fresh"
"""
TUNE = """
import pytest, tunedgemm
from tunedgemm.cli import main
from tunedgemm.ops import ops
from tunedgemm.registry import Registry

print(tunedgemm.__file__, *sorted(ops()))
assert [b.libtype for b in Registry().select("all") if "relu16" in b.ops] == ["fresh"]
assert pytest.main(["-q", "-p", "no:cacheprovider", FOLDER + "/test_fresh.py"]) == 0
assert main(["tune", "--op", "relu16", "-i", FOLDER + "/shapes.csv", "-o", FOLDER + "/out.csv"]) == 0
print(open(FOLDER + "/out.csv").read())
"""


@pytest.fixture
def arrival(tmp_path):
    """A folder with a plugin that nobody has heard of, its conformance test, and shapes to tune."""
    folder = tmp_path / "arrival"
    (folder / "fresh-1.dist-info").mkdir(parents=True)
    (folder / "fresh-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1\n")
    (folder / "fresh-1.dist-info" / "entry_points.txt").write_text("[tunedgemm.backends]\nfresh = fresh\n")
    (folder / "fresh.py").write_text(PLUGIN)
    (folder / "test_fresh.py").write_text(TEST)
    (folder / "shapes.csv").write_text("M,N,K\n4,48,64\n")
    return folder


def check_arrival(output: str, core: Path) -> None:
    """The op is listed, its conformance test passed, and it was tuned, over this core."""
    lines = output.splitlines()
    module, *names = lines[0].split()
    assert module == str(core / "tunedgemm" / "__init__.py")
    assert {"a16w16", "relu16"} <= set(names)
    assert any("passed" in line and "failed" not in line for line in lines)
    assert any("fresh" in line and "relu_v1" in line for line in lines)


@pytest.mark.slow
def test_an_op_and_a_backend_of_others_arrive_without_a_change(arrival, child):
    """Both by entry points: nothing of the core knows their names, and everything works with them."""
    (arrival / "relu16.py").write_text(OP)
    entry_points = arrival / "fresh-1.dist-info" / "entry_points.txt"
    entry_points.write_text(entry_points.read_text() + "[tunedgemm.ops]\nrelu16 = relu16:op\n")
    check_arrival(child(f"FOLDER = {str(arrival)!r}\n{TUNE}", arrival), Path(tunedgemm.__file__).parents[1])


@pytest.mark.slow
def test_an_op_of_ours_is_one_file(arrival, child, tmp_path):
    """A file dropped into the core's ops/ is an op: no list names it."""
    core = shutil.copytree(CORE, tmp_path / "core" / "tunedgemm", ignore=shutil.ignore_patterns("__pycache__")).parent
    (core / "tunedgemm" / "ops" / "relu16.py").write_text(OP)
    check_arrival(child(f"FOLDER = {str(arrival)!r}\n{TUNE}", core, arrival), core)
