"""Weights that `convert` keeps in two orders: each change of the plain one reaches the next call."""

from __future__ import annotations

import contextlib
import copy
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tunedgemm
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode
from tunedgemm.dispatch.preshuffle import PRESHUFFLE_M_THRESHOLD
from tunedgemm.errors import OperandError
from tunedgemm.integrations.conversion import Converted, convert
from tunedgemm.ops.formats import dual_layout
from tunedgemm.ops.formats.dual_layout import DualLayoutWeight
from tunedgemm.ops.formats.shuffle import ShuffledWeight, unshuffle_weight

BF16, SIDE = torch.bfloat16, 64
MANY = PRESHUFFLE_M_THRESHOLD
Layer = torch.nn.Linear


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).to(BF16)


def layer_of(weight: torch.Tensor, **options: Any) -> tuple[Layer, Converted]:
    """A layer with a weight in two orders, after its first call."""
    layer = Layer(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False)
    layer.weight.copy_(weight)
    done = convert(layer, shuffle=True, keep_plain=True, **options)
    assert done.shuffled == ("",)
    layer(x_of(MANY))
    return layer, done


def x_of(m: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(m, SIDE, generator=torch.Generator().manual_seed(m)).to(dtype)


def check(layer: Layer, met: list[tuple[int, str]], layout: str = "aiter16x16") -> None:
    """Few and many rows get the product of the present weight; many by this layout."""
    for m in (1, MANY):
        met.clear()
        x = x_of(m, layer.weight.dtype)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), torch._C._nn.linear(x, layer.weight), rtol=0.02, atol=0.05)
    assert [used for _, used in met] == [layout]


def test_the_page_lists_every_write(writes: Any) -> None:
    """The table of writes in docs/models.md is complete and names no other."""
    assert set(writes.answers()) == set(writes.WRITES)


def test_the_copy_follows_the_weight(met, writes: Any, write: str) -> None:
    """Each write reaches the next calls, again and again, by the weight that the page names."""
    layer, answer = layer_of(drawn(1))[0], writes.answers()[write]
    for seed in (2, 3):
        kept = writes.WRITES[write](layer, drawn(seed))
        if answer == "a new copy":
            del kept  # those that return themselves
        check(layer, met, "aiter16x16" if answer == "a new copy" else "row")


def test_unseen_writes_are_unseen_and_need_refresh(met, writes: Any, unseen: str) -> None:
    """The page lists no write as unseen that is followed; after `refresh` the next call follows it."""
    layer, _ = layer_of(drawn(1))
    kept = writes.WRITES[unseen](layer, drawn(2))
    with pytest.raises(AssertionError):
        check(layer, met)
    tunedgemm.refresh(torch.nn.Sequential(layer))
    x = x_of(MANY)
    torch.testing.assert_close(layer(x), torch._C._nn.linear(x, layer.weight), rtol=0.02, atol=0.05)
    del kept
    check(layer, met)


def test_a_trained_weight_has_no_copy(met) -> None:
    """From the first to the last moment of training calls take the plain weight, also without gradients."""
    layer, _ = layer_of(drawn(1))
    for train in (layer.requires_grad_, layer.weight.requires_grad_, lambda: setattr(layer.weight, "requires_grad", True)):
        train()
        assert layer.weight.orders is None
        check(layer, met, "row")
        layer(x_of(MANY)).sum().backward()
        assert layer.weight.grad is not None
        layer.requires_grad_(False)
        check(layer, met)


def test_an_array_of_the_weight_delays_the_copy(met) -> None:
    """An array may be written to at any time: calls take the plain weight until it is gone."""
    layer, _ = layer_of(drawn(1))
    array = layer.weight.detach().view(torch.int16).numpy()
    check(layer, met, "row")
    array[:] = 0x4000
    check(layer, met, "row")
    del array
    check(layer, met)
    layer.weight.copy_(drawn(2))
    check(layer, met)


