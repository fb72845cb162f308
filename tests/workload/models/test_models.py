"""Whole models: one rank's products as in serving engines, derived by hand from the architectures."""

from __future__ import annotations

from tunedgemm.workload.models import layers_of_model, shapes_of_model

#: Model and its tps -> its products: name, N x K, how many; what differs by tp has a part for each.
#: b: with a bias; of experts model_dim x inter_dim, E experts, top T; of batched ones the batch.
EXPECTED = {
    ("llama-3.2-1b", (1, 16)): """
        model.layers.*.self_attn.qkv_proj 192x128|16x128 2
        model.layers.*.self_attn.o_proj 128x128|128x8 2
        model.layers.*.mlp.gate_up_proj 1024x128|64x128 2
        model.layers.*.mlp.down_proj 128x512|128x32 2
        lm_head 512x128|32x128 1""",
    ("qwen2", (1, 2)): """
        model.layers.*.self_attn.qkv_proj 144x112|72x112 3 b
        model.layers.*.self_attn.o_proj 112x112|112x56 3
        model.layers.*.mlp.gate_up_proj 1216x112|608x112 3
        model.layers.*.mlp.down_proj 112x608|112x304 3
        lm_head 1024x112|512x112 1""",
    ("qwen3-moe", (1, 8)): """
        model.layers.*.self_attn.qkv_proj 320x128|48x128 2
        model.layers.*.self_attn.o_proj 128x256|128x32 2
        model.layers.*.mlp.experts 128x48|128x6 2 E16 T4
        model.layers.*.mlp.gate 16x128 2
        lm_head 640x128|80x128 1""",
    ("mixtral", (1, 4)): """
        model.layers.*.self_attn.qkv_proj 384x256|96x256 2
        model.layers.*.self_attn.o_proj 256x256|256x64 2
        model.layers.*.mlp.experts 256x896|256x224 2 E8 T2
        model.layers.*.mlp.gate 8x256 2
        lm_head 512x256|128x256 1""",
    ("deepseek-v2-lite", (1, 4)): """
        model.layers.*.self_attn.q_proj 192x128|48x128 3
        model.layers.*.self_attn.kv_a_proj_with_mqa 36x128 3
        model.layers.*.self_attn.kv_b_proj 256x32|64x32 3
        model.layers.*.self_attn.w_uk 32x8 3 B16|B4
        model.layers.*.self_attn.w_uv 8x32 3 B16|B4
        model.layers.*.self_attn.o_proj 128x128|128x32 3
        model.layers.*.mlp.gate_up_proj 1376x128|344x128 1
        model.layers.*.mlp.down_proj 128x688|128x172 1
        model.layers.*.mlp.experts 128x88|128x22 2 E8 T6
        model.layers.*.mlp.gate 8x128 2
        model.layers.*.mlp.shared_experts.gate_up_proj 352x128|88x128 2
        model.layers.*.mlp.shared_experts.down_proj 128x176|128x44 2
        lm_head 1600x128|400x128 1""",
    ("gemma2", (1, 4)): """
        model.layers.*.self_attn.qkv_proj 256x144|64x144 2
        model.layers.*.self_attn.o_proj 144x128|144x32 2
        model.layers.*.mlp.gate_up_proj 1152x144|288x144 2
        model.layers.*.mlp.down_proj 144x576|144x144 2
        lm_head 1600x144|400x144 1""",
    ("phi3", (1, 4)): """
        model.layers.*.self_attn.qkv_proj 288x192|72x192 2
        model.layers.*.self_attn.o_proj 192x192|192x48 2
        model.layers.*.mlp.gate_up_proj 1024x192|256x192 2
        model.layers.*.mlp.down_proj 192x512|192x128 2
        lm_head 2048x192|512x192 1""",
    ("gpt2", (1, 4)): """
        transformer.h.*.attn.c_attn 144x48|36x48 2 b
        transformer.h.*.attn.c_proj 48x48|48x12 2 b
        transformer.h.*.mlp.c_fc 192x48|48x48 2 b
        transformer.h.*.mlp.c_proj 48x192|48x48 2 b
        lm_head 50304x48|12576x48 1""",
    ("gpt-oss", (1, 2)): """
        model.layers.*.self_attn.qkv_proj 160x96|80x96 2 b
        model.layers.*.self_attn.o_proj 96x128|96x64 2 b
        model.layers.*.mlp.experts 96x96|96x48 2 b E8 T4
        model.layers.*.mlp.router 8x96 2 b
        lm_head 640x96|320x96 1""",
    ("qwen2.5-vl", (1, 2, 8)): """
        model.visual.blocks.*.attn.qkv 240x80|120x80|240x80 2 b
        model.visual.blocks.*.attn.proj 80x80|80x40|80x80 2 b
        model.visual.blocks.*.mlp.gate_up_proj 424x80|212x80|424x80 2 b
        model.visual.blocks.*.mlp.down_proj 80x212|80x106|80x212 2 b
        model.visual.merger.mlp.* 320x320 1 b
        model.visual.merger.mlp.* 128x320 1 b
        model.language_model.layers.*.self_attn.qkv_proj 192x128|96x128|32x128 2 b
        model.language_model.layers.*.self_attn.o_proj 128x128|128x64|128x16 2
        model.language_model.layers.*.mlp.gate_up_proj 1184x128|592x128|148x128 2
        model.language_model.layers.*.mlp.down_proj 128x592|128x296|128x74 2
        lm_head 512x128|256x128|64x128 1""",
    ("llava", (1, 2)): """
        model.vision_tower.encoder.layers.*.self_attn.qkv_proj 192x64|96x64 2 b
        model.vision_tower.encoder.layers.*.self_attn.out_proj 64x64|64x32 2 b
        model.vision_tower.encoder.layers.*.mlp.fc1 256x64|128x64 2 b
        model.vision_tower.encoder.layers.*.mlp.fc2 64x256|64x128 2 b
        model.multi_modal_projector.linear_1 128x64|64x64 1 b
        model.multi_modal_projector.linear_2 128x128|128x64 1 b
        model.language_model.layers.*.self_attn.qkv_proj 384x128|192x128 2
        model.language_model.layers.*.self_attn.o_proj 128x128|128x64 2
        model.language_model.layers.*.mlp.gate_up_proj 688x128|344x128 2
        model.language_model.layers.*.mlp.down_proj 128x344|128x172 2
        lm_head 512x128|256x128 1""",
    ("t5", (1, 4)): """
        encoder.block.*.layer.*.SelfAttention.qkv_proj 192x64|48x64 2
        encoder.block.*.layer.*.SelfAttention.o 64x64|64x16 2
        encoder.block.*.layer.*.DenseReluDense.wi 256x64|64x64 2
        encoder.block.*.layer.*.DenseReluDense.wo 64x256|64x64 2
        decoder.block.*.layer.*.SelfAttention.qkv_proj 192x64|48x64 2
        decoder.block.*.layer.*.SelfAttention.o 64x64|64x16 2
        decoder.block.*.layer.*.EncDecAttention.q 64x64|16x64 2
        decoder.block.*.layer.*.EncDecAttention.kv_proj 128x64|32x64 2
        decoder.block.*.layer.*.EncDecAttention.o 64x64|64x16 2
        decoder.block.*.layer.*.DenseReluDense.wi 256x64|64x64 2
        decoder.block.*.layer.*.DenseReluDense.wo 64x256|64x64 2
        lm_head 1024x64|256x64 1""",
}


