"""Settings of the gateway, checked when they are made. Secrets come from the environment and are never printed.

SEMKV_SECRET       keys of stored answers are HMACs under it; made once per cache directory where it is not set
SEMKV_ADMIN_KEY    opens the admin routes and the dashboard; without it they are closed
SEMKV_<FLAG>       any flag of ``semkv serve`` in upper case, such as SEMKV_TTL; how the middleware is set up
"""

from __future__ import annotations

import os
import secrets
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from semkv.config import CacheConfig, default_cache_dir, parse_choice, parse_embedding_layer
from semkv.errors import ConfigError, StoreError
from semkv.server.tenancy import Network
from semkv.stores.cachedir import make_folder
from semkv.types import CacheMode, PolicyName

_KEY_LENGTH = 16
_MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """What ``semkv serve`` and the middleware need to know. Field names are the flags' names.

    Attributes:
        upstream: the server behind; not used by the middleware.
        cache_dir: where answers, the catalog and donors' images live.
        store: a SQLite file, ``memory`` or ``redis://host:port/n``; empty for ``catalog.sqlite`` below ``cache_dir``.
        ttl: seconds an answer may be served; 0 for ever.
        ttl_rules: as ``prompt:*weather*=5m``; see `semkv.tiers.freshness.parse_rule`.
        tag_rules: as ``prompt:*weather*=weather``; see `semkv.server.tenancy.parse_tag_rule`.
        stale: seconds after that in which it is still served while a fresh one is fetched.
        sliding: an answer that is read in the second half of its life gets the whole again.
        jitter: share of ``ttl`` that is taken off at random, so that what came together does not go together.
        memory_mib: answers held in memory, in MiB.
        store_mib: answers held in the store, in MiB.
        max_entries: donors held in the catalog.
        media_mib: donors' images held, in MiB.
        data_version: part of every key; a change makes every stored answer unreachable.
        sampled: also keep answers of requests that draw at random (no temperature 0, no seed).
        remote_media: also keep answers to requests with http(s) images, keyed by their address.
        semantic: look for near-repeats.
        normalised: among these, take texts that are equal but for typing for the same, without asking the policy.
        mode: of near-repeats: live, dry-run (look and count, change nothing) or off.
        overlap: where fewer than one in twenty lookups (of the store, and for near-repeats) found something, ask the
            upstream meanwhile, and cut that off where one does.
        similarity_threshold: least cosine of a similar question.
        embedding_layers: as ``NAME:DIM[:THRESHOLD]``.
        embedding_hook: fills the embedding layers.
        index_encoder: sentence encoder.
        vision_encoder: tower behind the ``vision`` layer: id or directory.
        policy: who has the last word on a near-repeat: fixed, calibrated or bounded.
        max_error_rate: the bounded policy's limit on wrong approximate answers, as a share of all requests.
        calibration: what ``semkv calibrate`` wrote.
        verify_rate: share of approximate hits that are checked against the unchanged request's own answer.
        trusted_proxies: networks whose ``X-Semkv-Tenant`` and ``X-Semkv-Tags`` headers are believed.
        single_tenant: all API keys share answers.
        salt: send vLLM's ``cache_salt``, so that tenants share no prefix cache; off for a server that refuses it.
        tell: put an ``X-Semkv`` header on answers.
        tenant_metrics: label request metrics with a bucket of the tenant's digest.
        max_body_mib: larger requests are refused.
        max_answer_mib: larger answers are passed on, but neither shared nor kept.
        body_timeout: seconds to wait for a request's body, beside a second for every 16 KiB of it.
        connect_timeout: seconds to wait for a connection to the upstream.
        upstream_timeout: seconds to wait for its next byte.
        store_timeout: seconds a request waits for the store.
    """

    upstream: str = "http://127.0.0.1:8000"
    cache_dir: Path = field(default_factory=default_cache_dir)
    store: str = ""
    ttl: float = 0.0
    ttl_rules: tuple[str, ...] = ()
    tag_rules: tuple[str, ...] = ()
    stale: float = 0.0
    sliding: bool = False
    jitter: float = 0.0
    memory_mib: int = 256
    store_mib: int = 4096
    max_entries: int = 100_000
    media_mib: int = 4096
    data_version: str = ""
    sampled: bool = False
    remote_media: bool = False
    semantic: bool = True
    normalised: bool = True
    mode: str = "live"
    overlap: bool = True
    similarity_threshold: float = 0.92
    embedding_layers: tuple[str, ...] = ()
    embedding_hook: str = "none"
    index_encoder: str = "all-MiniLM-L6-v2"
    vision_encoder: str = ""
    policy: str = PolicyName.FIXED
    max_error_rate: float = 0.01
    calibration: str = ""
    verify_rate: float | None = None
    trusted_proxies: tuple[str, ...] = ()
    single_tenant: bool = False
    salt: bool = True
    tell: bool = True
    tenant_metrics: bool = False
    max_body_mib: int = 32
    max_answer_mib: int = 8
    body_timeout: float = 60.0
    connect_timeout: float = 2.0
    upstream_timeout: float = 600.0
    store_timeout: float = 0.25

    def __post_init__(self) -> None:
        if not self.upstream.startswith(("http://", "https://")):
            raise ConfigError("--upstream", self.upstream, "a URL such as http://127.0.0.1:8000")
        for name in ("memory_mib", "store_mib", "media_mib", "max_body_mib", "max_answer_mib"):
            if getattr(self, name) < 1:
                raise ConfigError(flag(name), getattr(self, name), "a positive number of MiB")
        for name in ("ttl", "stale"):
            if getattr(self, name) < 0:
                raise ConfigError(flag(name), getattr(self, name), "0 or more seconds")
        if not 0.0 <= self.jitter < 1.0:
            raise ConfigError("--jitter", self.jitter, "a share from 0 to below 1")
        for name in ("body_timeout", "connect_timeout", "upstream_timeout", "store_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(flag(name), getattr(self, name), "a positive number of seconds")
        parse_choice("--mode", self.mode, CacheMode)
        parse_choice("--policy", self.policy, PolicyName)
        _ = self.networks

    @property
    def networks(self) -> tuple[Network, ...]:
        """The trusted proxies."""
        found: list[Network] = []
        for text in self.trusted_proxies:
            try:
                found.append(ip_network(text.strip(), strict=False))
            except ValueError:
                raise ConfigError("--trusted-proxy", text, "networks such as 10.0.0.0/8, 127.0.0.1") from None
        return tuple(found)

    @property
    def bounds(self) -> tuple[int, int]:
        """Most bytes of a request and of an answer."""
        return self.max_body_mib * _MIB, self.max_answer_mib * _MIB

    def cache_config(self) -> CacheConfig | None:
        """Settings of the semantic cache; None where it is off."""
        if not self.semantic or self.mode == CacheMode.OFF:
            return None
        return CacheConfig(
            self.cache_dir,
            mode=CacheMode(self.mode),
            normalised=self.normalised,
            similarity_threshold=self.similarity_threshold,
            embedding_layers=tuple(parse_embedding_layer(layer) for layer in self.embedding_layers),
            embedding_hook=self.embedding_hook,
            index_encoder=self.index_encoder,
            vision_encoder=self.vision_encoder,
            max_entries=self.max_entries,
            max_media_bytes=self.media_mib * _MIB,
            policy=parse_choice("--policy", self.policy, PolicyName),
            max_error_rate=self.max_error_rate,
            calibration=Path(self.calibration) if self.calibration else None,
            verify_rate=self.verify_rate,
        )


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _parse(name: str, kind: Any, text: str) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not types.NoneType)
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool:
        if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
            raise ConfigError(name, text, "1 or 0")
        return text.lower() in ("1", "true", "yes")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(name, text, f"a value of type {kind.__name__}") from None


