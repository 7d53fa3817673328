"""What vLLM loads: connectors that keep KV blocks and encoder outputs in host memory and on disk. vLLM 0.32 or 0.33.

With semkv installed, this is all there is to type:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SemKVConnector", "kv_role": "kv_both"}' \\
                     --ec-transfer-config '{"ec_connector": "SemECConnector", "ec_role": "ec_both"}'

The directory is ``cache_dir`` in ``kv_connector_extra_config``, else ``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.
`KVSettings` and `ECSettings` describe what else may stand there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote, urlsplit

from semkv_stores.blocks import KV_MAX_BYTES, Bounds
from semkv_stores.errors import ConfigError
from semkv_stores.fusion import FUSION_MAX_BYTES
from semkv_stores.settings import NOT_NEGATIVE, Allowed, Needs, check, default_cache_dir

KV_CONNECTOR = "SemKVConnector"
EC_CONNECTOR = "SemECConnector"
KV_MODULE = "semkv_vllm.kv"
EC_MODULE = "semkv_vllm.ec"
SPEC = "SemKVSpec"
SPEC_MODULE = "semkv_vllm.spec"
TIER = "semkv"

FLOOR = (0, 32)
"""The oldest vLLM whose OffloadingConnector has out-of-tree tiers, partial promotion and hit sources."""

log = logging.getLogger("semkv.connectors")


def register() -> None:
    """Make the connectors, the spec and the tier known to vLLM by name. vLLM calls this in every process
    (``vllm.general_plugins``).

    Calling it again changes nothing. The modules are imported when an engine asks for them. An older vLLM gets a
    warning that names the oldest version.
    """
    if (installed := _too_old()) is not None:
        log.warning(
            "semkv: no connectors: vLLM %d.%d or newer is needed, and %s is installed",
            *FLOOR,
            installed,
        )
        return
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    try:
        KVConnectorFactory.register_connector(KV_CONNECTOR, KV_MODULE, KV_CONNECTOR)
    except ValueError:  # vLLM knows the name already
        return
    ECConnectorFactory.register_connector(EC_CONNECTOR, EC_MODULE, EC_CONNECTOR)
    OffloadingSpecFactory.register_spec(SPEC, SPEC_MODULE, SPEC)
    SecondaryTierFactory.register_tier(TIER, "semkv_vllm.tier", "SemKVTier")


def _too_old() -> str | None:
    """The version of the installed vLLM where it is below `FLOOR`. Its modules do not tell: 0.26 has those of today."""
    import vllm

    numbers = tuple(int(word) for word in vllm.__version__.split(".")[:2] if word.isdecimal())
    return str(vllm.__version__) if len(numbers) == 2 and numbers < FLOOR else None


# -- settings, as they stand in kv_connector_extra_config and ec_connector_extra_config -------------------------------


BUCKET_MAX_BYTES = 1 << 40

_SCHEMES = ("s3", "gs", "az", "file")


def _is_bucket(url: str) -> bool:
    """Whether a text is the URL of a bucket, without credentials or options, which the environment has."""
    if not url:
        return True
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    shown = unquote(url)
    folders = unquote(parts.path).removesuffix("/").split("/")[1:]
    plain = not (parts.query or parts.fragment or "@" in parts.netloc or ":" in parts.netloc)
    clean = shown.isprintable() and not {"", ".", ".."}.intersection(folders)
    is_folder = parts.scheme == "file" and not parts.netloc and folders != []
    is_named = parts.scheme != "file" and parts.netloc != ""
    return parts.scheme in _SCHEMES and plain and clean and (is_folder or is_named)


BUCKET = Allowed(
    "a URL such as s3://name/folder, gs://name/folder, az://container/folder or file:///folder, "
    "with credentials in the environment",
    _is_bucket,
)


def _is_peer(text: str) -> bool:
    host = text.rpartition(":")[0]
    port = text.rpartition(":")[2]
    return bool(host) and host.isprintable() and port.isdecimal() and 0 < int(port) < 1 << 16


PEER = Allowed("host:port, such as 10.0.0.1:5710", _is_peer, each=True)


IN_BUCKET = Needs("a bucket", lambda given: given.bucket)
OTHER_TIERS = Needs(
    f"tiers other than {TIER!r} in secondary_tiers",
    lambda given: any(tier.get("type") != TIER for tier in given.secondary_tiers),
)


def _check_installed(bucket: str) -> None:
    if bucket and find_spec("obstore") is None:
        raise ConfigError(
            "bucket",
            bucket,
            "none without obstore: pip install '/path/to/semkv/packages/vllm[bucket]'",
        )


def _follower(settings: KVSettings | ECSettings) -> dict[str, Any] | None:
    """What `semkv_vllm.bucket_log.Follower` takes beside a store; None for no bucket."""
    if not settings.bucket:
        return None
    return {
        "url": settings.bucket,
        "max_bytes": settings.bucket_bytes,
        "max_age_s": settings.bucket_age_s,
    }


@dataclass(frozen=True)
class KVSettings:
    """Settings of the KV connector.

    Attributes:
        cache_dir: the directory; KV blocks go under ``kv``.
        max_bytes: bound on the bytes of all KV block files in the directory; 0 for none.
        max_blocks: bound on the blocks in the directory; 0 for none.
        max_age_s: seconds after which a block is neither served, from host memory or the disk, nor kept; 0 for ever.
        tenant_bytes: bound on the bytes of one tenant's KV block files in the directory; 0 for none. At it he gives up
            his own. Requests without a ``cache_salt`` are one tenant.
        tenant_host_bytes: the same of one tenant's blocks in host memory.
        keep_bytes: host memory in which the conversations of one tenant are kept (`semkv_vllm.holdings`), where hints
            of their requests ask for it (`semkv_vllm.hints`); 0 for none. A tenant keeps half of ``tenant_host_bytes``
            at most, and all of them together half of host memory.
        peers: ``host:port`` of the ``p2p`` tiers of other engines that hints may name; a list for all of them may name
            this engine's own too. Needs a ``p2p`` tier with its ``host`` and ``port``.
        capture_decode: also store the blocks of generated tokens.
        host_bytes: host memory for KV blocks, of all ranks together, in ``/dev/shm``; 0 takes 4 GiB beside a GPU and
            256 MiB on a CPU. Where ``/dev/shm`` has less room, it gets four fifths of that.
        break_even: do not load from the disk what is computed faster, by what was measured in this engine.
        fixed_weights: the weights of a running engine are never exchanged. Then what is stored stays through sleep,
            pause and resets, at which vLLM does not tell whether other weights follow. Never set it where they do:
            what the old weights computed would be served.
        trust_media_names: media items whose content the scheduler cannot see (``--mm-processor-cache-type shm``) go by
            vLLM's name, which a client may choose (``uuid``). Set it where every client may be trusted not to give one
            name to two items. All other items go by their content, whatever they are called.
        bucket: URL of a place that several machines share: ``s3://name/folder``, ``gs://...``, ``az://...``, or
            ``file:///folder``. Files on the disk are copied there, and other machines' files there are read.
            Credentials come from the environment, as obstore reads them. Empty: none.
        bucket_bytes: bound on the bytes of all KV block files in the bucket; 0 for none.
        bucket_age_s: seconds after which a file goes from the bucket; 0 for never.
        secondary_tiers: tiers of vLLM below host memory (``p2p``, ``obj``, ...) in the order of their lookup. The
            entry ``{"type": "semkv"}`` is ours; without it ours comes first. The others are not called at a reset, so
            they need ``fixed_weights``, and they know a LoRA adapter by its name, so beside them its requests are not
            cached. What comes from them is checked (`semkv_vllm.seals`).
        unchecked_tiers: use what comes from the other tiers as it comes, also from vLLM without this connector. Then a
            damaged block gives wrong answers, and nobody notices.
        allowed_params: what clients may say in ``kv_transfer_params`` beside vLLM's limits, such as
            ``remote_kv_source``. With that a client has this server connect to any address and use the KV that it
            gets there.
        report_loads: tell each client what was loaded for its request (``loaded_tokens``, ``sources``). That also tells
            it what others have asked.
        document_repair: with `semkv_vllm.worker.DocumentWorker`, how many first tokens of a document are computed again
            where it is reused at another position, in whole blocks.
        document_tokens: reuse no documents where that saves fewer tokens: 2,048 of them are hardly sooner there than
            computed (`bench/results/h200/positions-again.json`).
        document_rows: how many tokens may be computed again in one step, outside of the step's own budget, while
            decoding requests wait; what is beyond comes in the next steps. 0 for as many as a step may have. 512
            stopped others hardly longer than 256 did (`bench/results/h200/documents-delay.json`).
        document_separator: tokens that stand before, between and after the documents of requests that say
            ``"spans": "separated"``.
    """

    cache_dir: Path = field(default_factory=default_cache_dir)
    max_bytes: Annotated[int, NOT_NEGATIVE] = KV_MAX_BYTES
    max_blocks: Annotated[int, NOT_NEGATIVE] = 0
    max_age_s: Annotated[float, NOT_NEGATIVE] = 0.0
    tenant_bytes: Annotated[int, NOT_NEGATIVE] = 0
    tenant_host_bytes: Annotated[int, NOT_NEGATIVE] = 0
    keep_bytes: Annotated[int, NOT_NEGATIVE] = 0
    peers: Annotated[tuple[str, ...], PEER] = ()
    capture_decode: bool = False
    host_bytes: Annotated[int, NOT_NEGATIVE] = 0
    break_even: bool = True
    fixed_weights: bool = False
    trust_media_names: bool = False
    bucket: Annotated[str, BUCKET] = ""
    bucket_bytes: Annotated[int, NOT_NEGATIVE, IN_BUCKET] = BUCKET_MAX_BYTES
    bucket_age_s: Annotated[float, NOT_NEGATIVE, IN_BUCKET] = 0.0
    secondary_tiers: tuple[dict[str, Any], ...] = ()
    unchecked_tiers: Annotated[bool, OTHER_TIERS] = False
    allowed_params: tuple[str, ...] = ()
    report_loads: bool = False
    document_repair: Annotated[int, NOT_NEGATIVE] = 32
    document_tokens: Annotated[int, NOT_NEGATIVE] = 4096
    document_rows: Annotated[int, NOT_NEGATIVE] = 512
    document_separator: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check(self, flags=False)
        _check_installed(self.bucket)
        if not all(
            tier.get("type") and isinstance(tier["type"], str) for tier in self.secondary_tiers
        ):
            raise ConfigError(
                "secondary_tiers", list(self.secondary_tiers), "a list of objects, each with a type"
            )
        if any(tier["type"] == "example" for tier in self.secondary_tiers):
            allowed = "no tier of type 'example': vLLM's demonstration says that blocks were loaded and loads none"
            raise ConfigError("secondary_tiers", list(self.secondary_tiers), allowed)
        ours = [tier for tier in self.secondary_tiers if tier["type"] == TIER]
        if len(ours) < len(self.secondary_tiers) and not self.fixed_weights:
            allowed = f"only {TIER!r} without fixed_weights: other tiers would serve what old weights computed"
            raise ConfigError("secondary_tiers", list(self.secondary_tiers), allowed)
        if len(ours) > 1 or any(set(tier) - {"type", "backpressure"} for tier in ours):
            allowed = (
                f"at most one tier of type {TIER!r}, whose settings stand beside secondary_tiers"
            )
            raise ConfigError("secondary_tiers", list(self.secondary_tiers), allowed)

        if self.peers and not self._own_peers():
            allowed = (
                "none without a tier of type 'p2p' in secondary_tiers that names its host and port"
            )
            raise ConfigError("peers", list(self.peers), allowed)

    def refuse_documents(self) -> None:
        """Raise a `ConfigError` for a setting of documents: nothing else says that they are to be reused."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.startswith("document_") and value != item.default:
                allowed = (
                    "left out, or given together with --worker-cls semkv_vllm.worker.DocumentWorker"
                )
                raise ConfigError(item.name, value, allowed)

    def _own_peers(self) -> set[str]:
        """Where this engine's own p2p tiers listen."""
        own = [tier for tier in self.secondary_tiers if tier["type"] == "p2p"]
        return {f"{tier['host']}:{tier['port']}" for tier in own if {"host", "port"} <= tier.keys()}

    @property
    def others(self) -> frozenset[str]:
        """The peers that a request may be sent to."""
        return frozenset(self.peers) - self._own_peers()

    def bounds(self) -> Bounds:
        return Bounds(
            max_bytes=self.max_bytes,
            max_blocks=self.max_blocks,
            max_age_s=self.max_age_s,
            tenant_bytes=self.tenant_bytes,
        )

    def follower(self) -> dict[str, Any] | None:
        return _follower(self)

    @property
    def sealed(self) -> bool:
        """Whether blocks carry a seal: where they leave for other tiers, whose blocks are checked."""
        others = any(tier["type"] != TIER for tier in self.secondary_tiers)
        return others and not self.unchecked_tiers

    def tiers(self) -> list[dict[str, Any]]:
        """All tiers below host memory, ours among them."""
        tiers = [dict(tier) for tier in self.secondary_tiers]
        return tiers if any(tier["type"] == TIER for tier in tiers) else [{"type": TIER}, *tiers]