def told(layer):
    """A layer as a line of `EXPECTED`."""
    words = [
        layer.name,
        f"{layer.n}x{layer.k}",
        str(layer.count),
        *(["b"] if layer.bias else []),
        *([f"B{layer.batch}"] if layer.batch else []),
    ]
    return " ".join([*words, *([f"E{layer.experts.count} T{layer.experts.topk}"] if layer.experts else [])])


def test_a_rank_runs_its_share_of_the_architecture(folder, faults_of):
    """Names, sizes, numbers and biases of all products of a rank are those worked out by hand."""

    def check(model, tps):
        lines = [line.split() for line in EXPECTED[model, tps].strip().splitlines()]
        for place, tp in enumerate(tps):
            wanted = [" ".join((parts := word.split("|"))[place if len(parts) > 1 else 0] for word in line) for line in lines]
            assert sorted(map(told, layers_of_model(folder(model), tp).layers)) == sorted(wanted)

    assert not faults_of(check, list(EXPECTED))


def test_a_tower_that_ranks_cannot_share_is_said_to_be_whole(folder):
    """An image encoder with four heads lets eight ranks split only the text, and a note says so."""
    notes = layers_of_model(folder("qwen2.5-vl"), 8).notes

    assert any(note.startswith("left whole on every rank: model.visual, as tp=8 does not divide heads") for note in notes)
    assert not any("left whole" in note for note in layers_of_model(folder("qwen2.5-vl"), 2).notes)