def from_environment(environment: Mapping[str, str]) -> ServerSettings:
    """Settings from variables named ``SEMKV_`` and the field, in upper case; lists are separated by commas.

    Raises:
        ConfigError: a value does not fit.
    """
    kinds = get_type_hints(ServerSettings)
    given: dict[str, Any] = {"cache_dir": default_cache_dir(environment)}
    for item in fields(ServerSettings):
        variable = f"SEMKV_{item.name.upper()}"
        if variable in environment and item.name not in given:
            given[item.name] = _parse(variable, kinds[item.name], environment[variable])
    return ServerSettings(**given)


def secret_of(settings: ServerSettings, environment: Mapping[str, str]) -> bytes:
    """The deployment's secret: ``SEMKV_SECRET``, else the one in the cache directory, made when it is missing.

    Raises:
        ConfigError: it is too short, or a shared store is used without it.
        StoreError: the directory cannot be made, or the file not read or written.
    """
    given = environment.get("SEMKV_SECRET", "")
    if given:
        if len(given) < _KEY_LENGTH:
            raise ConfigError("SEMKV_SECRET", "(hidden)", f"at least {_KEY_LENGTH} characters")
        return given.encode()
    if settings.store.startswith(("redis:", "rediss:", "unix:")):
        raise ConfigError("SEMKV_SECRET", "", "a secret that is the same for every gateway on this store")
    file = settings.cache_dir / "secret"
    make_folder(settings.cache_dir)
    try:
        if not file.exists():
            _make_secret(file)
        found = file.read_bytes()
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
    """``SEMKV_ADMIN_KEY``; empty where the admin routes are closed.

    Raises:
        ConfigError: it is too short.
    """
    key = environment.get("SEMKV_ADMIN_KEY", "")
    if key and len(key) < _KEY_LENGTH:
        raise ConfigError("SEMKV_ADMIN_KEY", "(hidden)", f"at least {_KEY_LENGTH} characters")
    return key
