"""Headers and query parameters of requests, and which of them tell requests apart.

A header that is not known to be harmless may hold a credential, whatever it is called. `Separation` sorts what a
request came with:

the client     everything that is neither harmless nor part of the answer: a tenant for each value
what is asked  headers that choose among answers, and the query: part of the key within a tenant
nothing        harmless headers, each listed in `HARMLESS` under the reason
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from semkv.errors import ConfigError
from semkv_gateway.http import Headers, Scope

HARMLESS: dict[str, str] = {
    "They say how this connection and this body are sent.": """
        connection content-digest content-encoding content-length content-md5 content-type date
        digest expect host http2-settings keep-alive max-forwards proxy-connection te trailer transfer-encoding upgrade
        x-http-version""",
    "They say which forms the client reads. An upstream that heeds one says so by Vary.": """
        accept accept-charset accept-encoding cache-control pragma want-content-digest want-digest""",
    "They name the client's program.": """
        anthropic-dangerous-direct-browser-access dnt http-referer origin originator priority referer save-data sec-gpc
        upgrade-insecure-requests user-agent x-requested-with x-title""",
    "A browser asks by them whether its page may send the request.": """
        access-control-request-headers access-control-request-method access-control-request-private-network""",
    "They name one request or one try of it.": """
        correlation-id idempotency-key request-id x-amz-request-id x-amzn-request-id x-amzn-requestid
        x-client-request-id x-correlation-id x-idempotency-key x-ms-client-request-id x-request-id x-trace-id""",
    "They carry a trace.": """
        b3 baggage elastic-apm-traceparent grpc-trace-bin newrelic ot-baggage sentry-trace traceparent tracestate
        uber-trace-id x-amzn-trace-id x-cloud-trace-context x-datadog-origin x-datadog-parent-id
        x-datadog-sampling-priority x-datadog-tags x-datadog-trace-id x-ot-span-context""",
    "They name a session of an agent, which sends the whole conversation with each request.": """
        x-claude-code-session-id""",
    "A proxy says by them from where, and on which way, the request came.": """
        cdn-loop cf-connecting-ip cf-connecting-ipv6 cf-ipcountry cf-ray cf-visitor cloudfront-viewer-address
        cloudfront-viewer-country fastly-client-ip fastly-ff fly-client-ip fly-forwarded-port fly-forwarded-proto
        fly-region fly-request-id forwarded front-end-https render-proxy-ttl true-client-ip via
        x-amz-cf-id x-appengine-city x-appengine-citylatlong x-appengine-country x-appengine-region x-arr-log-id
        x-arr-ssl x-azure-clientip x-azure-fdid x-azure-ref x-azure-socketip x-client-ip x-cluster-client-ip
        x-envoy-attempt-count x-envoy-expected-rq-timeout-ms x-envoy-external-address
        x-envoy-internal x-envoy-peer-metadata x-envoy-peer-metadata-id x-fd-healthprobe x-forwarded-by
        x-forwarded-client-ip x-forwarded-for x-forwarded-port x-forwarded-proto x-forwarded-scheme x-forwarded-server
        x-forwarded-ssl x-kong-request-id x-nginx-proxy x-original-forwarded-for x-proxy-id x-queue-start x-real-ip
        x-real-port x-request-start x-scheme x-varnish x-vercel-forwarded-for x-vercel-id x-vercel-ip-city
        x-vercel-ip-country x-vercel-ip-country-region""",
    "vLLM chooses by them where and when it computes, not what.": """
        x-data-parallel-rank x-vllm-priority""",
    "They are meant for the gateway, which reads them itself.": """
        x-semkv-bypass x-semkv-tags x-semkv-tenant""",
}
"""Headers that neither identify the client nor change the answer, by the reason. Not among them: those that repeat the
URL (``X-Forwarded-Host``, ``X-Original-URI``, ``Forwarded`` with more than a way) or say to which service a mesh sends
(``L5d-Dst-Canonical``), since an upstream may have a tenant for each host or path. `_MAY_SAY` has what some may say."""

_TRACERS = rb"[0-9a-f-]+@(nr|dt)|az|dd|es|gorouter|in|lightstep|nr|ot|sentry|sw|xray"
_MAY_SAY: dict[bytes, tuple[re.Pattern[bytes], re.Pattern[bytes]]] = {
    b"forwarded": (re.compile(rb"[;,\s]"), re.compile(rb"by|for|proto")),
    b"baggage": (re.compile(rb"[;,\s]"), re.compile(rb"sentry-[\w.-]+")),
    b"ot-baggage": (re.compile(rb"[;,\s]"), re.compile(rb"sentry-[\w.-]+")),
    b"tracestate": (re.compile(rb","), re.compile(_TRACERS)),
}
"""Harmless headers of several fields, what stands between these, and the names of those that say from where a request
came or how it is traced. With others they may separate: meshes and test environments choose a server by such fields."""

HARMLESS_FAMILIES: dict[bytes, str] = {
    b"sec-ch-": "a browser describes itself",
    b"sec-fetch-": "a browser says where the request began",
    b"x-b3-": "they carry a trace",
    b"x-stainless-": "the clients of OpenAI and Anthropic describe themselves, and count tries",
}
"""Beginnings of names of harmless headers, each with the reason."""

CREDENTIALS = frozenset(
    b"""
    authorization proxy-authorization cookie api-key apikey x-api-key x-apikey x-goog-api-key
    x-goog-iap-jwt-assertion x-access-token x-auth-key x-auth-token x-authorization x-csrf-token x-session-token
    x-amz-security-token x-amzn-oidc-accesstoken x-amzn-oidc-data x-amzn-oidc-identity
    x-ms-client-principal x-ms-client-principal-id x-ms-client-principal-name x-ms-token-aad-access-token
    x-ms-token-aad-id-token ocp-apim-subscription-key cf-access-client-id cf-access-client-secret
    cf-access-jwt-assertion cf-aig-authorization helicone-auth l5d-client-id x-litellm-api-key x-portkey-api-key
    x-portkey-virtual-key x-forwarded-access-token x-forwarded-client-cert x-forwarded-email x-forwarded-groups
    x-forwarded-preferred-username x-forwarded-user remote-user x-remote-user x-auth-request-access-token
    x-auth-request-email x-auth-request-groups x-auth-request-preferred-username x-auth-request-user x-user
    x-user-email x-user-id x-webauth-user
    """.split()
)
"""Headers that identify the client and do nothing else. They need no place here to separate: by this list ``--ignore-
header`` refuses them, and they count for nothing where another word names the tenant (``--single-tenant``, a
trusted proxy)."""

CHOOSES = frozenset(
    b"openai-organization openai-project openai-beta anthropic-version anthropic-beta accept-language"
    b" content-language x-model".split()
)
"""Headers that change the answer and hold no credential: part of the key, and no tenant of their own."""

_CHOOSES_BY_QUERY = (b"api-version", b"beta")  # parameters of a URL of which the same holds
_OPEN_TO_ALL = frozenset(  # who may read an answer, and how it is packed, are no part of it
    b"accept-encoding origin access-control-request-method access-control-request-headers".split()
)
_LISTED = frozenset(name for names in HARMLESS.values() for name in names.encode().split())
_FAMILIES = tuple(HARMLESS_FAMILIES)


@dataclass(frozen=True, slots=True)
class Sorted:
    """What a request's headers and query say, in one order."""

    credentials: Headers  # known to identify the client, and to do nothing else
    unknown: Headers  # may identify the client, or change the answer
    chooses: Headers  # change the answer; the query is here under a name that no header has


