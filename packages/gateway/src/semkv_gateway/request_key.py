"""From a request body to its canonical form: the exact key, and what the semantic tiers may look at.

Whatever is not known to leave the answer alone is part of the key. What cannot be keyed makes a request uncacheable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from semkv.keys import media_uuid
from semkv.stores.media import MediaStore
from semkv.tenants import signature, tenant_salt
from semkv.types import MediaSegment, Namespace, Plan, Request, TextSegment
from semkv_gateway import strict_json
from semkv_gateway.routes import (
    HINT,
    ROUTES,
    UNKNOWN,
    Content,
    Route,
    Unkeyable,
    by_name,
    has_unread_texts,
    is_hint,
    last_turn,
    last_words,
    texts_in,
    tool_names,
)
from semkv_stores.digests import digest

# Known not to change the answer, by the reason. Not among them: `cache_salt`, since a client that sets it wants to
# share with no other, and `session_id`, under which other servers than vLLM keep a conversation.
_HARMLESS: dict[str, str] = {
    "They say in which pieces an answer comes. `_build` adds them where its two forms are kept apart.": """
        stream stream_options stream_interval""",
    "They name the end user to a provider that looks for abuse.": "user safety_identifier",
    "It says whether a provider keeps a copy for the account's owner.": "store",
    "They name one request, and say whose turn it is.": "request_id priority",
    "They are hints for a provider's cache of prompts.": "prompt_cache_key prompt_cache_retention",
}
_NOT_IN_KEY = frozenset(name for names in _HARMLESS.values() for name in names.split())
# Where null means the same as leaving the field out. Not among them: `max_tokens` (a completion without it has 16
# tokens) and `top_logprobs` (with null vLLM gives none).
_NULL_IS_ABSENT = frozenset(
    "model temperature top_p top_k min_p seed n stop max_completion_tokens presence_penalty frequency_penalty"
    " repetition_penalty logit_bias logprobs tools response_format structured_outputs documents"
    " chat_template chat_template_kwargs reasoning_effort mm_processor_kwargs media_io_kwargs system stop_sequences"
    " thinking instructions text reasoning max_output_tokens include suffix cache_control".split()
)
# Choose among the model's answers without changing what it computes of the prompt: outside the semantic namespace.
_SAMPLING = frozenset(
    "temperature top_p top_k min_p seed n best_of max_tokens max_completion_tokens min_tokens stop stop_token_ids"
    " include_stop_str_in_output ignore_eos presence_penalty frequency_penalty repetition_penalty length_penalty"
    " use_beam_search logit_bias bad_words allowed_token_ids logprobs top_logprobs logprob_token_ids"
    " skip_special_tokens spaces_between_special_tokens return_tokens_as_token_ids repetition_detection"
    " watermarking".split()
)
# Answers that show the prompt belong to this prompt alone.
_SHOWS_PROMPT = tuple(
    "echo prompt_logprobs return_token_ids return_prompt_text suffix continue_final_message".split()
)
# Of which it is known that all they say is in the request, by the reason. Any other field may name what the server
# holds, so a request that has one passes, unless an operator says that it is harmless.
_WHOLE: dict[str, str] = {
    "They are what is asked.": """
        model messages prompt input query queries documents items text_1 text_2 data_1 data_2 system instructions
        suffix previous_input_messages instruction task input_type""",
    "They say what the model may call, and which form its answer has.": """
        tools tool_choice functions function_call parallel_tool_calls max_tool_calls response_format
        structured_outputs output_config output_format text modalities verbosity guided_json guided_choice guided_regex
        guided_grammar json_schema grammar regex ebnf""",
    "They say how the model thinks.": """
        reasoning reasoning_effort include_reasoning separate_reasoning stream_reasoning reasoning_format
        reasoning_budget thinking thinking_budget thinking_token_budget enable_thinking think prompt_mode prediction
        context_management""",
    "They say how a prompt is made of what is asked.": """
        chat_template chat_template_kwargs add_generation_prompt continue_final_message add_special_tokens
        truncate_prompt_tokens truncation truncation_side padding mm_processor_kwargs media_io_kwargs cache_salt
        cache_control safe_prompt max_tokens_per_doc max_tokens_per_query""",
    "They say how an answer is drawn, and when it ends.": """
        max_output_tokens stop_sequences logits_processors vllm_xargs random_seed do_sample typical_p typical top_a
        top_n_sigma tfs tfs_z mirostat mirostat_tau mirostat_eta repeat_penalty repeat_last_n penalize_nl n_predict
        min_keep samplers dynatemp_range dynatemp_exponent xtc_probability xtc_threshold dry_multiplier dry_base
        dry_allowed_length dry_penalty_last_n dry_sequence_breakers stop_regex no_stop_trim""",
    "They say what of an answer is shown.": """
        include echo usage prompt_logprobs return_token_ids return_prompt_text return_token_offsets return_mm_kwargs
        mm_payload enable_response_messages routed_experts_prompt_start return_documents top_n dimensions
        encoding_format embed_dtype embedding_type embedding_types endianness use_activation output_dimension
        output_dtype normalized n_probs post_sampling_probs return_tokens timings_per_token""",
    "They choose among models and machines, as `model` does; a proxy may do so by labels.": """
        adapter_id service_tier provider models route transforms inference_geo speed metadata""",
    "They are hints for a server's cache of prompts.": """
        prompt_cache_options cache_prompt""",
    "What they ask a server to do is refused by the route that knows them.": """
        background""",
}
_KNOWN = frozenset(name for names in _WHOLE.values() for name in names.split())
# With these it may matter in which order documents stand: something may be cut off.
_BY_PLACE = frozenset(
    [
        "context_management",
        "transforms",
        *_WHOLE["They say how a prompt is made of what is asked."].split(),
    ]
) - frozenset(
    "cache_salt cache_control chat_template chat_template_kwargs add_generation_prompt mm_processor_kwargs"
    " media_io_kwargs".split()
)
# Leave open how an answer is drawn. A request with any other field may have chosen that, so it gets no temperature.
# Not among them: `thinking`, with which Anthropic's models take no temperature, and what may reach a sampler.
_LEAVE_OPEN = _NOT_IN_KEY | frozenset(
    "model messages prompt input system instructions suffix metadata tools tool_choice functions function_call"
    " parallel_tool_calls max_tool_calls response_format structured_outputs guided_json guided_choice guided_regex"
    " guided_grammar output_config output_format text include reasoning reasoning_effort verbosity prediction"
    " documents chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs cache_salt cache_control"
    " max_tokens max_completion_tokens max_output_tokens min_tokens stop stop_sequences stop_token_ids"
    " include_stop_str_in_output ignore_eos presence_penalty frequency_penalty repetition_penalty logit_bias"
    " bad_words allowed_token_ids logprobs top_logprobs skip_special_tokens spaces_between_special_tokens"
    " return_token_ids return_tokens_as_token_ids add_generation_prompt echo service_tier truncation background".split()
)
_TRANSFER = "kv_transfer_params"
_UNKEYABLE = ("prompt_embeds", _TRANSFER, "ec_transfer_params")
# What a request says that asks to reuse documents, and nothing else.
_REUSE = frozenset(("spans", "repair"))
# As the connector reads it: what stands between its separators.
_SEPARATED = {"spans": "separated"}

# Beyond these a request is exact-only: one thread looks up and encodes for all, and this takes it part of a second.
_MOST_SEGMENTS = 1000
_MOST_TEXT = 1_000_000  # characters

# Names keep their order: a template shows a tool's parameters, and a grammar asks for fields, as a schema has them.
# In the objects that are read by name the order says nothing, so these are sorted where they are made.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
# Fields whose object is looked up by name, so that its order says nothing either.
_BY_NAME = frozenset(("logit_bias",))
# As such a name is written. A server that reads "05" and "5" as one number takes the last of them.
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a key depends on in addition to the body.

    Attributes:
        endpoint: one of `ROUTES`.
        tenant: opaque; never shares anything with another.
        secret: of the deployment.
        version: of model and data; a change makes every stored answer unreachable.
        tags: labels that came with it; answers are not shared with requests that have others.
        headers: those of the request that the answer may depend on, by `semkv_gateway.tenancy.Client`.
        known_fields: of which the operator says that all they say is in the request.
        stateless: the upstream keeps no response of `/v1/responses`, whatever a request leaves open.
        reuses_documents: an answer for which documents were reused (``kv_transfer_params.semkv.spans``) is kept apart
            from exact ones, so that such a request has a key: that of the same request without.
        separates_documents: a request that says nothing of that asks for the documents between vLLM's separators.
    """

    endpoint: str
    tenant: str
    secret: bytes
    version: str = ""
    tags: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    known_fields: frozenset[str] = frozenset()
    stateless: bool = False
    reuses_documents: bool = False
    separates_documents: bool = False

    def key(self, body: str) -> str:
        head = _encode(
            ["semkv", 3, self.endpoint, self.tenant, self.version, self.headers, *self.tags]
        )
        return signature(self.secret, f"{head}\n{body}".encode()).hex()


