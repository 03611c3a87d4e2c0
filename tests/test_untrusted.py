"""What strangers' files may claim, and what is believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpt2attn.untrusted import LONGEST_MESSAGE, local_file, one_line, read_bytes, read_json, short


class TestLocalFile:
    def test_what_is_no_regular_file_is_not_there(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for ever
        (tmp_path / "folder").mkdir()
        (tmp_path / "dangling").symlink_to("nowhere")
        (tmp_path / "loop").symlink_to("loop")
        for name in ("pipe", "folder", "dangling", "loop", "missing", "pipe/x"):
            assert local_file(tmp_path, name) is None

    def test_a_link_may_lead_within_the_folder_only(self, tmp_path: Path) -> None:
        folder, outside = tmp_path / "model", tmp_path / "secret"
        folder.mkdir()
        outside.write_text("x")
        (folder / "real").write_text("x")
        (folder / "within").symlink_to("real")
        (folder / "around").symlink_to("../model/real")
        (folder / "out").symlink_to("../secret")
        (folder / "absolute").symlink_to(outside)
        (folder / "chain").symlink_to("out")
        (folder / "sub").symlink_to("..")
        for name in ("real", "within", "around"):
            assert local_file(folder, name) == folder / name
        for name in ("out", "absolute", "chain", "sub/secret"):
            with pytest.raises(ValueError, match="outside the model's folder, and is not followed"):
                local_file(folder, name)
        (tmp_path / "link").symlink_to(folder)
        assert local_file(tmp_path / "link", "within") == tmp_path / "link" / "within"

    def test_the_hub_caches_own_links_work_and_no_others(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
        blobs = tmp_path / "models--a--b" / "blobs"
        other = tmp_path / "models--c--d" / "blobs"
        for folder in (snapshot, blobs, other):
            folder.mkdir(parents=True)
        for blob in (blobs / "1", other / "1", tmp_path / "secret"):
            blob.write_text("x")
        (snapshot / "good").symlink_to("../../blobs/1")
        assert local_file(snapshot, "good") == snapshot / "good"
        (blobs / "out").symlink_to(tmp_path / "secret")
        links = {"other": "../../../models--c--d/blobs/1", "up": "../../../secret"}
        links |= {"through": "../../blobs/out", "dots": "../../blobs/../../secret"}
        for name, target in links.items():
            (snapshot / name).symlink_to(target)
            with pytest.raises(ValueError, match="outside the model's folder"):
                local_file(snapshot, name)

    def test_blobs_beside_another_folder_are_not_the_caches(self, tmp_path: Path) -> None:
        folder = tmp_path / "models" / "mine" / "0123"
        folder.mkdir(parents=True)
        (tmp_path / "models" / "blobs").mkdir()
        (tmp_path / "models" / "blobs" / "1").write_text("x")
        (folder / "config.json").symlink_to("../../blobs/1")
        with pytest.raises(ValueError, match="outside the model's folder"):
            local_file(folder, "config.json")

    def test_blobs_that_are_themselves_a_link_are_not_the_caches(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "evil" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (tmp_path / "secret").write_text("x")
        (tmp_path / "evil" / "blobs").symlink_to(tmp_path)
        (snapshot / "config.json").symlink_to("../../blobs/secret")
        with pytest.raises(ValueError, match="outside the model's folder"):
            local_file(snapshot, "config.json")


def test_no_more_is_read_than_a_file_may_have(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.touch()
    os.truncate(path, 2**40)  # a hole
    with pytest.raises(ValueError, match=r"huge.json has more than 10 bytes"):
        read_bytes(path, 10)
    with pytest.raises(ValueError, match=r"huge.json has more than 1,000,000 bytes"):
        read_json(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' stands there twice"),
        (b'{"c": {"a": 1, "\\u0061": 3}}', "the key 'a' stands there twice"),
        (b"[1]", "must be a JSON object, not a list"),
        (b"{'a': 1}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"", r"is empty \(0 bytes\)"),
        (b" \n<!DOCTYPE HTML><title>404</title>", "is an HTML page"),
        (b"<?xml version='1.0'?><Error/>", "is an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid x", "is a Git LFS pointer"),
    ],
)
def test_json_of_strangers(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(tmp_path / "x.json")
    assert str(tmp_path / "x.json") in str(caught.value)
    assert str(caught.value).isprintable()


def test_messages_are_safe_to_print_and_have_an_end() -> None:
    assert one_line("é漢: a\nb\x1b[2J\u202e\ud800") == "é漢: a\\nb\\x1b[2J\\u202e\\ud800"
    shown = one_line("x" * (LONGEST_MESSAGE + 1_234_567))
    assert shown.endswith(" ... (1,234,567 more characters)")
    assert len(short("x" * 10**6)) < 250
    assert short("../other.safetensors") == "'../other.safetensors'"