@dataclass(frozen=True)
class ECSettings:
    """Settings of the encoder-cache connector.

    Attributes:
        cache_dir: the directory; fusion states go under ``fusion``.
        fusion_dir: the fusion states' own directory instead of ``cache_dir/fusion``.
        max_bytes: bound on the bytes of all fusion states in the directory; 0 for none.
        max_age_s: seconds after which a state is neither served nor kept; 0 for ever.
        bucket, bucket_bytes, bucket_age_s: as of `KVSettings`, for encoder outputs.
        report_loads: tell each client how many items were loaded for its request. That also tells it what others have
            asked.
        trust_media_names: as of `KVSettings`.
    """

    cache_dir: Path = field(default_factory=default_cache_dir)
    fusion_dir: Path | None = None
    max_bytes: Annotated[int, NOT_NEGATIVE] = FUSION_MAX_BYTES
    max_age_s: Annotated[float, NOT_NEGATIVE] = 0.0
    bucket: Annotated[str, BUCKET] = ""
    bucket_bytes: Annotated[int, NOT_NEGATIVE, IN_BUCKET] = BUCKET_MAX_BYTES
    bucket_age_s: Annotated[float, NOT_NEGATIVE, IN_BUCKET] = 0.0
    report_loads: bool = False
    trust_media_names: bool = False

    def __post_init__(self) -> None:
        check(self, flags=False)
        _check_installed(self.bucket)

    def bounds(self) -> Bounds:
        return Bounds(self.max_bytes, max_age_s=self.max_age_s)

    def follower(self) -> dict[str, Any] | None:
        return _follower(self)

    @property
    def root(self) -> Path:
        return self.fusion_dir or self.cache_dir / "fusion"


