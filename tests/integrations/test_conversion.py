"""convert(): a model's layers use the tables in place; everything else stays, and it can be
undone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import tunedgemm
from torch.fx.experimental.proxy_tensor import make_fx
from tunedgemm.dispatch.preshuffle import PRESHUFFLE_M_THRESHOLD
from tunedgemm.errors import OperandError, UserError
from tunedgemm.integrations.conversion import convert
from tunedgemm.integrations.layers import TunedLinear
from tunedgemm.ops.formats.quant import dequant_blocks, per_block_quant, pertoken_quant
from tunedgemm.ops.formats.shuffle import ShuffledWeight

BF16 = torch.bfloat16


class Model(torch.nn.Module):
    """A tied head, a layer with a bias, one that cannot be blocked, and one of a custom class."""

    class Own(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(48, 64)
        self.inner = torch.nn.Linear(64, 64)
        self.odd = torch.nn.Linear(64, 20, bias=False)
        self.own = self.Own(20, 64)
        self.head = torch.nn.Linear(64, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.own(self.odd(self.inner(self.embedding(tokens)))))


@pytest.fixture
def model() -> Model:
    return Model().to(BF16).requires_grad_(False)


TOKENS = torch.arange(6).view(2, 3)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.05)


def test_layers_go_through_the_tables_and_keep_all_they_have(met, model: Model) -> None:
    """Class names change, and nothing else: parameters, state, isinstance, and the numbers."""
    wanted, parameters, state = model(TOKENS), dict(model.named_parameters()), model.state_dict()
    done = convert(model)
    assert done.modules == ("inner", "odd", "head") and done.shuffled == () and done.bytes_added == 0
    assert list(done.skipped) == ["own"] and "Own may have another forward" in done.skipped["own"]
    near(model(TOKENS), wanted)
    assert met == [(6, "row")] * 3
    assert all(isinstance(layer, torch.nn.Linear) for layer in (model.inner, model.odd, model.head))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert model.head.weight is model.embedding.weight


def test_undo_restores_everything(met, model: Model) -> None:
    """A call or the end of a block restores all, also after an error; a second time nothing."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for keep in (False, True):
        with pytest.raises(RuntimeError, match="stop"), convert(model, shuffle=True, keep_plain=keep) as done:
            assert type(model.inner) is not torch.nn.Linear
            raise RuntimeError("stop")
        done.undo()
        assert [type(layer) for layer in (model.inner, model.odd, model.head)] == [torch.nn.Linear] * 3
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
        assert not model.inner._buffers and all(not isinstance(p, ShuffledWeight) for p in model.parameters())
        assert model.head.weight is model.embedding.weight
    model(TOKENS)
    assert met == []


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "keep_plain": True}], ids=["plain", "dual layout"])
def test_undo_leaves_a_parametrisation(met, options) -> None:
    """A layer that was parametrised since is an ordinary parametrised layer, and without it a linear one."""
    layer, x = torch.nn.Linear(64, 64, dtype=BF16).requires_grad_(False), torch.randn(128, 64, dtype=BF16)
    done = convert(layer, **options)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    wanted = layer(x)
    done.undo()
    torch.testing.assert_close(layer(x), wanted, rtol=0.02, atol=0.05)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is torch.nn.Linear
    torch.testing.assert_close(layer(x), wanted, rtol=0.02, atol=0.05)


def test_weights_are_shuffled_where_they_can_be(met, model: Model) -> None:
    """Weights are shuffled unless another module shares them or they do not divide;
    reasons are listed."""
    wanted = model(TOKENS)
    done = convert(model, shuffle=True)
    assert done.shuffled == ("inner",) and done.modules == ("inner", "odd", "head")
    assert "N divisible by 16" in done.skipped["odd"]
    assert "another module holds it" in done.skipped["head"]
    assert model.inner.weight.layout_name == "aiter16x16" and not isinstance(model.head.weight, ShuffledWeight)
    near(model(TOKENS), wanted)
    assert sorted(met) == [(6, "aiter16x16"), (6, "row"), (6, "row")]