@dataclass(frozen=True)
class CanonicalRequest:
    """A request with its exact key."""

    key: (
        str  # hex HMAC-SHA256 over everything that changes the answer, tenant and versions included
    )
    partition: str  # the tenant, `StoredResponse.partition`
    model: str  # as the client named it
    prompt: str  # what a user said last; empty where nobody did
    stream: bool  # the client wants a stream; part of the key only where the route does not convert
    include_usage: bool  # the client wants the usage at the end of its stream
    # The answer is drawn at random (neither temperature 0 nor a seed), and none but this request may have it.
    sampled: bool
    steadied: bool  # it has a temperature of 0 that the client did not name
    _body: Mapping[str, Any] = field(repr=False)
    _content: Content = field(repr=False)
    _deployment: Deployment = field(repr=False)
    reordered: bool = False  # its documents stand in another order than the client's
    spans: Mapping[str, Any] | None = (
        None  # what it asks of semkv's KV connector: to reuse documents
    )

    @property
    def exactly(self) -> CanonicalRequest:
        """The same without reuse of documents."""
        return self if self.spans is None else replace(self, spans=None)

    @property
    def is_drawn(self) -> bool:
        """Whether its answer is drawn at random, also where it may be kept: another one will say something else."""
        return _is_sampled(self._body, self.route)

    @property
    def given(self) -> Mapping[str, Any]:
        """The body that it was made of."""
        return self._body

    @property
    def is_plain(self) -> bool:
        """Whether no field of the body may go by the order of documents, or makes an answer show the prompt."""
        ordered = self._body.keys() & (_BY_PLACE | self._deployment.known_fields)
        return (
            not ordered
            and self.spans in (None, _SEPARATED)
            and not any(self._shows(name) for name in _SHOWS_PROMPT)
        )

    def reordered_as(self, body: Mapping[str, Any]) -> CanonicalRequest:
        """The same with its documents in another order. Raises `Unkeyable` as `canonicalise` does."""
        return replace(
            canonicalise(body, self._deployment),
            reordered=True,
            spans=self.spans,
        )

    @cached_property
    def stream_key(self) -> str:
        """Under which a stream is kept that is for streams only; empty where streams have the request's own key."""
        if not self.route.converts:
            return ""
        return signature(self._deployment.secret, f"stream {self.key}".encode()).hex()

    @property
    def keys(self) -> tuple[str, ...]:
        """Under which an answer to it may be kept, the best one first."""
        return (self.stream_key, self.key) if self.stream and self.stream_key else (self.key,)

    @cached_property
    def steady(self) -> CanonicalRequest | None:
        """The same at temperature 0; None where the request says, or may say, how its answer is to be drawn."""
        chosen = {name for name, value in _said(self._body).items() if value is not None}
        if not self.route.fixed_by or not chosen <= _LEAVE_OPEN:
            return None
        body = {**self._body, "temperature": 0}
        built = _build(body, self._content, self._deployment)
        return replace(built, steadied=True, reordered=self.reordered, spans=self.spans)

    @cached_property
    def kept(self) -> CanonicalRequest:
        """The same where an answer that is drawn at random does for later requests, too."""
        return replace(self, sampled=False)

    def streamed(self) -> CanonicalRequest:
        """The same for a stream that is for streams only."""
        return replace(self, key=self.stream_key)

    @property
    def tags(self) -> tuple[str, ...]:
        """Labels that came with the request; part of the key."""
        return self._deployment.tags

    @property
    def texts(self) -> Iterator[str]:
        """Every text in it."""
        return texts_in(self._body)

    @property
    def last_turn(self) -> Iterator[str]:
        """Every text of a user's last turn."""
        return last_turn(self._body)

    @property
    def has_unread_texts(self) -> bool:
        """Whether it has texts that nobody reads here."""
        return has_unread_texts(self._body)

    @property
    def tools(self) -> tuple[str, ...]:
        """A name for each tool that it offers."""
        return tool_names(self._body)

    @property
    def endpoint(self) -> str:
        """Where it came in."""
        return self._deployment.endpoint

    @property
    def route(self) -> Route:
        """The row of `ROUTES` for it."""
        return ROUTES[self.endpoint]

    def refusal(self, payload: bytes, status: int) -> str:
        """Why an answer to it must not be kept, in a word or two; empty for a complete one."""
        return self.route.refusal(payload, status, self._body)

    @cached_property
    def request(self) -> Request | None:
        """For `SemanticCache.try_reuse`; None where the request is exact-only. Images have no file: `with_media`.

        Computed when it is first asked for: an exact hit does not pay for it.
        """
        segments = self._content.segments
        if not 0 < len(segments) <= _MOST_SEGMENTS or any(
            self._shows(name) for name in _SHOWS_PROMPT
        ):
            return None
        if (
            sum(len(segment.text) for segment in segments if isinstance(segment, TextSegment))
            > _MOST_TEXT
        ):
            return None
        if self._content.media and self._body.get("media_io_kwargs"):
            return None  # the model sees other pictures than the vision layer does
        rest = {
            name: value
            for name, value in _said(self._body).items()
            if name not in _SAMPLING | _NOT_IN_KEY
        }
        rest[self._content.name] = self._content.template()
        deployment = self._deployment
        headers = (_encode(deployment.headers),) if deployment.headers else ()
        try:
            model = digest(
                "gateway", deployment.endpoint, deployment.version, _encode(by_name(rest)), *headers
            )
        except RecursionError:  # nested as deeply as the key could just be made of
            return None
        namespace = Namespace(deployment.tenant, model)
        return Request(self.key, namespace, self._content.segments)

    def _shows(self, name: str) -> bool:
        value = self._body.get(name)
        # 0 logprobs are those of the prompt's tokens.
        return value is not None and value is not False and value != ""

    def with_media(self, store: MediaStore) -> Request | None:
        """``request`` with a file behind every image, for the vision hook and later donors. Blocks (writes files)."""
        request = self.request
        if request is None or not request.media:
            return request
        segments = []
        for segment in request.segments:
            if isinstance(segment, MediaSegment):
                data = self._content.media[segment.media_id]
                segment = replace(segment, source=store.path(store.put(data)))
            segments.append(segment)
        return replace(request, segments=tuple(segments))

    def with_plan(self, plan: Plan) -> CanonicalRequest | None:
        """The canonical request' of a plan, with its own key. Blocks (reads donors' images). None where the plan cannot
        be mapped back one to one, or a donor's image is gone."""
        content = self._content.with_segments(plan.segments)
        if self.request is None or content is None:
            return None
        body = {**self._body, content.name: content.value}
        built = _build(body, content, self._deployment)
        return replace(
            built,
            sampled=self.sampled,
            steadied=self.steadied,
            reordered=self.reordered,
        )

    def body(self, *, salted: bool = True) -> dict[str, Any]:
        """What to send upstream: fresh, the caller may change its top level. ``salted``: with the tenant's
        ``cache_salt`` and uuids of images, by which vLLM knows them without hashing.

        An image's uuid is its digest under the tenant's salt, so nobody else can name it. With ``media_io_kwargs`` the
        same bytes may be read in another way, which vLLM does not tell apart by uuid: there are none then.
        """
        if not salted:
            return {**self._body, self._content.name: self._content.with_uuids(None)}
        salt = partial(tenant_salt, self._deployment.secret, self._deployment.tenant)
        named = bool(self._content.media) and not self._body.get("media_io_kwargs")
        value = self._content.with_uuids(partial(media_uuid, salt(None)) if named else None)
        return {
            **self._body,
            self._content.name: value,
            "cache_salt": salt(self._body.get("cache_salt")),
        }


