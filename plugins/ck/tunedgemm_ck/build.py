"""Compile one instance for one class of shapes, without a device, into the artifact cache.

An object's cache key is its source, options and toolchain. The toolchain that made the first object
of a source is stored too, so that a machine without a compiler finds what another one built.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import LaunchError, PluginError
from tunedgemm.tools.files import artifact, private_folder

from tunedgemm_ck.family import Family, Instance
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.stages import split_stages
from tunedgemm_ck.toolchain import Finder, Toolchain

#: Switches: compile while serving; AITER's, which recompiles stored objects.
COMPILE, REBUILD = "TUNEDGEMM_CK_COMPILE", "AITER_REBUILD"
#: Includes that are replaced by the headers' text, so that a source is one text; a stage of fmoe
#: has three.
CALL = '#include "call.h"\n'
MOE_CALL = '#include "moe_call.h"\n#include "moe.h"\n#include "moe_kernels.h"\n'
_SOURCES = Path(__file__).with_name("sources")
#: Maximum lines of a compiler's log in an error.
_LINES = 6
#: Poll interval of a process that waits for another one's build, seconds.
_POLL_S = 0.2


class MissingError(PluginError):
    """An object is not in the cache, and nothing was compiled."""


@attrs.frozen(eq=False)
class Target:
    """Everything that one shared object is built from.

    Attributes:
        family: the template library.
        instance: the template parameters.
        problem: the class of shapes.
        finder: finds the toolchain.
    """

    family: Family
    instance: Instance
    problem: Problem
    finder: Finder

    def __str__(self) -> str:
        problem = self.problem
        scale = f", scales by {problem.scale}" if problem.scale != "none" else ""
        bias = f", bias {problem.bias_dtype}" if problem.bias_dtype else ""
        of = f"{problem.op} {problem.dtype}->{problem.outdtype}{scale}{bias}"
        if problem.stage:
            gated, first = " gated" * problem.gated, ", weights in stage 1" * problem.doweight_stage1
            act = f", {problem.act}{gated}" if problem.act else ""
            of = f"stage {problem.stage} of {of}, {problem.q_type} {problem.q_dtype}{act}{first}"
        return f"{self.family.libtype} {self.instance.name} for {of} on {problem.gfx}"

    @property
    def source(self) -> str:
        """Return the whole source; its first line states the problem in JSON.

        Raises:
            PluginError: the family's source does not include ``call.h``, or a stage's headers,
                once.
        """
        text = self.family.render(self.instance, self.problem)
        includes = MOE_CALL if self.problem.stage else CALL
        names = re.findall('"(.+)"', includes)
        if text.count(includes) != 1:
            raise PluginError(f"{self.family.libtype} {self.instance.name}: the source must include {', '.join(names)} once")
        header = json.dumps({"instance": self.instance.name, **self.problem.fields()})
        return f"// tunedgemm {header}\n" + text.replace(includes, "".join((_SOURCES / name).read_text() for name in names))

    @property
    def flags(self) -> tuple[str, ...]:
        """Return options in addition to those of the toolchain."""
        return self.family.flags(self.instance, self.problem)


def targets_of(family: Family, instance: Instance, problem: Problem, finder: Finder) -> tuple[Target, ...]:
    """Return the targets of a solution's instance: itself, or its two stages."""
    return tuple(Target(family, *part, finder) for part in split_stages(instance, problem))


@attrs.frozen(eq=False)
class CompiledObject:
    """A compiled shared object.

    Attributes:
        code: the file's bytes.
        toolchain: identity of the toolchain that made it.
        seconds: compile time.
    """

    code: bytes
    toolchain: str
    seconds: float

    def pack(self) -> bytes:
        """Return one line of JSON, then the code."""
        return json.dumps({"toolchain": self.toolchain, "seconds": round(self.seconds, 1)}).encode() + b"\n" + self.code

    @classmethod
    def unpack(cls, payload: bytes) -> CompiledObject:
        """Return the object that `pack` wrote."""
        head, _, code = payload.partition(b"\n")
        return cls(code, **json.loads(head))


