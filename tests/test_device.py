"""Device: where a shape runs, present or not."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from tunedgemm import device as device_module
from tunedgemm.device import Device, as_present, current_device, device_of, device_of_text, slug
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape


@pytest.mark.parametrize(
    ("gfx", "kind", "text"), [("gfx942", "amd", "304 CUs"), ("sm_90", "nvidia", "304 SMs"), ("cpu-avx2", "cpu", "304 threads")]
)
def test_kinds(gfx, kind, text):
    """The architecture determines the vendor and the unit that is counted."""
    device = Device(gfx, 304, "some-name")
    assert device.kind == kind
    assert str(device) == f"{gfx}, {text} (some-name)"


def test_a_cpu_stands_for_the_host_that_it_emulates():
    """Kernels run on a GPU with an index, and on a CPU that emulates one, with that one's limits."""
    gpu, described, cpu = Device("sm_90", 132, index=1), Device("sm_90", 132), Device("cpu-avx2", 4)
    host = Device("gfx942", 304)
    assert [device.is_present for device in (gpu, described, cpu, host, cpu.limiting(host))] == [True, False, True, False, True]
    assert [device.limiting(host) for device in (gpu, cpu)] == [gpu, host]
    assert (cpu.limiting(None), gpu.limiting(host).index, cpu.limiting(host).index) == (cpu, 1, -1)
    assert [device.emulated for device in (gpu.limiting(host), cpu.limiting(host))] == [False, True]


def test_identity_leaves_out_index_and_versions():
    """The second of two equal GPUs is the same device to a table, as is one with another torch."""
    one, other = Device("sm_90", 132, "h", 0, (("torch", "2.9"),)), Device("sm_90", 132, "h", 1)
    assert one == other
    assert hash(pickle.loads(pickle.dumps(one))) == hash(other)
    assert one != Device("sm_90", 114, "h")


@pytest.mark.parametrize(("gfx", "cu_num"), [("", 1), ("GFX 942", 1), ("sm_90", -1)])
def test_invalid_devices_are_refused(gfx, cu_num):
    """An architecture is a lower-case word, a count is not negative."""
    with pytest.raises(ValueError, match=r"."):
        Device(gfx, cu_num)


def test_torch_devices():
    """A described GPU stands for the first, a CPU for the CPU."""
    assert Device("cpu-avx2", 4).torch_device == torch.device("cpu")
    assert Device("sm_90", 132).torch_device == torch.device("cuda", 0)
    assert Device("gfx942", 304, index=3).torch_device == torch.device("cuda", 3)


def test_the_cpu():
    """The CPU is described by its strongest instructions, torch's threads and torch's version."""
    cpu = device_of(-1)
    assert cpu.gfx.startswith("cpu-")
    assert cpu.cu_num == torch.get_num_threads()
    assert dict(cpu.versions)["torch"] == torch.__version__
    assert cpu == device_of(-1)


@pytest.mark.parametrize(
    ("text", "gfx", "name"),
    [
        ("processor : 0\nmodel name : AMD EPYC 9654\nflags : fpu avx2 avx512f avx512_bf16\n", "cpu-avx512_bf16", "amd-epyc-9654"),
        ("model name : Xeon 6\nflags : avx512_bf16 amx_bf16\n", "cpu-amx", "xeon-6"),
        ("Features : fp asimd sve\n", "cpu-sve", None),
        ("flags : fpu\nmodel name : 486\n", "cpu-generic", "486"),
    ],
)
def test_processors(monkeypatch, text, gfx, name):
    """/proc/cpuinfo of other machines gives their devices."""
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: text)
    found = device_module._cpu.__wrapped__(8)
    assert (found.gfx, found.cu_num) == (gfx, 8)
    assert name is None or found.name == name


def test_a_system_without_cpuinfo(monkeypatch):
    """Without /proc the processor is generic, and named by the platform."""

    def missing(self):
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", missing)
    assert device_module._cpu.__wrapped__(8).gfx == "cpu-generic"


