"""Long jobs over many records, whose results outlive a killed process.

The results of a job are rows, one JSON object a line, in the order of its input. While it runs they
are in `OUT.part`, after a first line that says which job they belong to: its inputs' SHA-256, the
model and the options. When all are there, the rows alone become `OUT`. So a file under the final
name is complete, and the same command goes on where an earlier one was stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from . import __version__
from .files import replacing, sha256

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows; there two runs of one job at once are not noticed
    flock = None  # type: ignore[assignment]

# A killed process loses nothing that was appended; a machine that stops, at most this much.
SYNC_SECONDS = 5.0


def job_record(
    command: str, inputs: Iterable[Path], model: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What makes two runs the same job; `model` is `LanguageModel.provenance`.

    `options` are those that the rows depend on. Numbers of threads and workers are none.
    """
    return {
        "command": command,
        "gpt2attn": __version__,
        "input_sha256": [sha256(path) for path in inputs],
        **model,
        **options,
    }


def check_same_job(found: Any, job: Mapping[str, Any], where: Path, remedy: str) -> None:
    """Raise ValueError, naming what differs, if `found` in `where` is another job's record."""
    job = json.loads(json.dumps(job))  # as it comes back from a file
    if found == job:
        return
    if not isinstance(found, dict):
        raise ValueError(f"{where} was not written by a job of this program; {remedy}.")
    differing = ", ".join(
        sorted(key for key in found.keys() | job.keys() if found.get(key) != job.get(key))
    )
    raise ValueError(f"{where} belongs to another job (it differs in: {differing}); {remedy}.")


def check_result_path(path: Path, *, force: bool = False) -> None:
    """Raise ValueError if there is a result already, so that nobody computes in vain.

    Unless `force`, which replaces it once the new one is complete.
    """
    if path.suffix.lower() != ".jsonl":
        raise ValueError(f"{path} must end in .jsonl: it will hold one JSON object a line.")
    if path.exists() and not force:
        raise ValueError(f"{path} is already there; --force replaces it.")


class ResultFile:
    """The rows of a job, a context manager: what was appended is kept whatever ends the block.

        with ResultFile(out, job_record("score", [source], lm.provenance, options)) as results:
            for record in itertools.islice(read_records(source), results.n_done, None):
                results.append({"line": record.line, ...})

    A block that ends without an exception makes `out` of the rows. A KeyboardInterrupt leaves it
    with a sentence that says how to go on. Raises ValueError if `out` is there already (unless
    `force`), or `out.part` belongs to another job or to a process that still runs.
    """

    def __init__(self, path: Path, job: Mapping[str, Any], *, force: bool = False) -> None:
        check_result_path(path, force=force)
        self.path, self.part = path, path.with_name(f"{path.name}.part")
        if not self.part.exists():
            with replacing(self.part) as part:
                part.write_bytes(_line({"job": job}))
        self._file: BinaryIO = self.part.open("r+b", buffering=0)
        try:
            self._lock()
            with self.part.open("rb") as file:
                self._start = self._read_header(file, job)
                self.n_done = self._drop_torn(file)
        except BaseException:
            self._file.close()
            raise
        self.n_rows = self.n_done  # those appended since, too
        self._synced = time.monotonic()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                self._finish()
            elif self.n_rows == 0:
                self.part.unlink(missing_ok=True)
            else:
                os.fsync(self._file.fileno())
        if isinstance(error, KeyboardInterrupt) and self.n_rows:
            raise KeyboardInterrupt(
                f"Records done: {self.n_rows}, kept in {self.part}; "
                "the same command goes on after them."
            ) from None

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write `rows` at the end. A number that JSON does not have (NaN) raises ValueError."""
        raw = memoryview(b"".join(map(_line, rows)))
        while raw:
            raw = raw[self._file.write(raw) :]
        self.n_rows += len(rows)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows so far, read from the file, those of earlier runs among them."""
        with self.part.open("rb") as file:
            file.seek(self._start)
            yield from map(json.loads, file)

    def _lock(self) -> None:
        if flock is None:
            return
        try:
            flock(self._file, LOCK_EX | LOCK_NB)
        except OSError:
            raise ValueError(f"{self.part} is being written by another process.") from None

    def _read_header(self, file: BinaryIO, job: Mapping[str, Any]) -> int:
        """Where the rows begin, if they are this job's."""
        try:
            found = json.loads(file.readline())["job"]
        except (ValueError, KeyError, TypeError, RecursionError):
            found = None
        check_same_job(found, job, self.part, "remove it or write to another file")
        return file.tell()

    def _drop_torn(self, file: BinaryIO) -> int:
        """How many rows are whole; what a kill or a stopped machine left after them is cut off."""
        n_rows, end = 0, self._start
        for raw in file:
            if not (raw.startswith(b"{") and raw.endswith(b"}\n")):
                break
            n_rows, end = n_rows + 1, end + len(raw)
        self._file.truncate(end)
        self._file.seek(end)
        return n_rows

    def _finish(self) -> None:
        with replacing(self.path) as complete, complete.open("wb") as file:
            self._file.seek(self._start)
            shutil.copyfileobj(self._file, file, 2**20)
            file.flush()
            os.fsync(file.fileno())
        self.part.unlink()


def _line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8; its escape is what JSON would write.
    return text.encode("utf-8", "backslashreplace") + b"\n"
