"""Check the mechanical rules of the project's English (CONTRIBUTING.md, "Words"): `python .ci/english.py [path ...]`.

Faults are counted by file. `.ci/english.csv` lists the files that still have some; a count may only fall.
`--all` prints those faults too, `--update` writes the list anew.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / ".ci" / "english.csv"

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


def python_faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the faults of a Python file's docstrings and comments."""
    source = path.read_text()
    test = "tests" in path.parts
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
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
    return [path for path in paths if path.is_file() and "results" not in path.parts and path.name != "CHANGELOG.md"]


def main(arguments: list[str]) -> int:
    """Print new faults; return 1 where there are any."""
    flags, paths = [word for word in arguments if word.startswith("-")], [word for word in arguments if not word.startswith("-")]
    found = {str(path.relative_to(ROOT)): faults(path) for path in files(paths)}
    if "--update" in flags:
        rows = [(name, len(each)) for name, each in sorted(found.items()) if each]
        with KNOWN.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("file", "faults"), *rows])
    with KNOWN.open(newline="") as file:
        known = {row["file"]: int(row["faults"]) for row in csv.DictReader(file)}
    worse = {name: each for name, each in found.items() if len(each) > (0 if "--all" in flags else known.get(name, 0))}
    for name, each in worse.items():
        print(*(f"{name}:{line}: {fault}" for line, fault in each), sep="\n")
    print(f"English: {sum(map(len, found.values()))} faults in {len(found)} files, {len(worse)} files above their number")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