_S = TypeVar("_S", KVSettings, ECSettings)


def read_settings(kind: type[_S], extra: Mapping[str, Any] | None) -> _S:
    """Make settings from a connector's extra config.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or range.
    """
    known = [item.name for item in fields(kind)]
    for key in extra or {}:
        if key not in known:
            raise ConfigError(f"{kind.__name__} key", key, known)
    return kind(**(extra or {}))


# -- what they did for one request, read from vLLM's output -----------------------------------------------------------

REPORT_KEY = "semkv"
"""The key of our report inside ``kv_transfer_params`` and ``ec_transfer_params``."""


@dataclass(frozen=True, slots=True)
class ConnectorOutcome:
    """What came from the stores. A field is None when nothing is known: no connector, or its report is off.

    Attributes:
        loaded_tokens: prompt tokens whose KV was loaded from the KV store.
        sources: of those, by where they came from: ``host``, ``disk``, ``p2p``.
        fusion_loaded: media items whose encoder output was loaded from the fusion store.
        fusion_encoded: media items that the encoder processed for this request. An item in neither count was in
            vLLM's own encoder cache, or lay in a part of the prompt whose KV was there.
        cached_tokens: prompt tokens vLLM did not compute, from its own prefix cache or from the store.
        approximate_tokens: of the loaded ones, those of documents at another position. Where there are any, the answer
            is not the one to this prompt, and must not be kept as such.
    """

    loaded_tokens: int | None = None
    sources: Mapping[str, int] = field(default_factory=dict)
    fusion_loaded: int | None = None
    fusion_encoded: int | None = None
    cached_tokens: int | None = None
    approximate_tokens: int = 0