def test_a_view_from_before_counts(met) -> None:
    """A view keeps the weight's count of writes, whenever it was made."""
    layer = Layer(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False)
    view = layer.weight.view(-1)
    convert(layer, shuffle=True, keep_plain=True)
    check(layer, met)
    view.copy_(drawn(2).view(-1))
    check(layer, met)


def test_a_shuffled_weight_alone_follows_or_raises(met, change: Any) -> None:
    """A layer with one memory becomes plain with a plain parameter, or raises; it has one value."""
    layer = Layer(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False)
    layer.weight.copy_(drawn(1))
    assert convert(layer, shuffle=True).shuffled == ("",)
    with contextlib.suppress(OperandError, RuntimeError):
        change(layer, drawn(2))
    present = unshuffle_weight(layer.weight) if isinstance(layer.weight, ShuffledWeight) else layer.weight
    x = x_of(MANY)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), torch._C._nn.linear(x, present), rtol=0.02, atol=0.05, equal_nan=True)


@pytest.fixture
def group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        distributed.destroy_process_group()


@pytest.mark.parametrize("of", [lambda layer: layer.weight, lambda layer: layer.weight.data], ids=["parameter", "data"])
@pytest.mark.parametrize("collective", [distributed.broadcast, distributed.all_reduce], ids=["broadcast", "all_reduce"])
def test_the_copy_is_dropped_by_collectives(met, group, collective: Any, of: Any) -> None:
    """They write, and torch counts nothing."""
    layer, _ = layer_of(drawn(1))
    assert layer.weight.orders is not None
    collective(of(layer), **({"src": 0} if collective is distributed.broadcast else {}))
    assert layer.weight.orders is None
    while not dual_layout.is_sole_holder(layer.weight):  # gloo's threads let the operand go a little later
        time.sleep(0.01)
    check(layer, met)


def test_sharded_layers_take_the_plain_weight(met, group) -> None:
    """FSDP2 gathers weights into memory that it fills again without a count."""
    layer, _ = layer_of(drawn(1))
    sharded = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    x = x_of(MANY)
    with torch.no_grad():
        for seed in (1, 2, 3):
            sharded.weight.to_local().copy_(drawn(seed))
            torch.testing.assert_close(sharded(x), torch._C._nn.linear(x, drawn(seed)), rtol=0.02, atol=0.05)


def test_an_unchanged_weight_is_copied_once(met) -> None:
    """Reading the weight costs no other copy; a state_dict does, because others may write to it."""
    layer, _ = layer_of(drawn(1))
    kept = layer.weight.orders
    for _ in range(3):
        check(layer, met)
        next(iter(layer.parameters())).sum()
        layer.requires_grad_(False).eval()
        layer.state_dict(keep_vars=True)
    assert layer.weight.orders is kept
    layer.state_dict()
    assert layer.weight.orders is None


def test_another_dtype_or_device_makes_another_copy(met) -> None:
    """`half`, `to` and `to_empty` give the weight other memory, and the old copy goes at once."""
    layer, _ = layer_of(drawn(1))
    layer.half()
    assert layer.weight.orders is None
    check(layer, met)
    layer.to(torch.float32)
    check(layer, met)
    layer.to_empty(device="cpu").weight.data.copy_(drawn(2))
    check(layer, met)
    layer.double()
    x = torch.ones(MANY, SIDE, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch._C._nn.linear(x, layer.weight))


def test_weights_with_uncounted_writes_stay_plain(met) -> None:
    """Those of inference mode, in shared memory, or with an alias by `data` are named with the remedy."""
    layers = {name: Layer(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False) for name in ("shared", "alias", "view", "free")}
    layers["shared"].weight.share_memory_()
    alias, view = layers["alias"].weight.data, layers["view"].weight.detach()
    with torch.inference_mode():
        layers["inference"] = Layer(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False)
    done = convert(torch.nn.ModuleDict(layers), shuffle=True, keep_plain=True)
    assert done.shuffled == ("view", "free")
    assert "inference mode" in done.skipped["inference"]
    assert "other processes" in done.skipped["shared"]
    assert "delete that tensor" in done.skipped["alias"]
    alias.fill_(2)
    view.fill_(3)
    for name in ("alias", "view"):
        x = x_of(MANY)
        torch.testing.assert_close(layers[name](x), torch._C._nn.linear(x, layers[name].weight), rtol=0.02, atol=0.05)