def test_both_weights_are_kept_and_each_call_picks_one(met, model: Model) -> None:
    """Few rows use the plain weight, many the shuffled one;
    extra memory is reported and in no state_dict."""
    state = model.state_dict().keys()
    wanted = {m: model.inner(torch.ones(m, 64, dtype=BF16)) for m in (1, PRESHUFFLE_M_THRESHOLD)}
    done = convert(model, shuffle=True, keep_plain=True, skip=("odd", "he*"))
    assert done.shuffled == ("inner",) and done.bytes_added == 64 * 64 * 2
    for m, out in wanted.items():
        near(model.inner(torch.ones(m, 64, dtype=BF16)), out)
    assert met == [(1, "row"), (PRESHUFFLE_M_THRESHOLD, "aiter16x16")]
    assert model.state_dict().keys() == state
    met.clear()
    assert tunedgemm.prewarm(torch.nn.ModuleList([model.inner, model.head]), m=(2, 4)) == 6
    assert sorted(met) == sorted((m, layout) for m in (2, 4) for layout in ("aiter16x16", "row", "row"))


def test_without_kernels_for_the_layout_weights_stay_plain(model: Model) -> None:
    """Torch would put each of them in order at each call."""
    done = convert(model, shuffle=True, skip=["odd"])
    assert done.shuffled == () and set(done.modules) == {"inner", "head"}
    assert "no backend on cpu" in done.skipped["inner"]


def test_weights_that_are_trained_or_absent_are_refused(met, model: Model) -> None:
    """Each is refused with what would help, and the model is unchanged."""
    model.inner.weight.requires_grad_()
    with pytest.raises(UserError, match=r"'inner' requires a gradient.*requires_grad_\(False\)"):
        convert(model, shuffle=True)
    with pytest.raises(UserError, match="'inner' is on the meta device"):
        convert(Model().to("meta"), shuffle=True)
    with pytest.raises(OperandError, match="unknown weight layout"):
        convert(model, shuffle=(3, "x"))
    assert type(model.inner) is torch.nn.Linear
    assert convert(model).modules == ("inner", "odd", "head")


def test_gradients_flow_through_converted_layers(met) -> None:
    """A model that is trained is converted without shuffling, and learns as before."""
    model = Model().to(BF16)
    model(TOKENS).sum().backward()
    wanted = model.inner.weight.grad.clone()
    model.zero_grad()
    convert(model)
    model(TOKENS).sum().backward()
    torch.testing.assert_close(model.inner.weight.grad, wanted)
    assert met == []


@pytest.mark.parametrize("keep", [False, True], ids=["shuffled", "both"])
def test_a_converted_model_is_copied_and_pickled(met, model: Model, keep: bool) -> None:
    """Copies have its classes, and its weights in their layouts."""
    convert(model, shuffle=True, keep_plain=keep, skip=["odd", "own"])
    x = torch.randn(PRESHUFFLE_M_THRESHOLD, 64, dtype=BF16)
    wanted = model.inner(x)
    for other in (copy.deepcopy(model.inner), pickle.loads(pickle.dumps(model.inner))):
        assert type(other) is type(model.inner)
        assert torch.equal(other(x), wanted)
    assert {layout for _, layout in met} == {"aiter16x16"}


def test_calls_that_routing_leaves_to_torch_are_unchanged(met, model: Model) -> None:
    """Autocast, functional transforms,
    other dtypes and mismatched sizes give torch's results and errors."""
    convert(model, shuffle=True, keep_plain=True, skip=["odd"])
    layer, x = model.inner, torch.randn(PRESHUFFLE_M_THRESHOLD, 64, dtype=BF16)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with torch.autocast("cpu", dtype=BF16):
        near(layer(x.float()), plain)
    near(torch.func.vmap(layer)(x.view(2, -1, 64)).view(-1, 64), plain)
    near(torch.func.jvp(layer, (x,), (x,))[0], plain)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|dtype"):
        layer(x.float())
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size"):
        layer(x[:, :32])
    assert met == []
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    assert met == []


