"""``semkv stats``, ``verify``, ``gc``, ``purge``, ``export`` and ``import``: looking after a cache directory."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import tarfile
import time
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators
from rich.filesize import decimal

from semkv.command_line import command_line
from semkv.errors import ConfigError, StoreError
from semkv.stores.catalog import CATALOG, SCHEMA
from semkv_stores.files import read_bytes
from semkv_stores.settings import default_cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cyclopts import App

    from semkv.stores.maintenance import CacheUse, Worth

EXIT_DAMAGED = 1
_ELSEWHERE = f"answers that a gateway keeps elsewhere than in {CATALOG} there (its --store)"
_INVALIDATE = f"{_ELSEWHERE}: its /semkv/api/invalidate removes them"
_IN_MEMORY = (
    "KV blocks and encoder outputs that running engines hold in memory (until they are evicted, or the engine "
    "restarts), the latest hits that a gateway's dashboard shows, and what is being written now"
)
_PUT_ASIDE = f"{CATALOG}.damaged, which an engine or a gateway put aside (delete it)"
_UNATTRIBUTED = (
    "KV blocks and encoder outputs without a salt, or stored before files named their tenant; "
    "what clients of a gateway asked with a cache_salt of their own"
)
_OF_GATEWAY = (
    "KV blocks and encoder outputs of a gateway's tenant (set SEMKV_SECRET to the gateway's)"
)
_IMPORTING = ".semkv-import-"  # begins the name of a folder that is being unpacked
_KEPT = (
    "secret",
    "policy.json",
    "document-reuse.json",
    "media/??/*",
)  # in an archive, beside the database

CacheDir = Annotated[
    Path | None,
    Parameter(
        name="--cache-dir",
        help="A cache, or a fusion store; by default SEMKV_CACHE_DIR, else ~/.cache/semkv.",
    ),
]
TenantName = Annotated[
    str | None,
    Parameter(name="--tenant", help="Only this tenant's, named as in stats ('' for no name)."),
]
AsJson = Annotated[
    bool,
    Parameter(
        name="--json",
        negative="",
        help="Print JSON.",
    ),
]
DryRun = Annotated[
    bool,
    Parameter(
        name="--dry-run",
        negative="",
        help="Count, and delete nothing.",
    ),
]


def _command(examples: str, **options: Any) -> App:
    return command_line(help_epilogue=f"Examples:\n\n```\n{examples}\n```", **options)


stats = _command("""\
  semkv stats --json | jq '.stores[] | select(.store == "kv").nbytes'
      the bytes of all KV blocks
  semkv stats --tenant alice
      what purge --tenant would delete. Name the tenant as stats does;
      with the gateway's secret also as a trusted proxy does. Hits are
      near-repeats, not exact repeats""")
verify = _command("""\
  semkv verify --repair
      delete what is damaged, so that it is computed again.
      A damaged catalog stays. Exit code 1: something is damaged;
      2: something could not be read""")
gc = _command("""\
  semkv gc --max-age-days 30
      delete orphaned files (of crashed writers, or of deleted entries),
      and data stored more than 30 days ago, used since or not""")
purge = _command("""\
  semkv purge --cache-dir runs/demo/cache
      delete everything that semkv stored there, except a gateway's
      secret. Running engines and gateways follow within a second or so.
      For vLLM's own caches on the device call reset_prefix_cache and
      reset_encoder_cache
  semkv purge --tenant alice
      delete one tenant's entries, images, answers, KV blocks and encoder
      outputs. For KV and encoder outputs of a gateway's tenant set
      SEMKV_SECRET, unless the gateway made its secret in this directory.
      A request under way is recorded afterwards: repeat the purge
  semkv purge --tag release-7 --dry-run
      count the entries with this tag
  SEMKV_SECRET=... semkv purge --tenant alice --bucket s3://name/folder
      delete one tenant's KV blocks and encoder outputs in a bucket. It
      needs no engine here. Engines on the bucket follow within a few
      seconds. Credentials come from the environment, as for engines""")
export = _command("""\
  semkv export cache.tar --cache-dir /var/lib/semkv
      write answers, entries, images, what a policy has learned, and the
      gateway's secret. Gateways may run. Not exported: KV blocks, encoder
      outputs, answers in Redis""")
import_ = _command(
    """\
  semkv import cache.tar --cache-dir /var/lib/semkv
      into an empty or new directory. Start the gateway with the
      SEMKV_SECRET of the old one, or without any if the old one had made
      its own. Data purged since the export are back""",
    name="import",
)


@stats.default
def _stats(
    *,
    cache_dir: CacheDir = None,
    tenant: TenantName = None,
    as_json: AsJson = False,
) -> None:
    """What a cache holds, by store, tenant and model."""
    from semkv.stores.maintenance import inspect

    folder = cache_dir or default_cache_dir()
    names = None if tenant is None else _names(folder, tenant)
    found = inspect(folder, names, _salts(folder, names or ()))
    if tenant is not None:
        print("not counted: " + "; ".join([*_unattributed(folder), _ELSEWHERE]), file=sys.stderr)
        if not (found.entries or found.stores or found.unread):
            print(
                f"no data of tenant {_tenant(tenant)}; stats without --tenant lists all",
                file=sys.stderr,
            )
    _report(asdict(found), as_json, lambda: _print_use(found))


def _print_use(found: CacheUse) -> None:
    whose = "" if found.tenants is None else f", tenant {' or '.join(map(_tenant, found.tenants))}"
    nbytes = sum(store.nbytes for store in found.stores)
    print(f"{_cell(found.cache_dir)}{whose}: {decimal(nbytes)} in the stores below")
    entries = []
    for row in found.entries:
        model = _cell(f"{row.name[:60]} ({row.model[:8]})" if row.name else row.model[:16])
        entries.append(
            [_tenant(row.tenant), model, row.entries, row.hits, _ago(row.oldest), _ago(row.used)]
        )
    _print_table("Entries", ["tenant", "model", "entries", "hits", "oldest", "last used"], entries)
    stores = []
    for use in found.stores:
        counts = [use.items, use.blocks or "-", decimal(use.nbytes)]
        name = _tenant(use.namespace) if use.store == "answers" else use.namespace[:16] or "-"
        stores.append([use.store, name, *counts, _ago(use.oldest), _ago(use.used)])
    _print_table(
        "Stores", ["store", "namespace", "items", "blocks", "bytes", "oldest", "last used"], stores
    )
    if found.worth is not None:
        _print_worth(found.worth)


def _print_worth(worth: Worth) -> None:
    """What was saved: seconds by tier, and all else by day, model and tenant."""
    if worth.tiers:
        columns = ["tier", "asked", "hits", "spent, ms", "saved, ms", "left out"]
        rows = [
            [name, row.asked, row.hits, _ms(row.spent_s), _ms(row.saved_s), row.left_out]
            for name, row in worth.tiers.items()
        ]
        _print_table(f"What looking cost and hits saved, {worth.days} days", columns, rows)
    tables = {
        "day": worth.by_day,
        "model": worth.by_model,
        "tenant": worth.by_tenant,
    }
    for name, table in tables.items():
        names = worth.names if name == "tenant" else {}
        found = [
            (f"{_cell(names[key])} ({_tenant(key)})" if key in names else _tenant(key), row)
            for key, row in table.items()
        ]
        columns = [
            name,
            "requests saved",
            "tokens in",
            "tokens out",
            "GPU s",
            "money saved",
            "requests sent",
            "money spent",
        ]
        rows = [
            [
                key,
                row.requests,
                row.input_tokens,
                row.output_tokens,
                f"{row.gpu_s:,.1f}",
                f"{row.money:,.2f}",
                row.sent_requests,
                f"{row.sent_money:,.2f}",
            ]
            for key, row in found
        ]
        if rows:
            _print_table(f"Saved by {name}, {worth.days} days", columns, rows)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}"


@verify.default
def _verify(
    *,
    cache_dir: CacheDir = None,
    repair: Annotated[bool, Parameter(negative="", help="Delete what is damaged.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything and check every checksum.

    Exit code 1 where something is damaged, 2 where something could not be read.
    """
    from rich.console import Console
    from rich.progress import track

    from semkv.stores.maintenance import verify as check

    console = Console(stderr=True)
    watched = partial(track, console=console, transient=True, disable=not console.is_terminal)
    found = check(cache_dir or default_cache_dir(), repair=repair, watched=watched)
    deleted = found.counts["deleted"]
    said = "{checked} files, {entries} entries and {answers} answers checked".format(**found.counts)
    said += f", {len(found.damaged)} damaged" + f", {deleted} of them deleted" * repair
    said += ", not all could be read" * bool(found.unread)
    result = {
        **found.counts,
        "damaged": found.damaged,
        "unread": found.unread,
    }
    _report(result, as_json, lambda: print(*found.damaged, said, sep="\n"))
    if len(found.damaged) > deleted:
        sys.exit(EXIT_DAMAGED)


