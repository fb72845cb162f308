"""Find packs and decide which of their kernels may be launched on an architecture.

A pack is a folder with a descriptor, a manifest and code objects. `catalog_of` reads descriptors
and manifests. `PackKernel` reads a code object on first use, or at once where several packs have
its name. A fault costs only its own pack or kernel and is remembered with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs

from tunedgemm_asm import codeobject, descriptor, manifest, resources
from tunedgemm_asm.abi import ABIS, Abi
from tunedgemm_asm.codeobject import Metadata
from tunedgemm_asm.descriptor import Descriptor
from tunedgemm_asm.manifest import KernelConfig, PackError, UnreadableError, content_of, place_of
from tunedgemm_asm.sources import sources

#: Most bytes of a code object; AITER's largest has 150 KiB.
MAX_BYTES = 64 << 20
#: Message where no pack exists.
NONE = "no pack found; install AITER, name folders in TUNEDGEMM_ASM_PACKS, or make one with `tunedgemm asm build`"


@attrs.frozen(eq=False)
class Pack:
    """Folder of kernels for one architecture.

    Attributes:
        descriptor: name, gfx, ABI and dtypes from its author.
        folder: folder of the manifest and the code objects.
        source: what led to the folder.
        kernels: kernels that the manifest allows.
        refused: kernel -> why it is not among them.
        remarks: harmless oddities.
        hashes: SHA-256 of each file read; the file must not change afterwards.
    """

    descriptor: Descriptor
    folder: Path
    source: str
    kernels: tuple[KernelConfig, ...]
    refused: Mapping[str, str] = attrs.field(factory=dict)
    remarks: tuple[str, ...] = ()
    hashes: dict[str, str] = attrs.field(factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Return the pack's name."""
        return self.descriptor.name

    @property
    def gfx(self) -> str:
        """Return the pack's architecture."""
        return self.descriptor.gfx

    @property
    def abi(self) -> Abi:
        """Return the argument layout of its kernels."""
        return ABIS[self.descriptor.abi]

    @functools.cached_property
    def pack_kernels(self) -> tuple[PackKernel, ...]:
        """Return its kernels with their files."""
        return tuple(PackKernel(self, kernel, self.folder / kernel.file) for kernel in self.kernels)

    def content(self, file: str) -> bytes:
        """Return the bytes of a file, the same each time, so that *sha256* covers what is used.

        Raises:
            PackError: the file changed since it was first read, or as `content_of`.
        """
        content = content_of(self.folder, file, MAX_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if self.hashes.setdefault(file, digest) != digest:
            raise PackError(f"{file} changed since it was listed")
        return content

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of descriptor, manifest and all code objects, in the order of their
        names.
        """
        total = hashlib.sha256(f"{descriptor.NAME}\0{self.descriptor.digest}\n".encode())
        for file in sorted({self.descriptor.manifest, *(kernel.file for kernel in self.kernels)}):
            if file not in self.hashes:
                with contextlib.suppress(PackError):  # reported when its kernel is used
                    self.content(file)
            total.update(f"{file}\0{self.hashes.get(file, 'unreadable')}\n".encode())
        return total.hexdigest()


@attrs.frozen
class Checked:
    """Code object that passed all checks.

    Attributes:
        content: its bytes.
        sha256: their hash.
        metadata: metadata of the kernel.
    """

    content: bytes = attrs.field(repr=False)
    sha256: str
    metadata: Metadata


@attrs.frozen(eq=False)
class PackKernel:
    """Kernel of a pack, whose code object is read and checked on first use."""

    pack: Pack
    kernel: KernelConfig
    path: Path
    _checked: list[Checked | PackError] = attrs.field(factory=list, init=False, repr=False)

    @property
    def abi(self) -> Abi:
        """Return its argument layout."""
        return self.pack.abi

    @property
    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """Return its dtypes by operand: ``x``, ``weight``, ``out``, ``bias``."""
        return self.pack.descriptor.dtypes

    @property
    def of_aiter(self) -> bool:
        """Check whether it belongs to AITER's tree of code objects."""
        return self.pack.descriptor.of_aiter

    def checked(self) -> Checked:
        """Return the checked code object.

        Raises:
            PackError: it must not be launched; names pack, file and reason.
        """
        if not self._checked or isinstance(self._checked[0], UnreadableError):
            try:
                self._checked[:] = [_check(self)]
            except PackError as error:
                self._checked[:] = [type(error)(f"pack {self.pack.name} ({self.pack.folder}): {error}")]
        if isinstance(answer := self._checked[0], PackError):
            raise answer.with_traceback(None)
        return answer

    def unfit(self) -> str | None:
        """Return why the code object must not be launched, or None; reads it."""
        try:
            self.checked()
        except PackError as error:
            return str(error)
        return None

    @property
    def fault(self) -> str:
        """Return the reason of a refusal so far, or an empty text; reads nothing."""
        return str(self._checked[0]) if self._checked and isinstance(self._checked[0], PackError) else ""


def _check(pack_kernel: PackKernel) -> Checked:
    file = pack_kernel.kernel.file
    content = pack_kernel.pack.content(file)
    try:
        code = codeobject.read(content)
    except PackError as error:
        raise PackError(f"{file}: {error}") from error
    pack_kernel.pack.descriptor.check_hash(file, code.sha256)
    reason = resources.unfit(code, pack_kernel.kernel, pack_kernel.abi, pack_kernel.pack.gfx)
    if reason:
        raise PackError(f"{file}: {reason}")
    return Checked(content, code.sha256, code.kernels[pack_kernel.kernel.name])


@attrs.frozen(eq=False)
class Catalog:
    """Kernels for one architecture.

    Attributes:
        gfx: the architecture.
        packs: packs in order of precedence.
        kernels: kernels by name; of equal names, the first whose code object is usable.
        refusals: faults of packs and manifests; *problems* adds code objects.
        elsewhere: kernel -> other architectures that have it.
    """

    gfx: str
    packs: tuple[Pack, ...]
    kernels: Mapping[str, PackKernel]
    refusals: tuple[str, ...]
    elsewhere: Mapping[str, tuple[str, ...]]

    @property
    def problems(self) -> tuple[str, ...]:
        """Return every refusal so far with its reason."""
        return self.refusals + tuple(pack_kernel.fault for pack_kernel in self.kernels.values() if pack_kernel.fault)

    @property
    def version(self) -> str:
        """Return ``asm 1a2b3c4d5e6f``, a hash of all packs, or an empty text without kernels."""
        if not self.kernels:
            return ""
        return f"asm {hashlib.sha256(' '.join(pack.sha256 for pack in self.packs).encode()).hexdigest()[:12]}"

    def missing(self, name: str) -> str:
        """Return why no kernel of this name can be launched, or an empty text; reads its code
        object.
        """
        if name in self.kernels:
            return self.kernels[name].unfit() or ""
        for pack in self.packs:
            if name in pack.refused:
                return f"pack {pack.name} ({pack.folder}): {pack.refused[name]}"
        if name in self.elsewhere:
            return f"the packs have {name} for {', '.join(self.elsewhere[name])}, not for {self.gfx}"
        return f"no pack for {self.gfx} has a kernel {name}" if self.packs else f"no pack for {self.gfx}"


def read_pack(said: Descriptor, folder: Path, source: str) -> Pack:
    """Return the pack in a folder with this descriptor.

    Raises:
        PackError: the whole pack is unusable; names the folder.
    """
    try:
        content = content_of(folder, said.manifest, manifest.MAX_BYTES)
        hashes = {said.manifest: hashlib.sha256(content).hexdigest()}
        said.check_hash(said.manifest, hashes[said.manifest])
        listed = manifest.decoded(content, said.manifest, ABIS[said.abi])
    except PackError as error:
        raise PackError(f"pack {said.name} ({folder}): {error}") from error
    kernels, refused = [], dict(listed.refused)
    for kernel in listed.kernels:
        reason = _unusable(kernel, said, folder)
        if reason:
            refused[kernel.name] = reason
        else:
            kernels.append(attrs.evolve(kernel, outputs=tuple(dtype for dtype in kernel.outputs if dtype in said.dtypes["out"])))
    return Pack(said, folder, source, tuple(kernels), MappingProxyType(refused), listed.remarks, hashes)


def _unusable(kernel: KernelConfig, said: Descriptor, folder: Path) -> str:
    """Return why a kernel is unusable without reading its code object, or an empty text."""
    try:
        place_of(folder, kernel.file)
    except PackError as error:
        return str(error)
    if not set(kernel.outputs) & set(said.dtypes["out"]):
        return f"writes {' '.join(kernel.outputs)}, but its pack declares {' '.join(said.dtypes['out'])}"
    return ""


def in_folder(folder: Path, source: str = "") -> tuple[tuple[Pack, ...], tuple[str, ...]]:
    """Return the packs in and below a folder, and the faults of others."""
    packs, problems = [], []
    for path, said in descriptor.below(folder):
        try:
            if isinstance(said, PackError):
                raise said
            packs.append(read_pack(said, path, source))
        except PackError as error:
            problems.append(str(error))
    if not packs and not problems:
        problems.append(f"{folder} holds no pack: no {descriptor.NAME} in it or below, and no kernels of AITER's")
    return tuple(packs), tuple(problems)


@functools.cache
def installed() -> tuple[tuple[Pack, ...], tuple[str, ...]]:
    """Return the packs of all sources in order, and the faults of others; cached."""
    packs: list[Pack] = []
    problems: list[str] = []
    for source in sources():
        if source.folder is None:
            problems.append(source.problem)
            continue
        try:
            these, wrong = in_folder(source.folder, source.label)
            known = {pack.folder.resolve() for pack in packs}
            packs += [pack for pack in these if pack.folder.resolve() not in known]
            problems += wrong
        except (OSError, RuntimeError, ValueError) as error:
            problems.append(f"{source.label}: {source.folder}: {error}")
    return tuple(packs), tuple(problems)


@functools.cache
def catalog_of(gfx: str) -> Catalog:
    """Return the kernels for an architecture from all sources; cached until `reload`."""
    return gathered(gfx, *installed())


def gathered(gfx: str, packs: Sequence[Pack], problems: Sequence[str] = ()) -> Catalog:
    """Return the kernels of these packs for an architecture, with all faults."""
    mine = tuple(pack for pack in packs if pack.gfx == gfx)
    kernels: dict[str, PackKernel] = {}
    refusals = list(problems)
    for pack in mine:
        refusals += [f"pack {pack.name} ({pack.folder}): {name}: {reason}" for name, reason in pack.refused.items()]
        refusals += [f"pack {pack.name} ({pack.folder}): {remark}" for remark in pack.remarks]
        taken = []
        for pack_kernel in pack.pack_kernels:
            name = pack_kernel.kernel.name
            earlier = kernels.setdefault(name, pack_kernel)
            if earlier is not pack_kernel and (fault := earlier.unfit()) and not pack_kernel.unfit():
                kernels[name] = pack_kernel
                refusals.append(fault)
            elif earlier is not pack_kernel:
                taken.append(name)
        if taken:
            owners = sorted({kernels[name].pack.name for name in taken})
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            refusals.append(f"pack {pack.name} ({pack.folder}): {taken[0]}{more}: already given by {', '.join(owners)}")
    elsewhere: dict[str, tuple[str, ...]] = {}
    for pack in packs:
        for kernel in pack.kernels if pack.gfx != gfx else ():
            elsewhere[kernel.name] = tuple(dict.fromkeys((*elsewhere.get(kernel.name, ()), pack.gfx)))
    return Catalog(gfx, mine, MappingProxyType(kernels), tuple(refusals), MappingProxyType(elsewhere))


def line_of(pack: Pack) -> str:
    """Describe a pack in one line with the hash of all its files."""
    source = f", by {pack.source}" if pack.source else ""
    return f"pack {pack.name} ({pack.folder}{source}): {len(pack.kernels)} kernels of {pack.abi.name}, sha256 {pack.sha256}"


def lines(catalog: Catalog) -> tuple[str, ...]:
    """Return a line for each pack and each refusal of an architecture; checks all code objects."""
    if not catalog.packs and not catalog.problems:
        others = sorted({gfx for every in catalog.elsewhere.values() for gfx in every})
        return (f"no pack for {catalog.gfx}; there are some for {', '.join(others)}" if others else NONE,)
    for pack_kernel in catalog.kernels.values():
        pack_kernel.unfit()  # records the refusal among the problems
    return (*map(line_of, catalog.packs), *(f"refused: {problem}" for problem in catalog.problems))


def reload() -> None:
    """Clear the caches after the environment or the folders have changed."""
    installed.cache_clear()
    catalog_of.cache_clear()
