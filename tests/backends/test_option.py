"""Option: a flag, its variable and its values, in a form that no author can get wrong unnoticed."""

import pytest
from tunedgemm.errors import PluginError
from tunedgemm.plugin import Option
from tunedgemm.testing.fakes import fake_backend

GOOD = {"flag": "--mine-search-space", "variable": "TUNEDGEMM_MINE_SEARCH_SPACE", "help": "how much to list", "choices": ("small", "full")}


def test_its_value_comes_from_the_environment():
    """The variable sets the value, blanks aside; empty or unset, the first choice or "" holds."""
    option, text = Option(**GOOD), Option(**{**GOOD, "choices": ()})
    assert [option.value({option.variable: said}) for said in ("full", " full ", "")] == ["full", "full", "small"]
    assert (option.value({}), text.value({}), text.value({text.variable: "any"})) == ("small", "", "any")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flag": "--mine"}, "option '--mine': a backend's flag must be --NAME-WORD"),
        ({"flag": "-m-space"}, "must be --NAME-WORD"),
        ({"flag": "--Mine-space"}, "in lower case"),
        ({"flag": "--mine_space"}, "must be --NAME-WORD"),
        ({"flag": "--mine-"}, "must be --NAME-WORD"),
        ({"flag": None}, "option None"),
        ({"variable": "MINE_SPACE"}, "option --mine-search-space: its variable must be TUNEDGEMM_MINE_SEARCH_SPACE (got 'MINE_SPACE')"),
        ({"variable": "PATH"}, "must be TUNEDGEMM_MINE_SEARCH_SPACE"),
        ({"help": " "}, "its help must be one line"),
        ({"choices": ("one",)}, "choices must be two or more different texts"),
        ({"choices": ("a", "a")}, "different texts"),
        ({"choices": ("a", "")}, "two or more different texts"),
        ({"choices": "ab"}, "two or more different texts"),
    ],
)
def test_invalid_options_are_errors(fields, message):
    """Each mistake names the flag and the remedy."""
    with pytest.raises(PluginError) as caught:
        Option(**{**GOOD, **fields})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (("--mine-space",), "libtype 'mine': options must be a tuple of values of tunedgemm.plugin.Option (got ('--mine-space',))"),
        (Option(**GOOD), "; write (Option(flag='--mine-search-space'"),
        ((Option(**GOOD), Option(**{**GOOD, "help": "another"})), "options state --mine-search-space more than once"),
    ],
)
def test_wrong_options_of_a_backend_are_errors(stated, message):
    """The error names the libtype and the remedy."""
    with pytest.raises(PluginError) as caught:
        fake_backend("mine", options=stated)
    assert message in str(caught.value)