def test_convolutions_are_named(folder):
    """Products without an op, such as the patch embedding of images, are in the notes."""
    assert "left out, as no op has convolutions: model.visual.patch_embed.proj" in layers_of_model(folder("qwen2.5-vl")).notes


def test_ranks_that_do_not_fit_name_ones_that_do(folder, one_line, faults_of):
    """A tp that does not divide heads is refused with those that do."""

    def check(model, tp, says):
        assert says in one_line(lambda: layers_of_model(folder(model), tp))

    assert not faults_of(
        check,
        [
            ("qwen2", 4, "tp=4 does not divide heads of model.layers.*.self_attn.q_proj: 14; use one of 1, 2"),
            ("qwen2", 3, "tp=3 does not divide heads of model.layers.*.self_attn.q_proj: 14; use one of 1, 2"),
            ("llama-3.2-1b", 0, r"tp must be in 1..1024 (got 0)"),
            ("llama-3.2-1b", 1025, "tp must be in 1..1024 (got 1025)"),
            ("llama-3.2-1b", 1024, "tp=1024 does not divide heads of model.layers.*.self_attn.q_proj: 32; use one of 1, 2, 4, 8, 16, 32"),
        ],
    )


def test_shared_experts_count_among_the_routed_ones(folder):
    """As in AITER's engines, a shared expert of DeepSeek-V3 is one more expert, without extra products."""
    found = layers_of_model(folder("deepseek-v3"), 2, fuse_shared_experts=True).layers

    experts = next(layer.experts for layer in found if layer.experts)
    assert (experts.count, experts.topk) == (17, 5)
    assert not [layer for layer in found if "shared_experts" in layer.name]


def test_no_shared_experts_to_count(folder, one_line):
    """A model without shared experts says so."""
    assert "the model has no shared experts" in one_line(lambda: layers_of_model(folder("mixtral"), fuse_shared_experts=True))


def test_shapes_have_their_rows_op_and_calls(folder):
    """Each product is under its op at each M times the batch size, with its number of layers."""
    shapes = shapes_of_model(folder("mixtral"), 1, (1, 16), batch_size=2)

    assert set(shapes.by_op) == {"a16w16", "fmoe"}
    assert {row.shape.m for row in shapes.by_op["a16w16"]} == {2, 32}
    qkv = next(row for row in shapes.by_op["a16w16"] if row.layer.endswith("qkv_proj"))
    assert (qkv.shape.n, qkv.shape.k, qkv.count) == (384, 256, 2)
    assert len(shapes.by_op["fmoe"]) == 2


def test_experts_with_a_bias_are_listed(folder):
    """The biases of both stages are options of the shape."""
    shapes = shapes_of_model(folder("gpt-oss"), 1, (1,))

    assert [(row.shape["options"], row.layer) for row in shapes.by_op["fmoe"]] == [("bias1 bias2", "model.layers.*.mlp.experts")]


def test_absurd_rows_are_refused(folder, one_line, faults_of):
    """None, none positive, more than any product has, or more than anybody tunes."""

    def check(asked, says):
        assert says in one_line(lambda: shapes_of_model(folder("llama-3.2-1b"), **asked))

    assert not faults_of(
        check,
        [
            ({"nsets": ()}, "no M given; name some"),
            ({"nsets": (0,)}, "M (--nsets times --batch_size) must be in 1.."),
            ({"nsets": (4, -1)}, "(got -1)"),
            ({"nsets": (2**40,)}, f"(got {2**40})"),
            ({"nsets": range(1, 100_001)}, "at most 4096 numbers of rows (got 100000)"),
            ({"batch_size": 0}, "the batch size must be at least 1 (got 0)"),
        ],
    )


def test_the_menu_needs_neither_torch_nor_transformers(child):
    """`import tunedgemm.workload.models` loads neither."""
    assert child("import sys, tunedgemm.workload.models\nprint('torch' in sys.modules, 'transformers' in sys.modules)") == "False False"
