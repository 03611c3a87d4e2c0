"""Names and downloads, end to end against a local server that speaks the Hub's protocol.

huggingface_hub reads its environment when it is imported, so every client is a process of its own.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import TOKEN, Generated, HubServer

from gpt2attn import hub

ROOT = Path(hub.__file__).parents[1]
CLIENT = """
import json, sys, time
from gpt2attn import hub
call, name, revision = sys.argv[1:]
notes, start = [], time.perf_counter()
try:
    source = getattr(hub, call)(name, revision=revision or None, notify=notes.append)
    answer = {"folder": str(source.folder), "name": source.name, "revision": source.revision}
except hub.HubError as error:
    answer = {"error": str(error)}
answer |= {"notes": notes, "seconds": time.perf_counter() - start, "torch": "torch" in sys.modules}
print(json.dumps(answer))
"""
# Seconds: the Hub's client waits 10 for an answer; to import it takes up to 2 on a busy machine.
AT_ONCE = 6
# Nothing listens on the discard port of a test machine.
NOWHERE = "127.0.0.1:9"
# More than one of huggingface_hub's 10 MiB chunks, so that a part of it reaches the disk.
WEIGHTS = Generated(25_000_000)
SMALL = {
    "config.json": b'{"model_type": "gpt2"}',
    "vocab.json": b'{"a": 0}',
    "merges.txt": b"#version: 0.2\n",
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": Generated(100_000),
}
OTHERS = {
    ".gitattributes": b"*.bin filter=lfs\n",
    "README.md": b"# GPT-2\n",
    "pytorch_model.bin": b"pickle",
    "tf_model.h5": b"h5",
    "onnx/config.json": b"{}",
    "generation_config.json": b"{}",
}


@pytest.fixture
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def ask(server, tmp_path):
    """Run `resolve` or `download` in a process of its own, in an empty folder."""
    work = tmp_path / "work"
    work.mkdir()

    def start(name, revision="", *, call="resolve", prelude="", **env):
        env = server.env(tmp_path / "home", PYTHONPATH=str(ROOT), **env)
        command = [sys.executable, "-c", prelude + CLIENT, call, str(name), revision]
        return subprocess.Popen(command, env=env, cwd=work, stdout=subprocess.PIPE, text=True)

    def ask(*args, **kwargs):
        with start(*args, **kwargs) as process:
            output = process.communicate(timeout=120)[0]
        assert process.returncode == 0
        return json.loads(output)

    ask.start, ask.work, ask.cache = start, work, tmp_path / "home" / "hub"
    return ask


def snapshot(ask, repo, commit):
    return ask.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / commit


def partials(ask):
    return list(ask.cache.rglob("*.incomplete"))


def sha256(content):
    digest = hashlib.sha256()
    chunks = content.chunks(0) if isinstance(content, Generated) else read(content)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def read(path):
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            yield chunk


def one_sentence(answer, *parts):
    """Check that the answer is an error in one line that names `parts` and a way on."""
    message = answer["error"]
    assert "\n" not in message
    for part in (*parts, "--model pocket", "--model FOLDER"):
        assert str(part) in message
    return message


def test_only_needed_files_are_fetched_once(server, ask):
    commit = server.add("gpt2", SMALL | OTHERS)
    answer = ask("gpt2")
    assert sorted(server.fetched()) == sorted(SMALL)
    folder = snapshot(ask, "gpt2", commit)
    assert (answer["folder"], answer["name"], answer["revision"]) == (str(folder), "gpt2", commit)
    assert sorted(path.name for path in folder.iterdir()) == sorted(SMALL)
    assert sha256(folder / "model.safetensors") == sha256(SMALL["model.safetensors"])
    assert answer["notes"] == [
        f"Downloading gpt2 (5 files, 0.1 MB) from {server.url} to {ask.cache}"
    ]
    assert not answer["torch"]

    server.requests.clear()
    again = ask("gpt2")
    assert (again["folder"], again["notes"], server.requests) == (str(folder), [], [])


@pytest.mark.slow
def test_full_size_file_resumes_by_range(server, ask):
    size = 548_105_171  # of gpt2's model.safetensors on the Hub
    weights = Generated(size)
    server.add("gpt2", SMALL | {"model.safetensors": weights})
    server.cut["model.safetensors"] = [300_000_000]
    answer = ask("gpt2")
    path = Path(answer["folder"], "model.safetensors")
    try:
        assert "(5 files, 548 MB)" in answer["notes"][0]
        assert path.stat().st_size == size
        assert sha256(path) == sha256(weights)
        assert [t.range is not None for t in server.transfers[-2:]] == [False, True]
    finally:
        path.resolve().unlink()


def test_dropped_connection_resumes_by_range(server, ask):
    server.add("gpt2", SMALL | {"model.safetensors": WEIGHTS})
    server.cut["model.safetensors"] = [11_000_000, 11_000_000]
    path = Path(ask("gpt2")["folder"], "model.safetensors")
    assert sha256(path) == sha256(WEIGHTS)
    spans = [transfer.range for transfer in server.transfers if transfer.file == path.name]
    starts = [int(span.removeprefix("bytes=").rstrip("-")) for span in spans[1:]]
    assert spans[0] is None
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1] < WEIGHTS.size
    assert not partials(ask)


@pytest.mark.slow  # huggingface_hub waits between its attempts
def test_connection_that_never_holds_leaves_no_file(server, ask):
    commit = server.add("gpt2", SMALL)
    server.cut["model.safetensors"] = [10] * 20
    one_sentence(ask("gpt2"), "'gpt2'", f"connection to {server.url} failed", ask.cache)
    assert not (snapshot(ask, "gpt2", commit) / "model.safetensors").exists()


def test_killed_download_starts_again(server, ask):
    commit = server.add("gpt2", SMALL | {"model.safetensors": WEIGHTS})
    server.hold = ("model.safetensors", 12_000_000)
    with ask.start("gpt2") as process:
        assert server.held.wait(60)
        wait_until(lambda: any(path.stat().st_size for path in partials(ask)))
        process.kill()
    assert process.returncode == -signal.SIGKILL
    path = snapshot(ask, "gpt2", commit) / "model.safetensors"
    assert partials(ask)
    assert not os.path.lexists(path)
    one_sentence(ask("gpt2", HF_HUB_OFFLINE="1"), ask.cache)

    server.hold = None
    server.release.set()
    assert ask("gpt2")["folder"] == str(path.parent)
    assert sha256(path) == sha256(WEIGHTS)
    assert not partials(ask)


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_fill_one_cache(server, ask):
    server.add("gpt2", SMALL | {"model.safetensors": WEIGHTS})
    server.hold = ("model.safetensors", 2_000_000)
    with ask.start("gpt2") as first, ask.start("gpt2") as second:
        # Both know the file's blob and want it; one of them is in the middle of it.
        wait_until(
            lambda: sum(r.method == "HEAD" and "safe" in r.path for r in server.requests) > 1
        )
        assert server.held.wait(60)
        server.release.set()
        answers = [json.loads(process.communicate(timeout=60)[0]) for process in (first, second)]
    assert answers[0]["folder"] == answers[1]["folder"]
    assert sha256(Path(answers[0]["folder"], "model.safetensors")) == sha256(WEIGHTS)
    assert server.fetched().count("model.safetensors") == 1
    assert not partials(ask)


def test_no_network(server, ask):
    """D58."""
    commit = server.add("gpt2", SMALL)
    ask("gpt2")
    server.requests.clear()
    dead = {"HF_ENDPOINT": f"http://{NOWHERE}"}
    folder = str(snapshot(ask, "gpt2", commit))
    assert ask("gpt2", **dead)["folder"] == folder
    assert ask("gpt2", commit, **dead)["folder"] == folder

    answer = ask("openai-community/gpt2", **dead)
    one_sentence(
        answer,
        "'openai-community/gpt2'",
        ask.work / "openai-community" / "gpt2",
        ask.cache,
        NOWHERE,
        "Connection refused",
    )
    assert answer["seconds"] < AT_ONCE
    newest = one_sentence(ask("gpt2", call="download", **dead), folder, "Connection refused")
    assert "still works" in newest
    assert server.requests == []


def test_dead_proxy_is_named_without_its_password(ask):
    """D58."""
    proxy = f"http://user:secret@{NOWHERE}"
    answer = ask("gpt2", HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=proxy, http_proxy=proxy)
    message = one_sentence(answer, "http://hub.invalid", f"proxy {NOWHERE}")
    assert "secret" not in message
    assert answer["seconds"] < AT_ONCE


def test_no_socket_is_opened_without_need(server, ask):
    """D58: a folder, and a name that is cached."""
    server.add("gpt2", SMALL)
    folder = ask("gpt2")["folder"]
    (ask.work / "mine").mkdir()
    prelude = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
    )
    assert ask("mine", prelude=prelude)["folder"] == str(ask.work / "mine")
    assert ask("gpt2", prelude=prelude)["folder"] == folder
    missing = ask("./nothing", prelude=prelude)
    one_sentence(missing, ask.work / "nothing")


def test_offline_mode(server, ask):
    """D58."""
    server.add("gpt2", SMALL)
    folder = ask("gpt2")["folder"]
    server.requests.clear()
    assert ask("gpt2", HF_HUB_OFFLINE="1")["folder"] == folder
    for call in ("resolve", "download"):
        one_sentence(ask("distilgpt2", call=call, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE", ask.cache)
    assert server.requests == []


def test_revisions(server, ask):
    old = server.add("gpt2", SMALL)
    server.add("gpt2", SMALL, branch="v1")
    assert ask("gpt2")["revision"] == old
    new = server.add("gpt2", SMALL | {"config.json": b'{"n_layer": 12}'})

    server.requests.clear()
    assert ask("gpt2")["revision"] == old  # cached: the branch stays where it was
    assert server.requests == []
    server.transfers.clear()
    assert ask("gpt2", call="download")["revision"] == new
    assert server.fetched() == ["config.json"]
    assert ask("gpt2")["revision"] == new
    assert ask("gpt2", "v1")["revision"] == old
    server.requests.clear()
    for revision in ("v1", old):
        pinned = ask("gpt2", revision, HF_HUB_OFFLINE="1")
        assert pinned["revision"] == old
        assert Path(pinned["folder"], "config.json").read_bytes() == SMALL["config.json"]
    assert server.requests == []
    assert "'v2'" in ask("gpt2", "v2")["error"]


def test_update_cut_short_keeps_the_older_snapshot(server, ask):
    old = server.add("gpt2", SMALL)
    ask("gpt2")
    server.add("gpt2", SMALL | {"model.safetensors": WEIGHTS})
    server.hold = ("model.safetensors", 2_000_000)
    with ask.start("gpt2", call="download") as process:
        assert server.held.wait(60)
        process.kill()
    assert ask("gpt2", HF_HUB_OFFLINE="1")["revision"] == old


def test_snapshot_that_lacks_a_file_is_completed(server, ask):
    commit = server.add("gpt2", SMALL)
    folder = Path(ask("gpt2")["folder"])
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").unlink()
    (folder / "model.safetensors").resolve().unlink()

    message = one_sentence(ask("gpt2", HF_HUB_OFFLINE="1"), folder)
    assert "lacks merges.txt, model.safetensors (a broken link)," in message
    server.transfers.clear()
    answer = ask("gpt2")
    assert answer["revision"] == commit
    assert "(3 files, 0.1 MB)" in answer["notes"][0]
    assert server.fetched() == ["model.safetensors"]  # the other two blobs were still there
    assert sha256(folder / "model.safetensors") == sha256(SMALL["model.safetensors"])


def test_cache_that_another_program_filled_in_part(server, ask):
    commit = server.add("gpt2", SMALL)
    prelude = (
        "from huggingface_hub import snapshot_download\n"
        "snapshot_download('gpt2', allow_patterns=['*.safetensors', 'config.json'])\n"
    )
    assert ask("gpt2", prelude=prelude)["revision"] == commit
    assert sorted(set(server.fetched())) == sorted(SMALL)


def test_damaged_file_is_fetched_again(server, ask):
    server.add("gpt2", SMALL)
    path = Path(ask("gpt2")["folder"], "model.safetensors")
    path.resolve().write_bytes(b"short")
    server.transfers.clear()
    ask("gpt2", call="download")
    assert server.fetched() == ["model.safetensors"]
    assert sha256(path) == sha256(SMALL["model.safetensors"])


def test_repository_without_a_tokenizer_is_complete_without_one(server, ask):
    names = ("config.json", "model.safetensors")
    server.add("someone/tiny", {name: SMALL[name] for name in names})
    folder = ask("someone/tiny")["folder"]
    server.requests.clear()
    assert ask("someone/tiny")["folder"] == folder
    assert server.requests == []


def test_sharded_repository(server, ask):
    shards = {f"model-0000{i}-of-00002.safetensors": Generated(50_000 + i) for i in (1, 2)}
    first, second = shards
    index = {"metadata": {}, "weight_map": {"wte": second, "wpe": first, "ln_f": second}}
    files = SMALL | OTHERS | shards | {"model.safetensors.index.json": json.dumps(index).encode()}
    del files["model.safetensors"]
    server.add("gpt2", files)
    folder = Path(ask("gpt2")["folder"])
    wanted = sorted(set(files) - set(OTHERS))
    assert sorted(server.fetched()) == wanted
    assert sorted(path.name for path in folder.iterdir()) == wanted
    assert hub.shard_names(folder / "model.safetensors.index.json") == [first, second]

    (folder / second).unlink()
    assert f"lacks {second}," in one_sentence(ask("gpt2", HF_HUB_OFFLINE="1"))
    assert ask("gpt2")["folder"] == str(folder)

    (folder / "model.safetensors.index.json").resolve().write_text("<html>\n\n")
    one_sentence(ask("gpt2", HF_HUB_OFFLINE="1"), "index.json (8 bytes)", "HTML page")
    assert ask("gpt2")["folder"] == ask("gpt2", HF_HUB_OFFLINE="1")["folder"] == str(folder)


OUTSIDE = ["../x.safetensors", "/abs/x.safetensors", "sub/../../x.safetensors", "..\\x", "C:x"]
OUTSIDE += ["C:x.safetensors", "sub/x.safetensors", "x\0.safetensors", "", 7, None, "x.bin", []]


@pytest.mark.parametrize("shard", OUTSIDE)
def test_shard_outside_the_folder_is_refused(shard, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"ok": "a.safetensors", "h.0.attn": shard}}))
    with pytest.raises(hub.HubError) as error:
        hub.shard_names(index)
    assert all(part in str(error.value) for part in (str(index), "'h.0.attn'", repr(shard)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("<html>", "HTML page"),
        ("[]", "must be a JSON object"),
        ("{}", "not an index of weight shards"),
        ('{"weight_map": []}', "not an index of weight shards"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' stands there twice"),
        ("\xff", "not valid JSON"),
        (" " * 1_000_001, "more than 1,000,000 bytes"),
    ],
)
def test_index_that_is_none_is_refused(text, reason, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode("latin-1"))
    with pytest.raises(hub.HubError, match=f"{index}.* {reason}"):
        hub.shard_names(index)


def test_repository_whose_index_leads_outside_or_nowhere(server, ask):
    files = {"config.json": b"{}"}
    for repo, shard in (("a/outside", "../x.safetensors"), ("a/nowhere", "x.safetensors")):
        index = json.dumps({"weight_map": {"wte": shard}}).encode()
        server.add(repo, files | {"model.safetensors.index.json": index})
        server.transfers.clear()
        message = ask(repo)["error"]
        assert shard in message
        assert "\n" not in message
        assert server.fetched() == ["model.safetensors.index.json"]


def test_repository_without_safetensors(server, ask):
    server.add("old/gpt2", {"config.json": b"{}"} | OTHERS)
    one_sentence(ask("old/gpt2"), "no model.safetensors, only pytorch_model.bin, tf_model.h5")
    server.add("half/gpt2", {"config.json": b"{}", "model.fp16.safetensors": b""})
    one_sentence(ask("half/gpt2"), "no model.safetensors, only model.fp16.safetensors")
    server.add("tuned/gpt2", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    one_sentence(ask("tuned/gpt2"), "only an adapter (LoRA), which is no model by itself")
    server.add("empty/gpt2", {"README.md": b""})
    one_sentence(ask("empty/gpt2"), "no config.json")
    assert server.fetched() == []


def test_unknown_and_gated_repositories(server, ask):
    one_sentence(ask("gpt22"), "gpt22", server.url, "no such model repository", ask.cache)
    server.add("corp/gpt2", SMALL, gated=True)
    for token in ("", "hf_wrong"):
        gated = ask("corp/gpt2", HF_TOKEN=token)
        one_sentence(gated, f"{server.url}/corp/gpt2", "HF_TOKEN", "granted access")
    assert server.fetched() == []

    ask("corp/gpt2", HF_TOKEN=TOKEN)
    assert sorted(server.fetched()) == sorted(SMALL)
    elsewhere = [r for r in server.requests if r.path.startswith("/cdn/")]
    assert elsewhere
    assert all(request.authorization is None for request in elsewhere)


@pytest.mark.parametrize(
    ("status", "words"),
    [(503, "HTTP status 503"), (403, "HTTP status 403"), (200, "as a Hub does")],
)
def test_server_that_does_not_serve(server, ask, status, words):
    server.status = status
    one_sentence(ask("gpt2"), words, server.url)


def test_endpoint_that_is_no_address(ask):
    one_sentence(ask("gpt2", HF_ENDPOINT="nonsense"), "nonsense", ask.cache)


@pytest.mark.parametrize("name", ["a b", "gpt2?", "https:x", "-gpt2", "a--b", "x" * 200, "a/b\0c"])
def test_name_that_is_neither_path_nor_repository(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hub.HubError, match="neither a folder") as error:
        hub.resolve(name)
    one_sentence({"error": str(error.value)}, repr(name))


def test_disk_that_cannot_hold_the_model(server, ask):
    server.add("gpt2", SMALL | {"model.safetensors": WEIGHTS})
    prelude = (
        "import shutil, collections\n"
        "usage = collections.namedtuple('usage', 'total used free')\n"
        "shutil.disk_usage = lambda path: usage(10**9, 10**9, 12_000_000)\n"
    )
    message = one_sentence(ask("gpt2", prelude=prelude), ask.cache, "HF_HUB_CACHE")
    assert "25 MB are needed and 12 MB are free" in message
    assert server.fetched() == []

    # A real refusal to write, in the middle of a file.
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
    one_sentence(ask("gpt2", prelude=prelude), ask.cache, "File too large")
    (ask.work / "file").touch()
    blocked = ask("gpt2", HF_HUB_CACHE=str(ask.work / "file" / "cache"))
    one_sentence(blocked, ask.work / "file" / "cache", "Not a directory")


def test_path_that_exists_wins(monkeypatch, tmp_path):
    """D58."""
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "openai-community/gpt2", "pocket"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        assert hub.resolve(name) == hub.download(name) == hub.Source(folder, name, None)
        assert hub.resolve(folder) == hub.Source(folder, str(folder), None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/gpt2/").folder == tmp_path / "gpt2"


def test_built_in_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert hub.BUILT_IN["pocket"] == ROOT / "gpt2attn" / "data" / "pocket"
    folder = tmp_path / "installed"
    monkeypatch.setitem(hub.BUILT_IN, "pocket", folder)
    with pytest.raises(hub.HubError, match=f"no folder {folder}\\); reinstall"):
        hub.resolve("pocket")
    folder.mkdir()
    assert hub.resolve("pocket") == hub.download("pocket") == hub.Source(folder, "pocket", None)
    with pytest.raises(hub.HubError, match="only a Hub name has revisions"):
        hub.resolve("pocket", revision="main")
    with pytest.raises(hub.HubError, match=f"no folder {tmp_path / 'pocket'}"):
        hub.resolve(Path("pocket"))  # a Path is never a name


@pytest.mark.parametrize("name", ["./x", "/x", "~/x", "x/", "../x", "a/b/c", ".\\x", Path("gpt2")])
def test_missing_path_is_not_asked_of_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it fails
    path = os.path.abspath(os.path.expanduser(name))
    with pytest.raises(hub.HubError) as error:
        hub.resolve(name)
    one_sentence({"error": str(error.value)}, repr(str(name)), f"no folder {path}")


def test_names_that_are_no_folder(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(hub.HubError, match=r"is a file .* give the folder"):
        hub.resolve(path)
    with pytest.raises(hub.HubError, match="name is empty"):
        hub.resolve(" ")
    with pytest.raises(hub.HubError, match="revision is empty; leave it out"):
        hub.resolve("gpt2", revision="")
    with pytest.raises(hub.HubError, match="is an address; give the owner/name in it alone"):
        hub.resolve("https://hub.example/openai-community/gpt2")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_lfs_pointer_is_named(file, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"
    (tmp_path / file).write_text(pointer)
    with pytest.raises(hub.HubError, match="Git LFS pointer") as error:
        hub.resolve(tmp_path)
    assert f"{tmp_path / file} ({len(pointer)} bytes)" in str(error.value)


def test_link_out_of_the_folder_is_not_read(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "model"
    outside.write_text("version https://git-lfs.github.com/spec/v1\n")  # noticed, if it were read
    folder.mkdir()
    for file in ("config.json", *hub.TOKENIZER_FILES, "model.safetensors"):
        (folder / file).symlink_to(outside)
    assert hub.resolve(folder).folder == folder


def _refs(content):
    return lambda repo, snapshot: (repo / "refs" / "main").write_bytes(content)


def _pipe_for_refs(repo, snapshot):
    (repo / "refs" / "main").unlink(missing_ok=True)
    os.mkfifo(repo / "refs" / "main")


def _device_for_refs(repo, snapshot):
    (repo / "refs" / "main").unlink(missing_ok=True)
    (repo / "refs" / "main").symlink_to("/dev/zero")


def _pipe_for_file_list(repo, snapshot):  # which huggingface_hub 2 keeps
    (repo / "trees").mkdir()
    os.mkfifo(repo / "trees" / f"{snapshot.name}.json")


def _without_blobs(repo, snapshot):
    shutil.rmtree(repo / "blobs")


def _file_for_snapshot(repo, snapshot):
    shutil.rmtree(snapshot)
    snapshot.touch()


def _pipe_for_config(repo, snapshot):
    (snapshot / "config.json").unlink()
    os.mkfifo(snapshot / "config.json")


def _loop_for_config(repo, snapshot):
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("config.json")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_refs(b""), "is damaged"),
        (_refs(b"\xff\xfe\0"), "is damaged"),
        (_refs(b"../../.."), "is damaged"),
        (_refs(b"/"), "is damaged"),
        (_refs(b"b" * 40), "is not in the Hub cache"),
        (_refs(b"b" * 100_000), "is not in the Hub cache"),
        (_pipe_for_refs, "is damaged"),
        (_device_for_refs, "is damaged"),
        (_pipe_for_file_list, "is damaged"),
        (_file_for_snapshot, "is damaged"),
        (_without_blobs, "lacks config.json (a broken link)"),
        (_pipe_for_config, "lacks config.json"),
        (_loop_for_config, "lacks config.json (a broken link)"),
    ],
)
def test_d58_broken_cache_is_diagnosed_offline(damage, words, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--a--gpt2"
    snapshot = repo / "snapshots" / ("a" * 40)
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    for number, (file, content) in enumerate(SMALL.items()):
        if isinstance(content, bytes):
            (repo / "blobs" / str(number)).write_bytes(content)
            (snapshot / file).symlink_to(f"../../blobs/{number}")
    (snapshot / "model.safetensors").write_bytes(b"x")
    (repo / "refs" / "main").write_text("a" * 40)
    assert hub.resolve("a/gpt2").folder == snapshot
    damage(repo, snapshot)
    start = time.perf_counter()
    with pytest.raises(hub.HubError) as caught:
        hub.resolve("a/gpt2")
    assert time.perf_counter() - start < AT_ONCE
    assert words in str(caught.value)
    assert "--model pocket" in str(caught.value)


def test_import_is_cheap(tmp_path):
    code = "import sys, gpt2attn.hub; print({'torch', 'huggingface_hub'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert run.stdout.strip() == b"set()"
