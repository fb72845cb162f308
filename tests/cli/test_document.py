"""The JSON document of a command: its head, its types, and its characters."""

import json
import math
from pathlib import Path

import pytest
from tunedgemm.cli.document import document_text, plain, print_document
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

#: Controls, bidi, zero width, half a character, DEL, which JSON may leave as it stands.
HOSTILE = "x\x1b]0;own\x07\x9b2J\u202e\u2028\u200b\x7f\ud800\n"


def test_a_document_begins_with_its_schema_and_version(capsys):
    """The facts follow in their order."""
    print_document("doctor", 3, {"b": 1, "a": [True, None, 0.5]})
    text = capsys.readouterr().out
    assert list(json.loads(text).items()) == [("schema", "tunedgemm.doctor"), ("version", 3), ("b", 1), ("a", [True, None, 0.5])]
    assert text.endswith("}\n")


def test_any_text_comes_back_and_is_printable():
    """A name with control characters is escaped by JSON's rules, in keys, too."""
    text = document_text({HOSTILE: [HOSTILE, Path(HOSTILE)]})
    assert text.isascii() and text.replace("\n", "").isprintable()
    assert json.loads(text) == {HOSTILE: [HOSTILE, HOSTILE]}


def test_the_projects_values_have_one_form():
    """A shape, a solution and a device are objects; infinite and unknown times are null."""
    shape = Shape("a16w16", 1, 64, 128, extra={"B": 8})
    assert plain(shape) == {"text": str(shape), **shape.to_dict()}
    solution = plain(Solution("asm", "k", 2, 5, extra=(("tile", 64),)))
    assert solution == {"text": "asm:k splitK=2", "libtype": "asm", "kernel_name": "k", "split_k": 2, "solidx": 5, "extra": {"tile": 64}}
    device = Device("gfx942", 304, "mi300x", versions=(("torch", "2.9"),))
    assert plain(device) == {"gfx": "gfx942", "cu_num": 304, "name": "mi300x", "versions": {"torch": "2.9"}}
    assert plain((math.inf, math.nan, frozenset(["a"]))) == [None, None, ["a"]]


def test_a_value_of_another_type_is_an_error():
    """No field becomes a text by accident."""
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        plain({"field": object()})
