"""Functions and classes with the signatures of SGLang's, as far as the plugin sees them."""

__version__ = "0.5.17"
