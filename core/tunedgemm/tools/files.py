"""Files of plugins: the artifact cache, private folders, signed and trusted code."""

from tunedgemm.backends.artifact import artifact, cache_folder, private_folder
from tunedgemm.backends.file_trust import read_trusted
from tunedgemm.backends.signed_files import SignatureError, check_signature, signature_required
from tunedgemm.process.files import open_regular, read_regular, replace_file
from tunedgemm.process.packages import folder_of_entry
from tunedgemm.process.paths import expanded
from tunedgemm.table.folders import home_folder

__all__ = [
    "SignatureError",
    "artifact",
    "cache_folder",
    "check_signature",
    "expanded",
    "folder_of_entry",
    "home_folder",
    "open_regular",
    "private_folder",
    "read_regular",
    "read_trusted",
    "replace_file",
    "signature_required",
]
