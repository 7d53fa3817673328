"""Finding a checkpoint: a directory, or a hub id that is stored here or reachable."""

from __future__ import annotations

import os
from pathlib import Path

from semkv.errors import EngineError


def check_model(model: str, revision: str | None = None) -> None:
    """Find the checkpoint before vLLM spends half a minute on importing itself.

    Raises:
        EngineError: no such directory, or a hub id that is neither stored here nor reachable.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngineError(f"model {model!r} is a directory without a config.json")
        return
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise EngineError(f"model {model!r} is not a directory; give a checkpoint's directory or a hub id")
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(model, "config.json", revision=revision, etag_timeout=10)
    except (OSError, ValueError) as e:
        raise EngineError(
            f"model {model!r} is neither in the local hub cache nor reachable ({first_line(e)}); download it "
            f"where there is a network (`hf download {model}`) and copy the cache here (HF_HOME), or give its "
            "directory with --model"
        ) from e


def hub_commit(model: str, revision: str | None = None) -> str | None:
    """The commit a hub id resolved to, from the local hub cache's folder layout."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
