"""Workers of a Ray cluster: actors, which Ray starts again, on another machine if need be."""

from __future__ import annotations

import os
from typing import Any

from . import MAX_DEATHS, Answer, Progress, Start, Worker, too_many_deaths


class Cluster:
    """A pool of `n_workers` actors, each with `n_cpus` (and `n_gpus`) of its machine to itself.

    The cluster is the one of RAY_ADDRESS or the one that runs on this machine; where there is none,
    one is started here for as long as the pool lives. Its machines need this package, and the model
    under the same name. `n_cpus` None divides the cluster's cores among the workers.
    """

    def __init__(
        self, start: Start, n_workers: int, *, n_cpus: int | None = None, n_gpus: int = 0
    ) -> None:
        self.n_workers = n_workers
        self._start, self._n_cpus, self._n_gpus = start, n_cpus, n_gpus
        self._running: dict[Any, tuple[int, Any]] = {}  # by reference: number, and the actor

    def __enter__(self) -> Cluster:
        self._ray = _import_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anyone
            self._ray.init(log_to_driver=False, logging_level="ERROR")
        n_cpus = self._n_cpus or cpus_each(_cpus_of_nodes(self._ray), self.n_workers)
        actor = self._ray.remote(
            num_cpus=n_cpus,
            num_gpus=self._n_gpus,
            max_restarts=-1,
            max_task_retries=MAX_DEATHS - 1,
        )(_Actor)
        self._actors = [actor.remote(self._start) for _ in range(self.n_workers)]
        self._idle = list(self._actors)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_ours:
            self._ray.shutdown()
            return
        for actor in self._actors:
            self._ray.kill(actor)

    def has_room(self) -> bool:
        return bool(self._idle)

    def send(self, number: int, chunk: Any) -> None:
        actor = self._idle.pop()
        self._running[actor.answer.remote(chunk)] = number, actor

    def receive(self, progress: Progress) -> tuple[int, Answer]:
        (reference,), _ = self._ray.wait(list(self._running), num_returns=1)
        number, actor = self._running.pop(reference)
        try:
            answer, n_done = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:
            raise too_many_deaths() from None
        self._idle.append(actor)
        progress(n_done)
        return number, answer


def cpus_each(cpus_of_nodes: list[int], n_workers: int) -> int:
    """The most cores that each of `n_workers` can have, each on one machine.

    Raises ValueError if there are fewer cores than workers.
    """
    for n_cpus in range(max(cpus_of_nodes, default=0), 0, -1):
        if sum(cpus // n_cpus for cpus in cpus_of_nodes) >= n_workers:
            return n_cpus
    raise ValueError(
        f"{n_workers} workers need a core each, but this Ray cluster has {sum(cpus_of_nodes)}."
    )


class _Actor:
    def __init__(self, start: Start) -> None:
        self._worker = Worker(start)

    def answer(self, chunk: Any) -> tuple[Answer, int]:
        """The answer, and how much was counted on the way to it."""
        counts: list[int] = []
        return self._worker.answer(chunk, counts.append), sum(counts)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ValueError(
            "--engine ray needs Ray, which is not installed: pip install 'gpt2attn[ray]'."
        ) from None
    return ray


def _cpus_of_nodes(ray: Any) -> list[int]:
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
