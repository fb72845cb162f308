"""Check moe.h on the host against torch, bit for bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import tunedgemm_ck

SOURCES = Path(tunedgemm_ck.__file__).with_name("sources")
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
BYTES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "int8": torch.int8}
ACTS = ("silu", "gelu", "swiglu")
_ENCODED = """
extern "C" void encode_NAME(const float* values, uint32_t* codes, long n) {
  for (long i = 0; i < n; i++) codes[i] = encoded<Type::NAME>(values[i]);
}
extern "C" void decode_NAME(const uint32_t* codes, float* values, long n) {
  for (long i = 0; i < n; i++) values[i] = decoded<Type::NAME>(codes[i]);
}
"""
_QUANTISED = """
extern "C" void quantise_NAME(const float* values, uint32_t* codes, float* scale, long n, int own) {
  uint32_t top = 0;
  for (long i = 0; i < n; i++) top = magnitude(values[i]) > top ? magnitude(values[i]) : top;
  if (own) *scale = scale_of<Type::NAME>(top);
  for (long i = 0; i < n; i++) codes[i] = quantised<Type::NAME>(values[i], *scale, own);
}
"""
_ACT = """
extern "C" void NAME_GATED(const float* gate, const float* rest, float* values, long n) {
  for (long i = 0; i < n; i++) values[i] = activated<Act::NAME, GATED>(gate[i], rest[i]);
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the arithmetic with the host's compiler."""
    if not shutil.which("c++"):
        pytest.skip("C++ compiler not found")
    folder = tmp_path_factory.mktemp("moe")
    text = f'#include "{SOURCES}/moe_call.h"\n#include "{SOURCES}/moe.h"\nusing namespace tunedgemm::moe;\n'
    text += "".join(_ENCODED.replace("NAME", name) for name in (*FLOATS, *BYTES))
    text += "".join(_QUANTISED.replace("NAME", name) for name in BYTES)
    text += "".join(
        _ACT.replace("NAME", act).replace("GATED", gated)
        for act in ACTS
        for gated in ("true", "false")
        if gated == "true" or act != "swiglu"
    )
    (folder / "values.cpp").write_text(text)
    command = ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(folder / "values.so")]
    subprocess.run([*command, str(folder / "values.cpp")], check=True)
    return ctypes.CDLL(str(folder / "values.so"))


def _call(function, *arguments):
    function(*(ctypes.c_void_p(each.data_ptr()) if isinstance(each, torch.Tensor) else ctypes.c_long(each) for each in arguments))


def _encode(host, name, values):
    codes = torch.empty(values.numel(), dtype=torch.int32)
    _call(host[f"encode_{name}"], values, codes, values.numel())
    return codes


def _values(limit: float) -> torch.Tensor:
    """Return a dense sample of float32 up to a magnitude, of both signs, with neighbours."""
    bits = torch.arange(0, 0x7F800000, 1 << 11)
    bits = torch.cat([bits - 1, bits, bits + 1]).clamp(min=0).to(torch.int32)
    found = bits.view(torch.float32)
    found = found[found <= limit]
    return torch.cat([found, -found])


def test_16_bits_are_read_and_written_as_torch_does(host):
    """All 65536 codes decode, and a dense sample of float32 encodes, as in torch."""
    for name, dtype in FLOATS.items():
        codes = torch.arange(1 << 16, dtype=torch.int32)
        found, wanted = torch.empty(1 << 16), codes.to(torch.int16).view(dtype).float()
        _call(host[f"decode_{name}"], codes, found, 1 << 16)
        assert torch.equal(found.nan_to_num(nan=7e38, posinf=8e38), wanted.nan_to_num(nan=7e38, posinf=8e38))
        values = torch.cat([_values(float("inf")), torch.tensor([float("inf"), -float("inf")])])
        assert torch.equal(_encode(host, name, values).to(torch.int16), values.to(dtype).view(torch.int16))
        assert _encode(host, name, torch.tensor([float("nan")])).to(torch.int16).view(dtype).isnan().all()


def test_8_bits_are_read_and_written_as_torch_does(host):
    """All 256 codes decode, and a dense sample of float32 encodes, as in torch."""
    for name, dtype in BYTES.items():
        codes = torch.arange(256, dtype=torch.int32)
        found, wanted = torch.empty(256), codes.to(torch.uint8).view(dtype).float()
        _call(host[f"decode_{name}"], codes, found, 256)
        assert torch.equal(found.nan_to_num(nan=7e38), wanted.nan_to_num(nan=7e38))
        values = _values(127.0 if name == "int8" else torch.finfo(dtype).max)
        rounded = values.round() if name == "int8" else values
        assert torch.equal(_encode(host, name, values).to(torch.uint8), rounded.to(dtype).view(torch.uint8))


