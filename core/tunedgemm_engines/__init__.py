"""Routes of serving engines: vLLM and SGLang find `register` of their module by its entry point."""

import time

#: Time at which the imports of an engine's plugin began (`time.perf_counter`).
BEGUN = time.perf_counter()
