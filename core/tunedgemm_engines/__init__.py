"""Routes of serving engines: vLLM and SGLang find `register` of their module by its entry point."""