class Separation:
    """Tells which requests may have one answer, as far as headers and query go. ``ignored``: further harmless ones."""

    def __init__(self, ignored: Iterable[str] = ()) -> None:
        more = {name.lower().encode() for name in ignored}
        for name in sorted(more & CREDENTIALS):
            raise ConfigError("--ignore-header", name.decode(), "a header that holds no credential")
        self._harmless = _LISTED | more

    def _is_harmless(self, name: bytes) -> bool:
        return name in self._harmless or name.startswith(_FAMILIES)

    def sort(self, scope: Scope) -> Sorted:
        """Sort what a request came with."""
        found = Sorted(credentials=[], unknown=[], chooses=[])
        for name, value in scope["headers"]:
            if name in CREDENTIALS:
                found.credentials.append((name, value))
            elif name in CHOOSES and name not in self._harmless:
                # A value with the meaning of no header.
                if (name, value) != (
                    b"accept-language",
                    b"*",
                ):
                    found.chooses.append((name, value))
            elif not self._is_harmless(name) or _says_more(name, value):
                found.unknown.append((name, value))
        for headers in (found.credentials, found.unknown, found.chooses):
            headers.sort(key=_name)
        if query := scope.get("query_string"):
            found.chooses.append((b"?", query))
            if any(part.partition(b"=")[0] not in _CHOOSES_BY_QUERY for part in query.split(b"&")):
                found.unknown.append((b"?", query))
        return found

    def refusal(self, headers: Headers, *, by_credentials: bool) -> str:
        """Why an answer with these headers may go to nobody else; empty where it may. ``by_credentials``: requests
        with other credentials are another tenant's."""
        for name, value in headers:
            if name == b"cache-control":
                words = {word.partition(b"=")[0].strip() for word in value.lower().split(b",")}
                if b"no-store" in words or b"private" in words:
                    return "no-store" if b"no-store" in words else "private"
            elif name == b"vary":
                names = {word.strip() for word in value.lower().split(b",")} - _OPEN_TO_ALL
                if any(
                    self._is_shared(named, by_credentials=by_credentials)
                    for named in names
                    if named
                ):
                    return "vary"
        return ""

    def _is_shared(self, name: bytes, *, by_credentials: bool) -> bool:
        """Whether requests with other values of a header may have one answer."""
        if name in CREDENTIALS:
            return not by_credentials
        return name == b"*" or self._is_harmless(name)


def _says_more(name: bytes, value: bytes) -> bool:
    """Whether a harmless header has a field that is not known to be harmless (`_MAY_SAY`)."""
    if name not in _MAY_SAY:
        return False
    between, known = _MAY_SAY[name]
    fields = (field.strip().partition(b"=") for field in between.split(value.lower()))
    return any(
        said and not (equals and known.fullmatch(said.strip())) for said, equals, _ in fields
    )


def _name(pair: tuple[bytes, bytes]) -> bytes:
    return pair[0]
