"""Hook of MkDocs: give the site the repository's paths, so that the links of a page work in both.

It adds the pages outside docs/, the files that pages link to, and the API reference of the public
modules. It imports nothing of tunedgemm: griffe reads the sources.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "tunedgemm"
PAGES = ("*.md", "docs/**/*.md", "plugins/*/*.md", "examples/*/*.md", "benchmarks/**/*.md", "core/**/configs/**/*.md")
LINK = re.compile(r"(?<=\]\()[^)\s#]+(?=[)#])")
#: The names in front of a description in a section of a docstring, where they are several.
SHARED = re.compile(r"^ {4}\w+(?:, \w+)+(?=: )", re.MULTILINE)
#: Linked files that a browser shows. Any other linked file gets a page with its text.
SHOWN = {".csv", ".html", ".json", ".png", ".svg"}
#: room of the core -> heading of the public names that it defines
HEADINGS = {"dispatch": "Dispatch", "integrations": "Models", "tuner": "Tuning", "ops": "Formats"}
#: Menus of `tunedgemm.tools`.
TOOLS = ("launching", "files", "tables")
#: module of `tunedgemm.testing` -> its public names
TESTING = {
    "conformance": ("BackendConformance",),
    "stand_in": ("StandInConformance",),
    "fakes": ("fake_backend", "fake_registry"),
    "shapes": ("shapes_of",),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give the pages the repository's paths, and add the pages and files outside docs/."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    linked = {path for page in pages for path in _targets(page)}
    linked |= {path for folder in linked if folder.is_dir() for path in _contents(folder)}
    return Files([*theme, *(_as_file(path, config) for path in [*pages, *sorted(linked)]), *_reference(config)])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to folders and source files at the pages that show them."""
    folder = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda link: link[0] + _suffix(folder / link[0]), markdown)


def _suffix(path: Path) -> str:
    """Return the end of the site's path for a path of the repository."""
    if path.is_dir():
        return "/index.md"
    return "" if path.suffix in {".md", *SHOWN} or not path.is_file() else ".md"


def _as_file(path: Path, config: MkDocsConfig) -> File:
    """Return a page or file of the repository at its path, or a page that shows it."""
    name = str(path.relative_to(ROOT))
    if not (suffix := _suffix(path)):
        return File(name, str(ROOT), config.site_dir, config.use_directory_urls)
    if path.is_dir():
        text = "".join(f"- [{file.relative_to(path)}]({file.relative_to(path)})\n" for file in _contents(path))
    else:
        text = f"````{path.suffix[1:]}\n{path.read_text()}\n````\n"
    return File.generated(config, name + suffix, content=f"# {name}\n\n{text}")


def _contents(folder: Path) -> list[Path]:
    """Return the files below a folder that browsers show."""
    return sorted(path for path in folder.rglob("*") if path.suffix in SHOWN)


def _targets(page: Path) -> Iterator[Path]:
    """Yield the files and folders of this repository that a page links to, but no pages."""
    for target in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve()
        if path.exists() and path.suffix != ".md" and ROOT in path.parents:
            yield path


def _reference(config: MkDocsConfig) -> Iterator[File]:
    """Yield the pages of the API reference."""
    pages = {
        "tunedgemm": _page("tunedgemm", _public_names()),
        "plugin": _page("tunedgemm.plugin", {"Names": _exported("plugin")}),
        "tools": _page("tunedgemm.tools", {menu: [f"{menu}.{name}" for name in _exported(f"tools/{menu}")] for menu in TOOLS}),
        "integrations": _page("tunedgemm.integrations", {"Names": sorted(_typed_imports(CORE / "integrations" / "__init__.py"))}),
        "results": _page("tunedgemm.analysis.results", {"Names": _exported("analysis/results/__init__")}),
        "testing": _page("tunedgemm.testing", {module: [f"{module}.{name}" for name in names] for module, names in TESTING.items()}),
    }
    for name, text in pages.items():
        yield File.generated(config, f"api/{name}.md", content=text)


def _page(module: str, sections: dict[str, list[str]]) -> str:
    """Return a page of mkdocstrings' directives, a heading for each section."""
    parts = [f"# {module}", f"::: {module}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}"]
    for heading, names in sections.items():
        parts += [f"## {heading}", *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def _public_names() -> dict[str, list[str]]:
    """Return the public names of `tunedgemm` by the heading of their section."""
    products = sorted(_op_functions())
    sections = {"Products": products}
    for name, module in sorted(_typed_imports(CORE / "__init__.py").items()):
        if name not in products and not name.startswith("_"):
            sections.setdefault(HEADINGS[module.split(".")[1]], []).append(name)
    return sections


def _typed_imports(path: Path) -> dict[str, str]:
    """Return the names that a module imports for type checkers, each with the module it is from."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in nodes for alias in node.names if str(node.module).startswith("tunedgemm.")}


def _exported(module: str) -> list[str]:
    """Return the names in a module's ``__all__``."""
    for node in ast.parse((CORE / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module}.py: has no __all__; the API reference lists the names in it")


def _op_functions() -> dict[str, str]:
    """Return the public functions of the ops, each with the first name of the same function."""
    by_name: dict[str, str] = {}
    for path in sorted((CORE / "ops").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "functions":
                names = ast.literal_eval(node.value)
                by_name |= dict.fromkeys(names, names[0])
    return by_name


class OpFunctions(griffe.Extension):
    """Let griffe find the functions of ops under each of their public names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Keep names that share a description together: griffe takes the second one for a type."""
        if obj.docstring is not None:
            obj.docstring.value = SHARED.sub(lambda names: names[0].replace(", ", ",\N{NO-BREAK SPACE}"), obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Add the further names of a function, which is in its op's module under the first of them."""
        modules = _typed_imports(CORE / "__init__.py")
        for name, first in _op_functions().items():
            pkg.set_member(name, griffe.Alias(name, f"{modules[first]}.{first}"))
