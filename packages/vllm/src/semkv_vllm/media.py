"""The identity of a media item in the stores: a digest of the tensors that the engine computes from.

vLLM names an item by a digest of what a client sent, by the client's own ``uuid``, or by a counter, and two items may
come to have one name. So no store goes by that name. The scheduler has what the encoder is given (pixels, grids), and
an item here is the digest of that: an encoder output is found by it, and so is each KV block from the item on.

vLLM's own caches in the engine still go by the name. Where one name has stood for two items in an engine, whatever is
computed with it may be of the other one, so from then on no KV of a request that uses the name is stored.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from semkv_stores.digests import digest

log = logging.getLogger("semkv.connectors")

_MIXED = "mixed"  # in place of a content: the name has stood for two, or for what cannot be seen
# Names that are remembered; an item in vLLM's caches takes a block or more of a smaller number.
_NAMES = 1 << 18


class UnreadableError(Exception):
    """What the encoder is given is not here, or of a kind that is not known."""


class Media:
    """The media items of one engine. For one thread.

    Args:
        trusted: go by vLLM's name where the content cannot be seen; see `semkv_vllm.KVSettings`.
        stop_storing: called with each request of which nothing more may be stored; None where no KV is.
    """

    def __init__(
        self, *, trusted: bool, stop_storing: Callable[[Any], object] | None = None
    ) -> None:
        self._trusted = trusted
        self._stop_storing = stop_storing
        # By id of what the encoder is given.
        self._digests: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._contents: OrderedDict[bytes, str] = OrderedDict()  # by name
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned: set[str] = set()

    def content(self, feature: Any) -> str:
        """Digest of an item's content; empty where that cannot be seen."""
        item = feature.data
        known = self._digests.get(id(item))
        if known is not None and known[0]() is item:
            return known[1]
        try:
            value = content_digest(feature.modality, item)
        except Exception as reason:  # whatever it is: vLLM asks for hashes in the middle of a step
            if self._trusted:
                return digest("named", feature.modality, feature.identifier)
            self._warn(
                f"nothing is kept of media whose content the scheduler cannot see ({reason}); use "
                "--mm-processor-cache-type lru, or set trust_media_names where every client may be trusted "
                "not to give one uuid to two items"
            )
            return ""
        number = id(item)
        self._digests[number] = weakref.ref(item, lambda _: self._digests.pop(number, None)), value
        return value

    def admit(self, request: Any, feature: Any) -> str:
        """The `content` of an item of a request whose KV is to be stored; empty where its name has stood for another
        one, or for one that cannot be seen: then vLLM's caches may give the request that one's KV or encoder output.
        """
        self._live.add(request)
        content = self.content(feature)
        name = bytes.fromhex(digest(feature.identifier))
        before = self._contents.setdefault(name, content or _MIXED)
        self._contents.move_to_end(name)
        if len(self._contents) > _NAMES:
            self._contents.popitem(last=False)
        if before == content:
            return content
        if before != _MIXED:
            self._contents[name] = _MIXED
            self._stop_all(feature.identifier)
        return ""

    def knows(self, request: Any) -> bool:
        """Whether each item of a request has a content that is known and a name that stands for nothing else."""
        contents = [self.admit(request, feature) for feature in request.mm_features]
        return all(contents)

    def _stop_all(self, identifier: str) -> None:
        self._warn(
            "one name (uuid) was given to two media items: no KV of requests that use it is stored; "
            "give each item a name of its own, or none"
        )
        if self._stop_storing is None:
            return
        for request in list(self._live):
            if any(used.identifier == identifier for used in request.mm_features):
                self._stop_storing(request)

    def _warn(self, text: str) -> None:
        """Once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("semkv: %s", text)


class ByContent:
    """A request as it is, but that its block hashes cover the content of the media items before their end."""

    def __init__(self, request: Any, media: Media, tokens_per_hash: int) -> None:
        self._request = request
        self._media = media
        self._tokens = tokens_per_hash
        self._hashes: list[Any] = []
        self._chain = b""  # over the contents of the items so far
        self._passed = 0  # items in it

    @property
    def block_hashes(self) -> list[Any]:
        for hashed in self._request.block_hashes[len(self._hashes) :]:
            self._cover((len(self._hashes) + 1) * self._tokens)
            self._hashes.append(_covering(hashed, self._chain))
        return self._hashes

    def name_anew(self) -> None:
        """Cover all hashes again: the request has others."""
        self._hashes = []
        self._chain = b""
        self._passed = 0

    def _cover(self, end: int) -> None:
        """Take in the items that begin before a token."""
        for feature in self._request.mm_features[self._passed :]:
            if feature.mm_position.offset >= end:
                return
            # An unknown value gets a digest that no other has.
            content = self._media.admit(self._request, feature) or uuid.uuid4().hex
            self._chain = hashlib.sha256(self._chain + content.encode()).digest()
            self._passed += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _covering(hashed: Any, chain: bytes) -> Any:
    """A block hash of the same length that covers ``chain``, too."""
    if not chain or hashed is None:
        return hashed
    return hashlib.blake2b(bytes(hashed) + chain, digest_size=len(hashed)).digest()


# -- the digest of what an encoder is given ---------------------------------------------------------------------------


def content_digest(modality: str, item: Any) -> str:
    """Digest of an item's tensors and numbers, with their names, types and shapes; ``item`` is vLLM's
    ``MultiModalKwargsItem``.

    Raises:
        UnreadableError: something of it is not here (in another process, say), or of an unknown kind.
    """
    from blake3 import blake3

    if not item:
        raise UnreadableError("it is not in this process")
    if "address" in item:
        raise UnreadableError("it is in the shared memory of --mm-processor-cache-type shm")
    hasher = blake3(max_threads=blake3.AUTO)
    _frame(hasher, modality)
    tensors = 0
    for name in sorted(item):
        _frame(hasher, name)
        tensors += _add(hasher, item[name].data)
    if not tensors:
        raise UnreadableError("it has no tensor")
    return str(hasher.hexdigest())


def _frame(hasher: Any, text: str) -> None:
    raw = text.encode()
    hasher.update(len(raw).to_bytes(8, "big") + raw)


def _add(hasher: Any, value: Any) -> int:
    """Take in a value, unambiguously; returns how many tensors it has."""
    import numpy as np
    import torch

    if isinstance(value, list | tuple):
        _frame(hasher, f"{len(value)} values")
        return sum(_add(hasher, part) for part in value)
    if isinstance(value, bool | int | float | str):
        _frame(hasher, f"{type(value).__name__} {value!r}")
        return 0
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        raise UnreadableError(f"it has a {type(value).__name__}")
    _frame(hasher, f"{value.dtype} {list(value.shape)}")
    flat = value.detach().cpu().contiguous().flatten()
    hasher.update(flat.view(torch.uint8).numpy().data)
    return 1
