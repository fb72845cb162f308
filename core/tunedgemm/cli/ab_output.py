"""The output of ``tunedgemm ab``: a line a turn, the verdict, and the document ``ab``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedgemm.analysis.ab.turns import Result
from tunedgemm.cli.document import document_text, print_document
from tunedgemm.errors import UserError
from tunedgemm.process.files import open_regular, replace_file
from tunedgemm.tuner.report import number_of
from tunedgemm.version import __version__

if TYPE_CHECKING:
    from tunedgemm.analysis.ab.kernels import Kernels, ShapeResult
    from tunedgemm.analysis.ab.turns import Result

#: How a document begins; -o replaces no other file.
_BEGINNING = b'{\n "schema": "tunedgemm.ab"'
_VERSION = 1


class Output:
    """What is printed, and the document that is kept after each turn.

    Args:
        path: file of the document; None for none.
        json: whether standard output gets the document alone.
        threshold: the slow-down that counts.
        turns: counted turns.

    Attributes:
        facts: facts about the arms.
        result: the turns so far.

    Raises:
        UserError: the file is another document, or has no folder.
    """

    def __init__(self, path: Path | None, json: bool, threshold: float, turns: int) -> None:
        self._path, self._json, self._threshold, self.turns = path, json, threshold, turns
        self.result = Result(())
        self.facts: dict[str, Any] = {"tunedgemm": __version__}
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: its folder does not exist; name another file with -o")
        if path is not None and path.exists():
            with open_regular(path) as file:
                begins = file.read(len(_BEGINNING))
            if begins and begins != _BEGINNING:
                raise UserError(f"{path}: exists and is not of `tunedgemm ab`; name another file with -o")

    def keep(self, result: Result) -> None:
        """Print the last turn, and write all."""
        self.result = result
        numbers = ", ".join(f"{arm} {number:g}" for arm, number in result.turns[-1].items())
        self._print(f"turn {len(result.turns)} of {self.turns}: {numbers}")
        self._write(result, None)

    def keep_shape(self, found: Kernels) -> None:
        """Print the last shape, and write all."""
        shape = found.shapes[-1]
        self._print(f"{shape.a.shape}: {_text(shape)}")
        self._write(found.whole, found)

    def end(self, result: Result, kernels: Kernels | None = None) -> None:
        """Print the verdict, and write all."""
        self._write(result, kernels)
        if self._json:
            print_document("ab", _VERSION, self._document(result, kernels))
        for line in _verdict(result, self._threshold):
            self._print(line)

    def _print(self, line: str) -> None:
        if not self._json:
            print(line, flush=True)

    def _write(self, result: Result, kernels: Kernels | None) -> None:
        if self._path is not None:
            document = {"schema": "tunedgemm.ab", "version": _VERSION, **self._document(result, kernels)}
            replace_file(self._path, f"{document_text(document)}\n".encode())

    def _document(self, result: Result, kernels: Kernels | None) -> dict[str, Any]:
        facts = {**self.facts, "threshold": self._threshold, **_facts(result), "slower": result.exceeds(self._threshold)}
        if kernels is None:
            return facts
        return {**facts, "device": kernels.device, "shapes": [_shape_facts(shape) for shape in kernels.shapes]}


def _text(shape: ShapeResult) -> str:
    if shape.failure:
        return shape.failure
    arms = ", ".join(f"{name} {_median(shape.result, name):.2f} us ({arm.solution})" for name, arm in (("a", shape.a), ("b", shape.b)))
    effect, verdict = shape.result.effect, shape.result.verdict
    return f"{arms}: b over a {f'not resolved ({effect})' if effect and effect.resolved and verdict == 'not resolved' else effect}"


def _median(result: Result, arm: str) -> float:
    return statistics.median(turn[arm] for turn in result.turns)


def _verdict(result: Result, threshold: float) -> list[str]:
    lines = [f"ended early, after {number_of(len(result.turns), 'turn')}: {result.ended}"] if result.ended else []
    effect, control = result.effect, result.control
    if effect is None or control is None:
        return [*lines, "not resolved: too few turns"]
    lines += [f"medians of {len(result.turns)} turns: " + ", ".join(f"{arm} {_median(result, arm):g}" for arm in result.turns[0])]
    lines += [f"A/A control: {control}" + ("; b must differ by more than it" if control.resolved else "")]
    interval = f"[{effect.low:+.2%}, {effect.high:+.2%}]"
    if result.verdict != "not resolved":
        return [*lines, f"b is {result.verdict} than a by {abs(effect.share):.2%} {interval}"]
    excluded = effect.high < threshold
    most = f"a slow-down of {threshold:.2%} is {'excluded' if excluded else 'not excluded; more turns narrow the interval'}"
    return [*lines, f"not resolved: b over a {effect.share:+.2%} {interval}; {most}"]


def _facts(result: Result) -> dict[str, Any]:
    return {
        "turns": [dict(turn) for turn in result.turns],
        "more_is_better": result.more,
        "effect": result.effect,
        "control": result.control,
        "verdict": result.verdict,
        "ended": result.ended,
    }


def _shape_facts(shape: ShapeResult) -> dict[str, Any]:
    arms = {"a": shape.a.solution, "b": shape.b.solution}
    return {"shape": shape.a.shape, "calls": shape.calls, **arms, "failure": shape.failure, **_facts(shape.result)}
