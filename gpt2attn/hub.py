"""From a model's name to the folder that holds its files.

A name is looked up as a path, as the built-in model, in the Hub cache and on the Hub, in this
order. A path that exists wins over every other meaning, the built-in name included: a folder the
user can see is never passed over in silence. Only a Hub name whose files are not all in the cache
causes network traffic.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from .untrusted import local_file, read_json, short

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VOCAB, MERGES, TOKENIZER = "vocab.json", "merges.txt", "tokenizer.json"
TOKENIZER_FILES = (
    VOCAB,
    MERGES,
    TOKENIZER,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)
# How other checkpoint formats end, to say what a repository without safetensors has instead.
_OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".gguf",
)

BUILT_IN = {"pocket": Path(__file__).parent / "data" / "pocket"}

_ELSE = "use `--model pocket` (built in) or `--model FOLDER`"

Notify = Callable[[str], None]


class HubError(ValueError):
    """A model's files cannot be had; the message says where they were looked for and what to do."""


@dataclass(frozen=True)
class Source:
    """Where a model's files lie (`folder`), the name that was asked for, and its Hub commit hash.

    `revision` is None for folders and for the built-in model.
    """

    folder: Path
    name: str
    revision: str | None


class _Copy(NamedTuple):
    """A snapshot in the Hub cache (None: there is none) and what it lacks."""

    folder: Path | None
    lacks: list[str]


def resolve(
    name: str | os.PathLike[str], *, revision: str | None = None, notify: Notify | None = None
) -> Source:
    """Find a model's files, downloading them if `name` is a Hub repository that is not cached.

    A cached snapshot that has every needed file is used without any network traffic, so a branch
    stays at the commit that was fetched last; `download` moves it on. `revision` is a branch, tag
    or commit hash, for Hub names only. `notify` gets one line before a download starts.
    Raises `HubError`.
    """
    source = _local(name, revision)
    if source is None:
        name = os.fspath(name)
        copy = _cached_copy(name, revision)
        if copy.folder is not None and not copy.lacks:
            source = Source(copy.folder, name, copy.folder.name)
        else:
            source = _fetch(name, revision, copy, notify)
    _refuse_pointers(source.folder)
    return source


def download(name: str, *, revision: str | None = None, notify: Notify | None = None) -> Source:
    """Ask the Hub for the newest commit of `name` (or for `revision`) and fetch what is missing.

    A cached file whose size differs from the Hub's is fetched again. A folder or the built-in
    model is returned as it is. Raises `HubError`.
    """
    source = _local(name, revision)
    if source is None:
        source = _fetch(name, revision, _cached_copy(name, revision), notify)
    _refuse_pointers(source.folder)
    return source


def shard_names(index: Path) -> list[str]:
    """The shard files that a `model.safetensors.index.json` names, sorted, each once.

    Raises `HubError` for an entry that is not the plain name of a safetensors file: it could lead
    out of the model's folder.
    """
    try:
        weight_map = read_json(index).get("weight_map")
    except ValueError as error:
        raise HubError(str(error)) from None
    if not isinstance(weight_map, dict):
        raise HubError(
            f"{index} is not an index of weight shards (it has no table 'weight_map'); fetch the "
            "file again"
        )
    for tensor, shard in weight_map.items():
        plain = isinstance(shard, str) and not set(shard) & set("/\\:\0")
        if not plain or not shard.endswith(".safetensors"):
            raise HubError(
                f"{index} maps {short(tensor)} to {short(shard)}, which is not the plain name of a "
                ".safetensors file in the same folder; do not use this checkpoint"
            )
    return sorted(set(weight_map.values()))


def _local(name: str | os.PathLike[str], revision: str | None) -> Source | None:
    """The folder or built-in model that `name` means, or None if only the Hub can have it."""
    text = os.fspath(name)
    if not text.strip():
        raise HubError(f"the model's name is empty; {_ELSE} or a Hub name such as gpt2")
    if revision is not None and not revision.strip():
        raise HubError("the revision is empty; leave it out, or give a branch, a tag or a commit")
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if os.path.isdir(path):
        source = Source(path, text, None)
    elif os.path.exists(path):
        raise HubError(f"model {text!r} is a file ({path}); give the folder that holds it")
    elif isinstance(name, str) and name in BUILT_IN:
        source = Source(BUILT_IN[text], text, None)
        if not source.folder.is_dir():
            raise HubError(
                f"the built-in model {text!r} is missing from this installation (no folder "
                f"{source.folder}); reinstall gpt2attn"
            )
    elif "://" in text:
        raise HubError(f"model {text!r} is an address; give the owner/name in it alone, or {_ELSE}")
    elif not isinstance(name, str) or _looks_like_path(text):
        raise HubError(f"model {text!r} is not there: no folder {path}; check the path, or {_ELSE}")
    else:
        return None
    if revision is not None:
        raise HubError(
            f"revision {revision!r} was given for {source.folder}, which has none: only a Hub "
            "name has revisions; leave --revision out"
        )
    return source


