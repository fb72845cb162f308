"""Plugins that misbehave in one way each, generated as source, and a good one for each to run next to.

An action is a line of Python; a place is where the plugin runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Calls of a launcher before a late action: more than a check takes, fewer than a timing.
LATE = 25

GOOD = """
import sys, torch
from tunedgemm.plugin import Backend, Launcher, Solution, hookimpl
@hookimpl
def supports(): return None
@hookimpl
def enumerate_solutions(): return [Solution("good", "linear")]
@hookimpl
def bind(): return Launcher(torch.nn.functional.linear)
backend = Backend("good", sys.modules[__name__], ops=("a16w16",))
"""

#: What ends or holds up a process, or leaves a function in an unusual way.
FAULTS = {
    "raise": 'raise ValueError("on purpose")',
    "sys_exit": "sys.exit(0)",
    "sys_exit_text": 'sys.exit("goodbye")',
    "generator_exit": "raise GeneratorExit",
    "interrupt": "raise KeyboardInterrupt",
    "memory_error": "raise MemoryError",
    "recursion": "_recurse()",
    "base_exception": "raise Odd(1, 2)",
    "stop_iteration": "raise StopIteration",
    "exit_0": "os._exit(0)",
    "exit_3": "os._exit(3)",
    "segfault": "ctypes.string_at(0)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminate": "os.kill(os.getpid(), signal.SIGTERM)",
    "hang": "ctypes.PyDLL(None).sleep(3600)",
    "spin": "while True: pass",
    "fork": "state_of_fork or (state_of_fork.append(1), os.fork())",  # once: copies would fork at every call
    "threads": "[threading.Thread(target=time.sleep, args=(3600,), daemon=True).start() for _ in range(8)]",
}
#: What changes the settings of its process.
CHANGES = {
    "chdir": 'os.chdir("/")',
    "handler": "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)]",
    "grad_mode": "import torch; torch.set_grad_enabled(False)",
    "inference_mode": "import torch; global mode; mode = torch.inference_mode(); mode.__enter__()",
    "function_mode": "import torch.overrides; global mode; mode = torch.overrides.BaseTorchFunctionMode(); mode.__enter__()",
    "dispatch_mode": "from torch.utils._python_dispatch import TorchDispatchMode as T; T.__torch_dispatch__ = _broken; T().__enter__()",
    "num_threads": "import torch; torch.set_num_threads(3)",
    "default_dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "default_device": 'import torch; torch.set_default_device("meta")',
    "deterministic": "import torch; torch.use_deterministic_algorithms(True)",
    "precision": 'import torch; torch.set_float32_matmul_precision("medium")',
    "autocast": 'import torch; torch.set_autocast_enabled("cpu", True)',
    "warnings": 'import warnings; warnings.simplefilter("error")',
    "close_stdout": "sys.stdout.close()",
    "close_fds": "[os.close(fd) for fd in (1, 2)]",
    "no_stdout": "sys.stdout = sys.stderr = None",
    "environment": 'os.environ.update(TUNEDGEMM_HOME="/nonexistent/x", OMP_NUM_THREADS="3", HOME="/"); os.environ.pop("PATH", None)',
}
_HEAD = """
import ctypes, os, signal, sys, threading, time
from tunedgemm.plugin import Backend, Launcher, Solution, Unsupported, hookimpl
class Odd(BaseException):
    def __init__(self, one, other): super().__init__("odd"); self.lock = lambda: None
def _recurse(): return _recurse()
@classmethod
def _broken(cls, func, types, args=(), kwargs=None): raise RuntimeError("a mode that breaks every call")
state_of_fork, kept = [], {}
"""
_BODY = """
{module}
{options}
@hookimpl
def supports(shape, device):
    {supports}
@hookimpl
def enumerate_solutions(shape, device):
    {enumerate_solutions}
    return [Solution("bad", "kernel")]
@hookimpl
def bind(solution, shape, device):
    {bind}
    import torch
    state = {{"calls": 0}}
    def launch(x, weight):
        state["calls"] += 1
        if state["calls"] == 1:
            {call}
        if state["calls"] > 25:
            {late}
        time.sleep(1e-3)
        out = torch.nn.functional.linear(x, weight)
        {out}
        return out
    return Launcher(launch, graph_safe=False)
