"""``semkv stats``, ``verify``, ``gc`` and ``purge``: looking after a cache directory."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from semkv.config import command_line, default_cache_dir
from semkv.errors import ConfigError, StoreError
from semkv.stores.database import CATALOG

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

    from semkv.stores.maintenance import CacheUse, Collected, Damage, Purged

EXIT_DAMAGED = 1
_ELSEWHERE = f"answers that a gateway keeps elsewhere than in {CATALOG} there (its --store)"
_INVALIDATE = f"{_ELSEWHERE}: its /semkv/api/invalidate removes them"
_IN_MEMORY = (
    "KV blocks and encoder outputs that running engines hold in memory (until they are evicted, or the engine "
    "restarts), the latest hits that a gateway's dashboard shows, and what is being written now"
)
_PUT_ASIDE = f"{CATALOG}.damaged, which an engine or a gateway put aside (delete it)"
_NAMES = 20  # tenants that are listed

CacheDir = Annotated[
    Path | None, Parameter(name="--cache-dir", help="Where the cache lives; SEMKV_CACHE_DIR or ~/.cache/semkv.")
]
FusionDir = Annotated[
    Path | None, Parameter(name="--fusion-cache-dir", help="Fusion states, where they are kept elsewhere.")
]
TenantName = Annotated[
    str | None, Parameter(name="--tenant", help="Only this tenant's, named as in stats ('' for no name).")
]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]
DryRun = Annotated[bool, Parameter(name="--dry-run", negative="", help="Count, and delete nothing.")]


def _examples(text: str) -> str:
    return f"Examples:\n\n```\n{text}```"


stats = command_line(
    help_epilogue=_examples("""\
  semkv stats --cache-dir runs/demo/cache
  semkv stats --json | jq '.stores[] | select(.store == "kv").nbytes'
  semkv stats --tenant alice
      what one tenant holds, and in which stores: what purge --tenant would find. The tenant is named as in stats: a
      gateway's by 32 hex digits; with the deployment's secret, as for purge, also by the name that a trusted proxy gave
      it. Hits count the requests for which an entry stood in; exact repeats get a gateway's answers without one. A
      running process adds its hits when it next records an entry
""")
)

verify = command_line(
    help_epilogue=_examples("""\
  semkv verify --cache-dir runs/demo/cache
      read every file, and every answer of a gateway, and check every checksum; exit code 1 where something is damaged,
      2 where something could not be read at all. Engines and gateways may be running
  semkv verify --repair
      delete what is damaged, so that it is computed again; of a gateway's answers only those that fail. A damaged
      catalog stays: a purge of everything deletes it, and an engine or a gateway that starts puts it aside
""")
)

gc = command_line(
    help_epilogue=_examples("""\
  semkv gc --cache-dir runs/demo/cache
      delete what crashed writers and deleted entries left
  semkv gc --max-age-days 30
      also what was stored more than 30 days ago, used since or not
""")
)

purge = command_line(
    help_epilogue=_examples("""\
  semkv purge --cache-dir runs/demo/cache
      delete everything that semkv stored there, and nothing else. Empty databases stay: engines and gateways that run
      go on with them, and forget what they hold within a second or so. A gateway's secret stays. What vLLM itself holds
      on the device goes with reset_prefix_cache and reset_encoder_cache
  semkv purge --tenant alice
      delete the entries of one tenant, named as for stats, with the pictures that only they had; a gateway's answers to
      it; and the KV blocks and encoder outputs that were stored for it. Running gateways forget its answers and
      vectors within a second or so, and its text is overwritten in the database. KV blocks and encoder outputs of a
      gateway's tenant need the deployment's secret: SEMKV_SECRET, or the file that the gateway made in its cache
      directory. Anything that could not be deleted is listed. A request under way is recorded as an entry afterwards:
      repeat the purge
  semkv purge --tag release-7 --dry-run
      count what would go
