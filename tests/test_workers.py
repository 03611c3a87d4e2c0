"""Workers: results in order, whatever becomes of a worker."""

import functools
import os
import signal
import time

import pytest

from gpt2attn.workers import CHUNKS_AHEAD, MAX_DEATHS, in_order, run_here
from gpt2attn.workers.cluster import cpus_each
from gpt2attn.workers.processes import Processes


def squaring(marks):
    """Makes workers that square; a chunk can ask for other things. `marks` is a folder."""
    started = marks / f"started-{os.getpid()}"
    assert not started.exists()
    started.touch()

    def work(chunk, progress):
        number, request = chunk
        progress(1)
        if request == "wait":
            time.sleep(0.3)
        if request == "die once" and not (marks / f"died-{number}").exists():
            (marks / f"died-{number}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if request == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if request == "refuse":
            raise ValueError(f"{number} is refused.")
        if request == "fail":
            raise KeyError("a fault of ours")
        return number**2, os.getpid()

    return work


def results(tmp_path, requests, n_workers=2):
    """The squares, the workers' process ids, and what was counted."""
    counted = []
    pool = Processes(functools.partial(squaring, tmp_path), n_workers)
    found = list(in_order(pool, enumerate(requests), counted.append))
    return [square for square, _ in found], {pid for _, pid in found}, sum(counted)


def test_results_are_in_order_and_each_worker_starts_once(tmp_path):
    requests = ["wait", *[""] * 20, "wait", ""]
    squares, pids, counted = results(tmp_path, requests)
    assert squares == [number**2 for number in range(23)]
    assert counted == 23
    assert len(pids) == len(list(tmp_path.glob("started-*"))) == 2
    assert os.getpid() not in pids
    here = run_here(functools.partial(squaring, tmp_path), enumerate(requests), lambda n: None)
    assert [square for square, _ in here] == squares


def test_a_killed_worker_is_replaced_and_its_chunk_done_again(tmp_path):
    requests = [""] * 3 + ["die once"] + [""] * 5 + ["die once"] + [""] * 5
    squares, _, counted = results(tmp_path, requests)
    assert squares == [number**2 for number in range(15)]
    assert counted == 15  # what was counted for nothing is taken back
    assert len(list(tmp_path.glob("started-*"))) == 4


def test_a_chunk_that_kills_every_worker_is_given_up(tmp_path):
    with pytest.raises(ChildProcessError, match=f"killed {MAX_DEATHS} times at the same records"):
        results(tmp_path, ["", "die", ""])


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [("refuse", ValueError, r"^1 is refused\.$"), ("fail", RuntimeError, "a fault of ours")],
)
def test_what_a_worker_raises_is_raised_here(tmp_path, request_, error, message):
    with pytest.raises(error, match=message):
        results(tmp_path, ["", request_])


def test_input_is_read_no_further_than_the_workers_need_and_they_end_with_the_pool(tmp_path):
    n_read = 0

    def endless():
        nonlocal n_read
        while True:
            yield n_read, ""
            n_read += 1

    pool = Processes(functools.partial(squaring, tmp_path), 2)
    found = in_order(pool, endless(), lambda n: None)
    first = [next(found) for _ in range(10)]
    assert [square for square, _ in first] == [number**2 for number in range(10)]
    assert n_read <= 10 + 2 * CHUNKS_AHEAD
    found.close()
    for pid in {pid for _, pid in first}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("nodes", "n_workers", "expected"),
    [([2], 2, 1), ([8, 8], 2, 8), ([8, 4], 2, 4), ([8, 4], 3, 4), ([16, 4, 1], 1, 16), ([3], 3, 1)],
)
def test_cores_of_each_worker_of_a_cluster(nodes, n_workers, expected):
    assert cpus_each(nodes, n_workers) == expected


def test_a_cluster_with_fewer_cores_than_workers():
    with pytest.raises(ValueError, match="3 workers need a core each, but this Ray cluster has 2"):
        cpus_each([1, 1], 3)
