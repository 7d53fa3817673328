"""semkv: a hierarchical semantic cache on top of vLLM."""

__version__ = "0.1.0"
