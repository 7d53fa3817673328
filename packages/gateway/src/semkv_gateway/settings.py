"""Settings of the gateway. Secrets come from the environment and are never printed.

SEMKV_SECRET       keys of stored answers are HMACs under it; made once per cache directory where it is not set
SEMKV_JUDGE_KEY    is sent to --judge-url in place of the keys of requests
SEMKV_ADMIN_KEY    opens the admin routes and the dashboard; without it they are closed
SEMKV_<FLAG>       any flag of ``semkv serve`` in upper case, such as SEMKV_TTL; a flag given overrides it
SEMKV_CONFIG       a TOML file of flags; what is given otherwise overrides it
"""

# The command line reads the annotations of inherited fields: they must be values, not texts.

import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import Parameter, validators

from semkv import plug
from semkv.config import BOUNDS, FOUND, JUDGING, NEAR, SERVED, CacheConfig, LookupConfig
from semkv.errors import ConfigError, StoreError
from semkv.types import CacheMode, TierChoice
from semkv_gateway.prices import PRICE_FORM, is_price
from semkv_gateway.responses.opening import is_redis
from semkv_stores.files import check_regular, read_bytes
from semkv_stores.settings import NOT_NEGATIVE, POSITIVE, Allowed, Needs

_KEY_LENGTH = 16


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text.strip(), strict=False)
    except ValueError:
        return None


def _is_url(text: str) -> bool:
    """Whether a request's path can go behind it, and the client's own credentials with it."""
    try:
        url = urlsplit(text)
        there = (
            url.scheme in ("http", "https")
            and bool(url.hostname)
            and url.port != 0
            and url.username is None
        )
    except ValueError:
        return False
    return there and not url.query and not url.fragment and not url.path.rstrip("/").endswith("/v1")


URL = Allowed("a URL without /v1 and without a password, such as http://127.0.0.1:8000", _is_url)
URLS = Allowed(URL.text, _is_url, each=True)
SOME = Allowed("one URL or more", bool)
PEER = Allowed(
    "host:port, such as 10.0.0.1:5710",
    re.compile(r"[^\s:]+:[1-9]\d{0,4}", re.ASCII).fullmatch,
    each=True,
)
NETWORK = Allowed("networks such as 10.0.0.0/8, 127.0.0.1", _network, each=True)
ORIGIN = Allowed(
    "an origin such as https://app.example.org, or *",
    re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", re.ASCII).fullmatch,
    each=True,
)
NAME = Allowed(
    "the name of a header, such as X-Region",
    re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII).fullmatch,
    True,
)
DOCUMENTS = Allowed(
    "field, parts, or a tag such as '<document>'",
    re.compile(r"field|parts|<[A-Za-z][\w.-]*>", re.ASCII).fullmatch,
    each=True,
)
PORT = Parameter(validator=validators.Number(gte=0, lte=65535))
ZERO = Allowed("0, since with another temperature answers are drawn at random", lambda n: n == 0)
DRAWN = Parameter(group="What is kept")
LIFE = Parameter(group="Lifetimes and labels")
TENANTS = Parameter(group="Tenants")
WORTH = Parameter(group="Worth")
PRICE = Allowed(PRICE_FORM, is_price, each=True)
RATE = Allowed("a share above 0 and below 1, such as 0.02", lambda share: 0.0 < share < 1.0)
SHARE = Allowed("0, or a share below 1, such as 0.01", lambda share: 0.0 <= share < 1.0)
SEARCHING = Allowed(
    "a redis:// or redis+cluster:// URL of Redis 8 or later, which has vector sets",
    lambda url: not url or is_redis(url),
)
ELSEWHERE = Needs("a --judge-model other than bundled", lambda given: not given.judges_itself)
ONE_EACH = Needs(
    "--kv-hints and as many --upstream, in the same order",
    lambda given: given.kv_hints and len(given.peers) == len(given.upstreams),
)
KEPT = Needs("a --store that is not memory", lambda given: given.store != "memory")
REUSING = Needs("--document-error-rate", lambda given: given.document_error_rate is not None)
AGING = Needs("a --ttl other than 0", lambda given: given.ttl or given.ttl_rules)