def test_a_group_is_quantised_like_the_op(host):
    """Scale and codes of a group are those of the formula in torch."""
    for size in [0.0, 1e-44, 1e-3, 1.0, 3e4, 3e38]:
        for name, dtype in BYTES.items():
            values = torch.randn(4096, generator=torch.Generator().manual_seed(1)).clamp(-1, 1) * size
            limit = 127.0 if name == "int8" else torch.finfo(dtype).max
            scale = values.abs().max() / limit
            scale = torch.where(scale == 0, 1.0, scale)
            parts = values / scale
            wanted = (parts.round() if name == "int8" else parts).clamp(-limit, limit).to(dtype)
            codes, found = torch.empty(4096, dtype=torch.int32), torch.empty(1)
            _call(host[f"quantise_{name}"], values, codes, found, 4096, 1)
            assert torch.equal(found, scale.reshape(1))
            assert torch.equal(codes.to(torch.uint8), wanted.view(torch.uint8))


def test_values_that_are_not_finite_are_quantised_like_the_op(host):
    """Values that are not finite are quantised as the op specifies, with either kind of scale."""
    for name, dtype in BYTES.items():
        values, codes, scale = (
            torch.tensor([1.0, float("inf"), -float("inf"), float("nan")]),
            torch.empty(4, dtype=torch.int32),
            torch.ones(1),
        )
        _call(host[f"quantise_{name}"], values, codes, scale, 4, 0)
        found = codes.to(torch.uint8).view(dtype).float()
        limit = 127.0 if name == "int8" else torch.finfo(dtype).max
        assert found[:3].tolist() == [1.0, limit, -limit]
        assert found[3] == 0 if name == "int8" else found[3].isnan()
        _call(host[f"quantise_{name}"], values, codes, scale, 4, 1)
        assert scale.isnan()
        assert not codes.any()


def test_activations_are_those_of_the_op(host):
    """Activations are within float32 rounding of torch's in float64."""
    for act in ACTS:
        generator = torch.Generator().manual_seed(2)
        gate = torch.cat([torch.linspace(-30, 30, 4001), torch.randn(4000, generator=generator)])
        rest = torch.cat([torch.linspace(9, -9, 4001), torch.randn(4000, generator=generator)])
        for gated in (True, False) if act != "swiglu" else (True,):
            found = torch.empty_like(gate)
            _call(host[f"{act}_{str(gated).lower()}"], gate, rest, found, gate.numel())
            x, y = gate.double(), rest.double()
            if act == "swiglu":
                wanted = x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)) * (y.clamp(-7, 7) + 1)
            else:
                wanted = (torch.nn.functional.silu(x) if act == "silu" else torch.nn.functional.gelu(x)) * (y if gated else 1)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=3e-6)


_KERNELS = """
template <Kind kind, Type type> Error all(const TunedGemmMoe& call, Stream stream) {
  const Layout layout = layout_of(call, kind, type);
  const Routing routing = routing_of(call, layout);
  launch_route(call, layout, Nothing{}, stream);
  const Quantised out{call.workspace, at<float>(call, 0), call.model_dim, nullptr, at<uint32_t>(call, 0)};
  launch_quantise<kind, type>(Rows<Type::bf16>{call.hidden, 8}, ToPlaces{routing.place, 1}, 1, out, stream);
  constexpr Type sum = kind == Kind::none ? type : Type::bf16;
  const Activated<sum, kind, Act::silu, true, true> middle{call.hidden, 8, nullptr, nullptr, nullptr, nullptr, nullptr};
  launch_quantise<kind, type>(middle, IfCounted{routing.offset}, 1, out, stream);
  return launch_combine<sum, kind, Type::bf16, true>(Combined{}, 1, stream);
}
Error each(const TunedGemmMoe& call, Stream stream) {
  all<Kind::none, Type::bf16>(call, stream), all<Kind::tensor, Type::e4m3fn>(call, stream), all<Kind::tensor, Type::int8>(call, stream);
  all<Kind::row, Type::e4m3fn>(call, stream), all<Kind::row, Type::e4m3fnuz>(call, stream);
  return all<Kind::block, Type::e4m3fn>(call, stream);
}
"""


@pytest.mark.slow
def test_the_kernels_compile_for_nvidia(tmp_path):
    """The kernels of each kind of scales compile without warnings or spills."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc not found")
    includes = "".join(f'#include "{SOURCES}/{name}"\n' for name in ("moe_call.h", "moe.h", "moe_kernels.h"))
    (tmp_path / "kernels.cu").write_text(f"{includes}using namespace tunedgemm::moe;\n{_KERNELS}")
    command = [nvcc, "-c", "-O3", "-std=c++17", "-arch=sm_90a", "-Xptxas=-v", "-Werror=all-warnings", "-o", "kernels.o", "kernels.cu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert said.count("0 bytes spill stores") == said.count("spill stores") > 0