""")
)


@stats.default
def _stats(
    *,
    cache_dir: CacheDir = None,
    fusion_cache_dir: FusionDir = None,
    tenant: TenantName = None,
    as_json: AsJson = False,
) -> None:
    """What a cache holds, by store, tenant and model."""
    from semkv.stores.maintenance import inspect

    folder = _folder(cache_dir)
    if tenant is None:
        found = inspect(folder, fusion_cache_dir)
    else:
        names = _names(folder, tenant)
        own, gateways = _salts(folder, names)
        found = inspect(folder, fusion_cache_dir, names, [*own, *gateways])
        unattributed = [*_unattributed(known=bool(gateways)), *[_ELSEWHERE] * _has_gateway(folder)]
        print("not counted: " + "; ".join(unattributed), file=sys.stderr)
        if not (found.entries or found.stores or found.unread):
            everybody = inspect(folder, fusion_cache_dir)
            names = [row.tenant for row in everybody.entries] + [held.tenant or "" for held in everybody.answers]
            known = list(dict.fromkeys(names))
            listed = ", ".join(map(_tenant, known[:_NAMES])) + ", ..." * (len(known) > _NAMES)
            print(f"nothing is here of {_tenant(tenant)}; known: {listed or 'nobody'}", file=sys.stderr)
    _report(found, as_json, lambda: _print_use(found))


def _print_use(found: CacheUse) -> None:
    console = _console()
    whose = "" if found.tenants is None else f", tenant {' or '.join(map(_tenant, found.tenants))}"
    console.print(f"{_cell(found.cache_dir)}{whose}: {_size(found.nbytes)} in the stores below")
    table = _table("Entries", "tenant", "model", "entries", "hits", "oldest", "last used")
    for row in found.entries:
        model = f"{row.name[:60]} ({row.model[:8]})" if row.name else row.model[:16]
        times = (_ago(row.oldest), _ago(row.used))
        table.add_row(_tenant(row.tenant), _cell(model), str(row.entries), str(row.hits), *times)
    console.print(table)
    if found.answers:
        table = _table("Answers", "tenant", "answers", "bytes", "oldest", "last used")
        for held in found.answers:
            whose = "?" if held.tenant is None else _tenant(held.tenant)
            table.add_row(whose, str(held.answers), _size(held.nbytes), _ago(held.oldest), _ago(held.used))
        console.print(table)
    table = _table("Stores", "store", "namespace", "items", "blocks", "bytes", "oldest", "last used")
    for use in found.stores:
        counts = (str(use.items), str(use.blocks) if use.blocks else "-", _size(use.nbytes))
        table.add_row(use.store, use.namespace[:16] or "-", *counts, _ago(use.oldest), _ago(use.used))
    console.print(table)


@verify.default
def _verify(
    *,
    cache_dir: CacheDir = None,
    fusion_cache_dir: FusionDir = None,
    repair: Annotated[bool, Parameter(negative="", help="Delete what is damaged.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything and check every checksum.

    Exit code 1 where something is damaged, 2 where something could not be read.
    """
    from rich.console import Console
    from rich.progress import Progress

    from semkv.stores.maintenance import verify as check

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Checking", total=None)
        found = check(
            _folder(cache_dir),
            fusion_cache_dir,
            repair=repair,
            advance=lambda done, total: bar.update(task, completed=done, total=total),
        )
    counts = f"{found.checked} files and {found.answers} answers checked, {len(found.damaged)} damaged"
    counts += f", {found.deleted} of them deleted" * repair + ", not all could be read" * bool(found.unread)
    _report(found, as_json, lambda: print(*found.damaged, counts, sep="\n"))
    if len(found.damaged) > found.deleted:
        sys.exit(EXIT_DAMAGED)


