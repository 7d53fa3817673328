"""All names of vLLM that are used and are not its API. `missing` says which of these names a release has lost.

That a name is there does not say that it means what it meant: for that there are the tests with an engine.

Everything else in this package goes by public names. Where vLLM gets a public way, a function here goes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu import manager as cpu_manager
from vllm.v1.kv_offload.cpu import shared_offload_region
from vllm.v1.kv_offload.cpu.policies import base as policies
from vllm.v1.kv_offload.tiering import manager as tiering_manager
from vllm.v1.kv_offload.tiering import metrics, spec
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

NAMES: dict[ModuleType, tuple[str, ...]] = {
    base: ("_offload_key_positions",),
    policies: ("get", "remove", "ref_cnt", "is_ready"),
    shared_offload_region: ("fd",),
    cpu_manager: ("_policy", "_num_evictable_cache_chunks", "_free_chunk"),
    tiering_manager: ("_maybe_process_finished_jobs", "_request_load_sources", "_metrics"),
    metrics: ("_request_states", "_stats", "observed_lookups", "primary_tier_label"),
    spec: ("_scheduler_mmap", "_manager"),
    scheduler: (
        "_maximal_prefix_lookup",
        "_current_batch_load_jobs",
        "_jobs",
        "is_store",
        "keys",
        "_req_status",
        "req_context",
        "transfer_jobs",
        "group_states",
        "max_offload_tokens",
        "num_locally_computed_tokens",
        "load_key_ranges",
        "offload_keys",
        "next_stored_chunk_idx",
        "kv_group_configs",
        "tokens_per_chunk",
    ),
}
"""What is private in vLLM, or has no word in its documentation, and where it is defined."""


def missing() -> list[str]:
    """The names that the installed vLLM does not define any more."""
    found = []
    for module, names in NAMES.items():
        defined = set(_defined(ast.parse(inspect.getsource(module))))
        found += [f"{module.__name__}: {name}" for name in names if name not in defined]
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    """Methods, the fields of classes, and attributes that are set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            yield from (field.id for field in fields if isinstance(field, ast.Name))


# ---------------------------------------------------------------------- host memory


def _held_by(primary: Any) -> Any:
    """What host memory holds (``CachePolicy``)."""
    return primary._policy


def chunk_of(primary: Any, key: bytes) -> Any | None:
    """The place of a block in host memory, or None. vLLM's lookup says that there is one, not who uses it."""
    return _held_by(primary).get(key)


def remove_unused(primary: Any, key: bytes) -> bool | None:
    """Take a block out of host memory: whether it was there. None: a transfer uses it, and it stays.

    vLLM removes what it has no room for, and nothing else.
    """
    chunk = chunk_of(primary, key)
    if chunk is None:
        return False
    if chunk.ref_cnt != 0:
        return None
    _held_by(primary).remove(key)
    primary._num_evictable_cache_chunks -= 1
    primary._free_chunk(chunk)
    return True


def descriptor(offloading_spec: Any) -> int:
    """Of host memory's file, which has no name any more."""
    return int(offloading_spec._scheduler_mmap.fd)


# ---------------------------------------------------------------------- lookups


def finish_transfers(manager: Any) -> None:
    """Let vLLM see which transfers have ended, as it does before each lookup of its own."""
    manager._maybe_process_finished_jobs()


def count_hits(manager: Any, request: str, keys: Iterable[bytes]) -> None:
    """Count hits in host memory as vLLM's own lookup does, which takes the time of each."""
    tracker = manager._metrics
    state = tracker._request_states.get(request)
    if state is None or state.observed_lookups is None:
        return
    label = tracker.primary_tier_label
    counted = state.observed_lookups.setdefault(label, {})
    before = len(counted)
    counted.update(dict.fromkeys(keys))
    new = len(counted) - before
    if new > 0:
        tracker._stats.increase_counter(TieringOffloadingMetrics.CHUNK_QUERIES, new, label)
        tracker._stats.increase_counter(TieringOffloadingMetrics.CHUNK_HITS, new, label)


def promoted(manager: Any, request: str) -> bool:
    """Whether vLLM notes of a request that blocks were brought into host memory for it."""
    return bool(manager._request_load_sources.get(request))


def key_positions(context: Any) -> dict[bytes, int]:
    """All keys of a request, each with the token where its block ends. vLLM gives the position of one key only."""
    positions: dict[bytes, int] = context._offload_key_positions
    return positions


# ---------------------------------------------------------------------- the scheduler's half


def _jobs_of(half: Any) -> dict[int, Any]:
    """All transfers that are under way, by their numbers."""
    jobs: dict[int, Any] = half._jobs
    return jobs