@gc.default
def _gc(
    *,
    cache_dir: CacheDir = None,
    max_age_days: Annotated[
        float | None,
        Parameter(
            validator=validators.Number(gte=0),
            help="Also delete older data: KV blocks, encoder outputs, entries (prompts and answers), their images, a "
            "gateway's answers. 0: keep any age.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete orphaned files, and anything that was stored too long ago.

    Orphaned are files that no index names, and images that no entry has any more.
    """
    from semkv.stores.maintenance import collect

    found = collect(cache_dir or default_cache_dir(), max_age_days)
    said = (
        "deleted: {kv} of KV, {fusion} of fusion states, {media} images, {entries} entries, {answers} answers, "
        "{strays} temporary files"
    )
    left = [_INVALIDATE] * bool(max_age_days)
    result = {**found.counts, "unread": found.damaged + found.unread}
    _report(result, as_json, lambda: print(said.format(**found.counts)), left)


@purge.default
def _purge(
    *,
    cache_dir: CacheDir = None,
    tenant: TenantName = None,
    tag: Annotated[str | None, Parameter(help="Only the entries with this tag.")] = None,
    bucket: Annotated[
        str | None,
        Parameter(
            help="Purge this bucket of KV blocks and encoder outputs instead of a directory; the URL that engines have."
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete a cache, or what is one tenant's in it.

    With --tag the entries and a gateway's answers that have one.
    """
    from semkv.stores.maintenance import purge as delete

    folder = cache_dir or default_cache_dir()
    names = None if tenant is None else _names(folder, tenant)
    if bucket is not None:
        if tag is not None:
            raise ConfigError("--tag", tag, "none with --bucket: what lies there has no tags")
        _purge_bucket(bucket, folder, names, dry_run=dry_run, as_json=as_json)
        return
    salts = _salts(folder, names) if names is not None and tag is None else None
    left = [_INVALIDATE]
    if names is not None or tag is not None:
        left += [_IN_MEMORY, *[_PUT_ASIDE] * (folder / f"{CATALOG}.damaged").exists()]
        left += (
            ["KV blocks and encoder outputs (they have no tags)"]
            if salts is None
            else _unattributed(folder)
        )
    found = delete(folder, tenants=names, tag=tag, salts=salts, dry_run=dry_run)
    said = "{entries} entries, {answers} answers and {files} files " + (
        "would be deleted" if dry_run else "deleted"
    )
    result = {
        **found.counts,
        "dry_run": dry_run,
        "unread": found.damaged + found.unread,
    }
    _report(result, as_json, lambda: print(said.format(**found.counts)), left)


def _purge_bucket(
    url: str,
    folder: Path,
    names: Sequence[str] | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Purge a bucket; the gateway's secret is looked for in ``folder``."""
    from semkv_stores.block_file import tenant_tag

    if find_spec("semkv_vllm") is None or find_spec("obstore") is None:
        raise StoreError(
            "--bucket needs semkv-vllm with obstore: pip install './packages/vllm[bucket]'"
        )
    owners = None
    left = []
    if names is not None:
        owners = sorted({tenant_tag(salt) for salt in _salts(folder, names)})
        left = [_IN_MEMORY, *_unattributed(folder)]
    count = import_module("semkv_vllm.bucket_purge").purge_bucket(
        url,
        owners=owners,
        dry_run=dry_run,
    )
    said = f"{count} files of {url} " + ("would be deleted" if dry_run else "deleted")
    result = {
        "files": count,
        "dry_run": dry_run,
        "unread": [],
    }
    _report(result, as_json, lambda: print(said), left)


# -- a cache as one file ----------------------------------------------------------------------------------------------


@export.default
def _export(
    file: Annotated[Path, Parameter(help="The archive to write: a tar file.")],
    /,
    *,
    cache_dir: CacheDir = None,
) -> None:
    """Write a cache into one file, which holds prompts and answers in the clear."""
    from rich.console import Console
    from rich.progress import track

    from semkv_stores.database import Database
    from semkv_stores.files import described, matching, replacing

    root = cache_dir or default_cache_dir()
    if not (root / CATALOG).is_file():
        raise StoreError(f"{root} holds no answers or entries (no {CATALOG}): nothing to export")
    if file.exists():
        raise StoreError(f"{file} is there already: delete it or name another file")
    # A gateway reads it all the same, and no answer is found without it.
    if (root / "secret").is_symlink():
        raise StoreError(
            f"{root / 'secret'} is a link, which export does not follow: put a copy in its place"
        )
    try:
        with TemporaryDirectory(prefix=".semkv-export-", dir=file.parent) as folder:
            copy = Path(folder) / CATALOG
            with (
                closing(
                    Database(
                        root / CATALOG,
                        schema=SCHEMA,
                        replace=False,
                    )
                ) as database,
                database as db,
            ):
                db.execute("VACUUM INTO ?", (str(copy),))
            files = [path for form in _KEPT for path, _ in described(matching(root, form))]
            with (
                replacing(file, private=True) as out,
                tarfile.open(fileobj=out, mode="w|") as archive,
            ):
                for path in track(
                    [copy, *files],
                    "Writing",
                    console=Console(stderr=True),
                    transient=True,
                ):
                    name = CATALOG if path == copy else path.relative_to(root).as_posix()
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        archive.add(path, name, recursive=False, filter=_of_nobody)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def _of_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A regular file without its owner; nothing else goes into an archive."""
    info.uid = 0
    info.gid = 0
    info.uname = ""
    info.gname = ""
    return info if info.isreg() else None


@import_.default
def _import(
    file: Annotated[Path, Parameter(help="What export wrote.")],
    /,
    *,
    cache_dir: CacheDir = None,
) -> None:
    """Make a cache directory of what export wrote."""
    from rich import progress
    from rich.console import Console

    from semkv.stores.maintenance import make_cache_folder
    from semkv_stores.database import Database

    root = cache_dir or default_cache_dir()
    for left in root.glob(f"{_IMPORTING}*"):  # by an import that was killed
        shutil.rmtree(left, ignore_errors=True)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise StoreError(f"{root} is not empty: choose a new --cache-dir")
    make_cache_folder(root)
    try:
        # It may be a disk of its own.
        with TemporaryDirectory(prefix=_IMPORTING, dir=root) as folder:
            made = Path(folder)
            reading = progress.open(file, "rb", console=Console(stderr=True), transient=True)
            # An archive without compression unpacks to its own size.
            with reading as source, tarfile.open(fileobj=source, mode="r:") as archive:
                archive.extractall(made, filter=_exported)  # noqa: S202 (its names are tested)
            if not (made / CATALOG).is_file():
                raise StoreError(f"{file} is no export of semkv (no {CATALOG})")
            with closing(
                Database(
                    made / CATALOG,
                    schema=SCHEMA,
                    replace=False,
                )
            ) as database:
                database.check()
            for path in sorted(made.iterdir(), reverse=True):  # the database last
                path.chmod(0o700 if path.is_dir() else 0o600)
                path.rename(root / path.name)
    except tarfile.ReadError as error:
        raise StoreError(
            f"{file}: not a tar archive as export writes it, but a compressed or damaged one ({error})"
        ) from error
    except (
        OSError,
        EOFError,
        sqlite3.Error,
        tarfile.TarError,
        ValueError,
        LookupError,
        OverflowError,
    ) as error:
        raise StoreError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def _exported(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """A file of a form that export writes, for its owner only; nothing else is unpacked."""
    known = any(fnmatchcase(member.name, form) for form in (CATALOG, *_KEPT))
    parts = Path(member.name).parts
    if not known or not member.isreg() or member.issparse() or ".." in parts or len(parts) > 3:
        raise StoreError(f"{member.name!r} is nothing that export writes")
    return tarfile.data_filter(member.replace(mode=0o600, deep=False), folder)


# -- for people -------------------------------------------------------------------------------------------------------


def _report(
    result: dict[str, Any],
    as_json: bool,
    show: Callable[[], None],
    left: Sequence[str] = (),
) -> None:
    """Print a result, and for people what was left.

    Raises:
        StoreError: not all could be read.
    """
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show()
    if left:
        print("left: " + "; ".join(left), file=sys.stderr)
    if result["unread"]:
        raise StoreError("; ".join(result["unread"]))


def _secret(folder: Path) -> bytes:
    """The gateway's, where it can be had."""
    try:
        return os.environ.get("SEMKV_SECRET", "").encode() or read_bytes(folder / "secret")
    except OSError:
        return b""


def _names(folder: Path, tenant: str) -> list[str]:
    """What a tenant is called in the stores: so, and as the gateway calls whom a trusted proxy calls so, where its
    secret can be had."""
    from semkv.tenants import named_tenant

    try:
        tenant.encode()
    except UnicodeError:
        raise ConfigError("--tenant", tenant, "a name in UTF-8") from None
    secret = _secret(folder)
    # A header is read as latin-1, whatever the proxy wrote.
    return (
        [tenant, named_tenant(secret, tenant.encode().decode("latin-1"))]
        if secret and tenant
        else [tenant]
    )


def _salts(folder: Path, names: Sequence[str]) -> list[str | None]:
    """The values of ``cache_salt`` under which requests of a tenant reach vLLM: of a client that names it itself, of
    ``semkv run``, and where the gateway's secret can be had, of the gateway."""
    from semkv.engines import EnginePrompt
    from semkv.tenants import tenant_salt

    secret = _secret(folder)
    salts = [salt for name in names for salt in (name, EnginePrompt((), name).cache_salt)]
    return salts + [tenant_salt(secret, name, None) for name in names if secret]


def _unattributed(folder: Path) -> list[str]:
    """What is on the disk and not known to be a tenant's, for people."""
    return [_UNATTRIBUTED, *[_OF_GATEWAY] * (not _secret(folder))]


_TEXTS = ("tenant", "model", "store", "namespace", "tier", "day")  # columns of text


def _print_table(
    title: str,
    columns: list[str],
    rows: list[list[Any]],
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXTS else "right")
    for row in rows:
        table.add_row(*map(str, row))
    # Names are anybody's words.
    console = Console(
        markup=False,
        emoji=False,
        highlight=False,
    )
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)


def _cell(name: str) -> str:
    """A name fit for a terminal: what does not print is written as in Python."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name) or "-"


def _tenant(name: str) -> str:
    return _cell(name) if name else "(none)"


def _ago(moment: float) -> str:
    return f"{timedelta(seconds=int(max(0.0, time.time() - moment)))} ago"
