"""Signatures: with ``TUNEDGEMM_REQUIRE_SIGNED``, foreign files need a trusted signature.

A signature is minisign's ``FILE.minisig``. ``TUNEDGEMM_TRUSTED_KEYS`` names a file of trusted
public keys, one per line. The verified bytes are the ones that are used.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from tunedgemm.backends.file_trust import read_trusted
from tunedgemm.errors import UserError
from tunedgemm.process.files import read_regular
from tunedgemm.process.paths import expanded
from tunedgemm.process.variables import switched_on

REQUIRED, KEYS = "TUNEDGEMM_REQUIRE_SIGNED", "TUNEDGEMM_TRUSTED_KEYS"
SUFFIX = ".minisig"


class SignatureError(PermissionError):
    """A file without a valid signature by a trusted key."""


def signature_required() -> bool:
    """Check whether packs, tables and shared artifacts need a signature."""
    return switched_on(REQUIRED)


def check_signature(file: Path, content: bytes) -> None:
    """Check that a trusted key signed these bytes of a file, if signatures are required.

    Raises:
        SignatureError: the signature is missing or invalid, or cannot be checked here.
    """
    if not signature_required():
        return
    place = Path(f"{file}{SUFFIX}")
    try:
        signature = read_regular(place, 1)
    except FileNotFoundError:
        raise SignatureError(f"{file}: unsigned; sign it with `minisign -Sm {file.name}`, or unset {REQUIRED}") from None
    except OSError as error:
        raise SignatureError(f"{place}: not a signature of minisign: {error}") from error
    verify_signature(file, content, signature)


def verify_signature(file: Path, content: bytes, text: bytes) -> None:
    """Verify the signature *text* of a file's bytes by a trusted key, whether or not one is required.

    The signature's comment names the file, so that one signed file cannot replace another.

    Raises:
        SignatureError: the signature is invalid, or cannot be checked here.
    """
    minisign = _minisign()
    try:
        signature = minisign.Signature.from_bytes(text)
    except (ValueError, minisign.Error) as error:
        raise SignatureError(f"{file}{SUFFIX}: not a signature of minisign: {error}") from error
    reasons = [_refusal(minisign, key, content, signature) for key in _trusted_keys(minisign)]
    if "" not in reasons:
        wrong = any("failed" in reason for reason in reasons)
        fault = "changed after it was signed" if wrong else f"signed by a key that {KEYS} does not list"
        raise SignatureError(f"{file}: {fault}; get the file and its signature again, or add the key")
    if f"file:{file.name}" not in signature.trusted_comment.split("\t"):
        raise SignatureError(f"{file}: signed as another file (got {signature.trusted_comment[:80]!r}); keep the name that was signed")


def _refusal(minisign: ModuleType, key: Any, content: bytes, signature: Any) -> str:
    """Return why a key did not sign these bytes, "" where it did."""
    try:
        key.verify(content, signature)
    except minisign.VerifyError as error:
        return str(error)
    return ""


def _minisign() -> ModuleType:
    try:
        import minisign
    except ImportError as error:
        raise SignatureError(f"{REQUIRED}: signatures cannot be checked without py-minisign; pip install 'tunedgemm[signed]'") from error
    return minisign  # type: ignore[no-any-return]


def _trusted_keys(minisign: ModuleType) -> list[Any]:
    """Return the trusted public keys; the file of each that minisign writes may be appended.

    Raises:
        SignatureError: the variable, its file or a line of it cannot be used.
    """
    if not (named := os.environ.get(KEYS)):
        raise SignatureError(f"{REQUIRED}: no trusted keys; set {KEYS} to a file with public keys of minisign")
    try:
        lines = read_trusted(expanded(named, KEYS)).decode().splitlines()
    except (OSError, UserError, UnicodeDecodeError) as error:
        raise SignatureError(f"{KEYS}: cannot be read: {error}") from error
    try:
        keys = [line.strip() for line in lines if line.strip() and not line.startswith(("#", "untrusted comment:"))]
        return [minisign.PublicKey.from_base64(key) for key in keys]
    except minisign.Error as error:
        raise SignatureError(f"{named}: has a line that is not a public key of minisign: {error}") from error
