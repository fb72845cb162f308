"""Forward of `tunedgemm_aiter_names`, under the name that programs import."""

from tunedgemm_aiter_names import install, uninstall

__all__ = ["install", "uninstall"]
