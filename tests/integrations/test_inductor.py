"""inductor: the routed op among the choices of max-autotune, where it is offered and nowhere else."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType

import pytest
import torch
from tunedgemm.errors import UserError
from tunedgemm.integrations import inductor
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape

CHOICES = """
import json, warnings
import torch, tunedgemm
warnings.simplefilter("ignore")
from torch._inductor import config
from torch._inductor.select_algorithm import add_feedback_saver
from torch._inductor.utils import run_and_get_code
from tunedgemm.integrations import inductor

offered, found = [], {}


def keep(timings, name, nodes, choices, *more):
    offered.append(sorted(choice.name[:24] for choice in choices))

add_feedback_saver(keep)
weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(8, 64)
narrow = weight.bfloat16()
shuffled = tunedgemm.shuffle_weight(narrow)

def product(x):
    return torch.relu(tunedgemm.linear(x, weight, bias))

def shuffled_product(x):
    return tunedgemm.linear(x.bfloat16(), shuffled).float()

def function(x):
    return tunedgemm.gemm_a16w16(x, narrow, None, torch.float32)

def scaled(x):
    return tunedgemm.gemm_a16w16(x, weight, bias, None, torch.full((1,), 0.5), torch.ones(1))

def torchs(x):
    return torch.mm(x, weight.t()) + 1

def compiled(label, function, operands=(x,), **more):
    torch._dynamo.reset()
    offered.clear()
    with torch.no_grad():
        call = torch.compile(function, fullgraph=True, **more)
        out, code = run_and_get_code(call, operands[0])
        pairs = [(out, operands[0]), *((call(other), other) for other in operands[1:])]
        right = all(torch.allclose(out, function(other), atol=1e-4) for out, other in pairs)
    found[label] = [right, [*offered], "torch.ops.tunedgemm." in code[-1]]

shuffled_product(x)
most = {"mode": "max-autotune"}
inductor.offer(external=True)
inductor.offer(external=True)
compiled("default", product)
compiled("shuffled", shuffled_product, **most)
config.test_configs.force_custom_op_decomposition = False
compiled("ours", product, (x, x[:5]), dynamic=True, **most)
compiled("our function", function, (x.bfloat16(),), **most)
compiled("scaled", scaled, **most)
config.test_configs.force_custom_op_decomposition = True
compiled("torch's", product, **most)
compiled("not our function", function, (x.bfloat16(),), **most)
compiled("external", torchs, **most)
inductor.withdraw()
inductor.withdraw()
compiled("withdrawn", product, **most)
compiled("withdrawn external", torchs, **most)
found["left"] = [len(config.external_matmul), torch.compiler.config.cache_key_tag]
print(json.dumps(found))
"""


def test_an_offer_before_any_graph_gives_our_ops_their_lowerings(child):
    """An offer that is first to load Inductor finds the lowerings of our ops, which choices replace."""
    found = child(
        "from tunedgemm.integrations import inductor, linear; inductor.offer();"
        "from torch._inductor.lowering import lowerings; print(linear.op in lowerings)"
    )
    assert found.splitlines()[-1] == "True"


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_max_autotune_chooses_among_offered_products(child, monkeypatch, tmp_path):
    """The op and torch's product are right choices at any M. Default mode, shuffled weights, calls
    after withdraw() and the graph cache have none."""
    import torch._inductor.config as settings

    if not hasattr(settings.test_configs, "force_custom_op_decomposition"):
        pytest.skip("this torch cannot be told which choice to take")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    found = json.loads(child(CHOICES).splitlines()[-1])
    for without in ("default", "shuffled", "scaled"):
        assert found[without] == [True, [], True]
    choices = {
        "linear": ["tunedgemm_linear_fallbac", "tunedgemm_linear_linear_"],
        "a16w16": ["tunedgemm_a16w16_a16w16_", "tunedgemm_a16w16_fallbac"],
    }
    cases = ("linear", "ours", True), ("linear", "torch's", False), ("a16w16", "our function", True), ("a16w16", "not our function", False)
    for name, case, is_ours in cases:
        right, offered, routed = found[case]
        assert (right, choices[name] in offered, routed) == (True, True, is_ours), (case, offered)
    right, offered, routed = found["external"]
    assert right and not routed and any("tunedgemm_mm" in choices for choices in offered)
    assert found["withdrawn"] == [True, [], True]
    right, offered, routed = found["withdrawn external"]
    assert right and not routed and not any("tunedgemm_mm" in choices for choices in offered)
    assert found["left"] == [0, ""]


TWICE = """
import json, warnings
import torch, tunedgemm
warnings.simplefilter("ignore")
from torch._inductor.select_algorithm import add_feedback_saver
from tunedgemm.integrations import inductor