@gc.default
def _gc(
    *,
    cache_dir: CacheDir = None,
    fusion_cache_dir: FusionDir = None,
    max_age_days: Annotated[
        float | None,
        Parameter(
            validator=validators.Number(gte=0),
            help="Delete also what was stored longer ago: KV blocks, encoder outputs, entries (prompts and answers), "
            "the pictures that only those have, a gateway's answers. 0: any age may stay.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete orphaned files, and anything that was stored too long ago.

    Orphaned are files that no index names, and pictures that no entry has any more.
    """
    from semkv.stores.maintenance import collect

    found = collect(_folder(cache_dir), fusion_cache_dir, max_age_days)
    said = (
        f"deleted: {found.kv} of KV, {found.fusion} of fusion states, {found.media} pictures, "
        f"{found.entries} entries, {found.answers} answers, {found.strays} temporary files"
    )
    left = [_INVALIDATE] * bool(max_age_days and _has_gateway(_folder(cache_dir)))
    _report(found, as_json, lambda: print(said), left)


@purge.default
def _purge(
    *,
    cache_dir: CacheDir = None,
    fusion_cache_dir: FusionDir = None,
    tenant: TenantName = None,
    tag: Annotated[str | None, Parameter(help="Only the entries with this tag.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete a cache, or what is one tenant's in it.

    With --tag the entries and a gateway's answers that have one.
    """
    from semkv.stores.maintenance import purge_all, purge_entries, purge_salts

    folder = _folder(cache_dir)
    left = [_INVALIDATE] * _has_gateway(folder)
    if tenant is None and tag is None:
        found = purge_all(folder, fusion_cache_dir, dry_run=dry_run)
    else:
        left += [_IN_MEMORY, *[_PUT_ASIDE] * (folder / f"{CATALOG}.damaged").exists()]
        names = None if tenant is None else _names(folder, tenant)
        found = purge_entries(folder, names, tag, dry_run=dry_run)
        if names is None or tag is not None:
            left.append("KV blocks and encoder outputs (they have no tags)")
        else:
            own, gateways = _salts(folder, names)
            left += _unattributed(known=bool(gateways))
            for salts in (own, gateways):
                theirs = purge_salts(folder, fusion_cache_dir, salts, dry_run=dry_run)
                found += theirs
            if gateways and not theirs.files:
                left.append("those of a gateway, if it stored any: none has the salt of this tenant and this secret")
    done = "would be deleted" if dry_run else "deleted"
    said = f"{found.entries} entries, {found.answers} answers and {found.files} files {done}"
    _report(found, as_json, lambda: print(said), left)


def _report(
    found: CacheUse | Damage | Collected | Purged, as_json: bool, show: Callable[[], None], left: Sequence[str] = ()
) -> None:
    """Print a result, and for people what was left.

    Raises:
        StoreError: not all could be read.
    """
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show()
    if left:
        print("left: " + "; ".join(left), file=sys.stderr)
    if found.unread:
        raise StoreError("; ".join(found.unread))


def _secret(folder: Path) -> bytes:
    """The gateway's, where it can be had."""
    file = folder / "secret"
    try:
        return os.environ.get("SEMKV_SECRET", "").encode() or file.read_bytes()
    except OSError:
        return b""


def _has_gateway(folder: Path) -> bool:
    """Whether one has been here, as far as is known."""
    return bool(_secret(folder)) or any(folder.glob("ahead*"))


def _names(folder: Path, tenant: str) -> list[str]:
    """What a tenant is called in the stores: so, and as the gateway calls whom a trusted proxy calls so, where its
    secret can be had."""
    from semkv.server.tenancy import named_tenant

    try:
        tenant.encode()
    except UnicodeError:
        raise ConfigError("--tenant", tenant, "a name in UTF-8") from None
    secret = _secret(folder)
    # A header is read as latin-1, whatever the proxy wrote.
    return [tenant, named_tenant(secret, tenant.encode().decode("latin-1"))] if secret and tenant else [tenant]


def _salts(folder: Path, names: list[str]) -> tuple[list[str | None], list[str]]:
    """The values of ``cache_salt`` under which requests of a tenant reach vLLM: of a client that names it itself and of
    ``semkv run``; and of the gateway, none without its secret."""
    from semkv.engines import EnginePrompt
    from semkv.server.tenancy import tenant_salt

    secret = _secret(folder)
    own = [salt for name in names for salt in (name, EnginePrompt((), name).cache_salt)]
    return own, [tenant_salt(secret, name, None) for name in names] if secret else []


def _unattributed(*, known: bool) -> list[str]:
    """What is on the disk and not known to be a tenant's, for people. ``known``: whether the gateway's secret is."""
    unattributed = [
        "KV blocks and encoder outputs without a salt, or stored before files said whose they are",
        "what clients of a gateway asked with a cache_salt of their own",
    ]
    if not known:
        unattributed.append("KV blocks and encoder outputs of a gateway's tenant (set SEMKV_SECRET to the gateway's)")
    return unattributed


def _folder(given: Path | None) -> Path:
    return given or default_cache_dir()


def _console() -> Console:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)  # names are anybody's words
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("tenant", "model", "store", "namespace") else "right")
    return table


def _cell(name: str) -> str:
    """A name fit for a terminal: what does not print is written as in Python."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name) or "-"


def _tenant(name: str) -> str:
    return _cell(name) if name else "(none)"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _ago(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
