"""Shuffled weights: AITER's permutation, and a type that survives modules, files and processes."""

from __future__ import annotations

import copy
import io
import pickle
import random
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.shuffle import (
    ShuffledWeight,
    as_shuffled,
    layout_name,
    plain_weight,
    shuffle_weight,
    unshuffle_weight,
    unshuffled,
)  # fmt: skip
from tunedgemm.testing.listed import listed

LAYOUTS = [(16, 16), (32, 16), (16, 32)]
DTYPES = [
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8, torch.uint8,
    torch.float4_e2m1fn_x2, torch.float32,
]  # fmt: skip


def random_weight(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Bytes at random as a tensor of any dtype."""
    size = torch.empty((), dtype=dtype).element_size()
    made = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bytes are equal: NaN equals itself, and fp4 has no comparison."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def by_formula(x: torch.Tensor, rows: int, pack_bytes: int = 16) -> torch.Tensor:
    """One [N, K] weight, each element placed by AITER's index formula."""
    n, k = x.shape
    size = x.element_size()
    pack = pack_bytes // size
    i, j = torch.arange(n)[:, None], torch.arange(k)[None, :]
    place = (i // rows) * rows * k + (j // pack) * rows * pack + (i % rows) * pack + j % pack
    out = torch.empty(n * k, size, dtype=torch.uint8)
    out[place.flatten()] = x.contiguous().view(torch.uint8).view(n * k, size)
    return out.view(n, k * size).view(x.dtype)


class Layer(nn.Module):
    """One shuffled parameter and one plain."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(shuffle_weight(random_weight(32, 64, dtype=dtype, seed=seed)), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(32))


@pytest.fixture
def weight() -> ShuffledWeight:
    return shuffle_weight(torch.randn(64, 64, dtype=torch.bfloat16))


@listed("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@listed("layout", LAYOUTS, ids=str)
def test_every_element_is_placed_by_the_formula_and_restored(layout: tuple[int, int], dtype: torch.dtype):
    """Over random sizes, shuffle_weight is the documented permutation and unshuffle_weight its inverse."""
    sizes = random.Random(f"{layout} {dtype}")
    for case in range(8):
        n, k = layout[0] * sizes.randint(1, 5), 2 * layout[1] * sizes.randint(1, 5)
        leading = [(), (sizes.randint(1, 3),), (2, sizes.randint(1, 2))][case % 3]
        x = random_weight(*leading, n, k, dtype=dtype, seed=case)
        w = shuffle_weight(x, layout)
        assert (w.shape, w.dtype, w.layout_name) == (x.shape, dtype, f"aiter{layout[0]}x{layout[1]}")
        for plain, shuffled in zip(x.view(-1, n, k), w.plain.view(-1, n, k), strict=True):
            assert same(shuffled, by_formula(plain, layout[0]))
        assert same(unshuffle_weight(w), x)
        assert same(unshuffle_weight(w.plain, layout), x)
        assert type(unshuffle_weight(w)) is torch.Tensor


@listed("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_columns_of_128_bytes_are_runs_of_memory(dtype: torch.dtype):
    """``columns128`` is [K / P, N, P] per matrix, P elements to 128 bytes; it is inverted."""
    pack = 128 // torch.empty((), dtype=dtype).element_size()
    for leading, n, k in (((), 1, pack), ((), 37, 3 * pack), ((2, 3), 24, 2 * pack)):
        x = random_weight(*leading, n, k, dtype=dtype)
        w = shuffle_weight(x, "columns128")
        assert (w.shape, w.dtype, w.layout_name) == (x.shape, dtype, "columns128")
        rows, lines = x.view(torch.uint8).view(-1, n, k // pack, 128), w.plain.view(torch.uint8).view(-1, n * k // pack * 128)
        for plain, shuffled in zip(rows, lines, strict=True):
            assert torch.equal(shuffled, plain.transpose(0, 1).reshape(-1))
        assert same(unshuffle_weight(w), x)
        assert as_shuffled(w.plain, "columns128").layout_name == "columns128"


def test_aliases_of_a_layout_have_one_name():
    """Pairs, lists, names and the alias tn give one name; others are an error that lists all."""
    assert {layout_name(layout) for layout in ((16, 16), [16, 16], "tn", "aiter16x16")} == {"aiter16x16"}
    assert (layout_name((32, 16)), layout_name("columns128")) == ("aiter32x16", "columns128")
    unknown: list[Any] = ["row", "TN", "aiter16", (16,), (16, 16, 1), (0, 16), (True, 16), (16.0, 16), 5, None, "columns64"]
    for layout in unknown:
        with pytest.raises(OperandError, match=r"unknown weight layout .*\(32, 16\).*'tn'.*'columns128'"):
            layout_name(layout)


def test_a_layout_is_a_type_and_does_not_leak():
    """Weights of one layout share a type, those of another have another, and plain results have none."""
    one, two = shuffle_weight(random_weight(32, 64)), shuffle_weight(random_weight(32, 64, seed=1))
    other = shuffle_weight(random_weight(32, 64), (32, 16))
    assert type(one) is type(two) is not type(other)
    assert one.is_shuffled is True and not hasattr(one.plain, "is_shuffled")
    assert not hasattr(one.plain, "layout_name")
    assert not hasattr(unshuffled(one), "layout_name")
    assert type(one.plain) is torch.Tensor and one.plain.data_ptr() == one.data_ptr()


def test_strided_weights_are_shuffled_as_their_copies():
    """Transposed and cut weights are shuffled by their values; their bytes cannot be declared shuffled."""
    for strided in (random_weight(64, 32).t(), random_weight(32, 128)[:, :64]):
        taken, copied = (shuffle_weight(one).plain.view(torch.uint8) for one in (strided, strided.contiguous()))
        assert torch.equal(taken, copied)
        with pytest.raises(OperandError, match=r"contiguous .*strides"):
            as_shuffled(strided)


@listed(
    ("x", "layout", "match"),
    [
        (torch.zeros(40, 64), (16, 16), r"aiter16x16 needs N divisible by 16 and K by 32 \(got N=40, K=64"),
        (torch.zeros(32, 48, dtype=torch.bfloat16), "tn", r"N divisible by 16 and K by 32 \(got N=32, K=48, torch.bfloat16\)"),
        (torch.zeros(48, 64), (32, 16), r"N divisible by 32 and K by 32 \(got N=48"),
        (torch.zeros(32, 32), (16, 32), r"N divisible by 16 and K by 64 \(got N=32, K=32"),
        (torch.zeros(16, 24, dtype=torch.int8), (16, 12), r"K divisible by the 16 torch.int8 in 16 bytes \(got K=24\)"),
        (torch.zeros(5, 96, dtype=torch.bfloat16), "columns128", r"K divisible by the 64 torch.bfloat16 in 128 bytes \(got K=96\)"),
        (torch.zeros(64), (16, 16), r"must be \[..., N, K\] \(got \(64,\)\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_and_named(x: torch.Tensor, layout: Any, match: str):
    """Sizes that do not divide are errors that give them."""
    with pytest.raises(OperandError, match=match):
        shuffle_weight(x, layout)
    with pytest.raises(OperandError):
        as_shuffled(x, layout)


@listed("dtype", [torch.bfloat16, torch.int8, torch.float4_e2m1fn_x2], ids=lambda dtype: str(dtype)[6:])
def test_packs_of_aiters_variants(dtype: torch.dtype):
    """use_int4 has packs of 32 elements, is_guinterleave packs of IK elements; both are inverted."""
    size = torch.empty((), dtype=dtype).element_size()
    x = random_weight(3, 64, 128, dtype=dtype)
    for name, pack in (("use_int4", 32 * size), ("is_guinterleave", 16 * size)):
        w = shuffle_weight(x, (16, 16), **{name: True})  # type: ignore[arg-type]
        assert w.layout_name == ("aiter16x16" if pack == 16 else f"aiter16x16p{pack}")
        assert all(same(shuffled, by_formula(plain, 16, pack)) for plain, shuffled in zip(x, w.plain, strict=True))
        assert same(unshuffle_weight(w), x)
    assert shuffle_weight(x, (16, 16), gate_up=True).layout_name == "aiter16x16"


def test_blocks_of_gate_and_up_take_turns():
    """With gate_up the first block is the gate's, the second the first of the up projection."""
    x = random_weight(2, 96, 64, dtype=torch.int8)
    w = shuffle_weight(x, (16, 16), is_guinterleave=True, gate_up=True)
    turns = x.view(2, 2, 3, 16, 64).transpose(1, 2).reshape(x.shape).contiguous()
    assert w.layout_name == "aiter16x16"
    assert same(w.plain, shuffle_weight(turns, (16, 16)).plain)
    assert same(unshuffle_weight(w), turns)
    with pytest.raises(OperandError, match=r"take turns in blocks of 16 \(got \(2, 48, 64\) of 2 experts\)"):
        shuffle_weight(x[:, :48].contiguous(), is_guinterleave=True, gate_up=True)


def test_k_is_padded_with_zeros():
    """pad_k_to appends zeros up to a multiple, and the result tells both K as AITER's does."""
    x = random_weight(32, 96, dtype=torch.float8_e4m3fn)
    w = shuffle_weight(x, (16, 16), pad_k_to=128)
    assert (tuple(w.shape), w.aiter_original_k, w.aiter_padded_k) == ((32, 128), 96, 128)
    assert same(unshuffle_weight(w)[:, :96].contiguous(), x)
    assert not unshuffle_weight(w)[:, 96:].contiguous().view(torch.uint8).any()
    assert same(shuffle_weight(x, pad_k_to=32).plain, shuffle_weight(x).plain)


@listed(
    ("arguments", "match"),
    [
        ({"use_int4": True, "pad_k_to": 128}, "use_int4=True and pad_k_to=128 do not go together"),
        ({"is_guinterleave": True, "pad_k_to": 128}, "is_guinterleave=True and pad_k_to=128 do not go together"),
        ({"is_guinterleave": True, "use_int4": True}, "is_guinterleave=True and use_int4=True do not go together"),
        ({"is_guinterleave": True}, r"is_guinterleave take AITER's layouts, the latter of \[E, N, K\].*got \(64, 64\)"),
        ({"use_int4": True, "layout": "columns128"}, "use_int4 and is_guinterleave take AITER's layouts"),
        ({"pad_k_to": -1}, r"pad_k_to must not be negative \(got -1\)"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], match: str):
    """AITER's refusals are errors that name the arguments."""
    with pytest.raises(OperandError, match=match):
        shuffle_weight(torch.zeros(64, 64), **arguments)


def test_shuffling_twice_or_under_another_name_is_refused(weight: ShuffledWeight):
    """A typed weight is not shuffled again, relabelled, or unshuffled from another layout."""
    with pytest.raises(OperandError, match="shuffled already, to aiter16x16"):
        shuffle_weight(weight)
    for wrong in (as_shuffled, unshuffle_weight):
        with pytest.raises(OperandError, match="of layout aiter16x16 already, not aiter32x16"):
            wrong(weight, (32, 16))
    assert as_shuffled(weight) is weight
    with pytest.raises(OperandError, match="does not tell its layout"):
        unshuffle_weight(weight.plain)


def test_declaring_bytes_to_be_shuffled_copies_nothing():
    """as_shuffled shares the memory, of a parameter, too."""
    for held in (torch.zeros(32, 64), nn.Parameter(torch.zeros(32, 64))):
        w = as_shuffled(held)
        assert w.data_ptr() == held.data_ptr() and not w.requires_grad
        assert plain_weight(w).data_ptr() == held.data_ptr() and plain_weight(held) is held


def test_its_values_are_not_read_as_an_array(weight: ShuffledWeight):
    """numpy() and tolist() raise, too."""
    for use in (weight.numpy, weight.tolist):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            use()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
def test_the_dtype_cannot_change(dtype: torch.dtype, weight: ShuffledWeight):
    """.to(dtype) to another dtype is refused, in a module too; the same dtype passes."""
    with pytest.raises(OperandError, match=r"cannot change its dtype; unshuffle_weight\(w\) first"):
        weight.to(dtype)
    with pytest.raises(OperandError, match="cannot change its dtype"):
        Layer().half()
    assert weight.to(torch.bfloat16) is weight
    assert isinstance(Layer().to(torch.bfloat16).weight, ShuffledWeight)
    assert isinstance(Layer(dtype=torch.int8).half().weight, ShuffledWeight)  # a module converts only floats


def test_copies_keep_the_type(weight: ShuffledWeight):
    """clone, detach, deepcopy, pickle, empty_like, meta and shared memory give weights of the same layout."""
    for copied in (weight.clone(), weight.detach(), copy.deepcopy(weight), copy.copy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(copied) is type(weight) and torch.equal(copied, weight) and torch.equal(copied.plain, weight.plain)
    assert copy.deepcopy(weight).data_ptr() != weight.data_ptr()
    assert type(torch.empty_like(weight)) is type(weight)
    assert weight.to("meta").plain.is_meta and weight.to("meta").layout_name == weight.layout_name
    assert weight.contiguous() is weight and weight.cpu() is weight and not weight.is_pinned()
    assert weight.share_memory_().is_shared() and weight.plain.is_shared()


def test_a_deep_copy_keeps_what_is_shared():
    """Two names of one parameter are one parameter in the copy, and it is still a parameter."""
    layer = Layer()
    layer.tied = layer.weight
    copied = copy.deepcopy(layer)
    assert copied.tied is copied.weight and isinstance(copied.weight, nn.Parameter) and not copied.weight.requires_grad
    assert torch.equal(copied.weight, layer.weight) and copied.weight.data_ptr() != layer.weight.data_ptr()


def test_only_weights_of_one_layout_are_compared_and_copied(weight: ShuffledWeight):
    """torch.equal and copy_ between shuffled and plain, or two layouts, are errors with a remedy."""
    plain, other = unshuffle_weight(weight), shuffle_weight(unshuffle_weight(weight), (32, 16))
    empty = torch.empty_like(weight)
    assert torch.equal(empty.copy_(weight), weight) and not torch.equal(weight, shuffle_weight(plain + 1))
    for use in (torch.equal, lambda one, two: one.copy_(two)):
        with pytest.raises(OperandError, match=r"plain weight cannot go .*shuffle_weight\(w, .aiter16x16.\), or as_shuffled"):
            use(weight, plain)
        with pytest.raises(OperandError, match=r"aiter16x16 cannot go where a plain one is; unshuffle_weight\(w\)"):
            use(plain, weight)
        with pytest.raises(OperandError, match=r"aiter32x16 cannot go .* aiter16x16 is; unshuffle_weight\(w\), then shuffle_weight"):
            use(weight, other)
    with pytest.raises(OperandError, match=r"equal shapes and dtypes: \(64, 64\) torch.bfloat16 from \(32, 64\)"):
        weight.copy_(shuffle_weight(random_weight(32, 64)))
    with pytest.raises(OperandError, match="plain weight cannot go"):
        weight.data = plain


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_a_saved_state_dict_comes_back_typed(dtype: torch.dtype, tmp_path: Path):
    """torch.save, torch.load(weights_only=True) and load_state_dict keep the type."""
    layer, file = Layer(seed=1, dtype=dtype), tmp_path / "state.pt"
    torch.save(layer.state_dict(), file)
    for assign in (False, True):
        fresh = Layer(seed=2, dtype=dtype)
        fresh.weight.plain  # noqa: B018 - what is kept of it must not be used later
        fresh.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        assert type(fresh.weight) is type(layer.weight) and isinstance(fresh.weight, nn.Parameter)
        assert same(fresh.weight.plain, layer.weight.plain) and fresh.weight.plain.data_ptr() == fresh.weight.data_ptr()
    assert type(torch.load(file, weights_only=True, mmap=True)["weight"]) is type(layer.weight)
    assert torch.load(file, weights_only=True, map_location="meta")["weight"].plain.is_meta


def test_a_state_dict_of_another_kind_is_refused(weight: ShuffledWeight):
    """load_state_dict refuses a plain tensor for a shuffled parameter, and the reverse."""
    with pytest.raises(RuntimeError, match=r"plain weight cannot go .*shuffle_weight\(w, .aiter16x16.\), or as_shuffled"):
        Layer().load_state_dict({"weight": random_weight(32, 64), "bias": torch.zeros(32)})
    with pytest.raises(RuntimeError, match=r"cannot go where a plain one is; unshuffle_weight\(w\) first"):
        nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).load_state_dict({"weight": weight})


def test_a_whole_module_is_saved_and_loaded():
    """A pickled module has its shuffled parameter back as a parameter, requires_grad included."""
    for grad in (False, True):
        layer = Layer()
        layer.weight.requires_grad_(grad)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert isinstance(loaded.weight, nn.Parameter) and loaded.weight.requires_grad is grad
        assert torch.equal(loaded.weight, layer.weight)


def test_safetensors_keeps_the_bytes(weight: ShuffledWeight, tmp_path: Path):
    """.plain goes through safetensors, and as_shuffled gives the type back."""
    files = pytest.importorskip("safetensors.torch")
    files.save_file({"w": weight.plain}, tmp_path / "w.safetensors")
    assert torch.equal(as_shuffled(files.load_file(tmp_path / "w.safetensors")["w"]), weight)


@pytest.mark.parametrize("way", ["set", "overwrite", "swap"])
def test_plain_is_never_stale_when_a_module_moves(way: str, request: pytest.FixtureRequest):
    """After a module moved, by each of torch's three ways, .plain is where the parameter is."""
    future = torch.__future__
    if way != "set":
        choose = {"overwrite": future.set_overwrite_module_params_on_conversion, "swap": future.set_swap_module_params_on_conversion}[way]
        choose(True)
        request.addfinalizer(lambda: choose(False))
    layer = Layer()
    assert not layer.weight.plain.is_meta
    layer.to("meta")
    assert layer.weight.plain.is_meta and isinstance(layer.weight, ShuffledWeight)
    layer.to_empty(device="cpu")
    layer.load_state_dict(Layer(seed=3).state_dict())
    assert same(layer.weight.plain, Layer(seed=3).weight.plain)
    assert layer.weight.plain.data_ptr() == layer.weight.data_ptr()


def test_plain_is_never_stale_when_data_is_set_or_swapped():
    """Setting param.data, torch's lower setter and swap_tensors change .plain too."""
    layer, new = Layer(), shuffle_weight(random_weight(32, 64, seed=5))
    old = layer.weight.plain.untyped_storage()
    layer.weight.data = new
    assert layer.weight._plain.data_ptr() == new.data_ptr() != old.data_ptr()
    assert layer.weight.plain.data_ptr() == new.data_ptr()
    torch.Tensor.data.__set__(layer.weight, shuffle_weight(random_weight(32, 64, seed=6)))  # type: ignore[attr-defined]
    assert same(unshuffle_weight(layer.weight), random_weight(32, 64, seed=6))
    one, two = Layer(seed=1).weight, Layer(seed=2).weight
    torch.utils.swap_tensors(one, two)
    assert same(unshuffle_weight(one), random_weight(32, 64, seed=2))
    assert type(layer.weight.data) is type(layer.weight)


def test_a_parameter_of_it_carries_no_gradient_into_plain(weight: ShuffledWeight):
    """A parameter that requires a gradient is typed; its bytes and its plain copy do not require one."""
    parameter: Any = nn.Parameter(weight)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, ShuffledWeight) and parameter.requires_grad
    assert not parameter.plain.requires_grad and not unshuffle_weight(parameter).requires_grad
    assert not shuffle_weight(nn.Parameter(torch.zeros(32, 64))).requires_grad
    assert torch.equal(unshuffle_weight(parameter), unshuffle_weight(weight))


def test_it_is_made_and_used_under_inference_mode():
    """shuffle, unshuffle, clone and plain work on tensors made in inference mode."""
    with torch.inference_mode():
        x = torch.randn(32, 64)
        w = shuffle_weight(x)
        assert torch.equal(unshuffle_weight(w.clone()), x) and w.plain.is_inference()


def test_it_prints_its_type_and_not_its_values(weight: ShuffledWeight):
    """repr and format show shape, dtype, device and layout."""
    assert repr(weight) == f"{weight}" == "ShuffledWeight((64, 64), torch.bfloat16, cpu, layout=aiter16x16)"
    assert "layout=aiter16x16" in repr(nn.Parameter(weight))


@pytest.mark.timing
def test_attributes_and_plain_are_quick(weight: ShuffledWeight):
    """Attributes cost as little as a plain tensor's; only .plain runs Python code."""

    def seconds(read: Callable[[], object]) -> float:
        return min(timeit.repeat(read, number=200, repeat=100))

    plain = weight.plain
    bare = seconds(lambda: plain.shape)  # about 0.05 us a call; a call that goes through Python's dispatch takes 50 times that
    assert seconds(lambda: weight.plain) < 10 * bare  # about 3.5
    for read in (lambda: weight.shape, lambda: weight.dtype, weight.data_ptr, weight.is_contiguous, weight.get_device):
        assert seconds(read) < 6 * bare  # about 2.5


@pytest.mark.gpu
def test_it_moves_to_the_gpu_and_back():
    """.cuda(), pinned memory, module.to and the permutation on the GPU give the bytes of the CPU."""
    layer, reference = Layer(), Layer()
    kept = layer.weight.plain
    layer.cuda()
    assert layer.weight.is_cuda and layer.weight.plain.is_cuda and not kept.is_cuda
    assert same(layer.weight.plain.cpu(), reference.weight.plain)
    assert torch.equal(shuffle_weight(random_weight(32, 64).cuda()).cpu(), reference.weight)
    pinned = reference.weight.detach().pin_memory()
    assert pinned.is_pinned() and type(pinned) is type(reference.weight)
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), reference.weight)
    assert torch.equal(copy.deepcopy(layer).cpu().weight, reference.weight)
    with pytest.raises(OperandError, match="as if it were plain"):
        F.linear(torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda"), layer.weight)


def test_compilers_see_the_memory_that_the_weight_has() -> None:
    """A weight's plain view follows it to other memory: set, moved by its module, or swapped."""
    layer = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(shuffle_weight(layer.weight.data), requires_grad=False)
    other = torch.nn.Parameter(shuffle_weight(torch.randn(32, 64, dtype=torch.bfloat16)), requires_grad=False)
    assert layer.weight._plain.data_ptr() == layer.weight.data_ptr()

    layer.weight.data = other.data
    assert layer.weight._plain.data_ptr() == layer.weight.data_ptr() == other.data_ptr()

    third = torch.nn.Parameter(shuffle_weight(torch.randn(32, 64, dtype=torch.bfloat16)), requires_grad=False)
    torch.utils.swap_tensors(layer.weight, third)
    assert layer.weight._plain.data_ptr() == layer.weight.data_ptr() != other.data_ptr()