@dataclass(frozen=True)
class ServerSettings(LookupConfig):
    """What ``semkv serve`` and the middleware need to know.

    Attributes:
        upstreams: The OpenAI-compatible server that answers misses; may be repeated for servers of the same models. The
            middleware does not use it.
        kv_hints: Tell vLLM's SemKVConnector behind the gateway which conversation a request belongs to, and for how
            long to keep its KV in host memory.
        peers: Where an upstream's p2p tier listens, such as 10.0.0.1:5710; one for each --upstream, in their order.
            A conversation that moves takes its KV along. Needs --kv-hints.
        store: A SQLite file, memory, redis://HOST:PORT/N, redis+cluster://HOST:PORT, or package.module:Factory;
            default: in the cache directory.
        donor_search: A Redis 8 (redis://HOST:PORT/N) that keeps donors and searches those behind one history; default:
            the gateway searches the latest 4,096.
        ttl: Seconds a response may be served; 0 for ever.
        ttl_rules: Such as `prompt:*weather*=5m` or `model:*-news=1h,stale=60,jitter=0.1`; may be repeated.
        tag_rules: Labels responses for invalidation: `prompt:*weather*=weather`; may be repeated.
        stale: Seconds after its lifetime in which a response is still served while a fresh one is fetched.
        memory_mib: Most MiB of responses held in memory.
        store_mib: Most MiB of responses held in the store.
        tenant_mib: Most MiB of one tenant's responses in a store that is a file; 0 for no bound by tenant.
        data_version: Part of every key: a change makes every stored response unreachable.
        default_temperature: 0: requests without a temperature, top_p or seed are sent with temperature 0.
        sampled: Also keep sampled responses, of requests without temperature 0 and without a seed.
        sampled_rules: Such as `model:o4-*=keep` or `prompt:*poem*=draw` (sent as it is, not kept); may be repeated.
        skip_rules: Requests that bypass the cache: `text:*passport*`, `tenant:3fa9c1d2`, `tool:*`, `answer:*cannot
            help*`; may be repeated.
        near_rules: Other thresholds for some near-repeats: `tenant:3fa9c1d2=off` or `model:*-coder=0.97`; may be
            repeated.
        stateless_responses: The upstream stores no /v1/responses (vLLM's default), so cache requests without `store`.
        known_fields: An unreviewed field of request bodies that refers to nothing on the server; may be repeated.
        trusted_proxies: A network whose X-Semkv-Tenant and X-Semkv-Tags headers are believed; may be repeated.
        tenant_names: A TOML file of names for tenants, shown to operators; 3fa9c1d2 = "Search team".
        single_tenant: All API keys share responses.
        separate_users: Each end user that a body names (`user`, `safety_identifier`, `metadata.user_id`) is a tenant.
        salt: Send vLLM's cache_salt, so that tenants share no prefix cache.
        reorder_documents: Send documents in the order that the upstream's prefix cache most likely holds. `field`:
            vLLM's `documents`; `parts`: long text parts before a user's last text; `<document>`: texts between such
            tags. May be repeated.
        document_error_rate: Largest share of answers, by model and tenant, that may change where vLLM reuses documents
            at another position. A share of them is checked.
        reuse_separated_documents: Ask vLLM in every request to reuse the documents between its `document_separator`.
        access_log: Log a line for every request: its id, route, model, tenant and outcome, never its text.
        otel: Send an OpenTelemetry span for every request to where OTEL_EXPORTER_OTLP_ENDPOINT says.
        cors_origins: An origin whose pages may read responses, or * for all; may be repeated.
        ignored_headers: A request header that neither holds a credential nor changes the response; may be repeated.
        max_body_mib: Larger requests are refused.
        store_timeout: Seconds a request waits for the store.
        encoder_timeout: Seconds a request waits for the sentence encoder; then it goes on as a miss.
        judge_url: The judge's OpenAI-compatible server; by default the upstream. It gets SEMKV_JUDGE_KEY, else the
            request's own key.
        judge_timeout: Seconds a request waits for the judge; then it is a miss, and the verdict counts for the next
            one.
        prices: Such as `gpt-4o*=input=2.5 output=10`, per million tokens; may be repeated, in a file a table.
        worth_days: Days for which daily savings are kept.
        hit_usage: original; or zero: the usage of a hit is 0.
        holdout: Share of requests that get no near-repeats: a control group.
        feedback: Hits that a tenant may report as wrong in a minute; 0 for none.
    """

    tiers: Annotated[TierChoice, NEAR] = TierChoice.AUTO

    upstreams: Annotated[tuple[str, ...], Parameter(name="--upstream"), URLS, SOME] = (
        "http://127.0.0.1:8000",
    )
    kv_hints: bool = False
    peers: Annotated[tuple[str, ...], Parameter(name="--peer"), PEER, ONE_EACH] = ()
    store: str = ""
    donor_search: Annotated[str, SEARCHING, FOUND, NEAR] = ""
    ttl: Annotated[float, NOT_NEGATIVE, LIFE] = 86400.0
    ttl_rules: Annotated[tuple[str, ...], Parameter(name="--ttl-rule"), LIFE] = ()
    tag_rules: Annotated[tuple[str, ...], Parameter(name="--tag-rule"), LIFE] = ()
    stale: Annotated[float, NOT_NEGATIVE, AGING, LIFE] = 0.0
    memory_mib: Annotated[int, POSITIVE, BOUNDS] = 256
    store_mib: Annotated[int, POSITIVE, KEPT, BOUNDS] = 4096
    tenant_mib: Annotated[int, NOT_NEGATIVE, BOUNDS] = 0
    data_version: Annotated[str, LIFE] = ""
    default_temperature: Annotated[float | None, ZERO, DRAWN] = None
    sampled: Annotated[bool, DRAWN] = False
    sampled_rules: Annotated[tuple[str, ...], Parameter(name="--sampled-rule"), DRAWN] = ()
    skip_rules: Annotated[tuple[str, ...], Parameter(name="--skip-rule"), DRAWN] = ()
    near_rules: Annotated[tuple[str, ...], Parameter(name="--near-rule"), FOUND, NEAR] = ()
    stateless_responses: Annotated[bool, DRAWN] = False
    known_fields: Annotated[tuple[str, ...], Parameter(name="--known-field"), DRAWN] = ()
    trusted_proxies: Annotated[
        tuple[str, ...], Parameter(name="--trusted-proxy"), TENANTS, NETWORK
    ] = ()
    tenant_names: Annotated[Path | None, TENANTS] = None
    single_tenant: Annotated[bool, TENANTS] = False
    separate_users: Annotated[bool, TENANTS] = False
    salt: Annotated[bool, TENANTS] = True
    reorder_documents: Annotated[tuple[str, ...], DOCUMENTS] = ()
    document_error_rate: Annotated[float | None, RATE] = None
    reuse_separated_documents: Annotated[bool, REUSING] = False
    access_log: bool = False
    otel: bool = False
    cors_origins: Annotated[tuple[str, ...], Parameter(name="--cors-origin"), ORIGIN] = ()
    ignored_headers: Annotated[
        tuple[str, ...], Parameter(name="--ignore-header"), TENANTS, NAME
    ] = ()
    max_body_mib: Annotated[int, POSITIVE, BOUNDS] = 32
    store_timeout: Annotated[float, POSITIVE] = 0.25
    encoder_timeout: Annotated[float, POSITIVE] = 0.25
    judge_url: Annotated[str | None, URL, JUDGING, SERVED, ELSEWHERE, NEAR] = None
    judge_timeout: Annotated[float, NOT_NEGATIVE, JUDGING, SERVED, ELSEWHERE, NEAR] = 0.25
    prices: Annotated[tuple[str, ...], Parameter(name="--price"), WORTH, PRICE] = ()
    worth_days: Annotated[int, POSITIVE, WORTH] = 90
    hit_usage: Annotated[Literal["original", "zero"], WORTH] = "original"
    holdout: Annotated[float, SHARE, SERVED, WORTH] = 0.0
    feedback: Annotated[int, NOT_NEGATIVE] = 10

    @property
    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The trusted proxies."""
        return tuple(filter(None, map(_network, self.trusted_proxies)))

    @property
    def finds_near_repeats(self) -> bool:
        return self.semantic and self.mode is not CacheMode.OFF

    @property
    def serves_near_repeats(self) -> bool:
        return self.semantic and self.mode is CacheMode.LIVE

    def cache_config(self) -> CacheConfig | None:
        """Settings of the semantic cache; None where it is off."""
        if not self.finds_near_repeats:
            return None
        return CacheConfig(**{item.name: getattr(self, item.name) for item in fields(LookupConfig)})


def secret_of(settings: ServerSettings, environment: Mapping[str, str]) -> bytes:
    """The deployment's secret: ``SEMKV_SECRET``, else the one in the cache directory, made when it is missing."""
    if given := _given("SEMKV_SECRET", environment):
        return given.encode()
    shares = is_redis(settings.store) or is_redis(settings.donor_search)
    if shares or plug.is_path(settings.store):
        raise ConfigError(
            "SEMKV_SECRET", "", "a secret that is the same for every gateway on this store"
        )
    from semkv.stores.maintenance import make_cache_folder

    file = settings.cache_dir / "secret"
    make_cache_folder(settings.cache_dir)
    try:
        if not check_regular(file):
            _make_secret(file)
        found = read_bytes(file)
    except OSError as error:
        raise StoreError(f"{file}: {error.strerror or error}") from error
    if len(found) < _KEY_LENGTH:
        raise StoreError(f"{file} holds no secret; delete it to have a new one made")
    return found


def _make_secret(file: Path) -> None:
    """Whole or not at all, and the first of several processes wins."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".secret-")
    with os.fdopen(handle, "w") as out:
        out.write(secrets.token_hex(32))
    try:
        os.link(temporary, file)
    except FileExistsError:
        pass
    finally:
        Path(temporary).unlink()


def admin_key(environment: Mapping[str, str]) -> str:
    """``SEMKV_ADMIN_KEY``; empty where the admin routes are closed."""
    return _given("SEMKV_ADMIN_KEY", environment)


def _given(name: str, environment: Mapping[str, str]) -> str:
    found = environment.get(name, "")
    if found and len(found) < _KEY_LENGTH:
        raise ConfigError(name, "(hidden)", f"at least {_KEY_LENGTH} characters")
    return found
