"""The scheduler's half of reusing documents at other positions: it plans, loads and names.

A request says where its documents stand (`semkv_vllm.spans`). What lies in vLLM's cache or in the store for the
request's own beginning comes first, exactly. For what follows, whole blocks of the documents are loaded into the
request's blocks, and a worker repairs them (`semkv_vllm.placement`) while vLLM still takes the load to be under way.
Where that fails, the load has failed: vLLM commits none of its blocks, and begins the request anew.

What was repaired is approximate. So from the first block on that is not exact, a request's blocks have names of this
request and this attempt: nobody else finds them, and nothing of them is stored. A request that is preempted, or finds
no room, gets new names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from semkv_vllm import REPORT_KEY, private
from semkv_vllm.orders import DocumentJob
from semkv_vllm.pictures import PICTURE, end_of, is_cut, within
from semkv_vllm.shared import KVShared
from semkv_vllm.spans import Asked, Load, Piece, Span, asked, piece_of, renamed, staged

Matched = tuple[int | None, bool]
"""What vLLM's scheduler asks a connector for: how many tokens can be loaded, and whether beside the steps."""

_LATER: Matched = (None, False)
_KNOWN = 256  # documents whose keys are remembered: hashing takes most of a plan's time


@dataclass
class _Wish:
    """What is known of a request that asked.

    Attributes:
        asked: where its documents are.
        keys: of each document's blocks in the store.
        limit: vLLM's bound on the request's tokens that may be stored.
        pictures: of the request, with what an encoder is given.
        exact: the request's exact block hashes while its blocks have other names.
        load: what will be loaded, without the blocks.
        staged: of each block that is loaded, its place among the request's blocks and its key.
        tried: a load of it has not come out right, or not yet: nothing is reused any more.
    """

    asked: Asked
    keys: list[list[bytes]]
    limit: int | None
    pictures: Sequence[Any] = ()
    exact: list[bytes] | None = None
    load: Load | None = None
    staged: list[tuple[int, bytes]] = field(default_factory=list)
    tried: bool = False


class Orders(NamedTuple):
    """For the workers, as in `semkv_vllm.orders.DocumentStep`."""

    dropped: Sequence[str] = ()
    unloaded: Sequence[str] = ()


