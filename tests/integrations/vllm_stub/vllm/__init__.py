"""Classes with the signatures of vLLM's, as far as the plugin sees them."""

__version__ = "0.25.1"
