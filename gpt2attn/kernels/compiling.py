"""How this package compiles functions: with Numba, once for a machine, kept on disk.

What is kept lies beside the source or, where that cannot be written, in the user's own cache
folder. Keeping it is a convenience: a file that is damaged, a full disk or no folder at all cost
the compilation, some seconds, and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.sigutils import normalize_signature

# Summing in any order lets the compiler use whole vector registers.
FAST = {"reassoc", "contract", "nsz", "arcp"}
EXACT = {"contract"}


class _Cache(FunctionCache):
    """Numba's files of compiled functions, none of whose failures reaches the caller.

    They are good for one state of all modules here, since code of one is compiled into another's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=_state_of_sources(),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            kept = super().load_overload(sig, target_context)
            # Two processes that wrote at once may have put one's code under the other's name.
            if kept is None or tuple(kept.signature.args) == tuple(normalize_signature(sig)[0]):
                return kept
        except Exception:
            pass  # whatever unpickling a damaged file may raise
        with contextlib.suppress(OSError):
            self.flush()  # beginning anew replaces it
        return None

    @property
    def is_kept(self) -> bool:
        try:
            return bool(self._cache_file._load_index())
        except Exception:
            return False

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


@cache
def _state_of_sources() -> tuple[tuple[str, int, int], ...]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


def is_kept(function: Any) -> bool:
    """Whether code of a compiled function, as its source is now, lies on disk."""
    return getattr(function._cache, "is_kept", False)


def compiled(*, inner: bool = False, fastmath: set[str] | None = None) -> Callable[..., Any]:
    """A decorator: the function compiled at its first call, running without the interpreter lock.

    `inner` is for what only compiled code calls. Compiled code divides by 0 as the machine does,
    and sets up no exception for it.
    """
    without = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True} if inner else {}

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, error_model="numpy", fastmath=fastmath or False, **without)(
            function
        )
        with contextlib.suppress(RuntimeError):  # there is no folder to keep it in
            dispatcher._cache = _Cache(function)
        return dispatcher

    return decorate
