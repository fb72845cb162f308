"""Loading: what a launch passes is what the installed Triton's own launcher passes, to the byte."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tunedgemm.plugin import Shape
from tunedgemm_triton import loading

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

PLAIN = Shape("a16w16", 300, 512, 256, epilogue="bias")
BLOCKS = Shape("a8w8_blockscale", 300, 256, 512, "fp8_e4m3fn", "bf16", scale="block")
#: Kernel, splitK and shape of each family: without and with partial sums, scales, batches,
#: descriptors by the host, and one that the kernel makes in scratch memory.
KERNELS = [
    ("gemv_r1_m1n2k1024u2_w4s1", 1, Shape("a16w16", 1, 512, 4096)),
    ("gemm_r1_m16n32k32_g1_w4s2", 1, PLAIN),
    ("gemm_r1_m16n32k32_g1_w4s2", 2, PLAIN),
    ("tma_r1_m128n128k64_g8_w4s3", 1, PLAIN),
    ("tma_r1_m64n128k64_g8_w4s3", 2, PLAIN),
    ("tma_r1_m64n64k64_g8_w4s3", 1, Shape("batched_bf16", 100, 512, 512, extra={"B": 3})),
    ("tma_r1_m64n128k64_g8_w4s3_ws", 1, PLAIN),
    ("tma_r2_m128n128k128_g8_w4s3_ws", 1, BLOCKS),
    ("streamk_r1_m128n128k64_g8_w4s3", 1, PLAIN),
]


@pytest.fixture(scope="module")
def launches(recording_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what a recording driver got of each kernel, by a known launcher and an unknown one."""
    cases = [
        {"kernel": kernel, "split_k": split_k, "shape": shape.to_dict(), "unknown": unknown}
        for kernel, split_k, shape in KERNELS
        for unknown in (False, True)
    ]
    caches = {name: str(tmp_path_factory.mktemp("cache")) for name in ("TUNEDGEMM_CACHE", "TRITON_CACHE_DIR")}
    driver = {"LD_LIBRARY_PATH": str(recording_driver), "TRITON_LIBCUDA_PATH": str(recording_driver)}
    command = [sys.executable, str(Path(__file__).with_name("launch_cases.py"))]
    child = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, timeout=600, env={**os.environ, **caches, **driver}
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return list(zip(cases, json.loads(child.stdout), strict=True))


def test_a_launch_passes_the_bytes_that_triton_passes(launches: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Grid, block, shared memory, stream and each parameter of the compiled code are the same, with
    addresses that are not null.
    """
    for case, seen in launches:
        assert seen["ours"] == seen["triton"], case
        configuration, parameters = seen["ours"]
        assert "stream 77" in configuration
        assert int(parameters[0], 16) and len(parameters) >= 14, case


def test_the_launcher_of_the_installed_triton_is_known(launches: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """No family goes through Triton's Python launcher, and where one has to, this is said."""
    for case, seen in launches:
        assert bool(seen["warnings"]) is case["unknown"], case
        assert all(text.startswith("triton ") and "each call takes" in text for text in seen["warnings"])


def test_code_stays_loaded(launches: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """A call launches after Triton's object is gone, with which it unloads the code from 3.8 on."""
    assert [seen["again"] for _, seen in launches] == [seen["ours"][0] for _, seen in launches]


def test_two_groups_of_specialised_warps_take_scratch_memory(launches: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """The kernel makes a descriptor of 128 bytes; others take none."""
    assert {case["kernel"]: seen["scratch"] for case, seen in launches if seen["scratch"]} == {"tma_r2_m128n128k128_g8_w4s3_ws": 128}


def _kernel(**others: Any) -> Any:
    """Return a stand-in of a compiled kernel with two pointers and a constant."""
    metadata = SimpleNamespace(global_scratch_size=0, tensordesc_meta=None)
    signature = {"x": "*bf16", "out": "*bf16", "BLOCK": "constexpr"}
    return SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=metadata, function=5, packed_metadata=(4, 1, 0), **others)


class _Launcher:
    """A launcher whose C function takes the arguments of a launch in another order."""

    def __init__(self, seed: int, got: list[Any], launch: str = "launch") -> None:
        choose = random.Random(seed)
        self.before, self.is_packed = choose.sample(range(10), choose.randrange(3)), choose.random() < 0.5
        self.order, self.name = choose.sample(range(5), 5), launch
        setattr(self, launch, lambda *given: got.append(given))

    def __call__(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        constant, parameters = [given[place] for place in self.order], given[5:]
        getattr(self, self.name)(*self.before, x, y, z, stream, *constant, *((parameters,) if self.is_packed else parameters))


def test_any_order_of_arguments_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher is asked, so that another version's order needs no change here."""
    said = list[str]()
    monkeypatch.setattr(loading, "warn_once", said.append)
    for seed in range(50):
        got = list[Any]()
        kernel, run = _kernel(), _Launcher(seed, got)
        function = loading.function_of(kernel, run, 0)
        function.launch(1, 2, 3, 77, *function.head, 1000, 2000, *function.rest)
        run(1, 2, 3, 77, 5, (4, 1, 0), None, None, None, 1000, 2000, None)
        assert got[0] == got[1] and len(got) == 2, seed
    assert not said


def test_a_launcher_that_is_not_understood_is_called_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a C function in reach serves, a grid of nothing at most is tried, and what is
    lost is said.
    """
    said, got = list[str](), list[Any]()
    monkeypatch.setattr(loading, "warn_once", said.append)
    function = loading.function_of(_kernel(), _Launcher(0, got, "start"), 0)
    assert not any(any(given[:4]) for given in got)
    got.clear()
    function.launch(1, 2, 3, 77, *function.head, 1000, 2000, *function.rest)
    assert len(got) == 1 and "1000, 2000" in str(got)
    assert "each call takes" in said[0]


@pytest.mark.parametrize("changes", [{"profile_scratch_size": 8}, {"profile_scratch_size": 8, "is_packed": True}])
def test_memory_of_a_profiler_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """A direct launch passes none, so such a kernel goes through Triton's launcher."""
    monkeypatch.setattr(loading, "warn_once", lambda text: None)
    run = _Launcher(1, [])
    vars(run).update(changes)
    assert loading.function_of(_kernel(), run, 0).launch is run


def test_amd_launches_pass_what_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher for AMD has another order and a warp size, with the installed Triton's class."""
    amd = pytest.importorskip("triton.backends.amd.driver")
    got = list[Any]()
    library = SimpleNamespace(launch=lambda *given: got.append(given), build_signature_metadata=lambda kinds: bytes(len(kinds)))
    for name, value in {
        "compile_module_from_src": lambda **_: library, "make_launcher": lambda *_: "", "PyKernelArg": lambda **fields: fields,
    }.items():  # fmt: skip
        monkeypatch.setattr(amd, name, value, raising=False)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=library))
    kernel = _kernel()
    scratch = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    kernel.metadata = SimpleNamespace(warp_size=64, launch_cooperative_grid=False, **scratch)
    run = amd.HIPLauncher(kernel.src, kernel.metadata)
    function = loading.function_of(kernel, run, 0)
    assert function.launch is not run
    function.launch(1, 2, 3, 77, *function.head, 1000, 2000, *function.rest)
    run(1, 2, 3, 77, 5, (4, 1, 0), None, None, None, 1000, 2000, None)
    assert len(got) == 2 and got[0] == got[1]