def read_outcome(output: object) -> ConnectorOutcome:
    """Read the outcome from a vLLM ``RequestOutput``, or from any object with the same attributes. The reports of
    several SemKVConnectors in one MultiConnector, of which one loads for a request, are added up."""
    kv = _reports(output, "kv_transfer_params")
    ec = _reports(output, "ec_transfer_params")
    loaded = [report["loaded_tokens"] for report in kv if "loaded_tokens" in report]
    sources = Counter[str]()
    for report in kv:
        sources.update(report.get("sources", {}))
    return ConnectorOutcome(
        loaded_tokens=sum(loaded) if loaded else None,
        sources=dict(sources),
        fusion_loaded=ec[0].get("loaded") if ec else None,
        fusion_encoded=ec[0].get("encoded") if ec else None,
        cached_tokens=getattr(output, "num_cached_tokens", None),
        approximate_tokens=sum(report.get("approximate_tokens", 0) for report in kv),
    )


def _reports(output: object, where: str) -> list[Mapping[str, Any]]:
    params = getattr(output, where, None)
    found = (
        [params[name] for name in params if name.startswith(REPORT_KEY)]
        if isinstance(params, Mapping)
        else []
    )
    return [report for report in found if isinstance(report, Mapping)]


def wants_skip(params: object) -> bool:
    """Whether a request's ``kv_transfer_params`` (or ``ec_transfer_params``) say ``{"semkv": {"skip": true}}``."""
    asked = params.get(REPORT_KEY) if isinstance(params, Mapping) else None
    return isinstance(asked, Mapping) and asked.get("skip") is True
