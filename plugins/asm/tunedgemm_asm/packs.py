"""Packs: folders with a descriptor, a manifest and code objects; which of their kernels may be launched on an architecture.

`found` reads descriptors and manifests, `PackKernel` a code object when its kernel is first wanted, and those of a name that several packs
have at once. What is wrong with one pack costs that pack, what is wrong with one kernel that kernel; both are remembered with their
reason.
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

#: Bytes of a code object at most; AITER's largest has 150 KiB.
MAX_BYTES = 64 << 20
#: What is said where there is no pack at all.
NONE = "no pack is found; install AITER, name folders in TUNEDGEMM_ASM_PACKS, or make one with `tunedgemm asm build`"


@attrs.frozen(eq=False)
class Pack:
    """A folder of kernels for one architecture.

    Attributes:
        descriptor: what its author says of it: name, gfx, ABI, dtypes.
        folder: where manifest and code objects lie.
        source: who led to it.
        kernels: those of its manifest that can be used, as far as the manifest tells.
        refused: name of a kernel -> why it is not among them.
        remarks: what is odd and does no harm.
        hashes: SHA-256 of the files that were read, which must stay what they were.
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
        """What it is called in messages."""
        return self.descriptor.name

    @property
    def gfx(self) -> str:
        """The architecture that it is for."""
        return self.descriptor.gfx

    @property
    def abi(self) -> Abi:
        """The layout of its kernels' arguments."""
        return ABIS[self.descriptor.abi]

    @functools.cached_property
    def pack_kernels(self) -> tuple[PackKernel, ...]:
        """Its kernels, each with its file."""
        return tuple(PackKernel(self, kernel, self.folder / kernel.file) for kernel in self.kernels)

    def content(self, file: str) -> bytes:
        """The bytes of one of its files, the same each time: *sha256* is of what is used.

        Raises:
            PackError: it was exchanged since it was first read; and as `content_of`.
        """
        content = content_of(self.folder, file, MAX_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if self.hashes.setdefault(file, digest) != digest:
            raise PackError(f"{file} was exchanged since it was listed")
        return content

    @property
    def sha256(self) -> str:
        """Over the bytes of descriptor, manifest and all code objects, in the order of their names."""
        total = hashlib.sha256(f"{descriptor.NAME}\0{self.descriptor.digest}\n".encode())
        for file in sorted({self.descriptor.manifest, *(kernel.file for kernel in self.kernels)}):
            if file not in self.hashes:
                with contextlib.suppress(PackError):  # told when its kernel is wanted
                    self.content(file)
            total.update(f"{file}\0{self.hashes.get(file, 'unreadable')}\n".encode())
        return total.hexdigest()


@attrs.frozen
class Checked:
    """A code object that was read and may be launched.

    Attributes:
        content: its bytes.
        sha256: their hash.
        metadata: what it says of the kernel.
    """

    content: bytes = attrs.field(repr=False)
    sha256: str
    metadata: Metadata


@attrs.frozen(eq=False)
class PackKernel:
    """A kernel of a pack. Its code object is read and checked when it is first wanted, once where it can be read."""

    pack: Pack
    kernel: KernelConfig
    path: Path
    _checked: list[Checked | PackError] = attrs.field(factory=list, init=False, repr=False)

    @property
    def abi(self) -> Abi:
        """The layout of its arguments."""
        return self.pack.abi

    @property
    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """What it takes and gives, by operand: ``x``, ``weight``, ``out``, ``bias``."""
        return self.pack.descriptor.dtypes

    @property
    def of_aiter(self) -> bool:
        """Whether it lies in AITER's tree of code objects."""
        return self.pack.descriptor.of_aiter

    def checked(self) -> Checked:
        """The code object.

        Raises:
            PackError: it must not be launched; names pack, file and reason, each time.
        """
        if not self._checked or isinstance(self._checked[0], UnreadableError):
            try:
                self._checked[:] = [_check(self)]
            except PackError as error:
                self._checked[:] = [type(error)(f"pack {self.pack.name} ({self.pack.folder}): {error}")]
        if isinstance(answer := self._checked[0], PackError):
            raise answer.with_traceback(None)
        return answer

    def code(self) -> bytes:
        """The bytes of the code object; raises as `checked`."""
        return self.checked().content

    def metadata(self) -> Metadata:
        """What the code object says of the kernel; raises as `checked`."""
        return self.checked().metadata

    @property
    def sha256(self) -> str:
        """Of the code object's bytes; raises as `checked`."""
        return self.checked().sha256

    def unfit(self) -> str | None:
        """Why it must not be launched, for which its code object is read; "" where it may be."""
        try:
            self.checked()
        except PackError as error:
            return str(error)
        return None

    @property
    def fault(self) -> str:
        """Why it was refused, where its code object was wanted and must not be launched; "" otherwise."""
        return str(self._checked[0]) if self._checked and isinstance(self._checked[0], PackError) else ""


def _check(pack_kernel: PackKernel) -> Checked:
    file = pack_kernel.kernel.file
    content = pack_kernel.pack.content(file)
    try:
        code = codeobject.read(content)
    except PackError as error:
        raise PackError(f"{file}: {error}") from error
    promised = pack_kernel.pack.descriptor.sha256.get(file, code.sha256)
    if promised != code.sha256:
        raise PackError(f"{file}: its sha256 is {code.sha256}, the descriptor says {promised}")
    reason = resources.unfit(code, pack_kernel.kernel, pack_kernel.abi, pack_kernel.pack.gfx)
    if reason:
        raise PackError(f"{file}: {reason}")
    return Checked(content, code.sha256, code.kernels[pack_kernel.kernel.name])


@attrs.frozen(eq=False)
class Catalog:
    """What there is for one architecture.

    Attributes:
        gfx: which.
        packs: in the order in which they count.
        kernels: by name; of two packs with one name the earlier has it whose code object can be used.
        refusals: what is wrong with packs and manifests; *problems* adds code objects.
        elsewhere: name of a kernel -> the other architectures that it is found for.
    """

    gfx: str
    packs: tuple[Pack, ...]
    kernels: Mapping[str, PackKernel]
    refusals: tuple[str, ...]
    elsewhere: Mapping[str, tuple[str, ...]]

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that was refused up to now, with its reason."""
        return self.refusals + tuple(pack_kernel.fault for pack_kernel in self.kernels.values() if pack_kernel.fault)

    @property
    def version(self) -> str:
        """``asm 1a2b3c4d5e6f`` over all packs' bytes: a kernel's name says nothing of the code behind it; "" where there is no kernel."""
        if not self.kernels:
            return ""
        return f"asm {hashlib.sha256(' '.join(pack.sha256 for pack in self.packs).encode()).hexdigest()[:12]}"

    def missing(self, name: str) -> str:
        """Why no kernel of this name can be launched here; "" where one may be. Its code object is read for it."""
        if name in self.kernels:
            return self.kernels[name].unfit() or ""
        for pack in self.packs:
            if name in pack.refused:
                return f"pack {pack.name} ({pack.folder}): {pack.refused[name]}"
        if name in self.elsewhere:
            return f"the packs have {name} for {', '.join(self.elsewhere[name])}, not for {self.gfx}"
        return f"no pack for {self.gfx} has a kernel {name}" if self.packs else f"there is no pack for {self.gfx}"


def described(said: Descriptor, folder: Path, source: str) -> Pack:
    """The pack in a folder, of which this is said.

    Raises:
        PackError: it cannot be used as a whole; names the folder.
    """
    try:
        content = content_of(folder, said.manifest, manifest.MAX_BYTES)
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
    hashes = {said.manifest: hashlib.sha256(content).hexdigest()}
    return Pack(said, folder, source, tuple(kernels), MappingProxyType(refused), listed.remarks, hashes)


def _unusable(kernel: KernelConfig, said: Descriptor, folder: Path) -> str:
    """What can be told of a kernel without reading its code object."""
    try:
        place_of(folder, kernel.file)
    except PackError as error:
        return str(error)
    if not set(kernel.outputs) & set(said.dtypes["out"]):
        return f"it writes {' '.join(kernel.outputs)}, its pack {' '.join(said.dtypes['out'])}"
    return ""


def in_folder(folder: Path, source: str = "") -> tuple[tuple[Pack, ...], tuple[str, ...]]:
    """The packs in and below a folder, or in AITER's tree there, and what is wrong with others."""
    packs, problems = [], []
    for place, said in descriptor.below(folder):
        try:
            if isinstance(said, PackError):
                raise said
            packs.append(described(said, place, source))
        except PackError as error:
            problems.append(str(error))
    if not packs and not problems:
        problems.append(f"{folder} holds no pack: no {descriptor.NAME} in it or below, and no kernels of AITER's")
    return tuple(packs), tuple(problems)


@functools.cache
def installed() -> tuple[tuple[Pack, ...], tuple[str, ...]]:
    """The packs of all sources in their order, and what is wrong with others; read once."""
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
    """The kernels for an architecture, from all sources; read once, until `reload`."""
    return gathered(gfx, *installed())


def gathered(gfx: str, packs: Sequence[Pack], problems: Sequence[str] = ()) -> Catalog:
    """The kernels for an architecture of these packs, and what is wrong with any of them."""
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
            refusals.append(f"pack {pack.name} ({pack.folder}): {taken[0]}{more}: given by {', '.join(owners)} already")
    elsewhere: dict[str, tuple[str, ...]] = {}
    for pack in packs:
        for kernel in pack.kernels if pack.gfx != gfx else ():
            elsewhere[kernel.name] = tuple(dict.fromkeys((*elsewhere.get(kernel.name, ()), pack.gfx)))
    return Catalog(gfx, mine, MappingProxyType(kernels), tuple(refusals), MappingProxyType(elsewhere))


def line_of(pack: Pack) -> str:
    """A pack in one line, with the hash of all that it may execute."""
    source = f", by {pack.source}" if pack.source else ""
    return f"pack {pack.name} ({pack.folder}{source}): {len(pack.kernels)} kernels of {pack.abi.name}, sha256 {pack.sha256}"


def described_packs(catalog: Catalog) -> tuple[str, ...]:
    """A line for each pack of an architecture."""
    return tuple(line_of(pack) for pack in catalog.packs)


def lines(catalog: Catalog) -> tuple[str, ...]:
    """What there is for an architecture, and what was refused with its reason; code objects are checked for it."""
    if not catalog.packs and not catalog.problems:
        others = sorted({gfx for every in catalog.elsewhere.values() for gfx in every})
        return (f"no pack for {catalog.gfx}; there are some for {', '.join(others)}" if others else NONE,)
    for pack_kernel in catalog.kernels.values():
        pack_kernel.unfit()  # told among the problems
    return (*described_packs(catalog), *(f"refused: {problem}" for problem in catalog.problems))


def reload() -> None:
    """Forget what was read: the environment or the folders have changed."""
    installed.cache_clear()
    catalog_of.cache_clear()
