"""Load a shared object from its bytes, and call its functions."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from typing import Any

import attrs
from tunedgemm.plugin import LaunchError
from tunedgemm.tools.launching import CallPlan, ForkSafeLock, Launch, call_of

#: The sizes of the struct, in its order.
Sizes = tuple[int, ...]

#: Status of an instance that cannot serve the sizes, as in ``sources/call.h``.
UNSUPPORTED = -1

#: Addresses of ``TunedGemmCall`` (sources/call.h) and ``TunedGemmMoe`` (sources/moe_call.h); sizes
#: follow them, all of 8 bytes.
POINTERS, MOE_POINTERS = 7, 11


@attrs.frozen(eq=False)
class LoadedObject:
    """A loaded shared object.

    Attributes:
        library: keeps it loaded.
        launch: its ``tunedgemm_launch``.
        workspace: its ``tunedgemm_workspace``.
    """

    library: ctypes.CDLL
    launch: Any
    workspace: Any

    def workspace_bytes(self, sizes: Sizes, pointers: int = POINTERS) -> int:
        """Return the bytes of workspace that a call of these sizes needs.

        The result is -1 where the instance cannot serve the sizes, or cannot query the device.
        """
        return int(self.workspace(ctypes.byref(_call_struct(pointers, sizes)(*(0,) * pointers, *sizes))))

    def runtime_error(self, count: int, pointers: int = POINTERS) -> int:
        """Return the error of the vendor's runtime on the current device, 0 for none.

        It comes from a call whose sizes are all 0, which launches nothing.
        """
        status = int(self.launch(ctypes.byref(_call_struct(pointers, (0,) * count)()), None))
        return 0 if status == UNSUPPORTED else status

    def launcher(self, sizes: Sizes, pointers: int = POINTERS) -> Launch:
        """Return the launch for these sizes: (stream, the struct's addresses in order) -> status.

        It is safe to call from several threads, and releases the interpreter's lock meanwhile.
        """
        words = bytes(8 * pointers) + struct.pack(f"={len(sizes)}q", *sizes)
        return call_of(self.launch, CallPlan(words, tuple(range(0, 8 * pointers, 8))))


#: The objects of this process, by the digest of their bytes.
_objects: dict[bytes, LoadedObject] = {}
_lock = ForkSafeLock()


def load_object(code: bytes) -> LoadedObject:
    """Return the object of these bytes, loaded once per process.

    Raises:
        LaunchError: the bytes are not an object for this machine, or lack the functions of
            ``call.h``.
    """
    digest = hashlib.sha256(code).digest()
    with _lock:
        if digest not in _objects:
            _objects[digest] = _load(code, digest.hex()[:12])
        return _objects[digest]


def _load(code: bytes, name: str) -> LoadedObject:
    # An anonymous file works with a cleared cache and on folders mounted noexec. The loader
    # identifies objects by path and inode: the open file keeps its inode number unique, and no
    # other path contains the dot.
    file = os.memfd_create(f"tunedgemm-{name}")
    try:
        with open(file, "wb", closefd=False) as target:
            target.write(code)
        library = ctypes.CDLL(f"/proc/self/./fd/{file}")
    except OSError as error:
        os.close(file)
        raise LaunchError(f"the compiled object cannot be loaded: {error}") from error
    try:
        launch, workspace = library.tunedgemm_launch, library.tunedgemm_workspace
    except AttributeError as error:
        raise LaunchError(f"the compiled object lacks this plugin's functions: {error}") from error
    launch.argtypes, launch.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    workspace.argtypes, workspace.restype = (ctypes.c_void_p,), ctypes.c_int64
    return LoadedObject(library, launch, workspace)


def _call_struct(pointers: int, sizes: Sizes) -> type[ctypes.Array[ctypes.c_uint64]]:
    """Return the struct of a call."""
    return ctypes.c_uint64 * (pointers + len(sizes))
