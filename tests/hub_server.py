"""A local HTTP server that speaks the Hub's protocol, for tests that must not use the network.

It serves a model's metadata, its file tree and its files. Files that the Hub keeps in Git LFS are
redirected to another host name, as the Hub redirects to its CDN. It announces no xet storage.
Transfers can be cut or held in the middle, and every request is logged.

    with HubServer() as server:
        commit = server.add("gpt2", {"config.json": b"{}", "model.safetensors": Path("x")})
        subprocess.run([...], env=server.env(tmp_path))
        assert server.fetched() == ["config.json", "model.safetensors"]
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

CHUNK = 1 << 20
TOKEN = "hf_test"


@dataclass(frozen=True)
class Generated:
    """`size` bytes that differ in every 1 MiB chunk, made as they are read and never stored."""

    size: int

    def chunks(self, start: int) -> Iterator[bytes]:
        body = hashlib.shake_128(b"body").digest(CHUNK - 8)
        for number in range(start // CHUNK, -(-self.size // CHUNK)):
            chunk = (number.to_bytes(8, "little") + body)[: self.size - number * CHUNK]
            yield chunk[max(0, start - number * CHUNK) :]


@dataclass(frozen=True)
class File:
    """One file of a repository: bytes, a path on disk, or generated content."""

    name: str
    content: bytes | Path | Generated

    @property
    def size(self) -> int:
        if isinstance(self.content, Path):
            return self.content.stat().st_size
        return self.content.size if isinstance(self.content, Generated) else len(self.content)

    @property
    def lfs(self) -> bool:
        return self.name.endswith((".safetensors", ".bin"))

    @cached_property
    def etag(self) -> str:
        """The git blob hash, or the sha256 of a file in LFS, as on the Hub."""
        digest = hashlib.sha256() if self.lfs else hashlib.sha1(b"blob %d\0" % self.size)
        for chunk in self.chunks(0):
            digest.update(chunk)
        return digest.hexdigest()

    def chunks(self, start: int) -> Iterator[bytes]:
        if isinstance(self.content, Generated):
            yield from self.content.chunks(start)
        elif isinstance(self.content, Path):
            with self.content.open("rb") as stream:
                stream.seek(start)
                while chunk := stream.read(CHUNK):
                    yield chunk
        else:
            yield from (self.content[i : i + CHUNK] for i in range(start, self.size, CHUNK))


@dataclass
class Repo:
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    authorization: str | None


@dataclass(frozen=True)
class Transfer:
    """The content of a file that was asked for, with the request's Range header."""

    file: str
    range: str | None