def canonicalise(body: Mapping[str, Any], deployment: Deployment) -> CanonicalRequest:
    """The canonical form of a request. Raises `Unkeyable` where it has none.

    Use `loads` for the JSON of ``body``.
    """
    body, spans = _with_spans_apart(body, deployment)
    try:
        if any(body.get(name) is not None for name in _UNKEYABLE):
            raise Unkeyable("state of another server")
        unknown = body.keys() - _KNOWN - _SAMPLING - _NOT_IN_KEY - deployment.known_fields
        if any(body[name] is not None for name in unknown):
            raise Unkeyable(UNKNOWN)
        route = ROUTES[deployment.endpoint]
        content = route.read(body)
        store = body.get("store")
        if route.stores and store is not False and not (store is None and deployment.stateless):
            raise Unkeyable("store")
        built = _build(body, content, deployment)
        return built if spans is None else replace(built, spans=spans)
    except (ValueError, TypeError, RecursionError):  # huge numbers, deep nesting, no JSON types
        raise Unkeyable("no canonical JSON") from None


def _with_spans_apart(
    body: Mapping[str, Any],
    deployment: Deployment,
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """A body without what it asks of semkv's KV connector, and what the connector is asked: by it, or by the gateway
    where it says nothing."""
    spans = _spans_of(body) if deployment.reuses_documents else None
    if spans is not None:
        return {name: value for name, value in body.items() if name != _TRANSFER}, spans
    is_silent = body.get(_TRANSFER) is None
    return body, _SEPARATED if deployment.separates_documents and is_silent else None


def _spans_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a body asks of semkv's KV connector, where that is to reuse documents and nothing else; else None."""
    given = body.get(_TRANSFER)
    if not isinstance(given, dict) or given.keys() != {"semkv"}:
        return None
    wish = given["semkv"]
    is_reuse = isinstance(wish, dict) and "spans" in wish and wish.keys() <= _REUSE
    return dict(wish) if is_reuse else None


def _build(body: Mapping[str, Any], content: Content, deployment: Deployment) -> CanonicalRequest:
    route = ROUTES[deployment.endpoint]
    stream = body.get("stream")
    options = body.get("stream_options")
    model = body.get("model")
    _check_types(body)
    asked = options if isinstance(options, dict) else {"unknown": options is not None}
    if route.converts and any(value for name, value in asked.items() if name != "include_usage"):
        raise Unkeyable("stream options")
    keyed = {
        name: value
        for name, value in _said(body).items()
        if name not in _NOT_IN_KEY or name in route.repeated
    }
    keyed.update(content.beside)
    keyed[content.name] = content.keyed
    if stream and not route.converts:
        keyed["stream"] = [options, body.get("stream_interval")]
    return CanonicalRequest(
        key=deployment.key(_encode(by_name(keyed))),
        partition=deployment.tenant,
        model=model or "",
        prompt=content.prompt or last_words(body),
        stream=bool(stream),
        include_usage=not route.converts or bool(asked.get("include_usage")),
        sampled=_is_sampled(body, route),
        steadied=False,
        _body=body,
        _content=content,
        _deployment=deployment,
    )


def _check_types(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("stream"), bool | None):
        raise Unkeyable("stream is no boolean")
    if not isinstance(body.get("model"), str | None):
        raise Unkeyable("model is no string")


def _is_sampled(body: Mapping[str, Any], route: Route) -> bool:
    """Whether the answer is drawn at random: no field of those that fix it has a value that does."""
    fixed_by = route.fixed_by
    return bool(fixed_by) and not any(_fixes(name, body.get(name)) for name in fixed_by)


def _fixes(name: str, value: object) -> bool:
    """Whether a temperature or a seed is one with which nothing is drawn at random."""
    if isinstance(value, bool):
        return False
    return value == 0 if name == "temperature" else isinstance(value, int) and value >= 0


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, without those that mean the same as leaving them out."""
    said = {
        name: _plain(name, value)
        for name, value in body.items()
        if value is not None or name not in _NULL_IS_ABSENT
    }
    if said.get("n") == 1 and said["n"] is not True:
        del said["n"]
    if is_hint(said.get(HINT)):
        del said[HINT]
    return said


def _plain(name: str, value: Any) -> Any:
    """One form for a parameter that may be written in several ways: 1 and 1.0, 0 and -0.0, a map in any order."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if name in _BY_NAME and isinstance(value, dict) and all(map(_NUMBER.fullmatch, value)):
        return by_name(value)
    return value


def loads(raw: bytes) -> dict[str, Any]:
    """Read the JSON object of a request. Of half a character no key can be made. Raises `Unkeyable`."""
    try:
        value = strict_json.read(raw)
        if b"\\u" in raw:
            _encode(value).encode()  # a lone surrogate cannot be encoded
    except (ValueError, RecursionError):
        raise Unkeyable("no JSON") from None
    if not isinstance(value, dict):
        raise Unkeyable("no JSON object")
    return value
