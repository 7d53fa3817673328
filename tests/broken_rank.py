"""A worker extension (vLLM's ``worker_extension_cls``): the second of two ranks fails while a file is there.

The file says where it fails; `SIGN` is the variable that names it. Each failure adds a byte to the file `FAILED` beside
it. If the file says `ALL_AGAIN`, nothing fails, and every rank computes again all that it has moved.

Only vLLM imports this, in each worker, however it starts them: so nothing is replaced in the engine's process.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from document_engines import ALL_AGAIN, FAILED, SIGN

_now = list[str]()  # what of ours runs


class BrokenRank:
    """What `collective_rpc` can call in addition."""

    def look_again(self: Any) -> str:
        """Look at the model as at the start: why it is refused."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        return str(connector._placement._looked_at(self.model_runner, connector._kv_caches))


def _said() -> str:
    try:
        return Path(os.environ[SIGN]).read_text()
    except FileNotFoundError:
        return ""


def _fail(where: str) -> None:
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() == 1 and _said() == where:
        with Path(os.environ[SIGN]).with_name(FAILED).open("a") as failed:
            failed.write(".")
        raise ValueError(where)


def _during(kind: Any, name: str, where: str, *, fail: bool = True) -> None:
    """Note that a method runs, and let it fail at once if told so."""
    method = getattr(kind, name)

    def runs(self: Any, *args: Any) -> Any:
        _now.append(where)
        try:
            if fail:
                _fail(where)
            return method(self, *args)
        finally:
            _now.pop()

    setattr(kind, name, runs)


def _replace() -> None:
    from vllm.model_executor.models.llama import LlamaMLP

    from semkv_vllm.placement import Placement
    from semkv_vllm.repair import Repair

    passes = Placement._passes
    forward = LlamaMLP.forward

    def chosen(self: Any, loads: Any, prompts: Any) -> Any:
        if _said() == ALL_AGAIN:
            loads = [replace(load, pieces=()) for load in loads]
        return passes(self, loads, prompts)

    def layer(self: Any, *args: Any, **fields: Any) -> Any:
        for where in _now:
            _fail(where)
        return forward(self, *args, **fields)

    Placement._passes = chosen  # type: ignore[method-assign]
    LlamaMLP.forward = layer  # type: ignore[method-assign]
    _during(Placement, "_moved", "moving")
    _during(Placement, "_trial", "before the check")
    _during(Repair, "rehearse", "in the rehearsal", fail=False)
    _during(Repair, "run", "in the pass", fail=False)


_replace()
