"""What the halves of the connector tell each other of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)

from semkv_vllm.spans import Load


@dataclass
class Gated(KVConnectorHandshakeMetadata):
    """What a worker says of its model at the start; ``refused`` is empty where documents may be reused."""

    refused: str


@dataclass
class DocumentJob(TransferJob):
    """A load that is not what its request needs before a worker has repaired it.

    Attributes:
        load: what must be done; None: the load is of no use, and has failed when it is there.
    """

    load: Load | None = None

    @classmethod
    def of(cls, job: TransferJob, load: Load | None) -> DocumentJob:
        """The same transfer, with what must be done."""
        return cls(**(vars(job) | {"load": load}))


@dataclass
class DocumentStep(OffloadingConnectorMetadata):
    """What the scheduler tells the workers in a step, in addition to its transfers.

    Attributes:
        dropped: requests whose loads are of no use any more, where they are not repaired already.
        unloaded: requests that wait for a load which has failed: when what comes for them in this step is there, or at
            once where nothing comes.
    """

    dropped: Sequence[str] = ()
    unloaded: Sequence[str] = ()


@dataclass
class WorkerNews(OffloadingWorkerMetadata):
    """What workers tell the scheduler; ``mismatch``: the live check has failed; ``faults``: how many there were."""

    mismatch: bool = False
    faults: int = 0

    def aggregate(self, other: Any) -> Any:
        merged = super().aggregate(other)
        mismatch = self.mismatch or getattr(other, "mismatch", False)
        faults = self.faults + getattr(other, "faults", 0)
        return WorkerNews(
            merged.completed_jobs,
            merged.transfer_stats,
            mismatch=mismatch,
            faults=faults,
        )