offered, right = [], []
add_feedback_saver(lambda timings, name, nodes, choices, *more: offered.append(sorted(choice.name for choice in choices)))
weight, bias = torch.randn(48, 64), torch.randn(48)
for offering, mode in ((True, "max-autotune"), (True, "default"), (False, "max-autotune")):
    inductor.offer() if offering else inductor.withdraw()
    offered.append(mode)
    for m in (8, 5):
        x = torch.randn(m, 64)
        torch._dynamo.reset()
        with torch.no_grad():
            out = torch.compile(tunedgemm.linear, fullgraph=True, mode=mode)(x, weight, bias)
        right.append(torch.allclose(out, torch._C._nn.linear(x, weight, bias), atol=1e-4))
print(json.dumps([offered, right]))
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_every_graph_has_the_choice(child, monkeypatch):
    """Each graph under max-autotune, not only the first,
    offers the op and its decomposition until withdrawn."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    offered, right = json.loads(child(TWICE).splitlines()[-1])
    assert right == [True] * 6
    asked, nothing = offered[1 : offered.index("default")], offered[offered.index("default") :]
    both = [choices for choices in asked if any("fallback" in name for name in choices) and any("fallback" not in name for name in choices)]
    assert len(both) == 2 and nothing == ["default", "max-autotune"]


CHOSEN = """
import json, warnings
import torch, tunedgemm
warnings.simplefilter("ignore")
from torch._inductor.select_algorithm import add_preprocessing_fn
from torch._inductor.utils import run_and_get_code
from tunedgemm.integrations import inductor

met = []


def ours_alone(choices):
    met.append(len(choices))
    ours = [choice for choice in choices if "fallback" in choice.name]
    return ours * 2 or choices  # two, for torch 2.11 does not take one

add_preprocessing_fn(ours_alone)
inductor.offer()
x, weight, bias = torch.randn(8, 64).bfloat16(), torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16()
calls = {
    "plain": lambda x: tunedgemm.linear(x, weight),
    "biased": lambda x: tunedgemm.linear(x, weight, bias),
    "function": lambda x: tunedgemm.gemm_a16w16(x, weight),
    "wide": lambda x: tunedgemm.gemm_a16w16(x, weight, bias, torch.float32),
}
found = {}
for name, call in calls.items():
    torch._dynamo.reset()
    with torch.no_grad():
        (out, code), wanted = run_and_get_code(torch.compile(call, fullgraph=True, mode="max-autotune"), x), call(x)
    right = out.dtype == wanted.dtype and torch.allclose(out, wanted, atol=1e-2, rtol=1e-2)
    found[name] = [right, code[-1].count("_straight(")]
print(json.dumps([len(met) >= 3, found]))
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_chosen_op_gets_all_its_arguments(child, monkeypatch):
    """The generated call has the graph's bias and output dtype, and skips torch's dispatcher."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    chosen, found = json.loads(child(CHOSEN).splitlines()[-1])
    assert chosen
    assert found == {name: [True, 1] for name in ("plain", "biased", "function", "wide")}


def test_the_external_product_fills_its_output():
    """`tunedgemm_mm` fills Inductor's output tensor,
    whatever the memory order of b and the output dtype."""
    a, b = op_named("a16w16").make_inputs(Shape("a16w16", 5, 48, 64), torch.device("cpu"), 0)
    for matrix in (b.t(), b.t().contiguous()):
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty(5, 48, dtype=dtype)
            inductor.tunedgemm_mm(a, matrix, out)
            torch.testing.assert_close(out, (a.float() @ matrix.float()).to(dtype), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("present", [False, True])
def test_a_torch_without_such_choices_is_an_error(monkeypatch, present):
    """A missing module or another signature is an error that names a working version,
    and changes nothing."""
    module = ModuleType("torch._inductor.kernel.custom_op")
    module.CustomOpConfig = object
    module.register_custom_op_autotuning = lambda custom_op, decompositions: None
    monkeypatch.setitem(sys.modules, module.__name__, module if present else None)
    before = torch.compiler.config.cache_key_tag
    with pytest.raises(UserError, match=r"use torch 2\.13"):
        inductor.offer()
    inductor.withdraw()
    assert torch.compiler.config.cache_key_tag == before
