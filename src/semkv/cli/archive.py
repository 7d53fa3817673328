"""``semkv export`` and ``semkv import``: a cache directory as one file, for a backup or another machine."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from semkv.cli.store import CacheDir
from semkv.config import CacheConfig, command_line, default_cache_dir
from semkv.errors import StoreError

_KEPT = ("secret", "policy.json", "media/??/*")
_CUT = 1 << 20  # bytes that are copied at once

export = command_line(
    help_epilogue="""\
Examples:

```
  semkv export cache.tar --cache-dir /var/lib/semkv
      answers, entries, pictures, what a policy has learned, and the gateway's secret, while gateways run. KV blocks and
      encoder outputs stay: they belong to an engine. Answers in Redis stay there
```"""
)

import_ = command_line(
    name="import",
    help_epilogue="""\
Examples:

```
  semkv import cache.tar --cache-dir /var/lib/semkv
      into a directory that is empty or not there yet. Start the gateway with the SEMKV_SECRET of the old one, or
      without any where the old one had made its own. What was purged since the export is back
```""",
)


@export.default
def _export(
    file: Annotated[Path, Parameter(help="The archive to write: a tar file.")],
    /,
    *,
    cache_dir: CacheDir = None,
) -> None:
    """Write a cache into one file, which holds prompts and answers in the clear."""
    from semkv.stores.database import CATALOG, Database
    from semkv.stores.files import described, matching, open_file

    root = cache_dir or default_cache_dir()
    if not (root / CATALOG).is_file():
        raise StoreError(f"{root} holds no answers or entries (no {CATALOG}): nothing to export")
    if file.exists():
        raise StoreError(f"{file} is there already: delete it or name another file")
    if not file.parent.is_dir():
        raise StoreError(f"{file.parent} is no directory")
    try:
        with TemporaryDirectory(prefix=".semkv-export-", dir=file.parent) as folder:
            copy = Path(folder) / CATALOG
            with closing(Database(root / CATALOG, replace=False)) as database, database as db:
                db.execute("VACUUM INTO ?", (str(copy),))
            part = Path(folder) / "archive"
            target = open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            files = [path for form in _KEPT for path, _ in described(matching(root, form))]
            with os.fdopen(target, "wb") as out, tarfile.open(fileobj=out, mode="w|") as archive:
                for path in [copy, *files]:
                    name = CATALOG if path == copy else path.relative_to(root).as_posix()
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        archive.add(path, name, recursive=False, filter=lambda info: info if info.isreg() else None)
            part.rename(file)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


@import_.default
def _import(
    file: Annotated[Path, Parameter(help="What export wrote.")],
    /,
    *,
    cache_dir: CacheDir = None,
) -> None:
    """Make a cache directory of what export wrote."""
    from semkv.stores.cachedir import make_folder, prepare
    from semkv.stores.database import CATALOG, Database

    root = cache_dir or default_cache_dir()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise StoreError(f"{root} is not empty: choose a new --cache-dir")
    make_folder(root.parent)
    try:
        with TemporaryDirectory(prefix=".semkv-import-", dir=root.parent) as folder:
            made = Path(folder) / "cache"
            make_folder(made)
            with tarfile.open(file) as archive:
                _unpack(archive, made)
            if not (made / CATALOG).is_file():
                raise StoreError(f"{file} is no export of semkv (no {CATALOG})")
            with closing(Database(made / CATALOG, replace=False)) as database:
                if fault := database.check():
                    raise StoreError(f"{file} is damaged: {fault}")
            prepare(CacheConfig(made))
            if root.exists():
                root.rmdir()
            made.rename(root)
    except (OSError, EOFError, sqlite3.Error, tarfile.TarError) as error:
        raise StoreError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Files of the forms that export writes, and nothing else."""
    from semkv.stores.database import CATALOG
    from semkv.stores.files import make_folder, open_file

    for member in archive:
        name = Path(member.name)
        known = any(fnmatchcase(member.name, form) for form in (CATALOG, *_KEPT))
        source = archive.extractfile(member) if member.isreg() and known else None
        if source is None or ".." in name.parts or len(name.parts) > 3:
            raise StoreError(f"{member.name!r} is nothing that export writes")
        make_folder((folder / name).parent)
        with os.fdopen(open_file(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
            shutil.copyfileobj(source, out, _CUT)
