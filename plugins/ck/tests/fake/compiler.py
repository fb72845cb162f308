#!/usr/bin/env python3
"""A fake nvcc or clang++, as FAKE_CK_NAME says.

It takes their options and compiles what a source's first line describes, by the C compiler.
FAKE_CK_LOG names a file that gets a line of JSON for each compilation.
FAKE_CK_OBJECTS names a folder that keeps the objects.
FAKE_CK_DOES selects a failure: ``fail``, ``die`` (by SIGKILL), ``wait`` (until the file
FAKE_CK_WAITS exists), ``full`` (a full disk), ``empty`` (no output).
FAKE_CK_VERSION is the version that it prints.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TYPES = ("", "bf16", "fp16", "fp32", "int8", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4x2")
HERE = Path(__file__).resolve().parent


def version(name: str) -> str:
    number = os.environ.get("FAKE_CK_VERSION", "")
    if name == "nvcc":
        number = number or "13.0.88"
        return f"nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {number.rpartition('.')[0]}, V{number}\n"
    return f"fake clang version {number or '19.1.7'}\n"


def macros(problem: dict[str, str]) -> list[str]:
    fp4 = problem["op"] in ("a4w4_blockscale", "a16w4_blockscale")
    shuffled = problem["layout"].removeprefix("aiter").partition("x")[0] if problem["layout"] != "row" else "0"
    defined = {
        "X_TYPE": TYPES.index(problem["dtype"]),
        "W_TYPE": TYPES.index("fp4x2" if fp4 else problem["dtype"]),
        "OUT_TYPE": TYPES.index(problem["outdtype"]),
        "BIAS_TYPE": TYPES.index(problem["bias_dtype"]),
        "SCALE": ("none", "tensor", "row", "block").index(problem["scale"]),
        "FP4": int(fp4),
        "SHUFFLED": int(shuffled),
        "TRANSPOSED": int(problem["op"] == "a8w8_blockscale_bpreshuffle"),
    }
    return [f"-D{name}={value}" for name, value in defined.items()]


KINDS = {"No": "none", "per_Tensor": "tensor", "per_Token": "row", "per_1x128": "block", "per_1x32": "mx"}


def routed(problem: dict[str, Any]) -> list[str]:
    """Return the macros of a stage of fmoe."""
    defined = {
        "STAGE": problem["stage"],
        "HIDDEN": problem["dtype"],
        "QUANTISED": problem["q_dtype"].removeprefix("fp8_"),
        "OUTPUT": problem["outdtype"],
        "KIND": KINDS[problem["q_type"]],
        "ACT": problem["act"],
        "GATED": str(problem["gated"]).lower(),
        "WEIGHT_FIRST": str(problem["doweight_stage1"]).lower(),
        "SHUFFLED": problem["layout"].removeprefix("aiter").partition("x")[0] if problem["layout"] != "row" else "0",
    }
    return [f"-D{name}={value}" for name, value in defined.items()]


def main() -> int:
    name, words = os.environ["FAKE_CK_NAME"], sys.argv[1:]
    if "--version" in words:
        sys.stdout.write(version(name))
        return 0
    source, output = Path(words[-1]), Path(words[words.index("-o") + 1])
    if log := os.environ.get("FAKE_CK_LOG"):
        with Path(log).open("a") as file:
            file.write(json.dumps({"name": name, "command": words, "folder": str(Path.cwd()), "time": time.time()}) + "\n")
    does = os.environ.get("FAKE_CK_DOES", "")
    if does == "fail":
        sys.stderr.write(f"In file included from somewhere\n{source}(7): error: no such type\nnothing else\n")
        return 2
    if does == "full":
        sys.stderr.write(f"Fatal: {output}: No space left on device\n")
        return 1
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "empty":
        return 0
    while does == "wait" and not Path(os.environ["FAKE_CK_WAITS"]).exists():
        time.sleep(0.02)
    first = source.read_text().partition("\n")[0]
    problem = json.loads(first.removeprefix("// tunedgemm "))
    if problem["op"] == "fmoe":
        compiler, made_of, defined = ["c++", "-std=c++17"], "moe.cpp", routed(problem)
    else:
        compiler, made_of, defined = ["cc", "-std=gnu11"], "instance.c", macros(problem)
    command = [*compiler, "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *defined, f"-I{HERE}"]
    return compile_once([*command, str(HERE / made_of), "-lm"], output)


def compile_once(command: list[str], output: Path) -> int:
    """Compile into *output*, or copy what the same command compiled before into FAKE_CK_OBJECTS."""
    folder = os.environ.get("FAKE_CK_OBJECTS", "")
    if not folder:
        return subprocess.run([*command, "-o", str(output)], check=False).returncode
    kept = Path(folder, f"{hashlib.sha256(repr(command).encode()).hexdigest()}.so")
    if not kept.exists():
        new = kept.with_suffix(f".{os.getpid()}")
        if status := subprocess.run([*command, "-o", str(new)], check=False).returncode:
            return status
        new.replace(kept)
    output.write_bytes(kept.read_bytes())
    return 0


sys.exit(main())