def find_object(target: Target) -> CompiledObject:
    """Return the object of this machine's toolchain, else the one that was built first.

    Raises:
        MissingError: neither exists; the message says how to build one.
    """
    keys = _CacheKeys(target)
    try:
        toolchain = target.finder(target.problem)
        payload = _read_artifact(keys.of(toolchain.identity))
        absent = f"run `tunedgemm ck prebuild TABLE`, or set {COMPILE}=1 to compile here"
    except PluginError as error:
        payload, absent = None, str(error)
    if payload is None:
        first = _read_artifact(keys.first)
        payload = _read_artifact(keys.of(first.decode())) if first else None
    if payload is None:
        raise MissingError(f"{target} is not built: {absent}")
    return CompiledObject.unpack(payload)


def build_object(target: Target, *, fresh: bool = False) -> CompiledObject:
    """Return the object of this machine's toolchain; compile it where it is not stored.

    One process at a time compiles an object; the others wait for it.

    Args:
        fresh: compile even where it is stored.

    Raises:
        PluginError: no toolchain was found, or the cache cannot be written.
        LaunchError: compilation failed; the message has the compiler's first errors.
    """
    toolchain = target.finder(target.problem)
    keys = _CacheKeys(target)
    key = keys.of(toolchain.identity)
    payload = None if fresh else _read_artifact(key)
    if payload is None:
        with _build_lock(key):
            payload = artifact(key, lambda: _compile(target, toolchain).pack(), fresh=fresh, on_disk=True)
    artifact(keys.first, toolchain.identity.encode, on_disk=True)
    return CompiledObject.unpack(payload)


def is_built(target: Target) -> bool:
    """Return whether any toolchain has built the object."""
    return _read_artifact(_CacheKeys(target).first) is not None


class _CacheKeys:
    """Cache keys of a target's objects."""

    def __init__(self, target: Target) -> None:
        self._text = "\n".join((*target.flags, target.problem.gfx, target.source))

    def of(self, toolchain: str) -> str:
        """Return the key of the object that a toolchain makes."""
        return f"ck object\n{toolchain}\n{self._text}"

    @property
    def first(self) -> str:
        """Return the key of the identity of the toolchain that made the first object."""
        return f"ck toolchain\n{self._text}"


class _AbsentError(Exception):
    """An artifact is not stored."""


def _read_artifact(key: str) -> bytes | None:
    """Return a stored artifact, or None."""

    def build() -> bytes:
        raise _AbsentError

    try:
        return artifact(key, build)
    except _AbsentError:
        return None


@contextlib.contextmanager
def _build_lock(key: str) -> Iterator[None]:
    """Enter a block as the only process, where the cache's folder can be written.

    The lock of a process that dies is released.
    """
    from filelock import FileLock  # a process that only serves never imports it: see the core's process/filelocks.py

    try:
        lock = FileLock(private_folder("locks") / f"{hashlib.sha256(key.encode()).hexdigest()}.lock", poll_interval=_POLL_S)
        lock.acquire()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _compile(target: Target, toolchain: Toolchain) -> CompiledObject:
    """Compile in a temporary folder.

    Raises:
        LaunchError: the compiler failed or was killed.
    """
    started = time.monotonic()
    suffix = ".cu" if target.family.kind == "nvidia" else ".hip"
    try:
        with tempfile.TemporaryDirectory(prefix="tunedgemm-ck-") as folder:
            source, output = Path(folder, f"instance{suffix}"), Path(folder, "instance.so")
            source.write_text(target.source)
            command = toolchain.command(source, output, target.problem.gfx, target.flags)
            # The compiler's temporary files are deleted with the folder, even when it is killed.
            environment = {**os.environ, "TMPDIR": folder}
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=folder, env=environment, stdin=subprocess.DEVNULL
            )
            if done.returncode or not output.is_file():
                raise LaunchError(f"{target} does not compile: {_failure_reason(done, folder)}")
            code = output.read_bytes()
    except OSError as error:
        raise LaunchError(f"{target} cannot be compiled: {error}") from error
    return CompiledObject(code, toolchain.identity, time.monotonic() - started)


def _failure_reason(done: subprocess.CompletedProcess[Any], folder: str) -> str:
    """Return why a compiler failed: its first errors, or the signal that killed it."""
    if done.returncode < 0:
        killed = signal.Signals(-done.returncode).name
        hint = ", probably out of memory; reduce --jobs" if killed == "SIGKILL" else ""
        return f"the compiler was killed by {killed}{hint}"
    lines = [line.replace(f"{folder}/", "") for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() or "No space left" in line]
    return f"exit code {done.returncode}: {' | '.join((wrong or lines)[:_LINES])[:1500] or 'no output'}"
