"""``semkv serve`` and ``semkv warm``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SERVE_EXAMPLES = """\b
Examples:
  semkv serve --upstream http://127.0.0.1:8000 --port 8080
      in front of a vLLM server; clients use port 8080 instead
  semkv serve --upstream http://127.0.0.1:8000 --ttl 86400 --no-semantic
      exact repeats alone, for a day
  SEMKV_SECRET=... semkv serve --upstream http://127.0.0.1:8000 --store redis://127.0.0.1:6379/0
      several gateways share their answers
  SEMKV_ADMIN_KEY=... semkv serve --upstream http://127.0.0.1:8000
      with the dashboard, at http://127.0.0.1:8080/semkv
"""


def serve(
    upstream: Annotated[str, typer.Option(help="The OpenAI-compatible server behind.")] = "http://127.0.0.1:8000",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on (0: any free one).")] = 8080,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where the cache lives (SEMKV_CACHE_DIR or ~/.cache/semkv).")
    ] = None,
    store: Annotated[
        str, typer.Option(help="A SQLite file, memory, or redis://HOST:PORT/N; default: in the cache directory.")
    ] = "",
    ttl: Annotated[float, typer.Option(help="Seconds an answer may be served (0: for ever).")] = 0.0,
    ttl_rule: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Such as prompt:*weather*=5m or model:*-news=1h,stale=60; may be repeated."),
    ] = None,
    tag_rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE", help="Labels answers for invalidation: prompt:*weather*=weather; may be repeated."
        ),
    ] = None,
    stale: Annotated[
        float, typer.Option(help="Seconds it is still served after that, while a fresh one is fetched.")
    ] = 0.0,
    sliding: Annotated[bool, typer.Option("--sliding", help="Reading an answer prolongs its life.")] = False,
    jitter: Annotated[float, typer.Option(help="Share of --ttl that is taken off at random.")] = 0.0,
    memory_mib: Annotated[int, typer.Option(help="Answers held in memory.")] = 256,
    store_mib: Annotated[int, typer.Option(help="Answers held in the store.")] = 4096,
    max_entries: Annotated[
        int, typer.Option(help="Donors held in the catalog; the least recently used go first.")
    ] = 100_000,
    media_mib: Annotated[int, typer.Option(help="Donors' images held.")] = 4096,
    data_version: Annotated[str, typer.Option(help="A change makes every stored answer unreachable.")] = "",
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Also keep answers that were drawn at random (no temperature 0, no seed).")
    ] = False,
    remote_media: Annotated[
        bool, typer.Option("--remote-media", help="Also keep answers about http(s) images, keyed by address.")
    ] = False,
    semantic: Annotated[bool, typer.Option("--semantic/--no-semantic", help="Look for near-repeats.")] = True,
    normalised: Annotated[
        bool,
        typer.Option(
            "--normalised/--no-normalised",
            help="Take texts that differ in typing (blanks, a sentence's first letter, Unicode form) for the same. "
            "Without, a question or a few sentences of an earlier turn that differ so are a near-repeat like others, "
            "mostly with a cosine near 1: threshold, guards and policy decide. All else has to be byte-equal.",
        ),
    ] = True,
    mode: Annotated[
        str, typer.Option(help="Of near-repeats: live, dry-run (look and count, change nothing) or off.")
    ] = "live",
    overlap: Annotated[
        bool,
        typer.Option(help="Where near-repeats are rare, ask the upstream while they are looked for."),
    ] = True,
    similarity_threshold: Annotated[float, typer.Option(help="Least cosine of a similar question.")] = 0.92,
    embedding_layer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:DIM[:THRESHOLD]", help="A layer of the embedding tier; may be repeated."),
    ] = None,
    embedding_hook: Annotated[
        str, typer.Option(help="none, prompt, vision, prompt_vision, or a dotted path.")
    ] = "none",
    index_encoder: Annotated[str, typer.Option(help="Sentence encoder: id or directory.")] = "all-MiniLM-L6-v2",
    vision_encoder: Annotated[str, typer.Option(help="Tower behind the vision layer: id or directory.")] = "",
    policy: Annotated[str, typer.Option(help="Last word on a near-repeat: fixed, calibrated or bounded.")] = "fixed",
    max_error_rate: Annotated[
        float, typer.Option(help="Bounded policy: limit on wrong approximate answers, as a share of all requests.")
    ] = 0.01,
    calibration: Annotated[str, typer.Option(help="What `semkv calibrate` wrote.")] = "",
    verify_rate: Annotated[
        float | None, typer.Option(help="Share of approximate hits whose unchanged request is also run, to compare.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Whose X-Semkv-Tenant and -Tags headers are believed; may be repeated."),
    ] = None,
    single_tenant: Annotated[bool, typer.Option("--single-tenant", help="All API keys share answers.")] = False,
    salt: Annotated[
        bool, typer.Option("--salt/--no-salt", help="Send vLLM's cache_salt, so that tenants share no prefix cache.")
    ] = True,
    tell: Annotated[bool, typer.Option("--tell/--no-tell", help="Put an X-Semkv header on answers.")] = True,
    tenant_metrics: Annotated[
        bool, typer.Option("--tenant-metrics", help="Label metrics with a bucket of the tenant's digest.")
    ] = False,
    max_body_mib: Annotated[int, typer.Option(help="Larger requests are refused.")] = 32,
    max_answer_mib: Annotated[int, typer.Option(help="Larger answers are passed on, but not kept.")] = 8,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a request, beside one for every 16 KiB.")
    ] = 60.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to wait for a connection to the upstream.")] = 2.0,
    upstream_timeout: Annotated[float, typer.Option(help="Seconds to wait for its next byte.")] = 600.0,
    store_timeout: Annotated[float, typer.Option(help="Seconds a request waits for the store.")] = 0.25,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Answer repeated requests in front of a server.

    Any OpenAI-compatible server will do; near-repeats are answered too, unless --no-semantic is given.

    Secrets come from the environment: SEMKV_SECRET (keys of stored answers), SEMKV_ADMIN_KEY (dashboard, admin routes).
    """
    import os

    from semkv.config import default_cache_dir
    from semkv.server.serve import run_server
    from semkv.server.settings import ServerSettings

    settings = ServerSettings(
        upstream=upstream,
        cache_dir=cache_dir or default_cache_dir(),
        store=store,
        ttl=ttl,
        ttl_rules=tuple(ttl_rule or ()),
        tag_rules=tuple(tag_rule or ()),
        stale=stale,
        sliding=sliding,
        jitter=jitter,
        memory_mib=memory_mib,
        store_mib=store_mib,
        max_entries=max_entries,
        media_mib=media_mib,
        data_version=data_version,
        sampled=sampled,
        remote_media=remote_media,
        semantic=semantic,
        normalised=normalised,
        mode=mode,
        overlap=overlap,
        similarity_threshold=similarity_threshold,
        embedding_layers=tuple(embedding_layer or ()),
        embedding_hook=embedding_hook,
        index_encoder=index_encoder,
        vision_encoder=vision_encoder,
        policy=policy,
        max_error_rate=max_error_rate,
        calibration=calibration,
        verify_rate=verify_rate,
        trusted_proxies=tuple(trusted_proxy or ()),
        single_tenant=single_tenant,
        salt=salt,
        tell=tell,
        tenant_metrics=tenant_metrics,
        max_body_mib=max_body_mib,
        max_answer_mib=max_answer_mib,
        body_timeout=body_timeout,
        connect_timeout=connect_timeout,
        upstream_timeout=upstream_timeout,
        store_timeout=store_timeout,
    )
    run_server(settings, os.environ, host=host, port=port, log_level=log_level)


def warm(
    file: Annotated[
        Path, typer.Argument(metavar="PROMPTS", help="JSON lines: a prompt as a string, or a whole request body.")
    ],
    url: Annotated[str, typer.Option(help="The gateway.")] = "http://127.0.0.1:8080",
    model: Annotated[str, typer.Option(help="For lines that name none.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="For lines that are prompts.")] = 512,
) -> None:
    """Send the prompts of a file through a gateway.

    So that its cache has them. The API key is taken from OPENAI_API_KEY.
    """
    import os

    from semkv.server.warm import warm_up

    counts = warm_up(
        file, url, model=model, concurrency=concurrency, max_tokens=max_tokens, key=os.environ.get("OPENAI_API_KEY", "")
    )
    typer.echo(f"{counts.sent} sent, {counts.there} there already, {counts.failed} failed")
    if counts.failed:
        typer.echo(f"first failure: {counts.why}", err=True)
        raise typer.Exit(1)