"""
#: Optional hooks and functions, which a plugin has only where it misbehaves there.
_OPTIONAL = {
    "prepare": "@hookimpl\ndef prepare(solution, shape, device):\n    {}\n",
    "refine": "@hookimpl\ndef refine(solution, shape, device):\n    {}\n    return []\n",
    "library_version": "@hookimpl\ndef library_version(device):\n    {}\n    return '1'\n",
    "heuristic_fallback": "@hookimpl\ndef heuristic_fallback(shape, device):\n    {}\n",
    "details": "@hookimpl\ndef details(device):\n    {}\n    return ()\n",
    "lacks": "@hookimpl\ndef lacks(solution, shape, device):\n    {}\n    return ''\n",
}
PLACES = ("module", "supports", "enumerate_solutions", "bind", "call", "late", "prepare", "refine", "library_version")
#: Faults that are planted at every place; the others only at two.
EVERYWHERE = ("sys_exit", "generator_exit", "base_exception", "exit_0", "segfault", "hang", "fork")
#: Faults that end or hold up the process that imports the plugin: no other code can prevent that.
FATAL_AT_IMPORT = ("interrupt", "exit_0", "exit_3", "segfault", "kill", "terminate", "hang", "spin")
#: What only some places can do: lists, outputs, operands and statements.
PARTICULAR = {
    "endless_list": {"enumerate_solutions": 'import itertools; return (Solution("bad", f"k{i}") for i in itertools.count())'},
    "endless_equal_list": {"enumerate_solutions": 'import itertools; return itertools.repeat(Solution("bad", "k"))'},
    "foreign_list": {"enumerate_solutions": 'return [Solution("good", "linear")]'},
    "text_list": {"enumerate_solutions": 'return ["kernel"]'},
    "no_list": {"enumerate_solutions": "return None"},
    "core_name": {"enumerate_solutions": 'return [Solution("bad", "kernel+add")]'},
    "true_split": {"enumerate_solutions": 'return [Solution("bad", "kernel", True)]'},
    "text_index": {"enumerate_solutions": 'return [Solution("bad", "kernel", 0, "7")]'},
    "huge_split": {"enumerate_solutions": 'return [Solution("bad", "kernel", 10**40)]'},
    "vague_support": {"supports": "return True"},
    "vague_bind": {"bind": "return 7"},
    "uncallable": {"bind": "return Launcher(7)"},
    "vague_version": {"library_version": "return 7"},
    "ops_text": {"ops": '"a16w16"'},
    "ops_number": {"ops": "7"},
    "hook_raises": {"module": "def __getattr__(name): raise SystemExit(name)"},
    "misspelt_field": {"ops": '("a16w16",), platform=()'},
    "options_raise": {"options": 'from tunedgemm.plugin import Option; Option("bad", "BAD", "")'},
    "details": {"details": "sys.exit(0)"},
    "lacks": {"lacks": "sys.exit(0)"},
    "heuristic": {"heuristic_fallback": "sys.exit(0)"},
    "wrong_shape": {"out": "out = out[:1]"},
    "wrong_dtype": {"out": "out = out.double()"},
    "wrong_device": {"out": 'out = out.to("meta")'},
    "no_tensor": {"out": "out = 7"},
    "transposed": {"out": "out = out.t().contiguous().t()"},
    "expanded": {"out": "out = out[:1].expand(8, 64)"},
    "shared_buffer": {"out": 'out = kept.setdefault("out", out).copy_(out)'},
    "alias_of_operand": {"out": "out = x[:, :64].copy_(out)"},
    "lies_once": {"call": "return torch.zeros(8, 64)"},
    "lies_late": {"late": "return torch.zeros(8, 64)"},
    "nan": {"out": "out *= float('nan')"},
    "mutates_x": {"out": "x.add_(1)"},
    "mutates_weight": {"out": "weight.zero_()"},
    "mutates_x_late": {"late": "x.add_(1)"},
    "mutates_weight_late": {"late": "weight.zero_()"},
    "mutates_by_address_late": {"late": "ctypes.memset(x.data_ptr(), 0, x.nbytes)"},
    "resizes_late": {"late": "x.resize_(1)"},
    "mutates_and_raises": {"call": 'x.add_(1); raise ValueError("after a change")'},
    "leaks": {"out": 'kept.setdefault("leak", []).append(torch.empty(1 << 18))'},
}


def cases() -> dict[str, dict[str, str]]:
    """Return the lines of each misbehaving plugin by place."""
    found = {}
    for place in PLACES:
        for name, line in FAULTS.items():
            if (name in EVERYWHERE or place in ("supports", "call")) and not (place == "module" and name in FATAL_AT_IMPORT):
                found[f"{place}-{name}"] = {place: line}
        if place in ("module", "bind", "late"):
            found.update({f"{place}-{name}": {place: line} for name, line in CHANGES.items()})
    return {**found, **PARTICULAR}


def source(lines: Mapping[str, str]) -> str:
    """Return a plugin that runs a line at each of these places."""
    required = {"module", "options", "supports", "enumerate_solutions", "bind", "call", "late", "out"}
    filled = {place: lines.get(place, "pass") for place in required}
    optional = "".join(text.format(lines[place]) for place, text in _OPTIONAL.items() if place in lines)
    record = f"backend = Backend('bad', sys.modules[__name__], ops={lines.get('ops', repr(('a16w16',)))})\n"
    return _HEAD + _BODY.format(**filled) + optional + record


def install(folder: Path, **plugins: str) -> None:
    """Write plugins of these libtypes, as installed distributions, into a folder for the path."""
    for libtype, text in plugins.items():
        (folder / f"plugin_{libtype}.py").write_text(text)
        info = folder / f"plugin_{libtype}-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{libtype}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[tunedgemm.backends]\n{libtype} = plugin_{libtype}:backend\n")
