"""GPT-2, from scratch in PyTorch: exact, fast, with every attention head in view."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionSteps
    from .cache import KVCache
    from .capture import AttentionMaps, attention_maps
    from .checkpoint import load_model, save_model
    from .config import GPT2Config
    from .generation import generate
    from .language_model import LanguageModel, load
    from .model import GPT2
    from .text_generation import Generation
    from .tokenizer import Tokenizer, load_tokenizer
    from .trace import HeadTrace, trace_head

__version__ = "0.1.0"

# Where each public name lives. It is imported when first used: `import torch` alone costs a second
# of CPU, and `gpt2attn --help` must not pay it.
_HOME = {
    "AttentionMaps": "capture",
    "AttentionSteps": "attention",
    "GPT2": "model",
    "HeadTrace": "trace",
    "GPT2Config": "config",
    "Generation": "text_generation",
    "KVCache": "cache",
    "LanguageModel": "language_model",
    "Tokenizer": "tokenizer",
    "attention_maps": "capture",
    "generate": "generation",
    "load": "language_model",
    "load_model": "checkpoint",
    "load_tokenizer": "tokenizer",
    "save_model": "checkpoint",
    "trace_head": "trace",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
