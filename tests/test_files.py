"""Files are whole or not there, whatever the disk says."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cli_runner import run

from gpt2attn import Tokenizer, load_model, save_model
from gpt2attn.files import replacing, save_tensors

TEXT = "Apple raised its price target and then it did so again because it could " * 3


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """No file can grow beyond `n_bytes`: a full disk that needs no rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A tmpfs in `folder`; the test is skipped where this user may not mount one."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", folder]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"needs the right to mount a file system: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 20 kB."""
    with mounted(tmp_path, "size=20k"):
        yield tmp_path


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write into; root, whom no mode stops, gets a read-only mount."""
    folder = tmp_path / "unwritable"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
    else:
        with mounted(folder, "ro"):
            yield folder


class TestReplacing:
    def test_the_old_file_stays_until_the_new_one_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_text("old")
        with replacing(path) as part:
            part.write_text("new")
            assert path.read_text() == "old"
            assert part.parent == tmp_path
        assert path.read_text() == "new"
        for error in (KeyError, KeyboardInterrupt, SystemExit):
            with pytest.raises(error), replacing(path) as part:  # noqa: PT012
                part.write_text("half")
                raise error
        assert path.read_text() == "new"
        assert names(tmp_path) == ["x"]

    def test_a_name_may_be_as_long_as_the_system_allows(self, tmp_path: Path) -> None:
        for name in ("n" * 255, "漢" * 85):
            with replacing(tmp_path / name) as part:
                part.write_text("x")
        assert len(names(tmp_path)) == 2

    def test_errors_name_the_final_path(self, tmp_path: Path) -> None:
        path = tmp_path / "nowhere" / "x"
        with pytest.raises(FileNotFoundError) as caught, replacing(path):
            pass
        assert caught.value.filename == str(path)
        path = tmp_path / "x"
        with (
            pytest.raises(OSError, match="File too large") as caught,
            largest_file(100),
            replacing(path) as part,
        ):
            part.write_bytes(bytes(101))
        assert caught.value.filename == str(path)
        with pytest.raises(FileNotFoundError) as caught, replacing(path):
            (tmp_path / "another").read_bytes()
        assert caught.value.filename == str(tmp_path / "another")
        assert names(tmp_path) == []

    def test_devices_pipes_and_folders_are_not_replaced(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "folder").mkdir()
        (tmp_path / "null").symlink_to("/dev/null")
        for name in ("pipe", "folder", "null", "/dev/null", "/dev/stdout"):
            with (
                pytest.raises(ValueError, match="is not a regular file"),
                replacing(tmp_path / name),
            ):
                pytest.fail("the block ran")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
        assert names(tmp_path) == ["folder", "null", "pipe"]

    def test_a_link_is_replaced_not_what_it_leads_to(self, tmp_path: Path) -> None:
        (tmp_path / "blob").write_text("old")
        (tmp_path / "link").symlink_to("blob")
        with replacing(tmp_path / "link") as part:
            part.write_text("new")
        assert (tmp_path / "blob").read_text() == "old"
        assert not (tmp_path / "link").is_symlink()


def test_tensors_that_find_no_room_are_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(OSError, match="File too large") as caught, largest_file(1000):
        save_tensors({"a": torch.ones(1000)}, path, {})
    assert caught.value.filename == str(path)
    assert names(tmp_path) == []


SUFFIXES = ("safetensors", "npz", "json", "csv", "png", "html")


def failed(result: object, path: Path, status: int, words: str) -> None:
    """The work failed with one sentence that names the file."""
    assert result.status == status, result.stderr
    assert result.stderr.splitlines()[-1] == f"error: {path}: {words}."


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    folder: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"maps.{suffix}"
    with largest_file(5000):
        result = run("attention", TEXT, "-m", folder, "-o", path)
    failed(result, path, 1, "File too large")
    assert names(tmp_path) == []


def test_a_small_file_system(folder: Path, disk: Path) -> None:
    path = disk / "maps.safetensors"
    words = "No space left on device"
    failed(run("attention", TEXT, "-m", folder, "-o", path), path, 1, words)
    path = disk / "maps.npz"
    attention = ("--attention", path, "-n", "40")
    failed(run("generate", TEXT, "-m", folder, *attention), path, 1, words)
    path = disk / "lesson.html"
    failed(run("explain", TEXT, "-m", folder, "-s", "1-4", "-o", path), path, 1, words)
    path = disk / "tokens.csv"
    failed(run("score", TEXT * 20, "-m", folder, "--csv", path), path, 1, words)
    assert names(disk) == []
    model = load_model(folder)
    with pytest.raises(OSError, match=f"cannot save the model in {disk}: {words}"):
        save_model(model, disk)
    with pytest.raises(OSError, match=words):
        Tokenizer.gpt2().save(disk)
    assert names(disk) == []


def test_a_folder_that_may_not_be_written(folder: Path, unwritable: Path) -> None:
    words = "Permission denied" if os.geteuid() else "Read-only file system"
    for suffix in ("safetensors", "npz", "png"):
        path = unwritable / f"maps.{suffix}"
        failed(run("attention", "one", "-m", folder, "-o", path), path, 2, words)
    path = unwritable / "lesson.md"
    failed(run("explain", "one two", "-m", folder, "-s", "1", "-o", path), path, 2, words)
    path = unwritable / "tokens.csv"
    failed(run("score", "one", "-m", folder, "--csv", path), path, 2, words)
    with pytest.raises(OSError, match=f"cannot save the model in {unwritable}: {words}"):
        save_model(load_model(folder), unwritable)
    assert names(unwritable) == []


def test_a_file_is_as_open_as_the_umask_says(tmp_path: Path) -> None:
    """safetensors alone makes files that only their owner can read."""
    path = tmp_path / "a.safetensors"
    before = os.umask(0o027)
    try:
        save_tensors({"a": torch.zeros(3)}, path, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
