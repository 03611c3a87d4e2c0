"""Writing files that are either whole or not there."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_OF_DEVICES = re.compile("/dev(/fd)?|/proc(/.*)?")

_unfinished: set[Path] = set()  # temporary files of this process


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path` that becomes it if the block succeeds, else vanishes.

    Renaming within a folder is atomic, so a reader sees the old file or the new one, and a process
    that is killed leaves nothing under the final name. Raises OSError, naming `path`, where it
    cannot be written, and ValueError if it is a device, a pipe or a folder.
    """
    path = Path(path)
    # /dev/stdout may lead to a regular file, but would itself be replaced.
    is_device = _OF_DEVICES.fullmatch(os.path.realpath(path.parent)) is not None
    if is_device or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} is not a regular file and is not replaced; give a file's name.")
    # A name may have 255 bytes, and the final one may use them all.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}.part")
    _unfinished.add(temporary)
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        mode = os.fstat(handle).st_mode  # what the umask leaves; safetensors makes its own private
        os.close(handle)
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, os.fspath(temporary)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with suppress(OSError):  # there is none where the folder is missing or not ours
            temporary.unlink()
        _unfinished.discard(temporary)


def remove_unfinished() -> None:
    """Remove the temporary files of this process: for one that ends without its `finally`s."""
    for temporary in list(_unfinished):
        with suppress(OSError):
            temporary.unlink()


def save_tensors(
    tensors: dict[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str]
) -> None:
    """Write a .safetensors file, whole or not at all; raises OSError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as part:
        try:
            save_file(tensors, part, metadata=metadata)
        except SafetensorError as error:
            if found := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
            raise


def sha256(path: str | os.PathLike[str]) -> str:
    """The file's SHA-256, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