class HubServer:
    """Serves repositories on 127.0.0.1 while used as a context manager.

    `cut[file]` lists byte counts: each transfer of `file` takes the next one and is dropped after
    so many bytes. A transfer of `hold[0]` stops after `hold[1]` bytes, sets `held` and waits for
    `release`. `status`, if set, answers every request.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.transfers: list[Transfer] = []
        self.cut: dict[str, list[int]] = {}
        self.hold: tuple[str, int] | None = None
        self.held = threading.Event()
        self.release = threading.Event()
        self.status: int | None = None

    def __enter__(self) -> HubServer:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.hub = self
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def add(
        self,
        repo: str,
        files: Mapping[str, bytes | Path | Generated],
        *,
        branch: str = "main",
        gated: bool = False,
    ) -> str:
        """Commit `files` to a repository's branch; return the commit hash."""
        commit = {name: File(name, content) for name, content in files.items()}
        listing = [repo, *(f"{file.name} {file.etag}" for file in commit.values())]
        sha = hashlib.sha1("\n".join(listing).encode()).hexdigest()
        entry = self.repos.setdefault(repo, Repo())
        entry.commits[sha], entry.branches[branch], entry.gated = commit, sha, gated
        return sha

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a client: this server as the Hub, `home` as HF_HOME, no proxy."""
        proxies = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
            and key.lower() not in proxies
        }
        return kept | {"HF_ENDPOINT": self.url, "HF_HOME": str(home)} | more

    def fetched(self) -> list[str]:
        """The files whose content was asked for, in the order of the requests."""
        return [transfer.file for transfer in self.transfers]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def log_message(self, *_: object) -> None:
        """Keep the test's stderr clean; requests are logged in `HubServer.requests`."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.hub.requests.append(Request(self.command, self.path, self.headers["Authorization"]))
        path = urlsplit(self.path).path
        if self.hub.status is not None:
            self.reply(self.hub.status)
        elif path.startswith("/cdn/"):
            etag = path.removeprefix("/cdn/")
            every = (commit for repo in self.hub.repos.values() for commit in repo.commits.values())
            self.transfer(next(f for commit in every for f in commit.values() if f.etag == etag))
        elif path.startswith("/api/models/"):
            self.metadata(path.removeprefix("/api/models/"))
        else:
            name, _, rest = path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self.resolve(name, unquote(revision), unquote(file))

    def metadata(self, path: str) -> None:
        for verb in ("/revision/", "/tree/"):
            name, found, revision = path.partition(verb)
            if found:
                break
        repo, commit = self.find(name, unquote(revision) or "main")
        if commit is None:
            return
        files = repo.commits[commit].values()
        if "/tree/" in path:
            self.reply(
                200, json.dumps([{"type": "file", "path": f.name, **entry(f)} for f in files])
            )
        else:
            siblings = [{"rfilename": f.name, "blobId": entry(f)["oid"], **entry(f)} for f in files]
            answer = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
            self.reply(200, json.dumps(answer | {"private": False, "tags": [], "downloads": 0}))

    def resolve(self, name: str, revision: str, file: str) -> None:
        repo, commit = self.find(name, revision)
        if commit is None:
            return
        token = self.headers["Authorization"]
        headers = {"X-Repo-Commit": commit}
        if repo.gated and token != f"Bearer {TOKEN}":
            self.reply(403 if token else 401, code="GatedRepo")
        elif file not in repo.commits[commit]:
            self.reply(404, code="EntryNotFound", headers=headers)
        elif (found := repo.commits[commit][file]).lfs:
            headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{found.etag}"
            headers["X-Linked-Etag"] = f'"{found.etag}"'
            headers["X-Linked-Size"] = str(found.size)
            self.reply(302, headers=headers)
        else:
            self.transfer(found, headers)

    def find(self, name: str, revision: str) -> tuple[Repo, str] | tuple[None, None]:
        """The repository and commit asked for; answers 404 itself if there is none."""
        repo = self.hub.repos.get(name)
        if repo is None:
            self.reply(404, code="RepoNotFound")
            return None, None
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            self.reply(404, code="RevisionNotFound")
            return None, None
        return repo, commit

    def transfer(self, file: File, headers: Mapping[str, str] | None = None) -> None:
        span = self.headers["Range"]
        start = int((span or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if self.command == "GET":
            self.hub.transfers.append(Transfer(file.name, span))
        self.send_response(206 if span else 200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("ETag", f'"{file.etag}"')
        self.send_header("Content-Length", str(file.size - start))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{file.size - 1}/{file.size}")
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # a client that was killed
                self.send(file, start)

    def send(self, file: File, start: int) -> None:
        cuts = self.hub.cut.get(file.name)
        stop = cuts.pop(0) if cuts else None
        held_at = self.hub.hold[1] if self.hub.hold and self.hub.hold[0] == file.name else None
        sent = 0
        for chunk in file.chunks(start):
            if stop is not None and sent + len(chunk) >= stop:
                self.wfile.write(chunk[: stop - sent])
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if held_at is not None and sent >= held_at:
                self.hub.held.set()
                self.hub.release.wait(60)
            self.wfile.write(chunk)
            sent += len(chunk)

    def reply(
        self,
        status: int,
        body: str = "",
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if code is not None:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())


def entry(file: File) -> dict[str, object]:
    """A file's size and hashes as the Hub lists them."""
    if not file.lfs:
        return {"size": file.size, "oid": file.etag}
    pointer = hashlib.sha1(file.etag.encode()).hexdigest()
    lfs = {"sha256": file.etag, "oid": file.etag, "size": file.size, "pointerSize": 134}
    return {"size": file.size, "oid": pointer, "lfs": lfs}