def test_traces_with_sizes_that_are_symbols_are_torchs(met, model: Model) -> None:
    """A layer with its weight in two orders is traced as the product of the plain one."""
    convert(model, shuffle=True, keep_plain=True, skip=["odd"])
    x = torch.ones(PRESHUFFLE_M_THRESHOLD, 64, dtype=BF16)
    graph = make_fx(model.inner, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert torch.ops.aten.addmm.default in [node.target for node in graph.graph.nodes]
    assert met == []


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "keep_plain": True}], ids=["plain", "shuffled", "both"])
def test_converted_layers_compile_whole(met, model: Model, options: dict[str, bool]) -> None:
    """No break, also with sizes that vary, and the results of eager."""
    convert(model, skip=["odd", "head"], **options)
    compiled = torch.compile(model.inner, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (3, PRESHUFFLE_M_THRESHOLD, 5):
            x = torch.randn(m, 64, dtype=BF16)
            near(compiled(x), model.inner(x))


def test_layers_that_hooks_or_others_have_changed_are_left(met, model: Model) -> None:
    """A layer with its own forward, a parametrised weight or a typed one is left."""
    torch.nn.utils.parametrize.register_parametrization(model.odd, "weight", torch.nn.Identity())
    model.inner.forward = lambda x: x

    class Odd(torch.Tensor):
        pass

    model.head.weight = torch.nn.Parameter(torch.ones(48, 64).as_subclass(Odd), requires_grad=False)
    done = convert(model)
    assert done.modules == ()
    assert "replaced on the module" in done.skipped["inner"]
    assert "ParametrizedLinear" in done.skipped["odd"] and "type Odd" in done.skipped["head"]
    assert convert(torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float64))).skipped["0"] == "its weight is torch.float64"


def test_a_second_convert_changes_nothing(met, model: Model) -> None:
    """A converted layer is named as such; its undo leaves the first conversion alone."""
    first = convert(model)
    again = convert(model)
    assert again.modules == () and set(again.skipped.values()) >= {"converted already"}
    again.undo()
    assert type(model.inner) is TunedLinear
    first.undo()


def fp8_layer(bias: bool, blocks: bool) -> tuple[torch.nn.Module, torch.Tensor]:
    """transformers' layer of fp8, filled, and its weight in float32."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = torch.randn(256, 384)
    layer = module.FP8Linear(384, 256, block_size=(128, 128) if blocks else None, has_bias=bias)
    if blocks:
        q, scale = per_block_quant(weight, torch.float8_e4m3fn)
        wide = dequant_blocks(q, scale, block=(128, 128))
    else:
        scale = weight.abs().max() / 448
        q = (weight / scale).to(torch.float8_e4m3fn)
        wide = q.float() * scale
    layer.weight = torch.nn.Parameter(q, requires_grad=False)
    layer.weight_scale_inv.data = scale.to(torch.float32)
    if bias:
        layer.bias.data = torch.randn(256)
    return layer, wide


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "tensor"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_layers_of_fp8_keep_their_scales(bias: bool, blocks: bool) -> None:
    """transformers' FP8Linear gives its product within the error of quantised activations,
    in the input's dtype."""
    layer, wide = fp8_layer(bias, blocks)
    model = torch.nn.Sequential(layer)
    before = type(layer)
    done = convert(model)
    assert done.modules == ("0",) and not done.skipped
    x = torch.randn(2, 3, 384, dtype=BF16)
    with torch.no_grad():
        out = model(x)
    wanted = x.float() @ wide.t() + (layer.bias if bias else 0)
    assert out.shape == (2, 3, 256) and out.dtype == BF16
    assert (out.float() - wanted).norm() / wanted.norm() < 0.05
    assert tunedgemm.prewarm(model, m=6) == 1
    done.undo()
    assert type(layer) is before and "blocks" not in layer.__dict__
    assert "may have another forward" in convert(model, fp8=False).skipped["0"]


