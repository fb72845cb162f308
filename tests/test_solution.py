"""Solution and Unsupported: an identity, and a reason that is falsy."""

import json
from fractions import Fraction

import attrs
import pytest
from tunedgemm.errors import PluginError
from tunedgemm.solution import Solution, Unsupported


def test_identity_is_libtype_name_and_split():
    """Index, claims and further columns are not part of the identity."""
    plain = Solution("mine", "k", 2)
    assert plain == Solution("mine", "k", 2, solidx=7, deterministic=False, batch_invariant=True, extra=(("block_m", 32),))
    assert len({plain, Solution("mine", "k", 4), Solution("mine", "l", 2), Solution("other", "k", 2)}) == 4


@pytest.mark.parametrize("name", ["a,b", 'a"b', "a'b", "a\nb", "a\rb", 7, None])
def test_names_fit_a_csv_field(name):
    """A kernel name that would break a table is refused with its libtype."""
    with pytest.raises(PluginError, match="libtype 'mine': 'kernel_name' must be text without"):
        Solution("mine", name)


@pytest.mark.parametrize("libtype", ["", "a b", "a,b", "a/b"])
def test_libtypes_are_words(libtype):
    """A libtype must fit into comma lists and file names."""
    with pytest.raises(ValueError, match="libtype"):
        Solution(libtype)


@pytest.mark.parametrize(
    "field",
    [
        *({name: value} for name in ("split_k", "solidx") for value in ("2", True, 2.0, None, 2**53 + 1, Fraction(2))),
        *({name: value} for name in ("deterministic", "batch_invariant") for value in ("no", 1, None)),
        *({"extra": value} for value in (None, "ab", [("a", 1)], (("a", True),), (("a", 1.5),), ((1, "a"),), (("a",),))),
    ],
    ids=str,
)
def test_values_are_those_that_tables_keep(field):
    """Numbers are ints that a reader takes back, claims are bools, and further columns are pairs."""
    with pytest.raises(PluginError, match=f"libtype 'mine': '{next(iter(field))}' must be"):
        Solution("mine", "k", **field)
    assert Solution("mine", "k", -(2**53), 2**53).split_k == -(2**53)


def test_a_name_has_room_for_no_number_that_int_refuses():
    """Plugins take numbers from kernels' names, which a table may give any length."""
    assert Solution("mine", "9" * 4096).kernel_name
    with pytest.raises(PluginError, match="at most 4096 letters"):
        Solution("mine", "9" * 4097)


def test_round_trip():
    """Every field survives the trial log, including the claims."""
    solution = Solution("mine", "k", 2, 7, False, True, (("a", 1), ("b", "x")))
    assert attrs.astuple(Solution.from_dict(json.loads(json.dumps(solution.to_dict())))) == attrs.astuple(solution)


def test_text():
    """The text is libtype:kernel, with the split where there is one."""
    assert str(Solution("mine", "k")) == "mine:k"
    assert str(Solution("mine", "k", 3)) == "mine:k splitK=3"


def test_unsupported_has_a_reason():
    """The reason is its text; `if refusal:` holds for it."""
    answer = Unsupported("no tensor cores")
    assert answer
    assert str(answer) == answer.reason == "no tensor cores"
    with pytest.raises(TypeError):
        Unsupported(None)
