"""Where the processes of a sweep run: one after the other on this machine, or spread by Ray."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

from semkv.errors import ConfigError
from semkv_lab.sweep.job import Job, Outcome, read_outcome, run_here, run_job

EXECUTORS = ("local", "ray")
_POLL_S = 0.25


class Executor(Protocol):
    """Runs jobs, each in a process of its own."""

    def results(self, jobs: Iterable[Job], tick: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
        """The jobs as they end; ``tick`` is called now and then with one that runs."""
        ...

    def close(self) -> None: ...


class LocalExecutor:
    """One job after the other. The processes are forked from one that has imported the heavy libraries."""

    def __init__(self, *, preload: bool = True) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._preload = preload

    def results(self, jobs: Iterable[Job], tick: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
        if self._preload:
            from semkv.engines.vllm import set_environment

            set_environment()  # what the libraries read when they are loaded
            self._context.set_forkserver_preload(["semkv_lab.sweep.preload"])
        for job in jobs:
            yield job, self._run(job, tick)

    def _run(self, job: Job, tick: Callable[[Job], None]) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            alive, ours = self._context.Pipe(duplex=False)  # ours closes when this process ends, however it does
            process = self._context.Process(target=run_job, args=(job, result, alive), name=job.name)
            with alive, ours:
                process.start()
                try:
                    while process.is_alive():
                        tick(job)
                        process.join(_POLL_S)
                finally:
                    _stop(process)
            return read_outcome(result, job.output, process.exitcode)

    def close(self) -> None:
        pass


def _stop(process: Any) -> None:
    """End what is left of an experiment: itself, or what a crash left of it, such as an engine's own process."""
    with suppress(OSError):  # nothing left, or not yet a group
        os.killpg(process.pid, signal.SIGKILL)
    process.join(1)
    if process.is_alive():
        process.kill()
        process.join()


class RayExecutor:
    """Jobs as Ray tasks, as many at a time as the cluster has GPUs, or cores where it has none.

    Args:
        address: of a running cluster; None starts one on this machine.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--executor", "ray", "local, or ray once installed: pip install 'semkv[ray]'") from error
        self._ray = ray
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError("--ray-address", address, f"the address of a running cluster ({error})") from error

    def results(self, jobs: Iterable[Job], tick: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
        ray = self._ray
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
        # A worker ends after one task, so that an engine's memory is really gone; a crash is not tried again.
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=0)(run_here)
        waiting = {task.remote(job): job for job in jobs}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_S)
            for job in waiting.values():
                tick(job)
            for reference in done:
                job = waiting.pop(reference)
                try:
                    yield job, ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield job, Outcome(None, {}, f"{type(error).__name__}: {error}"[:2_000])

    def close(self) -> None:
        self._ray.shutdown()


def make_executor(name: str, ray_address: str | None, *, preload: bool = True) -> Executor:
    """The executor of that name.

    Args:
        preload: import the heavy libraries once for all experiments (local only).

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if name not in EXECUTORS:
        raise ConfigError("--executor", name, EXECUTORS)
    if name == "ray":
        return RayExecutor(ray_address)
    if ray_address:
        raise ConfigError("--ray-address", ray_address, "--executor ray beside it")
    return LocalExecutor(preload=preload)