def test_a_replaced_weight_waits_for_its_last_alias(met) -> None:
    """Calls take the plain weight while another tensor has the memory of a new parameter."""
    layer, _ = layer_of(drawn(1))
    new = torch.nn.Parameter(drawn(2), requires_grad=False)
    alias = new.data
    layer.weight = new
    check(layer, met, "row")
    alias.fill_(2)
    check(layer, met, "row")
    del alias
    check(layer, met)
    with torch.inference_mode():
        layer.weight = torch.nn.Parameter(drawn(3), requires_grad=False)
    check(layer, met, "row")


def _assigned(layer: Layer) -> torch.Tensor:
    layer.weight.data = average = drawn(2)
    return average


def _tied(layer: Layer) -> torch.Tensor:
    other = Layer(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False)
    other.weight.data = layer.weight.data
    return other.weight


def _from_vector(layer: Layer) -> torch.Tensor:
    vector = drawn(2).view(-1)
    torch.nn.utils.vector_to_parameters(vector, layer.parameters())
    return vector.view(SIDE, SIDE)


def _of_its_class(layer: Layer) -> torch.Tensor:
    new = drawn(2)
    layer.weight = type(layer.weight)(new.data, requires_grad=False)
    return new


#: Ways to another tensor with a weight's memory, which has its own count of writes.
ALIASES = {
    "assigned": _assigned,
    "tied": _tied,
    "vector": _from_vector,
    "of its class": _of_its_class,
    "data of data": lambda layer: layer.weight.data.data,
    "copy.copy": lambda layer: copy.copy(layer.weight),
}


@pytest.mark.parametrize("aliased", ALIASES.values(), ids=ALIASES)
def test_memory_that_others_keep_has_no_copy(met, aliased: Any) -> None:
    """Writes of an average or a tied layer reach the calls, which are plain until the tensor is gone."""
    layer, _ = layer_of(drawn(1))
    alias = aliased(layer)
    check(layer, met, "row")
    alias.copy_(drawn(3))
    check(layer, met, "row")
    del alias
    check(layer, met)


def test_memory_of_arrays_has_no_copy(met) -> None:
    """torch counts no writes of numpy's: such weights stay plain, at once or when they are assigned."""
    arrays = [np.full((SIDE, SIDE), 3.0, np.float32) for _ in range(3)]
    layer = Layer(SIDE, SIDE, bias=False).requires_grad_(False)
    assert convert(layer, shuffle=True, keep_plain=True).shuffled == ("",)
    other = Layer(SIDE, SIDE, bias=False)
    other.weight = torch.nn.Parameter(torch.from_numpy(arrays[0]), requires_grad=False)
    assert "clone it first" in convert(other, shuffle=True, keep_plain=True).skipped[""]
    layer.weight.data = torch.from_numpy(arrays[1])
    check(layer, met, "row")
    arrays[1][:] = 2
    check(layer, met, "row")
    layer.weight = torch.nn.Parameter(torch.from_numpy(arrays[2]), requires_grad=False)
    check(layer, met, "row")
    arrays[2][:] = 1
    check(layer, met, "row")
    layer.weight.data = torch.ones(SIDE, SIDE)
    check(layer, met)


def test_tied_weights_have_one_copy(met) -> None:
    """Two layers of one parameter share it, and both follow a change by either."""
    first, second = (Layer(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False) for _ in range(2))
    second.weight = first.weight
    model = torch.nn.ModuleList([first, second])
    done = convert(model, shuffle=True, keep_plain=True)
    assert done.shuffled == ("0", "1") and done.bytes_added == SIDE * SIDE * 2
    second.weight.copy_(drawn(2))
    check(first, met)
    check(second, met)
    done.undo()
    assert type(first.weight) is torch.nn.Parameter and not hasattr(first.weight, "orders")
    assert type(first) is Layer and not hasattr(first, "copy_layout")


