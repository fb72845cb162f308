"""moe_words: AITER's words for the fused mixture of experts."""

import enum

import pytest
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import moe_words
from tunedgemm.ops.moe_words import ActivationType, QuantType
from tunedgemm.testing.listed import listed


class TestWords:
    """From AITER's enums and texts to the words of a shape."""

    def test_numbers_are_aiters(self):
        """csrc/include/aiter_enum.h gives the members these values."""
        assert [(member.name, member.value) for member in ActivationType] == [("Silu", 0), ("Gelu", 1), ("Swiglu", 2)]
        assert [member.name for member in sorted(QuantType)] == ["No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128"]

    def test_members_numbers_and_enums_of_others(self):
        """A member, its number, and a member of another library's enum mean the same."""

        class Theirs(enum.Enum):
            Gelu = 1
            per_1x128 = 4

        assert moe_words.act_word(ActivationType.Gelu) == moe_words.act_word(1) == moe_words.act_word(Theirs.Gelu) == "gelu"
        assert moe_words.quant_word(QuantType.per_1x128) == moe_words.quant_word(4) == moe_words.quant_word(Theirs.per_1x128) == "per_1x128"
        assert moe_words.quant_word(QuantType.per_128x128) == "per_1x128"

    @listed("value", [3, -1, "Silu", None, 1.5j])
    def test_activations_that_are_not_computed(self, value):
        """The message lists those that are."""
        with pytest.raises(OperandError, match=r"no ActivationType .* is computed here; known: Silu \(0\), Gelu \(1\), Swiglu \(2\)"):
            moe_words.act_word(value)

    def test_kinds_that_are_not_computed(self):
        """The message lists those that are."""
        with pytest.raises(OperandError, match=r"no QuantType 6 is computed here; known: No \(0\), per_Tensor \(1\)"):
            moe_words.quant_word(6)

    def test_texts_of_tables(self):
        """AITER's text or its last part; others are named with those known."""
        words = {"QuantType.No": "No", "QuantType.per_Token": "per_Token"}
        assert (
            moe_words.cell_word("q_type", "QuantType.per_Token", words) == moe_words.cell_word("q_type", "per_Token", words) == "per_Token"
        )
        for text in ("QuantType.per_Sunday", "ActivationType.No", "__import__('os')"):
            with pytest.raises(ShapeError, match=r"column 'q_type' has the unknown word .*; known: QuantType.No, QuantType.per_Token"):
                moe_words.cell_word("q_type", text, words)
