"""Check the mechanical rules of the project's English: `python .ci/english.py [path ...]`.

CONTRIBUTING.md lists the rules under "Words". Any fault fails the check.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]

WORDS, COLUMNS = 25, 100
#: What a function's docstring does not begin with: it begins with a verb.
NO_VERBS = frozenset(
    [
        *("the", "a", "an", "what", "whether", "why", "who", "whose", "which", "how", "where", "when", "that", "these", "those"),
        *("this", "its", "their", "all", "each", "every", "no", "one", "two", "both", "it", "some", "any", "and", "as", "if"),
        *("of", "for", "in", "on", "by", "with", "without", "from", "at"),
    ]
)
BANNED = re.compile(
    r"\b(told|nobody|lies|besides?|once more|of its own|of their own|as it is|as they are|gone on with|for want of"
    r"|nothing of that|is no [a-z]+)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?=[-*|#]|\d+\.)")
_CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|https?://\S+|\]\([^)]*\)", re.DOTALL)


def prose_faults(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield the faults of one passage that begins at *line*: banned words and long sentences."""
    plain = _CODE.sub(lambda code: "x" + "\n" * code[0].count("\n"), text)
    for found in BANNED.finditer(plain):
        yield line + plain[: found.start()].count("\n"), f"write it plainly: {found[0]!r}"
    start = 0
    for sentence in _SENTENCE_END.split(plain):
        start = plain.find(sentence, start)
        words = re.findall(r"[A-Za-z][\w'-]*", sentence)
        if len(words) > WORDS:
            yield line + plain[:start].count("\n"), f"{len(words)} words in a sentence (at most {WORDS})"


def width_faults(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose that are too wide; links, tables and code may be."""
    for offset, row in enumerate(text.splitlines()):
        if len(row) > COLUMNS and not re.search(r"https?://|^\s*\||^\s*\[|\]\(", row):
            yield line + offset, f"{len(row)} columns (at most {COLUMNS})"


def comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield blocks of comments as their first line, their text, and the lines as they stand."""
    block: list[tuple[int, str, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|fmt:|!|pragma)", token.string):
            continue
        line, alone = token.start[0], token.line.lstrip().startswith("#")
        if block and not (alone and line == block[-1][0] + 1):
            yield block[0][0], "\n".join(each[1] for each in block), "\n".join(each[2] for each in block)
            block = []
        block.append((line, token.string.lstrip("#: "), token.line.rstrip() if alone else ""))
    if block:
        yield block[0][0], "\n".join(each[1] for each in block), "\n".join(each[2] for each in block)


def definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a module and the classes and functions in it; expressions, most of a tree, are skipped."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from definitions(child)


def python_faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the faults of a Python file's docstrings and comments."""
    source = path.read_text()
    test = "tests" in path.parts
    for node in definitions(ast.parse(source)):
        text = ast.get_docstring(node, clean=False)
        if not text:
            continue
        line = node.body[0].lineno
        first = re.match(r"\W*([A-Za-z]*)", text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not test and first and first[1].lower() in NO_VERBS:
            yield line, f"a docstring begins with a verb (got {first[1]!r})"
        yield from prose_faults(text, line)
        yield from width_faults(text, line)
    for line, text, rows in comments(source):
        yield from prose_faults(text, line)
        yield from width_faults(rows, line)


def markdown_faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the faults of a page."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    yield from prose_faults(text, 1)
    yield from width_faults(text, 1)


def faults(path: Path) -> list[tuple[int, str]]:
    """Return the faults of a file by line."""
    return sorted(set(python_faults(path) if path.suffix == ".py" else markdown_faults(path)))


def files(arguments: list[str]) -> list[Path]:
    """Return the files below some paths, or all that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.splitlines() if name.endswith((".py", ".md"))]
    return [path for path in paths if path.is_file() and "results" not in path.parts]


def main(arguments: list[str]) -> int:
    """Print the faults; return 1 where there are any."""
    paths = files(arguments)
    with ProcessPoolExecutor() as processes:
        found = dict(zip(paths, processes.map(faults, paths, chunksize=20), strict=True))
    for path, lines in found.items():
        for line, fault in lines:
            print(f"{path.relative_to(ROOT)}:{line}: {fault}")
    number = sum(map(len, found.values()))
    print(f"English: {number} faults in {len(found)} files")
    return 1 if number else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