@pytest.mark.parametrize(
    ("hip", "properties", "expected"),
    [
        (
            "7.0",
            {"gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304, "name": "AMD Instinct MI300X"},
            ("gfx942", 304, "amd-instinct-mi300x", "hip"),
        ),
        (None, {"major": 9, "minor": 0, "multi_processor_count": 132, "name": "NVIDIA H200"}, ("sm_90", 132, "nvidia-h200", "cuda")),
    ],
)
def test_gpus(monkeypatch, hip, properties, expected):
    """A GPU's description comes from its driver."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    found = device_module._gpu.__wrapped__(1)
    assert (found.gfx, found.cu_num, found.name, found.versions[1][0]) == expected
    assert found.index == 1


@pytest.mark.parametrize(
    ("gfx", "mode", "expected"),
    [
        *(
            (gfx, None, 64)
            for gfx in ("gfx1010", "gfx1030", "gfx1036", "gfx1100", "gfx1103", "gfx1151", "gfx1170", "gfx1172", "gfx1200", "gfx1201")
        ),
        *((gfx, None, 32) for gfx in ("gfx1250", "gfx1251", "gfx942", "gfx950", "gfx90a", "gfx906")),
        ("gfx1201", "1", 64),
        ("gfx1201", "0", 32),
    ],
)
def test_compute_units_of_amd(monkeypatch, tmp_path, gfx, mode, expected):
    """A key has CUs, where HIP counts pairs of them unless it runs in CU mode."""
    monkeypatch.delenv("GPU_ENABLE_WGP_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("GPU_ENABLE_WGP_MODE", mode)
    monkeypatch.setattr(device_module, "TOPOLOGY", tmp_path)
    properties = SimpleNamespace(gcnArchName=gfx, multi_processor_count=32, name="AMD Radeon")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    assert device_module._gpu.__wrapped__(0).cu_num == expected


#: Nodes as the kernel driver lists them: a CPU, two GPUs, and two parts of one GPU that differ.
NODES = (
    "cpu_cores_count 16\nsimd_count 0\nlocation_id 0\ndomain 0\n",
    "simd_count 128\nsimd_per_cu 2\nlocation_id 768\ndomain 0\nunique_id 17446744073709551615\n",
    "simd_count 192\nsimd_per_cu 2\nlocation_id 768\ndomain 1\n",
    "simd_count 256\nsimd_per_cu 4\nlocation_id 1024\ndomain 0\n",
    "simd_count 128\nsimd_per_cu 4\nlocation_id 1025\ndomain 0\n",
    "not what the driver writes",
)


@pytest.mark.parametrize("mode", [None, "0"])
@pytest.mark.parametrize("counted", [32, 64])
@pytest.mark.parametrize(
    ("gfx", "address", "expected"),
    [
        ("gfx1201", (0, 3), 64),
        ("gfx1100", (1, 3), 96),
        ("gfx1250", (1, 3), 96),
        ("gfx1310", (1, 3), 96),
        ("gfx1201", (2, 3), None),
        ("gfx1201", (0, 4), None),
        ("gfx942", (0, 3), None),
    ],
)
def test_the_kernel_drivers_count_decides_on_rdna(monkeypatch, tmp_path, mode, counted, gfx, address, expected):
    """Whichever HIP counts, and in either mode, a key has the CUs of the driver's node, as
    rocminfo has; without such a node HIP's count is taken by its mode.
    """
    monkeypatch.delenv("GPU_ENABLE_WGP_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("GPU_ENABLE_WGP_MODE", mode)
    for index, node in enumerate(NODES):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "properties").write_text(node)
    monkeypatch.setattr(device_module, "TOPOLOGY", tmp_path)
    properties = SimpleNamespace(multi_processor_count=counted, pci_domain_id=address[0], pci_bus_id=address[1], pci_device_id=0)
    paired = gfx == "gfx1201" and mode is None
    assert device_module.compute_units(gfx, properties) == (expected or counted * (1 + paired))


def test_rows_of_compute_units_are_found_where_torch_counts_pairs(monkeypatch, tmp_path):
    """A row with AITER's CUs serves a device of 32 WGPs, which the tuner's rows name the same."""
    monkeypatch.delenv("GPU_ENABLE_WGP_MODE", raising=False)
    monkeypatch.setattr(device_module, "TOPOLOGY", tmp_path)
    properties = SimpleNamespace(gcnArchName="gfx1201", multi_processor_count=32, name="AMD Radeon RX 9070 XT")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    row = "gfx1201,64,1,4096,4096,False,torch.bfloat16,torch.bfloat16,False,False,torch,0,0,9.0,native,0.0,1.0,1.0\n"
    path = tmp_path / "bf16_tuned_gemm.csv"
    path.write_text(
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n" + row
    )

    found = Dispatcher(op_named("a16w16"), above=(path,)).explain(Shape("a16w16", 1, 4096, 4096), device_module._gpu.__wrapped__(0))

    assert found.tuned and str(path) in found.offer.file


def test_the_default_device(monkeypatch):
    """Without a GPU the default device is the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_device() == device_of(-1)


def test_slugs():
    """Product names become words joined by hyphens."""
    assert slug("AMD Instinct™ MI300X (OAM)") == "amd-instinct-mi300x-oam"


def test_a_device_in_words():
    """One thread is singular."""
    assert str(Device("cpu-avx512", 1)) == "cpu-avx512, 1 thread" and str(Device("sm_90", 132, "h200")) == "sm_90, 132 SMs (h200)"


def test_a_device_from_a_users_text():
    """GFX:CU[:NAME] is parsed, with the maker's or the tables' name; an error shows the format."""
    assert device_of_text("gfx942:304") == Device("gfx942", 304)
    assert device_of_text("sm_90:132:NVIDIA H200") == device_of_text("sm_90:132:nvidia-h200") == Device("sm_90", 132, "nvidia-h200")
    for text in ("gfx942", "gfx942:", ":304", "gfx942:many", "gfx942:-1", "H200:132"):
        with pytest.raises(UserError, match="a device must be GFX:CU, such as gfx942:304"):
            device_of_text(text)


def test_a_description_of_the_present_device_is_that_device():
    """A described device of the default one's gfx and units is the default one; a GPU keeps its index."""
    here = current_device()
    assert as_present(Device(here.gfx, here.cu_num)).versions == here.versions
    assert as_present(Device(here.gfx, here.cu_num, "other")).versions == ()
    assert as_present(Device(here.gfx, here.cu_num + 1)).versions == ()
    second = Device(here.gfx, here.cu_num, here.name, index=7)
    assert as_present(second) is second
