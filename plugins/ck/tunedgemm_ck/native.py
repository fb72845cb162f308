"""Load a shared object from its bytes, and launch it.

The C extension launches, or ctypes where the extension was not built.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

import attrs
from tunedgemm.plugin import LaunchError

#: (stream, then the struct's addresses in order) -> the instance's status
Launch = Callable[..., int]
#: The sizes of the struct, in its order.
Sizes = tuple[int, ...]

#: Status of an instance that cannot serve the sizes, as in ``sources/call.h``.
UNSUPPORTED = -1


def _load_extension() -> Any:
    try:
        return importlib.import_module("tunedgemm_ck._shim")
    except ImportError:  # installed without a C compiler
        return None


_extension = _load_extension()


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
        """Return the launch for these sizes.

        It is safe to call from several threads, and releases the interpreter's lock meanwhile.
        """
        return by_ctypes(self, sizes, pointers) if _extension is None else by_extension(self, sizes, pointers)


#: The objects of this process, by the digest of their bytes.
_objects: dict[bytes, LoadedObject] = {}
_lock = threading.Lock()


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


def by_extension(of: LoadedObject, sizes: Sizes, pointers: int = POINTERS) -> Launch:
    """Return the launch through `shim.c`."""
    address = ctypes.cast(of.launch, ctypes.c_void_p).value
    return _extension.Launch(address, pointers, sizes, of).launch  # type: ignore[no-any-return]


def by_ctypes(of: LoadedObject, sizes: Sizes, pointers: int = POINTERS) -> Launch:
    """Return the launch through ctypes."""
    call, byref, words = of.launch, ctypes.byref, _call_struct(pointers, sizes)

    def launch(stream: int, *addresses: int) -> int:
        if len(addresses) != pointers:
            raise TypeError(f"launch takes {pointers + 1} addresses (got {len(addresses) + 1})")
        return int(call(byref(words(*addresses, *sizes)), stream))

    return launch