def _looks_like_path(text: str) -> bool:
    return (
        text.startswith((".", "~", "/"))
        or text.endswith("/")
        or "\\" in text
        or text.count("/") > 1
        or os.path.isabs(text)
    )


def _cached_copy(name: str, revision: str | None) -> _Copy:
    """What the Hub cache holds of `name` at `revision`, found without network traffic."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = None
    try:
        if not _has_pipes(name):
            # No patterns: this only maps the revision to its folder. Which files a model needs is
            # decided below, and alike for every version of huggingface_hub.
            folder = Path(
                snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[])
            )
    except HFValidationError as error:
        raise HubError(
            f"model {name!r} is neither a folder ({os.path.abspath(name)}) nor a valid Hub "
            f"repository name (such as gpt2 or owner/name); check the spelling, or {_ELSE}"
        ) from error
    except LocalEntryNotFoundError:
        return _Copy(None, [])
    except UnicodeDecodeError:
        pass
    except OSError as error:
        raise HubError(
            f"cannot read the Hub cache for {name!r}: {error}; check its permissions, set "
            f"HF_HUB_CACHE to another folder, or {_ELSE}"
        ) from error
    # The cache joins what refs/ holds to the path without a look at it.
    if folder is None or folder.parent.name != "snapshots" or not folder.is_dir():
        raise HubError(
            f"the copy of {name!r} in the Hub cache {constants.HF_HUB_CACHE} is damaged (its refs "
            f"or its snapshots are not what a Hub cache has); remove its folder "
            f"models--{name.replace('/', '--')}, or {_ELSE}"
        )
    return _Copy(folder, _lacking(name, folder))


def _has_pipes(name: str) -> bool:
    """Whether a pipe or a device stands where the cache keeps notes: to read it may never end."""
    from huggingface_hub import constants

    repository = os.path.join(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    if not os.path.isdir(repository):
        return False
    notes = (
        Path(folder, file)
        for kind in ("refs", "trees")  # the commit of each branch, the files of each commit
        for folder, _, files in os.walk(os.path.join(repository, kind))
        for file in files
    )
    return any(path.exists() and not path.is_file() for path in notes)


def _lacking(name: str, folder: Path) -> list[str]:
    """The needed files that the cached snapshot `folder` lacks, each as a user should read it."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    def has(file: str) -> bool:
        return (folder / file).is_file()  # False for a link that leads nowhere

    def known_absent(file: str) -> bool:
        return try_to_load_from_cache(name, file, revision=folder.name) is _CACHED_NO_EXIST

    needed, unusable = [CONFIG], []
    if not has(TOKENIZER):
        needed += [file for file in (VOCAB, MERGES) if not known_absent(file)]
    if has(INDEX) and not has(WEIGHTS):
        try:
            needed += shard_names(folder / INDEX)
        except HubError as error:
            unusable = [f"a usable index ({error})"]
    else:
        needed.append(WEIGHTS)
    return unusable + [
        f"{file} (a broken link)" if (folder / file).is_symlink() else file
        for file in needed
        if not has(file)
    ]