@pytest.mark.parametrize("leaf", ["input", "bias"])
def test_layers_of_fp8_leave_gradients_to_the_layers_class(leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's class computes gradients of an input and of a bias."""
    layer, wide = fp8_layer(True, False)
    own, x = type(layer), torch.randn(2, 384, requires_grad=leaf == "input")
    layer.bias.requires_grad_(leaf == "bias")
    convert(torch.nn.Sequential(layer))
    monkeypatch.setattr(own, "forward", lambda self, input: torch.nn.functional.linear(input, wide, self.bias))
    layer(x).sum().backward()
    assert (x if leaf == "input" else layer.bias).grad.any()
    with torch.no_grad():
        assert not layer(x).requires_grad


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "tensor"])
def test_updated_weights_of_fp8_reach_the_next_call(blocks: bool) -> None:
    """A converted layer keeps no copy: other scales and weights, in place or replaced, are multiplied."""
    layer, _ = fp8_layer(False, blocks)
    convert(torch.nn.Sequential(layer))
    x = torch.randn(3, 384, dtype=BF16)
    with torch.no_grad():
        first = layer(x)
        layer.weight_scale_inv.data.mul_(-2)
        assert torch.equal(layer(x), first * -2)
        layer.weight_scale_inv = torch.nn.Parameter(layer.weight_scale_inv * 2, requires_grad=False)
        assert torch.equal(layer(x), first * -4)
        layer.weight.data = torch.zeros_like(layer.weight)
        assert not layer(x).any()


def test_a_static_scale_of_activations_is_used() -> None:
    """Values beyond it are cut off, as where it was calibrated."""
    layer, wide = fp8_layer(False, False)
    layer.activation_scale = torch.nn.Parameter(torch.tensor(1 / 448.0))
    convert(torch.nn.Sequential(layer))
    x = torch.full((1, 384), 5.0, dtype=BF16)
    with torch.no_grad():
        out = layer(x).float()
    wanted = torch.ones(1, 384) @ wide.t()
    assert (out - wanted).norm() / wanted.norm() < 0.05


def test_layers_of_fp8_with_other_scales_are_left() -> None:
    """Layers with other blocks, static scales with blocks,
    or scales of unknown size are left alone."""
    layer, _ = fp8_layer(False, True)
    layer.block_size = (64, 64)
    assert convert(torch.nn.Sequential(layer)).modules == ()
    layer.block_size = (128, 128)
    layer.activation_scale = torch.nn.Parameter(torch.tensor(1.0))
    assert convert(torch.nn.Sequential(layer)).modules == ()


def test_one_scale_a_row_serves_too() -> None:
    """A layer with compressed-tensors' name for scales of rows is converted."""
    weight = torch.randn(32, 64)
    q, scale = pertoken_quant(weight, quant_dtype=torch.float8_e4m3fn)

    class Rows(torch.nn.Linear):
        def forward(self, input):
            raise NotImplementedError

    layer = Rows(64, 32, bias=False)
    layer.weight = torch.nn.Parameter(q, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    convert(torch.nn.Sequential(layer))
    x = torch.randn(5, 64, dtype=BF16)
    wanted = x.float() @ weight.t()
    assert (layer(x).float() - wanted).norm() / wanted.norm() < 0.08


def test_a_layer_whose_weight_has_no_size_yet_costs_itself_alone():
    """A lazy layer that has not run stays torch's; the others are converted."""
    first = torch.nn.Linear(64, 48, dtype=BF16).requires_grad_(False)
    model = torch.nn.Sequential(first, torch.nn.LazyLinear(8, dtype=BF16))

    for shuffle in (False, True):
        done = convert(model, shuffle=shuffle)
        assert done.modules == ("0",) and "LazyLinear" in done.skipped["1"]
        done.undo()
    convert(model)

    assert model(torch.randn(4, 64, dtype=BF16)).shape == (4, 8)
