"""What a policy and the checks have learned, kept in the cache directory as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semkv.stores.files import replace_text

FORMAT = 1
FILE = "policy.json"


def load_memory(folder: Path, fingerprint: str) -> Mapping[str, Any] | None:
    """What was kept for an encoder; None where there is nothing, or it belongs to another encoder.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged.
    """
    try:
        body = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"{folder / FILE} is damaged or of another version")
    return body if body.get("fingerprint") == fingerprint else None


def save_memory(folder: Path, fingerprint: str, body: Mapping[str, Any]) -> None:
    """Put it in the place of what was kept: where several caches share a folder, the last one's stays. Raises
    OSError."""
    replace_text(folder / FILE, json.dumps({"format": FORMAT, "fingerprint": fingerprint, **body}))