def keys_being_stored(half: Any) -> set[bytes]:
    """What is on its way from the GPU to host memory."""
    return {key for job in _jobs_of(half).values() if job.is_store for key in job.keys}


def state_of(half: Any, request: str) -> Any:
    """What vLLM's half knows of a request (``RequestOffloadState``)."""
    return half._req_status[request]


def mark_load(half: Any, request: str, mark: Callable[[Any], Any]) -> bool:
    """Put ``mark(job)`` in the place of the load that a request was given in this step (``TransferJob``).

    Returns:
        Whether there is one.
    """
    given = half._current_batch_load_jobs
    own = [number for number, job in given.items() if job.req_id == request]
    for number in own:
        given[number] = mark(given[number])
    return bool(own)


def first_held(half: Any, request: Any, keys: Sequence[bytes]) -> int | None:
    """How many of the first keys are in host memory; None where some are on their way there."""
    context = state_of(half, request.request_id).req_context
    group = half.config.kv_group_configs[0]
    held: int | None = half._maximal_prefix_lookup(keys, context, request, group, 0)
    return held


def names_changed(
    half: Any,
    request: str,
    first: int,
    limit: int | None,
) -> None:
    """A request's blocks have other hashes from block ``first`` on, and so many of its tokens may be stored."""
    state = state_of(half, request)
    del state.group_states[0].offload_keys[first:]
    state.max_offload_tokens = limit


def load_blocks(
    half: Any,
    request: Any,
    *,
    keys: list[bytes],
    blocks: Sequence[Any],
    others: Sequence[Any],
) -> None:
    """Have vLLM load some keys, which are in host memory, into some blocks of a request (``KVCacheBlock``).

    vLLM's half loads a run of a request's own keys into its blocks, from the first one on that has no hash yet. So for
    the time of the call the request has these keys, and these blocks come first. Of ``others`` vLLM must know that they
    are lent now.
    """
    state = state_of(half, request.request_id)
    group = state.group_states[0]
    own = group.offload_keys
    lent = [*blocks, *others]
    tokens = half.config.kv_group_configs[0].tokens_per_chunk
    group.offload_keys = keys
    state.num_locally_computed_tokens = 0
    try:
        half.update_state_after_alloc(request, SimpleNamespace(blocks=(lent,)), len(keys) * tokens)
    finally:
        group.offload_keys = own
    group.next_stored_chunk_idx = 0
    state.load_key_ranges.clear()


# ---------------------------------------------------------------------- a worker's model


def graph_inputs(runner: Any, rows: int, tokens: int) -> tuple[Any, Any] | None:
    """Where the CUDA graphs of a model's pieces read tokens and positions: for at least so many tokens of ``rows``
    requests, or None where there are no such graphs.

    Only model runner V2 has them under this name. It asks a connector what has come when it has sampled a step's
    tokens, and writes all inputs anew for the next step: in between nobody needs what is in these places, nor what the
    graphs have computed, which lies in memory that they share. V1 samples later.
    """
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is None or manager.use_breakable_cg:
        return None
    found = manager.dispatch(
        num_reqs=rows,
        num_tokens=tokens,
        uniform_token_count=None,
        num_active_loras=0,
    )
    if found.cg_mode != CUDAGraphMode.PIECEWISE:
        return None
    own = slice(found.num_tokens)
    buffers = runner.input_buffers
    return buffers.input_ids[own], buffers.positions[own]


def keeps_picture_inputs(model: Any, vision: Any) -> bool:
    """Whether it is known how a model keeps what pictures add behind its first layers, if it does.

    ``vision``: the configuration of its encoder.
    """
    adds = bool(getattr(vision, "deepstack_visual_indexes", ()))
    names = (
        "deepstack_input_embeds",
        "deepstack_input_embeds_num_tokens",
        "_clear_deepstack_input_embeds",
    )
    return all(hasattr(model, name) for name in names) or not (adds or hasattr(model, names[0]))


@contextmanager
def picture_inputs_cleared(model: Any) -> Iterator[None]:
    """Run passes of ours, which leave nothing of their pictures in the model.

    A pass takes what pictures add behind the first layers from the model and clears it, where it comes to its end.

    Raises:
        RuntimeError: the model holds that of another pass.
    """
    if not getattr(model, "deepstack_input_embeds", None):
        yield
        return
    if model.deepstack_input_embeds_num_tokens:
        raise RuntimeError("the model holds pictures of another pass")
    try:
        yield
    finally:
        model._clear_deepstack_input_embeds(int(model.deepstack_input_embeds_num_tokens))
