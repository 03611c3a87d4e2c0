"""The linear layer of GPT-2, over the checkpoint's own matrix."""

from .linear import Linear

__all__ = ["Linear"]
