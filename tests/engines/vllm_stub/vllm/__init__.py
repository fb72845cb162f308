"""A stub of vLLM: the classes that the plugin uses, in the form of one of several versions."""

import os

__version__ = os.environ.get("VLLM_STUB", "0.25.1")
#: Major and minor version whose names and signatures the modules take.
FORM = tuple(int(part) for part in __version__.split(".")[:2])
