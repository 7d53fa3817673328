"""Puts the gateway together from its settings."""

from __future__ import annotations

from collections.abc import Mapping

from semkv.cache import SemanticCache
from semkv.server.app import App
from semkv.server.caches import Caches
from semkv.server.gateway import Gateway
from semkv.server.metrics import Metrics
from semkv.server.operations import Operations
from semkv.server.settings import ServerSettings, admin_key, secret_of
from semkv.server.tags import parse_tag_rule
from semkv.server.upstream import HttpUpstream, Upstream
from semkv.stores.responses.ahead import folder_of
from semkv.stores.responses.open import open_store
from semkv.stores.schema import CATALOG
from semkv.tiers.freshness import FOREVER, Freshness, Lifetime, parse_rule
from semkv.tiers.response import ResponseCache


def gateway_of(settings: ServerSettings, environment: Mapping[str, str], upstream: Upstream) -> Gateway:
    """The core with its stores open and its encoder loaded.

    Raises:
        ConfigError: a setting does not fit.
        StoreError: a store cannot be opened.
    """
    secret = secret_of(settings, environment)
    config = settings.cache_config()
    rules = [parse_tag_rule(rule) for rule in settings.tag_rules]
    metrics = Metrics(tenants=settings.tenant_metrics)
    responses = _responses(settings)
    semantic = None if config is None else SemanticCache(config)
    if semantic is not None:
        semantic.warm_up()
    caches = Caches(
        responses,
        semantic,
        metrics,
        store_s=settings.store_timeout,
        sampled=settings.sampled,
        tag_rules=rules,
    )
    gateway = Gateway(settings, secret, upstream, caches, metrics)
    metrics.read_sizes(gateway.sizes)
    return gateway


def _responses(settings: ServerSettings) -> ResponseCache:
    file = settings.cache_dir / CATALOG
    limits = {"max_bytes": settings.store_mib << 20}
    store = open_store(settings.store, file, timeout_s=settings.store_timeout, **limits)
    lifetime = Lifetime(settings.ttl or FOREVER, settings.stale, settings.sliding, settings.jitter)
    freshness = Freshness(lifetime, [parse_rule(rule) for rule in settings.ttl_rules])
    return ResponseCache(
        store,
        max_bytes=settings.memory_mib << 20,
        freshness=freshness,
        sampled=settings.sampled,
        ahead=folder_of(settings.cache_dir, settings.store),
    )


def app_of(settings: ServerSettings, environment: Mapping[str, str]) -> App:
    """The gateway in front of ``settings.upstream``."""
    limits = {"connect_s": settings.connect_timeout, "read_s": settings.upstream_timeout}
    key = admin_key(environment)
    gateway = gateway_of(settings, environment, HttpUpstream(settings.upstream, **limits))
    return App(gateway, Operations(gateway, key).application())
