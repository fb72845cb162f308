"""Layouts of engines' kernels: places of codes, scales and zero points by a scalar model, and errors."""

import itertools

import attrs
import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.repacked import decode_repacked, repack_weight
from tunedgemm.ops.formats.shuffle import as_shuffled, shuffle_weight, unshuffle_weight
from tunedgemm.ops.formats.weight_only import decode, quantise, unpack
from tunedgemm.ops.repacked import PACKINGS, kind_of
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

N, K = 128, 128
ROUNDED = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def drawn(n=N, k=K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator) * (torch.rand(n, 1, generator=generator) + 0.5)


def stored_as(name, group=None, dtype=torch.bfloat16, n=N, k=K):
    """A quantised weight, with act-order where the format has it."""
    form, group = FORMATS[name], max(FORMATS[name].groups) if group is None else group
    index = (torch.arange(k, dtype=torch.int32) * 7 % k) // (group or k) if form.has_index else None
    return quantise(name, drawn(n, k), group, dtype=dtype, index=index)


def shape_of(name, layout, group, dtype=torch.bfloat16, n=N, k=K):
    text = "bf16" if dtype is torch.bfloat16 else "fp16"
    return Shape("a16wn", 1, n, k, text, text, scale="block", layout=layout, extra={"w_format": name, "w_group": group})


def marlin_place(n, k, bits):
    """Where mma.m16n8k16's thread has an element of B: a word, and the place of the code in it."""
    tile, row, column = k // 16 * (N // 64) + n // 64, n % 64, k % 16
    thread, warp = row % 8 * 4 + column % 8 // 2, row // 16
    number = column % 2 + column // 8 * 2 + row // 8 % 2 * 4  # among the thread's eight of a warp
    if bits == 4:
        return tile * 128 + thread * 4 + warp, number // 2 + number % 2 * 4
    return tile * 256 + thread * 8 + warp * 2 + number // 4, (0, 2, 1, 3)[number % 4]


