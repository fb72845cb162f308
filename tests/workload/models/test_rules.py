"""Lists of modules in a quantisation, matched as vLLM 0.33 matches them."""

from __future__ import annotations

from tunedgemm.workload.models.rules import WIDE, Names, Verdict, rules_of

Q, GATE, EXPERT = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.3.up_proj"))
FP8 = Verdict("fp8_block")


def test_ways_to_match(faults_of):
    """Each way matches whole names, words, shell patterns, parts of words or regular expressions."""

    def check(how, entry, name, matches):
        (rule,) = rules_of("ignore", [entry], WIDE, how)
        assert rule.matches([name]) is matches
        assert rule.unmatched({name}) == ([] if matches else [entry])

    assert not faults_of(
        check,
        [
            ("exact", Q, Q, True),
            ("exact", "self_attn", Q, False),
            ("exact", "model.layers.*.self_attn.q_proj", Q, False),
            ("exact", "re:.*self_attn", Q, True),
            ("exact", "re:self_attn", Q, False),
            ("exact", "re:model.layers.0", Q, True),
            ("substring", "attn.q", Q, True),
            ("substring", "mlp.gate", GATE, True),
            ("substring", "re:.*", Q, False),
            ("substring", "model.layers.*", Q, False),
            ("of layers", "gate", GATE, True),
            ("of layers", "up", EXPERT, False),
            ("of layers", "experts.3.up", EXPERT, True),
            ("regex", r"-:.*\.0\..*", Q, True),
            ("regex", r"+:.*\.0\..*", Q, True),
            ("regex", "self_attn", Q, False),
            ("regex", r".*experts\.[0-3]\.", EXPERT, True),
            ("glob", "*q_proj", Q, True),
            ("glob", "q_proj", Q, False),
            ("glob", "re:.*q_proj", Q, True),
            ("substring or glob", "self_attn", Q, True),
            ("substring or glob", "model.layers.0*", Q, True),
            ("substring or glob", "model.layers.1*", Q, False),
            ("words", "mlp.gate", GATE, False),
            ("words", "mlp", GATE, True),
            ("words", "layers.*.mlp", GATE, True),
        ],
    )


def test_a_fused_layer_is_named_by_the_engine():
    """An entry for vLLM's fused layer matches each of its layers, but not through one of them."""
    parts = tuple(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up"))
    names = [Names((part,), fused=("model.layers.0.mlp.gate_up_proj",), siblings=parts) for part in parts]

    def decided(entry):
        (rule,) = rules_of("ignore", [entry], WIDE, "exact")
        return [rule.decides(each) for each in names]

    assert decided("model.layers.0.mlp.gate_up_proj") == [True, True]
    assert decided("re:.*up_proj") == [False, True]
    assert decided("re:.*qkv_proj") == [False, False]


def test_an_invalid_expression_leaves_the_rest_undecided(faults_of):
    """Layers that a valid entry matches are decided; others are left out with the entry and its fault."""

    def check(how, entry):
        rules = rules_of("ignore", ["lm_head", entry, "re:.*q_proj" if how == "exact" else ".*q_proj"], FP8, how)
        assert next(rule.verdict for rule in rules if rule.matches([Q])) == FP8
        (refused,) = [rule.verdict.refused for rule in rules if rule.matches([GATE])]
        assert refused.startswith(f"'ignore' has an invalid regular expression (got {entry!r}: ")

    assert not faults_of(check, [("exact", "re:("), ("regex", "+:*"), ("regex", "-:[a")])
    assert rules_of("ignore", [], FP8, "exact") == []
