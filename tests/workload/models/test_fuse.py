"""Fuse: which layers of a rank are one product as engines run them."""

from __future__ import annotations

from tunedgemm.workload.models.fuse import Latent, fused
from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.roles import crosses, role_of


def layers(*names, **more):
    return [Layer(name, "linear", 8, 16, role=role_of(name), **more) for name in names]


def told(found):
    return [(layer.name, layer.n) for layer in found]


def test_layers_with_one_input_are_one_product(faults_of):
    """In any order, within one block, and not where queries look at another input than keys and values."""

    def check(names, expected):
        assert told(fused(layers(*names), None)) == expected

    assert not faults_of(
        check,
        [
            (("a.self_attn.q_proj", "a.self_attn.k_proj", "a.self_attn.v_proj"), [("a.self_attn.qkv_proj", 24)]),
            (("a.self_attn.k_proj", "a.self_attn.v_proj", "a.self_attn.q_proj"), [("a.self_attn.qkv_proj", 24)]),
            (("a.mlp.gate_proj", "a.mlp.up_proj"), [("a.mlp.gate_up_proj", 16)]),
            (("a.w1", "a.w3"), [("a.gate_up_proj", 16)]),
            (("a.self_attn.q_a_proj", "a.self_attn.kv_a_proj_with_mqa"), [("a.self_attn.fused_qkv_a_proj", 16)]),
            (
                ("a.encoder_attn.q_proj", "a.encoder_attn.k_proj", "a.encoder_attn.v_proj"),
                [("a.encoder_attn.q_proj", 8), ("a.encoder_attn.kv_proj", 16)],
            ),
            (("a.q_proj", "b.k_proj", "b.v_proj"), [("a.q_proj", 8), ("b.kv_proj", 16)]),
            (("a.mlp.up_proj", "a.mlp.down_proj"), [("a.mlp.up_proj", 8), ("a.mlp.down_proj", 8)]),
        ],
    )


def test_different_layers_stay_apart(faults_of):
    """Another dtype, another quantisation, or another number of layers."""

    def check(other):
        (gate,), (up,) = layers("a.gate_proj"), layers("a.up_proj", **other)

        assert told(fused([gate, up], None)) == [("a.gate_proj", 8), ("a.up_proj", 8)]

    assert not faults_of(check, [{"dtype": "fp32"}, {"scheme": "fp8_row"}, {"count": 3}])


def test_one_bias_is_a_bias_of_all():
    """Queries with a bias and keys without, as in Whisper, give a product with one."""
    (q,), rest = layers("a.q_proj", bias=True), layers("a.k_proj", "a.v_proj")
    (found,) = fused([q, *rest], None)

    assert (found.n, found.bias) == (24, True)


def test_decoding_goes_around_the_latent_vector():
    """kv_b_proj of 4 heads gets its two halves, a product a head, in 16 bits."""
    kv_b = Layer("a.kv_b_proj", "linear", 4 * 24, 32, role="kv_b", unit=24, scheme="fp8_block")
    _, up, down = fused([kv_b], Latent(32, 8, 16))

    assert [(layer.name, layer.batch, layer.n, layer.k, layer.scheme) for layer in (up, down)] == [
        ("a.w_uk", 4, 32, 8, ""),
        ("a.w_uv", 4, 16, 32, ""),
    ]


def test_roles_by_name(faults_of):
    """One name closes an attention where it stands in one, a feed-forward network elsewhere."""

    def check(name, role):
        assert role_of(name) == role

    assert not faults_of(
        check,
        [
            ("model.layers.0.self_attn.o_proj", "o"),
            ("h.0.attn.c_proj", "o"),
            ("h.0.mlp.c_proj", "down"),
            ("bert.encoder.layer.0.attention.output.dense", "o"),
            ("bert.encoder.layer.0.intermediate.dense", "up"),
            ("bert.encoder.layer.0.output.dense", "down"),
            ("encoder.block.0.layer.1.DenseReluDense.wo", "down"),
            ("something.else", ""),
        ],
    )


def test_attention_to_an_encoder():
    """By its name."""
    assert crosses("decoder.block.0.layer.1.EncDecAttention.q")
    assert not crosses("decoder.block.0.layer.0.SelfAttention.q")