class Documents:
    """See the module. For the scheduler's thread.

    Args:
        half: vLLM's half of the scheduler's side.
        shared: what all parts of the connector share.
        vllm_config: vLLM's configuration.
        block: tokens of a block.
        seen: gives a request as vLLM's half has it, which knows what its pictures contain.
        by_content: makes such a one of a request that vLLM's half does not know; None after a fault.

    Attributes:
        refused: why nothing is reused; empty where it may be.
        orders: for the workers, since the last call of `take_orders`.
    """

    def __init__(
        self,
        half: Any,
        shared: KVShared,
        vllm_config: Any,
        block: int,
        *,
        seen: Callable[[Any], Any],
        by_content: Callable[[Any], Any],
    ) -> None:
        self.refused = "no worker has said that its model is right"
        self._half = half
        self._shared = shared
        self._settings = shared.settings
        self._block = block
        self._seen = seen
        self._by_content = by_content
        self._most_rows = (
            self._settings.document_rows or vllm_config.scheduler_config.max_num_batched_tokens
        )
        function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hasher = get_request_block_hasher(block, function)
        self._keys_of = lru_cache(_KNOWN)(self._hashed)
        self._wishes: dict[str, _Wish] = {}
        self._arriving: dict[str, Load] = {}
        self.orders = Orders()
        # By request, its tokens that were not exact when some of its answer was computed.
        self._used: dict[str, int] = {}

    # ------------------------------------------------------------------ a request

    def on_new_request(self, request: Any, sent: Any) -> None:
        """A request begins, which vLLM's half knows; ``sent``: its client's parameters."""
        if self.refused or not self._may_reuse(request):
            return
        wish = asked(
            sent.get(REPORT_KEY) if isinstance(sent, dict) else None,
            request.prompt_token_ids,
            repair=self._settings.document_repair,
            separator=self._settings.document_separator,
        )
        if wish is None or any(is_cut(request.mm_features, *span) for span in wish.spans):
            return
        if sum(e - b for b, e in wish.spans) < self._settings.document_tokens:
            return
        state = private.state_of(self._half, request.request_id)
        if state.max_load_tokens is not None:
            return
        keys = [self._keys(request, span) for span in wish.spans]
        places = private.key_positions(state.req_context)
        for span, own in zip(wish.spans, keys, strict=True):
            ends = range(span.begin + self._block, span.end + 1, self._block)
            # So that the index is asked for many at once.
            places.update(zip(own, ends, strict=True))
        self._wishes[request.request_id] = _Wish(
            asked=wish,
            keys=keys,
            limit=state.max_offload_tokens,
            pictures=tuple(request.mm_features),
        )

    def _may_reuse(self, request: Any) -> bool:
        """Whether nothing about a request needs exact KV, or is not handled."""
        plain = request.prompt_token_ids is not None and request.prompt_embeds is None
        special = (
            any(item.modality != PICTURE for item in request.mm_features)
            or request.lora_request
            or request.resumable
            or request.skip_reading_prefix_cache
            or request.sampling_params is None
            or request.sampling_params.prompt_logprobs is not None
        )
        return plain and not special and self._aligned(request)

    def _aligned(self, request: Any) -> bool:
        """Whether vLLM's hashes are of the blocks that this object thinks of."""
        return len(request.block_hashes) == int(request.num_tokens) // self._block

    def _keys(self, request: Any, span: Span) -> list[bytes]:
        """The keys in the store of a request that is one document alone."""
        tokens = array("i", request.prompt_token_ids[span.begin : span.end])
        pictures = within(request.mm_features, *span)
        if pictures:
            return list(self._hashed(tokens.tobytes(), request.cache_salt, pictures))
        return list(self._keys_of(tokens.tobytes(), request.cache_salt))

    def _hashed(
        self,
        packed: bytes,
        salt: str | None,
        pictures: Sequence[Any] = (),
    ) -> tuple[bytes, ...]:
        tokens = array("i")
        tokens.frombytes(packed)
        alone = Request(
            "a document alone",
            tokens.tolist(),
            SamplingParams(),
            None,
            mm_features=list(pictures),
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        seen = self._by_content(alone)
        hashes = () if seen is None else seen.block_hashes
        return tuple(make_offload_key(hashed, 0) for hashed in hashes)

    # ------------------------------------------------------------------ its plan

    def matched(self, request: Any, computed: int) -> Matched | None:
        """How many tokens are loaded for a request of which vLLM's cache has some; None where it is an exact one."""
        wish = self._wishes.get(request.request_id)
        return None if wish is None else self._matched(request, wish, computed)

    def unmatched(self, request: Any, computed: int) -> Matched | None:
        """After a fault of `matched`: no documents are reused. Blocks keep the names that they have.

        Where vLLM has found blocks of an earlier attempt, it must ask again later: what follows them might get exact
        names.
        """
        wish = self._wishes.pop(request.request_id, None)
        if wish is None or wish.load is None:
            return None
        return _LATER if computed > wish.load.begin else None

    def _matched(
        self,
        request: Any,
        wish: _Wish,
        computed: int,
    ) -> Matched | None:
        self._count_used(request.request_id)  # of a load of whose end nothing was heard
        # With no token to load this only says whether transfers are under way, and makes ready for a lookup.
        waiting, _ = self._half.get_num_new_matched_tokens(self._seen(request), computed, 0)
        if waiting is None:
            return _LATER
        if wish.exact is not None:
            own = wish.load is not None and computed > wish.load.begin
            self._name_exactly(request, wish)
            if own:  # the local hit has blocks of an earlier attempt
                return _LATER
            self._half.get_num_new_matched_tokens(self._seen(request), computed, 0)
        if self.refused or wish.tried:  # since it was asked
            self.forget(request)
            return None
        planned = self._plan(request, wish, computed)
        if planned is None:
            return _LATER
        if not self._is_worth_it(planned):
            self.forget(request)
            return None
        arriving = sum(load.rows for load in self._arriving.values())
        if arriving and arriving + planned.rows > self._most_rows:
            return _LATER
        self._name_own(request, wish, planned)
        return planned.end - computed, True

    def _plan(
        self,
        request: Any,
        wish: _Wish,
        computed: int,
    ) -> Load | None:
        """What can be loaded now; None where that is not known yet."""
        size = self._block
        state = private.state_of(self._half, request.request_id)
        most = request.num_tokens - 1
        own = state.group_states[0].offload_keys[computed // size : most // size]
        exact = self._held(request, own)
        wish.staged = list(enumerate(own[: exact or 0], computed // size))
        exact_end = computed + (exact or 0) * size
        waits = exact is None
        seen = {key for _, key in wish.staged}
        pieces = []
        for span, keys in zip(wish.asked.spans, wish.keys, strict=True):
            piece = piece_of(
                span,
                block=size,
                skip=wish.asked.repair,
                exact_end=exact_end,
            )
            piece = self._unseen(piece, keys, seen)
            if piece is None:
                continue
            first = piece.skip // size
            held = self._held(request, keys[first : piece.size // size])
            waits |= held is None
            if held:
                used = keys[first : first + held]
                seen.update(used)
                piece = replace(piece, size=piece.skip + held * size)
                wish.staged += enumerate(used, staged(piece, size).begin // size)
                pieces.append(piece)
        if waits:
            return None
        return Load(
            request=request.request_id,
            tokens=[],
            blocks=np.empty(0, np.int64),
            pieces=tuple(pieces),
            begin=exact_end,
            end=min(max((piece.last for piece in pieces), default=exact_end), most),
        )

    def _unseen(
        self,
        piece: Piece | None,
        keys: list[bytes],
        seen: set[bytes],
    ) -> Piece | None:
        """The first blocks of a document that are not loaded for another one.

        A load has each block once: vLLM counts a block's loads one by one and ends them together, so one that came
        twice would never leave host memory.
        """
        if piece is None:
            return None
        first = piece.skip // self._block
        last = piece.size // self._block
        while first < last and keys[first] in seen:
            first += 1
        end = first
        while end < last and keys[end] not in seen:
            end += 1
        if first == end:
            return None
        return replace(
            piece,
            skip=first * self._block,
            size=end * self._block,
        )

    def _held(self, request: Any, keys: list[bytes]) -> int | None:
        """How many of the first keys are in host memory; None where some are on their way there."""
        if not keys:
            return 0
        return private.first_held(self._half, self._seen(request), keys)

    def _is_worth_it(self, load: Load) -> bool:
        least = max(1, self._settings.document_tokens)
        return bool(load.pieces) and load.reused >= least

    # ------------------------------------------------------------------ its names

    def _name_own(
        self,
        request: Any,
        wish: _Wish,
        load: Load,
    ) -> None:
        """Give a request's blocks names of its own from the first one on that is not exact."""
        first = load.begin // self._block
        if wish.exact is None:
            wish.exact = list(request.block_hashes)
        wish.load = load
        self._rename(request, renamed(request.block_hashes, first))
        limit = load.begin if wish.limit is None else min(load.begin, wish.limit)
        private.names_changed(self._half, request.request_id, first, limit)

    def _rename(self, request: Any, hashes: Sequence[bytes]) -> None:
        request.block_hashes[:] = hashes
        seen = self._seen(request)
        if seen is not request:
            seen.name_anew()

    def _name_exactly(self, request: Any, wish: _Wish) -> None:
        """Give a request's blocks their exact names again."""
        if wish.exact is None or wish.load is None:
            return
        first = wish.load.begin // self._block
        self._rename(request, wish.exact)
        request.update_block_hashes()
        private.names_changed(self._half, request.request_id, first, wish.limit)
        wish.exact = None
        wish.load = None

    def forget(self, request: Any) -> None:
        """A request is an exact one from now on."""
        wish = self._wishes.pop(request.request_id, None)
        self._arriving.pop(request.request_id, None)
        if wish is not None:
            self._name_exactly(request, wish)

    # ------------------------------------------------------------------ its load

    def allocated(
        self,
        request: Any,
        blocks: Any,
        tokens: int,
    ) -> int | None:
        """A request has its blocks; None where the load of ``tokens`` is exact, else how many are really loaded."""
        wish = self._wishes.get(request.request_id)
        if wish is None or wish.load is None or not tokens:
            return None
        own = blocks.blocks[0]
        load = replace(
            wish.load,
            tokens=_tokens(request, wish.load.end),
            blocks=np.array(blocks.get_block_ids()[0]),
            pictures=wish.pictures,
        )
        wish.tried = True
        private.load_blocks(
            self._half,
            self._seen(request),
            keys=[key for _, key in wish.staged],
            blocks=[own[place] for place, _ in wish.staged],
            others=own,
        )
        private.mark_load(self._half, request.request_id, partial(DocumentJob.of, load=load))
        self._arriving[request.request_id] = load
        return tokens - load.rows

    def not_loaded(self, request: Any, tokens: int) -> int | None:
        """After a fault of `allocated`: as that, with nothing loaded.

        vLLM believes that ``tokens`` are on their way. The workers say that this has failed, when what is under way has
        come.
        """
        name = request.request_id
        wish = self._wishes.get(name)
        if wish is None or wish.load is None or not tokens:
            return None
        wish.tried = True
        self._arriving.pop(name, None)
        self._order(unloaded=[name])
        return 0

    def _order(self, dropped: Iterable[str] = (), unloaded: Iterable[str] = ()) -> None:
        before = self.orders
        self.orders = Orders(
            dropped=[*before.dropped, *dropped],
            unloaded=[*before.unloaded, *unloaded],
        )

    def take_orders(self) -> Orders:
        """What is new for the workers since the last call."""
        orders = self.orders
        self.orders = Orders()
        return orders

    def arrived(self, requests: Iterable[str], failed: Collection[str]) -> None:
        """Loads of some requests have ended; those of ``failed`` brought nothing."""
        for name in requests:
            if name in failed:
                self._arriving.pop(name, None)
                continue
            load = self._count_used(name)
            if load is not None and name in self._wishes:
                self._wishes[name].tried = False
                self._shared.counters["document_tokens"] += load.reused
                self._shared.counters["document_rows"] += load.rows

    def _count_used(self, request: str) -> Load | None:
        """What was loaded for a request, of which the answer is approximate from now on, whatever comes later."""
        load = self._arriving.get(request)
        if load is not None:
            self._used[request] = self.used(request)
            del self._arriving[request]
        return load

    def give_pictures(self, scheduled: Any) -> None:
        """Let workers have what the encoder is given of pictures that count as loaded, which vLLM takes out.

        vLLM's first model runner keeps what it is given first, and a request that is preempted may be computed whole.
        """
        for new in scheduled.scheduled_new_reqs if self._wishes else ():
            wish = self._wishes.get(new.req_id)
            if wish is not None and wish.pictures:
                new.mm_features = list(wish.pictures)

    def used(self, request: str) -> int:
        """How many of a request's tokens are not exact, or were not when some of its answer was computed."""
        load = self._arriving.get(request)
        before = self._used.get(request, 0)
        return before if load is None else max(load.reused, before)

    def ended(self, request: str) -> None:
        self._wishes.pop(request, None)
        self._used.pop(request, None)
        if self._arriving.pop(request, None) is not None:
            self._order(dropped=[request])

    # ------------------------------------------------------------------ all of them

    def reset(self) -> None:
        """What was loaded so far may be of other weights: where it was not repaired yet, it is not used."""
        self._order(dropped=self._arriving)

    def mistrust(self) -> None:
        """The live check has failed: nothing is reused any more."""
        self.refused = "rotated keys were not what the model computes"
        self._shared.counters["document_mismatches"] += 1


def _tokens(request: Any, end: int) -> list[int]:
    """All up to a token, and to the end of a picture that begins before it."""
    return list(request.all_token_ids[: end_of(request.mm_features, end)])


def refusal_of(answers: Sequence[Any], ranks: int) -> str:
    """Why some worker refuses; empty where all allow it."""
    said = [answer.refused for answer in answers]
    if len(said) < ranks:
        return "not every worker has looked at its model"
    return next((reason for reason in said if reason), "")