def test_copies_of_a_model_have_their_own(met) -> None:
    """A deep copy, a pickled one and its saved state follow their own weights alone."""
    layer, _ = layer_of(drawn(1))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other.weight.copy_(drawn(2))
        check(other, met)
        check(layer, met)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(layer.state_dict(keep_vars=True), Path(folder, "state"))
        state = torch.load(Path(folder, "state"), weights_only=True)
    assert type(state["weight"]) is torch.nn.Parameter and torch.equal(state["weight"], layer.weight)


def test_other_weights_in_a_call_are_used(met) -> None:
    """`functional_call` and a parametrisation give other weights for a call, or all calls."""
    layer, _ = layer_of(drawn(1))
    x, other = x_of(MANY), drawn(2)
    near = torch.testing.assert_close
    near(torch.func.functional_call(layer, {"weight": other}, (x,)), torch._C._nn.linear(x, other), rtol=0.02, atol=0.05)
    check(layer, met)

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return weight * 2

    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    near(layer(x), torch._C._nn.linear(x, drawn(1) * 2), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad], ids=["inference", "no_grad"])
def test_modes_of_a_call_leave_the_copy_usable(met, around: Any) -> None:
    """A copy made in inference mode serves calls outside it."""
    layer, _ = layer_of(drawn(1))
    layer.weight.copy_(drawn(2))
    with around():
        layer(x_of(MANY))
    check(layer, met)
    layer(x_of(MANY).requires_grad_()).sum().backward()


def test_a_traced_call_makes_no_copy(met) -> None:
    """Under a dispatch mode or a transform a changed weight is used plain, until a usual call."""
    layer, _ = layer_of(drawn(1))
    layer.weight.copy_(drawn(2))
    with FlopCounterMode(display=False):
        layer(x_of(MANY))
    torch.func.vmap(layer)(x_of(MANY).view(2, -1, SIDE))
    torch.func.grad(lambda x: layer(x).sum())(x_of(MANY))
    assert layer.weight.orders.version != layer.weight._version
    check(layer, met)


def test_a_write_during_the_copy_is_not_lost(met, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may take `data` and write while a call makes the copy."""
    layer, done = layer_of(drawn(1))
    shuffle = dual_layout.shuffle_weight

    def interrupted(weight: torch.Tensor, layout: str) -> torch.Tensor:
        shuffled = shuffle(weight, layout)
        layer.weight.data.view(torch.int16).numpy()[:] = 0x4000
        return shuffled

    done.refresh()
    with monkeypatch.context() as patched:
        patched.setattr(dual_layout, "shuffle_weight", interrupted)
        layer(x_of(MANY))
    check(layer, met)


def test_threads_take_a_finished_copy(met) -> None:
    """Eight threads that meet a changed weight at once all get its product."""
    layer, _ = layer_of(drawn(1))
    x, failed = x_of(MANY), []
    for seed in range(2, 6):
        layer.weight.copy_(drawn(seed))
        wanted = torch._C._nn.linear(x, layer.weight)
        start = threading.Barrier(8)

        def call(wanted: torch.Tensor = wanted, start: threading.Barrier = start) -> None:
            start.wait()
            for _ in range(5):
                if not torch.allclose(layer(x), wanted, rtol=0.02, atol=0.05):
                    failed.append(1)

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_the_weight_stays_a_parameter(met) -> None:
    """Its identity, its state and `isinstance` stay; the copy is in no state."""
    layer = Layer(SIDE, SIDE, dtype=BF16).requires_grad_(False)
    weight = layer.weight
    convert(layer, shuffle=True, keep_plain=True)
    assert layer.weight is weight and type(weight) is DualLayoutWeight and isinstance(weight, torch.nn.Parameter)
    assert list(layer.state_dict()) == ["weight", "bias"] and not layer._buffers
    layer(x_of(MANY))
    assert isinstance(weight.orders.shuffled, ShuffledWeight)
    assert type(weight.detach()) is type(weight + 0) is torch.Tensor
