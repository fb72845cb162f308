"""precision: torch's settings of float32 products, whichever of its two interfaces was used."""

SETTINGS = '''
import contextlib, itertools, warnings
import torch
get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
PLACES = [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]
backends, matmul = torch.backends, torch.backends.cuda.matmul
ACTIONS = {
    "none": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "allowed": lambda: setattr(matmul, "allow_tf32", True),
    "forbidden": lambda: setattr(matmul, "allow_tf32", False),
    "all tf32": lambda: setattr(backends, "fp32_precision", "tf32"),
    "all ieee": lambda: setattr(backends, "fp32_precision", "ieee"),
    "cuda tf32": lambda: setattr(matmul, "fp32_precision", "tf32"),
    "cuda ieee": lambda: setattr(matmul, "fp32_precision", "ieee"),
    "conv": lambda: setattr(backends.cudnn.conv, "fp32_precision", "ieee"),
    "mkldnn": lambda: setattr(backends.mkldnn, "fp32_precision", "bf16"),
    "mkldnn bf16": lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn tf32": lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "tf32"),
}
OLD = [torch.get_float32_matmul_precision, torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32]
warnings.simplefilter("ignore")

def answer(function):
    try:
        return function()
    except RuntimeError as error:
        return str(error).splitlines()[0]

def state():
    return [answer(function) for function in OLD] + [get(*place) for place in PLACES]

def following():
    """Return the settings after the widest one has changed, which shows those that follow it."""
    put("generic", "all", "tf32")
    return state()

def start(*names):
    torch.set_float32_matmul_precision("highest")
    for place in PLACES:
        put(*place, "none")
    for operation in ("conv", "rnn"):
        put("cuda", operation, "tf32")
    for name in names:
        ACTIONS[name]()
'''


def test_restored_after_any_changes(child):
    """Settings of both interfaces read as before once restored; a single one follows wider ones, too."""
    source = f"""{SETTINGS}
from tunedgemm.process.precision import read_precision, write_precision
checked = 0
for names in itertools.product(ACTIONS, repeat=2):
    start(*names)
    before, expected = state(), following()
    for change in ("medium", "allowed", "all tf32", "cuda ieee", "mkldnn bf16"):
        start(*names)
        held = read_precision()
        ACTIONS[change]()
        write_precision(held)
        assert (state(), read_precision()) == (before, held), (names, change, before, state())
        assert names[0] != "none" or following() == expected, (names, change)
        checked += 1
print(checked)
"""
    assert child(source) == str(14 * 14 * 5)


def test_initial_is_that_of_a_fresh_torch(child):
    """The values that a plugin's import of torch is given are those of a process that sets nothing."""
    source = "from tunedgemm.process.precision import initial_precision, read_precision\nprint(read_precision() == initial_precision())"
    assert child(source) == "True"


CALLS = """
import tunedgemm as T
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
torch.manual_seed(0)
x, w, b = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)
bytes_ = torch.ones(8, 64, dtype=torch.int8), torch.ones(32, 64, dtype=torch.int8), torch.ones(8, 1), torch.ones(1, 32)
op, shape = op_named("a16w16"), Shape("a16w16", 8, 32, 64, dtype="fp32")

def patched():
    with T.patched():
        return torch.nn.functional.linear(x, w)

def converted():
    layer = torch.nn.Linear(64, 32)
    with T.convert(layer):
        return layer(x)

def reference():
    out = op.reference(shape, (x, w))
    assert torch.equal(out, x.double() @ w.double().t())

ENTRIES = {
    "gemm": lambda: T.gemm_a16w16(x, w, b), "linear": lambda: T.linear(x, w), "patched": patched, "convert": converted,
    "a8w8": lambda: T.gemm_a8w8(*bytes_), "explain": lambda: T.explain(x, w), "prewarm": lambda: T.prewarm([shape]),
    "fingerprint": T.fingerprint, "reference": reference,
}
"""


def test_every_entry_serves_in_every_state(child):
    """After any two settings of either interface all entry points serve, and torch's answers stay."""
    source = f"""{SETTINGS}{CALLS}
seen = []
for names in itertools.product(ACTIONS, repeat=2):
    start(*names)
    before = state()
    if before[:2] in seen:
        continue
    seen.append(before[:2])
    T.reload()
    for name, entry in ENTRIES.items():
        entry()
        assert state() == before, (names, name, before, state())
print(len(seen))
"""
    assert int(child(source)) >= 6


def test_a_reference_is_exact_with_each_setting(child):
    """Neither TF32, oneDNN's bf16, autocast nor the size of the product makes a reference less exact."""
    source = f"""{SETTINGS}
from tunedgemm.ops import product
x, w = torch.randn(33, 517), torch.randn(65, 517)
exact = x.double() @ w.double().t()
product._CHUNK = 517 * 16
for name in ACTIONS:
    start(name)
    for dtype in (torch.float64, torch.float32):
        with torch.autocast("cpu", torch.bfloat16):
            out = product.exact_product(x, w, dtype)
        bound = 0 if dtype == torch.float32 else 1e-12
        assert out.dtype == dtype and (out - exact.to(dtype)).abs().max() <= bound + 1e-6 * (dtype == torch.float32), name
print("exact")
"""
    assert child(source) == "exact"


def test_a_worker_tunes_in_every_state(child):
    """Each state is read and restored around a plugin's hook, also one that torch refuses to read."""
    source = f"""{SETTINGS}
from tunedgemm.process.switches import kept_torch_switches
for names in itertools.product(ACTIONS, repeat=2):
    start(*names)
    before = state()
    with kept_torch_switches(changed := []):
        pass
    assert state() == before and not changed
    with kept_torch_switches(changed := []):
        torch.set_float32_matmul_precision("medium" if before[0] != "medium" else "high")
    assert state() == before and changed == ["torch's float32 precision"], (names, changed)
print("kept")
"""
    assert child(source) == "kept"