def machete_place(n, k, bits):
    """Where wgmma.m64k16's thread has an element of A in a block of 128 rows and 64 columns."""
    block, row, column = k // 64 * (N // 128) + n // 128, n % 128, k % 64
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    number = column % 2 + row // 8 % 2 * 2 + column // 8 % 2 * 4
    number = number // 2 + number % 2 * 4 if bits == 4 else number
    return divmod(block * 8192 + thread * 32 + column // 16 * 8 + number, 32 // bits)


@listed("name", ["ct_int4", "awq_int4", "int8_channel", "fp8_channel", "nvfp4"])
@listed(("layout", "place"), [("marlin", marlin_place), ("machete", machete_place), ("humming", marlin_place)])
def test_places_of_codes(name, layout, place):
    """Each code is where the kernel's thread takes it; integers of 8 bits have 128 added."""
    form = FORMATS[name]
    if kind_of(form) not in PACKINGS[layout].kinds:
        return
    stored = stored_as(name)
    codes = unpack(stored.weight, form, form.along).view(torch.uint8).tolist()
    packed = repack_weight(stored, name, layout).weight
    assert packed.layout_name == layout and (packed.shape, packed.dtype) == (stored.weight.shape, stored.weight.dtype)
    words = (packed.plain.view(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF).tolist()
    for n in range(N):
        for k in range(K):
            word, at = place(n, k, form.bits)
            code = words[word] >> form.bits * at & (1 << form.bits) - 1
            assert code == codes[n][k] ^ (128 if name == "int8_channel" else 0), (n, k)


def test_places_of_scales_and_zero_points_in_marlin():
    """Scales of groups are transposed as 8 x 8 within 64 rows, one a row as 4 x 4 pairs within 32."""
    stored = stored_as("gptq_int4_zp", 32)
    found, zeros = repack_weight(stored, "gptq_int4_zp", "marlin"), unpack(stored.w_zeros, FORMATS["gptq_int4_zp"], "n")
    for n in range(N):
        at = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
        assert torch.equal(found.w_scale[:, at], stored.w_scale[:, n])
        word, shift = at // 8, 4 * (0, 4, 1, 5, 2, 6, 3, 7)[at % 8]
        assert torch.equal(found.w_zeros[:, word] >> shift & 15, (zeros[n] + 1) % 16)
    stored = stored_as("gptq_int4", 0)
    found = repack_weight(stored, "gptq_int4", "marlin")
    for n in range(N):
        assert found.w_scale[0, n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2] == stored.w_scale[0, n]


@listed("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_floats_in_marlin(dtype):
    """fp8's contain its bias of the exponent; e8m0 and nvfp4's have the middle two of four swapped."""
    bias = 120 if dtype is torch.bfloat16 else 8
    fp8 = stored_as("fp8_tensor")
    assert torch.equal(repack_weight(fp8, "fp8_tensor", "marlin", dtype).w_scale, (fp8.w_scale.to(dtype) * 2.0**bias).expand(1, N))
    stored = stored_as("nvfp4")
    found = repack_weight(stored, "nvfp4", "marlin", dtype)
    assert float(found.w_global_scale) == float(stored.w_global_scale) * 2.0 ** (119 if dtype is torch.bfloat16 else 7)
    for n in range(N):
        at = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
        at = at // 4 * 4 + (0, 2, 1, 3)[at % 4]
        for group in range(K // 16):
            byte, scale = int(found.w_scale.view(torch.uint8)[group, at]), float(stored.w_scale[n, group])
            assert (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) - 15) == scale * 128


@listed("name", ["fp8_channel", "fp8_block", "mxfp8", "nvfp4", "gptq_int4_zp"])
def test_scales_and_zero_points_in_humming(name):
    """They are in Marlin's order; scales of 8 bits and the global scale are the checkpoint's."""
    stored, form = stored_as(name), FORMATS[name]
    found = repack_weight(stored, name, "humming")
    scale = stored.w_scale.t() if form.is_kn else stored.w_scale.repeat_interleave(form.rows, 0)
    for n in range(N):
        at = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
        if name in ("mxfp8", "nvfp4"):
            assert torch.equal(found.w_scale[:, at].view(torch.uint8), scale[n].view(torch.uint8))
        else:
            at = at if len(found.w_scale) > 1 else n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
            assert torch.equal(found.w_scale[:, at], scale[n].bfloat16().view(-1))
    assert found.w_global_scale is stored.w_global_scale
    if form.zeros is not None:
        zeros = (unpack(stored.w_zeros, form, "n") + 1) % 16
        for n in range(N):
            at = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
            assert torch.equal(found.w_zeros[:, at // 8] >> 4 * (at % 8) & 15, zeros[n])


def test_small_scales_of_nvfp4_are_lifted_or_lost():
    """bf16 lifts all scales by one power of two, out of the global one; what stays below 2^-6 becomes 0."""
    stored = stored_as("nvfp4")
    small = attrs.evolve(stored, w_scale=(stored.w_scale.float() / 64).to(torch.float8_e4m3fn))
    small.w_scale[5, 1] = 2.0**-9
    for dtype, lost in ((torch.bfloat16, False), (torch.float16, True)):
        shape = shape_of("nvfp4", "marlin", 16, dtype)
        values, factor = decode_repacked(shape, repack_weight(small, "nvfp4", "marlin", dtype), torch.float64)
        exact = decode(FORMATS["nvfp4"], small, torch.float64) * small.w_global_scale
        assert bool((values * factor)[5, 16:32].any()) is not lost
        exact[5, 16:32] *= not lost
        assert torch.equal((values * factor).float(), exact.float())
    values, _ = decode_repacked(
        shape, repack_weight(attrs.evolve(small, w_scale=torch.zeros_like(small.w_scale)), "nvfp4", "marlin"), torch.float32
    )
    assert not values.any()


@listed("layout", list(PACKINGS))
@listed("name", list(FORMATS))
def test_decoding_inverts_repacking(layout, name):
    """All formats and groups; scales rounded to the dtype of x are the only difference."""
    form, op = FORMATS[name], op_named("a16wn")
    for group in form.groups:
        for dtype, rounding in ROUNDED.items():
            shape = op.canonical(shape_of(name, layout, group, dtype, k=256))
            if op.problem(shape):
                continue
            stored = stored_as(name, group, dtype, k=256)
            packed = repack_weight(stored, name, layout, dtype)
            values, factor = decode_repacked(shape, packed, torch.float64)
            exact = decode(form, stored, torch.float64)
            difference = ((values if factor is None else values * factor / stored.w_global_scale) - exact).abs()
            zero_points = layout == "machete" and form.zeros is not None
            rounds = zero_points or "fp32" in form.scale
            assert difference.max() <= (rounding * (exact.abs().max() * (4 if zero_points else 1)) if rounds else 0)
            assert op.shape_of(torch.ones(1, 256, dtype=dtype), *attrs.astuple(packed, recurse=False), w_format=name) == shape


def test_act_order_sorts_the_columns():
    """The index becomes the columns of x in the order of the groups, which must have equal sizes."""
    stored = stored_as("gptq_int4_order", 32)
    packed = repack_weight(stored, "gptq_int4_order", "marlin")
    assert packed.w_index.dtype is torch.int32
    assert torch.equal(stored.w_index[packed.w_index.long()], torch.arange(K, dtype=torch.int32) // 32)
    unequal = stored.w_index.clone()
    unequal[0] = 1
    for index in (unequal, stored.w_index.clamp(max=2), stored.w_index - 1, stored.w_index + 1):
        with pytest.raises(OperandError, match="w_index must name each of 4 groups equally often; of a sharded weight"):
            repack_weight(attrs.evolve(stored, w_index=index), "gptq_int4_order", "marlin")


@listed(
    ("name", "group", "layout", "sizes", "message"),
    [
        ("gptq_int4", 32, "machete", (128, 128), "w_group in layout machete must be 0 or 64 or 128 (got 32)"),
        ("nvfp4", 16, "machete", (128, 128), "layout machete has no nvfp4; pass the weight as the checkpoint stores it"),
        ("ct_int4", 64, "marlin", (64, 64), "layout marlin needs N and K to be multiples of 64 and 128 or 128 and 64 (got 64 and 64)"),
        ("ct_int4", 64, "machete", (64, 128), "layout machete needs N and K to be multiples of 128 and 64 (got 64 and 128)"),
        ("ct_int4", 64, "humming", (128, 128), "layout humming has no ct_int4; pass the weight as the checkpoint stores it"),
        ("ct_int4", 64, "exllama", (64, 128), "layout must be row or marlin or machete or humming (got exllama)"),
    ],
)
def test_what_a_layout_lacks(name, group, layout, sizes, message):
    """The error names the field, its value and the valid ones."""
    with pytest.raises(OperandError) as error:
        repack_weight(stored_as(name, group, n=sizes[0], k=sizes[1]), name, layout)
    assert str(error.value) == f"repack_weight: {message}"


def test_dtypes_of_x():
    """Kernels take 16 bits, and Marlin reads e8m0 scales as bf16."""
    with pytest.raises(OperandError, match=r"dtype must be torch.bfloat16 or torch.float16 \(got torch.float32\); pass the dtype of x"):
        repack_weight(stored_as("ct_int4"), "ct_int4", "marlin", torch.float32)
    with pytest.raises(OperandError, match=r"mxfp8 in layout marlin needs x in bf16 \(got fp16\)"):
        repack_weight(stored_as("mxfp8"), "mxfp8", "marlin", torch.float16)


def test_the_layout_is_a_type():
    """An engine's own bytes get the type without a copy; nothing can shuffle or unshuffle them."""
    packed = repack_weight(stored_as("mxfp4"), "mxfp4", "marlin").weight
    again = as_shuffled(packed.plain, "marlin")
    assert type(again) is type(packed) and again.plain.data_ptr() == packed.plain.data_ptr()
    for function in (shuffle_weight, unshuffle_weight):
        with pytest.raises(OperandError, match="of layout 'marlin'; its order depends on the format: call repack_weight"):
            function(packed.plain, "marlin")
    with pytest.raises(OperandError, match="would read a weight of layout marlin as if it were plain"):
        packed + 1


def test_a_row_of_operands_is_served():
    """The public function takes repacked operands, also by leading dimensions, a bias and float32."""
    import tunedgemm

    for layout, name, dtype in (("marlin", "nvfp4", torch.float16), ("machete", "ct_int4_zp", torch.bfloat16)):
        x, bias, packed = torch.randn(2, 3, K).to(dtype), torch.randn(N), repack_weight(stored_as(name, dtype=dtype), name, layout, dtype)
        out = tunedgemm.gemm_a16wn(x, *attrs.astuple(packed, recurse=False), bias, torch.float32, w_format=name)
        values, factor = decode_repacked(shape_of(name, layout, max(FORMATS[name].groups) or 0, dtype), packed, torch.float64)
        exact = (x.double() @ values.t()) * (1 if factor is None else factor) + bias
        assert out.shape == (2, 3, N) and (out.double() - exact).norm() < 1e-5 * exact.norm()


def called(x, operands, name):
    """Call the public function."""
    import tunedgemm

    return tunedgemm.gemm_a16wn(x, *operands, w_format=name)


@listed(
    ("layout", "name"), [("marlin", name) for name in ("gptq_int4_order", "gptq_int4_zp", "awq_int4", "nvfp4")] + [("machete", "awq_int4")]
)
def test_mixed_operands_are_refused(layout, name):
    """Each operand of the other side is refused, although right ones of its size have been served."""
    x, stored = torch.randn(3, K).bfloat16(), stored_as(name)
    sides = {"checkpoint": stored, layout: repack_weight(stored, name, layout)}
    sides = {key: attrs.astuple(each, recurse=False) for key, each in sides.items()}
    for (own, operands), (other, others) in itertools.permutations(sides.items()):
        called(x, operands, name)
        for place in range(1, 5):
            if operands[place] is not None:
                mixed = (*operands[:place], others[place], *operands[place + 1 :])
                with pytest.raises(
                    OperandError, match=rf"belongs to a weight of layout {other} \(got a weight of layout {own}\); pass all"
                ):
                    called(x, mixed, name)
        assert called(x, (operands[0], *(each if each is None else torch.nn.Parameter(each, False) for each in operands[1:])), name).any()


def test_other_layouts_are_refused():
    """Operands of one engine's layout serve no weight in another's."""
    packed = [repack_weight(stored_as("ct_int4", 64), "ct_int4", layout) for layout in ("marlin", "machete")]
    with pytest.raises(OperandError, match="w_scale belongs to a weight of layout machete"):
        called(torch.randn(3, K).bfloat16(), (packed[0].weight, packed[1].w_scale), "ct_int4")


def test_operands_of_other_layouts_are_refused_after_calls():
    """Those of both engines have equal sizes and dtypes; each is refused although its own side was served."""
    x, stored = torch.randn(3, K).bfloat16(), stored_as("awq_int4", 64)
    packed = {layout: list(attrs.astuple(repack_weight(stored, "awq_int4", layout), recurse=False)) for layout in PACKINGS}
    for operands in packed.values():
        called(x, operands, "awq_int4")
    for own, other, place in (("marlin", "machete", 1), ("marlin", "humming", 2), ("humming", "marlin", 2)):
        mixed = list(packed[own])
        mixed[place] = packed[other][place]
        with pytest.raises(OperandError, match=f"belongs to a weight of layout {other}"):
            called(x, mixed, "awq_int4")


def test_a_copy_leaves_no_launcher_for_the_other_side():
    """A clone of repacked scales is served; the checkpoint's own, of their sizes, are refused after it."""
    x, stored = torch.randn(3, K).bfloat16(), stored_as("gptq_int4", 64)
    packed = repack_weight(stored, "gptq_int4", "marlin")
    called(x, (packed.weight, packed.w_scale.clone()), "gptq_int4")
    with pytest.raises(OperandError, match="belongs to a weight of layout checkpoint"):
        called(x, (packed.weight, stored.w_scale), "gptq_int4")


def test_written_operands_are_no_longer_known():
    """Operands copied into the other side's memory are served; unwritten ones are refused after it."""
    x, layers = torch.randn(3, K).bfloat16(), [stored_as("gptq_int4", 64) for _ in range(3)]
    packed = [repack_weight(each, "gptq_int4", "marlin") for each in layers]
    wanted = called(x, (packed[0].weight, packed[0].w_scale), "gptq_int4")
    layers[0].w_scale.copy_(packed[0].w_scale)
    assert torch.equal(called(x, (packed[0].weight, layers[0].w_scale), "gptq_int4"), wanted)
    wanted = called(x, (layers[1].weight, layers[1].w_scale), "gptq_int4")
    packed[1].w_scale.copy_(layers[1].w_scale)
    assert torch.equal(called(x, (layers[1].weight, packed[1].w_scale), "gptq_int4"), wanted)
    for mixed in ((packed[2].weight, layers[2].w_scale), (layers[2].weight, packed[2].w_scale)):
        with pytest.raises(OperandError, match="belongs to a weight of layout"):
            called(x, mixed, "gptq_int4")


def test_copies_are_known_by_their_sizes_alone():
    """A copy of the checkpoint's scales has other sizes in most formats, and in others nothing tells."""
    stored = stored_as("ct_int4", 64)
    weight = repack_weight(stored, "ct_int4", "marlin").weight
    with pytest.raises(OperandError, match=r"w_scale of ct_int4 in layout marlin must be .*\[2, 128\] for group 64.* \(got \(128, 2\)"):
        called(torch.ones(1, K).bfloat16(), (weight, stored.w_scale.clone()), "ct_int4")
    tensor = stored_as("fp8_tensor")
    with pytest.raises(OperandError, match=r"w_scale must be \[1, 128\], torch.bfloat16 on cpu \(got \(\) torch.float32"):
        called(torch.ones(1, K).bfloat16(), (repack_weight(tensor, "fp8_tensor", "marlin").weight, tensor.w_scale.clone()), "fp8_tensor")
    gptq = stored_as("gptq_int4", 64)
    called(torch.ones(1, K).bfloat16(), (repack_weight(gptq, "gptq_int4", "marlin").weight, gptq.w_scale.clone()), "gptq_int4")
