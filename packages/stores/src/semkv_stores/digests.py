"""SHA-256 digests of values and of a model's files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_NOT_WEIGHTS = frozenset({".md", ".jsonl", ".log"})


def digest(*parts: str | bytes) -> str:
    """SHA-256 over length-prefixed parts, as lowercase hex; unambiguous whatever the parts contain."""
    framed = []
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        framed.append(len(raw).to_bytes(8, "big"))
        framed.append(raw)
    return hashlib.sha256(b"".join(framed)).hexdigest()


def weights_digest(model: str | Path) -> str:
    """Digest of a local checkpoint's files, or of the id of a model that lives in a hub.

    A directory is read in full (names and bytes of every file but model cards and logs), so two checkpoints with one
    name and other weights never share state. Anything else is taken as a hub id, whose revision must be pinned by the
    caller.
    """
    root = Path(model)
    if not root.is_dir():
        return digest("hub", str(model))
    parts = []
    for file in weight_files(root):
        with file.open("rb") as f:
            parts.append(
                (file.relative_to(root).as_posix(), hashlib.file_digest(f, "sha256").hexdigest())
            )
    return digest("weights", *(part for pair in sorted(parts) for part in pair))


def weight_files(root: Path) -> list[Path]:
    """The files of a local checkpoint that `weights_digest` reads, in one order; links are followed."""
    found, seen = [], set()
    for folder, below, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            below.clear()  # a link back up
        seen.add(real)
        files = (Path(folder, name) for name in names if name[0] != ".")
        found += [file for file in files if file.is_file() and file.suffix not in _NOT_WEIGHTS]
    return sorted(found)
