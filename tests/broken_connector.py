"""A KV connector that promises two blocks, leaves rubbish in them and says that their load failed.

It does so once for each request whose prompt begins with `MARK`, and never while `ARMED` is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from semkv_vllm.kv import IdleConnector

MARK = 11
PROMISED = 64
ARMED = {"yes"}


@dataclass
class Broken(KVConnectorMetadata):
    """The blocks that this step's loads will spoil."""

    blocks: list[int] = field(default_factory=list)


class BrokenConnector(IdleConnector):
    """Both halves; an engine in one process has one of each."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.promised: set[str] = set()
        self.planned: list[int] = []
        self.failed: set[int] = set()
        self.tensors: dict[str, Any] = {}

    # the scheduler's half

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        marked = request.prompt_token_ids[0] == MARK and request.request_id not in self.promised
        return (PROMISED if ARMED and marked and not num_computed_tokens else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.promised.add(request.request_id)
            self.planned += blocks.get_block_ids()[0][:2]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        planned, self.planned = self.planned, []
        return Broken(planned)

    # the worker's half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.tensors = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Broken)
        for block in step.blocks:
            for tensor in self.tensors.values():
                tensor[block].fill_(0.37)
        self.failed |= set(step.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed
