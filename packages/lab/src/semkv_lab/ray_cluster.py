"""Experiments of a sweep on a Ray cluster.

A task runs one experiment with `semkv_lab.sweep.run_one`, in a folder of its own with a cache of its own, and hands its
files back. The sweep writes them, and the log, where it runs. So the machines need no folder in common, but each needs
semkv, and what the experiments name (data, models, own code) under the same paths.

Ray starts a task again whose worker or machine is lost. A sweep that is lost itself goes on with ``--resume``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError
from semkv_lab.sweep import Begin, Experiment, run_one

LOCAL = "local"
_TRIES = 3  # after the first one, where a worker is lost
_AHEAD = 1  # experiments that wait in the cluster, so that one that grows by demand grows
_NO_GPU = ("scripted", "labels")  # engines without a model


@dataclass(frozen=True)
class Brought:
    """What a task hands back: why there is no summary, and the files that there are, by the ends of their names."""

    error: str
    files: dict[str, bytes]


def run_on_ray(
    address: str, left: Sequence[Experiment], begin: Begin, *, cpus: int
) -> Iterator[tuple[Experiment, str]]:
    """Run experiments, as many at once as the cluster has room for; each as it ends, with what `run_one` returns.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has too few cores on this machine.
    """
    with _cluster(address) as ray:
        needs = _needs(ray, address, left, cpus)
        # A worker is kept for more experiments; by Ray's default one that has a GPU is not.
        task = ray.remote(max_retries=_TRIES, **needs)(run_away)
        waiting = deque(left)
        running = dict[Any, Experiment]()
        while waiting or running:
            while waiting and len(running) < _room(ray, needs) + _AHEAD:
                e = begin(waiting.popleft())
                cold = e.baseline.read_bytes() if e.baseline else None
                running[task.remote(e, cold, str(Path.cwd()))] = e
            for done in ray.wait(list(running))[0]:
                e = running.pop(done)
                yield e, _collect(ray, done, e)


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Ray, connected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's makers
    try:
        import ray
    except ImportError:
        allowed = (
            "given with Ray installed: in a checkout of semkv, pip install './packages/lab[ray]'"
        )
        raise ConfigError("--ray", address, allowed) from None
    own = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # what Ray raises where it does not start has no type of its own
        allowed = f"{LOCAL}, or the address of a Ray cluster that answers ({error})"
        raise ConfigError("--ray", address, allowed) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _needs(
    ray: Any,
    address: str,
    left: Sequence[Experiment],
    cpus: int,
) -> dict[str, float]:
    """What of the cluster each experiment takes, by Ray's names."""
    has = ray.cluster_resources()
    if address == LOCAL and cpus > has.get("CPU", 0):
        allowed = f"at most the {has.get('CPU', 0):.0f} cores of this machine"
        raise ConfigError("--ray-cpus", cpus, allowed)
    gpus = has.get("GPU", 0) and any(e.settings.engine not in _NO_GPU for e in left)
    return {"num_cpus": cpus, "num_gpus": 1 if gpus else 0}


def _room(ray: Any, needs: dict[str, float]) -> int:
    """How many experiments the cluster runs at once now."""
    has = ray.cluster_resources()
    rooms = [has.get("CPU", 0) // needs["num_cpus"]]
    if needs["num_gpus"]:
        rooms.append(has.get("GPU", 0))
    return max(1, int(min(rooms)))


def _collect(ray: Any, done: Any, e: Experiment) -> str:
    """Write the files of an experiment that has ended; why it has no summary."""
    try:
        brought: Brought = ray.get(done)
    except ray.exceptions.RayError as error:
        return f"Ray: {error}"
    for ending, content in brought.files.items():
        e.samples.with_suffix(ending).write_bytes(content)
    return brought.error


def run_away(experiment: Experiment, cold: bytes | None, folder: str) -> Brought:
    """Run an experiment on a machine of the cluster, as if in this folder where it is there.

    Args:
        cold: the file of cold answers that it takes.
    """
    with contextlib.suppress(OSError):
        os.chdir(folder)
    with tempfile.TemporaryDirectory(prefix="semkv-sweep-") as own:
        here = _placed(experiment, Path(own), cold)
        error = run_one(here)
        endings = (".jsonl", ".json", ".log")
        found = {ending: here.samples.with_suffix(ending) for ending in endings}
        files = {ending: path.read_bytes() for ending, path in found.items() if path.is_file()}
        return Brought(error, files)


def _placed(e: Experiment, folder: Path, cold: bytes | None) -> Experiment:
    """The experiment with all its files in a folder."""
    samples = folder / e.samples.name
    summary = folder / e.summary.name
    baseline = None
    if e.baseline is not None and cold is not None:
        baseline = folder / f"cold-{e.baseline.name}"
        baseline.write_bytes(cold)
    cache = replace(e.settings.cache, cache_dir=folder / "cache")
    settings = replace(e.settings, cache=cache, samples_out=samples, summary_out=summary)
    return replace(e, settings=settings, samples=samples, summary=summary, baseline=baseline)
