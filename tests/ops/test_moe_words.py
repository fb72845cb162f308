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
        assert [(member.name, member.value) for member in ActivationType] == [
            ("No", -1), ("Silu", 0), ("Gelu", 1), ("Swiglu", 2), ("Situv2", 3),
        ]  # fmt: skip
        assert [member.name for member in sorted(QuantType)] == [
            "No",
            "per_Tensor",
            "per_Token",
            "per_1x32",
            "per_1x128",
            "per_128x128",
            "per_256x128",
            "per_1024x128",
        ]

    def test_members_numbers_and_enums_of_others(self):
        """A member, its number, and a member of another library's enum mean the same."""

        class Theirs(enum.Enum):
            Gelu = 1
            per_1x128 = 4

        assert moe_words.act_word(ActivationType.Gelu) == moe_words.act_word(1) == moe_words.act_word(Theirs.Gelu) == "gelu"
        assert moe_words.quant_word(QuantType.per_1x128) == moe_words.quant_word(4) == moe_words.quant_word(Theirs.per_1x128) == "per_1x128"
        assert moe_words.quant_word(QuantType.per_128x128) == "per_1x128"

    @listed("value", [4, -2, "Silu", None, 1.5j])
    def test_activations_that_are_not_computed(self, value):
        """The message lists those that are."""
        with pytest.raises(OperandError, match=r"no ActivationType .* is computed here; known: No \(-1\), Silu \(0\), Gelu \(1\), "):
            moe_words.act_word(value)

    def test_kinds_that_are_not_computed(self):
        """The message lists those that are."""
        with pytest.raises(OperandError, match=r"no QuantType 8 is computed here; known: No \(0\), per_Tensor \(1\)"):
            moe_words.quant_word(8)

    def test_texts_of_tables(self):
        """AITER's text or its last part; others are named with those known."""
        words = {"QuantType.No": "No", "QuantType.per_Token": "per_Token"}
        assert (
            moe_words.cell_word("q_type", "QuantType.per_Token", words) == moe_words.cell_word("q_type", "per_Token", words) == "per_Token"
        )
        for text in ("QuantType.per_Sunday", "ActivationType.No", "__import__('os')"):
            with pytest.raises(ShapeError, match=r"column 'q_type' has the unknown word .*; known: QuantType.No, QuantType.per_Token"):
                moe_words.cell_word("q_type", text, words)

    def test_members_are_written_as_aiters_tables_hold_them(self):
        """Their str() and format() are the cells of AITER's files, and name them again."""
        assert str(ActivationType.Situv2) == f"{ActivationType.Situv2}" == "ActivationType.Situv2"
        assert str(QuantType.per_1x32) == "QuantType.per_1x32"
        assert f"{QuantType.No:>14}" == "  QuantType.No"


class TestActivationDtype:
    """The dtype of the activations by AITER's rule (fused_moe.py)."""

    @listed(
        ("kind", "weights", "act", "m", "interleaved", "gfx", "wanted"),
        [
            ("No", "bf16", "silu", 1, False, "gfx950", "bf16"),
            ("per_Token", "fp8_e4m3fnuz", "swiglu", 1, True, "gfx942", "fp8_e4m3fnuz"),
            ("per_1x32", "fp8_e4m3fn", "swiglu", 1, False, "gfx950", "fp8_e4m3fn"),
            ("per_1x32", "int4", "silu", 4096, False, "gfx942", "bf16"),
            ("per_1x32", "fp4x2", "silu", 1, False, "gfx950", "fp4x2"),
            ("per_1x32", "fp4x2", "swiglu", 255, False, "gfx950", "bf16"),
            ("per_1x32", "fp4x2", "swiglu", 256, False, "gfx942", "fp4x2"),
            ("per_1x32", "fp4x2", "swiglu", 1, False, "sm_90", "fp4x2"),
            ("per_1x32", "fp4x2", "swiglu", 255, True, "gfx950", "bf16"),
            ("per_1x32", "fp4x2", "silu", 256, True, "gfx950", "fp8_e4m3fn"),
            ("per_1x32", "fp4x2", "silu", 256, True, "gfx942", "bf16"),
            ("per_1x32", "fp4x2", "situv2", 4096, True, "gfx950", "bf16"),
            ("per_1x32", "fp4x2", "situv2", 1, False, "gfx1250", "fp4x2"),
        ],
    )
    def test_the_rule(self, kind, weights, act, m, interleaved, gfx, wanted):
        """Kind, weights, activation, tokens, order of w1 and architecture decide."""
        assert moe_words.activation_dtype(kind, weights, act, m, interleaved, gfx) == wanted

    @listed(
        ("variable", "value", "act", "gfx", "wanted"),
        [
            ("AITER_SITUV2_A8W4", "1", "situv2", "gfx950", "fp8_e4m3fn"),
            ("AITER_SITUV2_A4W4", "1", "situv2", "gfx950", "fp4x2"),
            ("AITER_FORCE_A8W4", "1", "silu", "gfx1250", "fp8_e4m3fn"),
            ("GPTOSS_SWIGLU_MXFP4_BF16_BOUND", "16", "swiglu", "gfx950", "fp4x2"),
            ("GPTOSS_SWIGLU_MXFP4_BF16_BOUND", "17", "swiglu", "gfx950", "bf16"),
            ("GPTOSS_SWIGLU_MXFP4_BF16_BOUND", "many", "swiglu", "gfx950", "bf16"),
        ],
    )
    def test_aiters_variables(self, variable, value, act, gfx, wanted):
        """AITER's environment variables apply; an unreadable one is its default."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, value)
            assert moe_words.activation_dtype("per_1x32", "fp4x2", act, 16, False, gfx) == wanted