def _fetch(name: str, revision: str | None, copy: _Copy, notify: Notify | None) -> Source:
    from huggingface_hub import HfApi, constants

    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        _refuse(
            name,
            copy,
            f"{endpoint} was not asked because HF_HUB_OFFLINE is set",
            f"unset HF_HUB_OFFLINE, or {_ELSE}",
        )
    try:
        info = HfApi().model_info(
            name, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        offered = {file.rfilename: file for file in info.siblings or []}
        if unfit := _unfit(offered):
            _refuse(
                name, copy, f"the repository at {endpoint} {unfit}", f"choose another, or {_ELSE}"
            )
        folder = _fetch_files(name, revision, info, offered, notify)
    except HubError:
        raise
    except Exception as error:  # each major version of huggingface_hub has another HTTP library
        network = isinstance(error, (ConnectionError, TimeoutError))
        if isinstance(error, OSError) and error.errno is not None and not network:
            _refuse_cache(name, error.strerror or str(error), error)
        cause, remedy = _explain(error, name, revision, endpoint)
        _refuse(name, copy, cause, remedy, error)
    return Source(folder, name, info.sha)


def _unfit(offered: dict[str, RepoSibling]) -> str | None:
    """Why a repository with these files cannot be used, if so."""
    has_weights = WEIGHTS in offered or INDEX in offered
    if not has_weights and any(file.startswith("adapter_") for file in offered):
        return "has only an adapter (LoRA), which is no model by itself"
    if CONFIG not in offered:
        return f"has no {CONFIG}"
    if has_weights:
        return None
    others = sorted(file for file in offered if file.endswith(_OTHER_WEIGHTS))
    return f"has no {WEIGHTS}, only {', '.join(others) or 'files without weights'}"


def _fetch_files(
    name: str,
    revision: str | None,
    info: ModelInfo,
    offered: dict[str, RepoSibling],
    notify: Notify | None,
) -> Path:
    """Fetch what the cache lacks of the commit `info.sha`; return the snapshot's folder."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    commit = info.sha
    assert commit is not None  # the Hub names the commit that it answers for
    wanted = [CONFIG, *(file for file in TOKENIZER_FILES if file in offered)]
    if WEIGHTS in offered:
        wanted.append(WEIGHTS)
    else:
        shards = shard_names(_fetch_file(name, offered[INDEX], commit))
        if strangers := [shard for shard in shards if shard not in offered]:
            raise HubError(
                f"the repository {name!r} at {constants.ENDPOINT} lacks {', '.join(strangers)}, "
                f"which its {INDEX} names; choose another revision, or {_ELSE}"
            )
        wanted += [INDEX, *shards]
    todo = [offered[file] for file in wanted if not _cached(name, offered[file], commit)]
    if todo:
        _announce(name, len(todo), sum(file.size or 0 for file in todo), notify)
    paths = [_fetch_file(name, offered[file], commit) for file in wanted]
    folder = paths[0].parent
    if TOKENIZER not in offered:
        # Asking once makes huggingface_hub note in its cache that these do not exist; without the
        # note every later run would take the snapshot for incomplete and ask the Hub again.
        for file in {VOCAB, MERGES} - set(offered):
            with suppress(EntryNotFoundError):
                hf_hub_download(name, file, revision=info.sha)
    _remove_partials(folder.parent.parent / "blobs", [offered[file] for file in wanted])
    if revision != info.sha:
        # Last, so that the branch keeps its older, complete snapshot if this run is cut short.
        hf_hub_download(name, CONFIG, revision=revision)
    return folder


def _fetch_file(name: str, file: RepoSibling, commit: str) -> Path:
    """One file's path in the cache, downloaded unless it is there already."""
    from huggingface_hub import hf_hub_download

    # A cached file of the wrong size is damaged, and a plain call would keep it.
    damaged = _cached(name, file, commit) is False
    had = _resumable(name, file, commit)
    while True:
        try:
            path = hf_hub_download(name, file.rfilename, revision=commit, force_download=damaged)
            return Path(path)
        except Exception:
            # Before 2.0 huggingface_hub gives up when the server closes the connection, but keeps
            # what it got and resumes there when called again.
            if (has := _resumable(name, file, commit)) <= had:
                raise
            had = has


def _resumable(name: str, file: RepoSibling, commit: str) -> int:
    """The bytes of `file` that the next call will not fetch again (0 from huggingface_hub 2.0)."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, CONFIG, revision=commit)
    if not isinstance(config, str):
        return 0
    partial = Path(config).parents[2] / "blobs" / f"{_blob(file)}.incomplete"
    try:
        return partial.stat().st_size
    except FileNotFoundError:  # none, or another process has just completed it
        return 0


def _blob(file: RepoSibling) -> str | None:
    """The name of the file's blob in the cache: the sha256 of a file in LFS, else git's hash."""
    return file.lfs.sha256 if file.lfs is not None else file.blob_id


def _cached(name: str, file: RepoSibling, commit: str) -> bool | None:
    """Whether the cached file has the Hub's size; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file.rfilename, revision=commit)
    if not isinstance(path, str):
        return None
    return file.size is None or os.path.getsize(path) == file.size


def _announce(name: str, n_files: int, n_bytes: int, notify: Notify | None) -> None:
    """Say what is about to be fetched; refuse what the disk cannot hold."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if n_bytes > (free := shutil.disk_usage(disk).free):
        _refuse_cache(name, f"{_megabytes(n_bytes)} are needed and {_megabytes(free)} are free")
    if notify is not None:
        files = "1 file" if n_files == 1 else f"{n_files} files"
        notify(
            f"Downloading {name} ({files}, {_megabytes(n_bytes)}) from {constants.ENDPOINT} "
            f"to {cache}"
        )


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.{0 if n_bytes >= 1e7 else 1}f} MB"


def _remove_partials(blobs: Path, files: list[RepoSibling]) -> None:
    """Remove what killed downloads left of blobs that are now complete.

    huggingface_hub names a partial file after its blob. A live download of the same blob is not
    hit: it waits for the blob's lock before it opens a file, and then finds the blob complete.
    """
    for file in files:
        for partial in blobs.glob(f"{_blob(file)}*.incomplete"):
            partial.unlink(missing_ok=True)


def _refuse_pointers(folder: Path) -> None:
    """Refuse Git LFS pointers: a clone without LFS holds them where the real files should be."""
    for file in (CONFIG, *TOKENIZER_FILES, WEIGHTS, INDEX):
        start, path = b"", None
        # Absent, unreadable, or a link that leads outside: for the file's reader to judge.
        with suppress(OSError, ValueError):
            if path := local_file(folder, file):
                with path.open("rb") as stream:
                    start = stream.read(40)
        if path is not None and start.startswith(b"version https://git-lfs.github.com/spec"):
            raise HubError(
                f"{path} ({path.stat().st_size} bytes) is a Git LFS pointer, not the file "
                "itself; fetch the real file (`git lfs pull`)"
            )


def _explain(error: Exception, name: str, revision: str | None, endpoint: str) -> tuple[str, str]:
    """What went wrong on the Hub's side, and the remedy."""
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # "not in the cache either" hides what the Hub answered
    response: Any = getattr(error, "response", None)
    if isinstance(error, GatedRepoError):
        return (
            f"{endpoint} gives this repository only to accounts that were granted access",
            f"ask for access at {endpoint}/{name} and set HF_TOKEN, or {_ELSE}",
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{endpoint} has no such model repository, or it is private",
            f"check the spelling, set HF_TOKEN if it is private, or {_ELSE}",
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{endpoint} has no revision {revision!r} of it",
            "give a branch, a tag or a full commit hash that the repository has",
        )
    if isinstance(error, HfHubHTTPError) and response is not None:
        if response.status_code in (401, 403):
            remedy = f"check HF_TOKEN and what it may read, or {_ELSE}"
        else:
            remedy = f"try again later, or {_ELSE}"
        return f"{endpoint} answered with HTTP status {response.status_code}", remedy
    if isinstance(error, (FileMetadataError, ValueError, TypeError, KeyError)):
        return (
            f"{endpoint} did not answer as a Hub does ({_reason(error)})",
            f"check HF_ENDPOINT and whether a login page is in the way, or {_ELSE}",
        )
    return (
        f"the connection to {endpoint}{_proxy(endpoint)} failed ({_reason(error)})",
        f"check the connection, or {_ELSE}",
    )


def _reason(error: BaseException) -> str:
    """The operating system's words for it if any are in the chain, else the first line."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        link = link.__cause__ or link.__context__
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _proxy(endpoint: str) -> str:
    """' through the proxy HOST:PORT' if one is set, without the password it may carry."""
    from urllib.request import getproxies, proxy_bypass

    target, proxies = urlsplit(endpoint), getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(target.hostname or ""):
        return ""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return f" through the proxy {parts.netloc.rpartition('@')[2]}"


def _refuse(
    name: str, copy: _Copy, cause: str, remedy: str, error: Exception | None = None
) -> NoReturn:
    """Raise the one sentence that says where `name` was looked for, and what to do."""
    from huggingface_hub import constants

    if copy.folder is not None and not copy.lacks:
        raise HubError(
            f"cannot get the newest {name!r}: {cause}; the complete copy in the Hub cache "
            f"({copy.folder}) still works, or {remedy}"
        ) from error
    if copy.folder is None:
        cached = f"it is not in the Hub cache {constants.HF_HUB_CACHE}"
    else:
        cached = f"its copy in the Hub cache ({copy.folder}) lacks {', '.join(copy.lacks)}"
    raise HubError(
        f"cannot get model {name!r}: there is no folder {os.path.abspath(name)}, {cached}, and "
        f"{cause}; {remedy}"
    ) from error


def _refuse_cache(name: str, reason: str, error: Exception | None = None) -> NoReturn:
    from huggingface_hub import constants

    raise HubError(
        f"cannot store {name!r} in the Hub cache {constants.HF_HUB_CACHE}: {reason}; make room "
        f"there, set HF_HUB_CACHE to another folder, or {_ELSE}"
    ) from error
