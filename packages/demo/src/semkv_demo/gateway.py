"""vLLM's server asked alone, and through the gateway."""

from __future__ import annotations

import http.client
import json
import re
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from semkv.errors import EngineError
from semkv_demo.asked import Asked
from semkv_demo.names import ALONE, REPEAT, REWORDED, SEMKV, TRAP
from semkv_demo.processes import HOST, Server
from semkv_demo.turns import Ask, Found, Reply, in_turns

SERVED = "minigqa-vlm"
_VETO = re.compile(
    r'^semkv_cache_events_total\{event="semantic (?:veto|told apart):([^"]+)"\} (\S+)',
    re.MULTILINE,
)
_RECORDED = re.compile(
    r'^semkv_cache_events_total\{event="semantic recorded"\} (\S+)', re.MULTILINE
)
_RECORDING_S = 30.0
_LOOK_S = 0.05


def ask_gateway(
    asked: Sequence[Asked], server: Server, gateway: Server
) -> tuple[list[Reply], dict[str, int]]:
    """Replies by row, and why matches were refused. The first picture only warms up."""
    with Chat(server) as alone, Chat(gateway) as through:
        ask = {ALONE: alone.ask, SEMKV: through.ask}
        _ask_rows(asked[:1], ask, gateway)
        before = vetoes(gateway)
        replies = _ask_rows(asked[1:], ask, gateway)
        reasons = Counter(vetoes(gateway)) - Counter(before)
    return replies, dict(reasons)


def _ask_rows(
    asked: Sequence[Asked],
    ask: Mapping[str, Ask],
    gateway: Server,
) -> list[Reply]:
    before = recorded(gateway)
    new = [(one.picture, one.question) for one in asked]
    in_turns("a new question", new, ask)
    wait_until_recorded(gateway, before + len(asked))
    replies = in_turns(REPEAT, new, ask)
    replies += in_turns(REWORDED, [(one.picture, one.reworded) for one in asked], ask)
    return replies + in_turns(TRAP, [(one.picture, one.trap) for one in asked], ask)


class Chat:
    """A client of a server with one connection."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(HOST, server.port, timeout=600)

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, asked: tuple[bytes, str]) -> Found:
        """Ask about a picture; the time is that to the answer."""
        body = json.dumps(_body(*asked))
        headers = {"Content-Type": "application/json"}
        start = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        response = self._connection.getresponse()
        text = response.read()
        seconds = time.perf_counter() - start
        if response.status != http.client.OK:
            raise EngineError(f"a server of the demo answered {response.status}: {text[:300]!r}")
        answer = json.loads(text)["choices"][0]["message"]["content"].strip()
        hit = response.getheader("x-semkv", "").startswith("hit")
        return Found(seconds, answer, hit)


def _body(picture: bytes, question: str) -> dict[str, Any]:
    image = {"url": f"data:image/jpeg;base64,{b64encode(picture).decode()}"}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": question}]
    return {
        "model": SERVED,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
    }


def vetoes(gateway: Server) -> dict[str, int]:
    """How many matches the guards have refused, by reason."""
    found = Counter[str]()
    for reason, count in _VETO.findall(gateway.page("/metrics")):
        found[reason] += int(float(count))
    return dict(found)


def recorded(gateway: Server) -> int:
    """How many entries the gateway has recorded."""
    found = _RECORDED.search(gateway.page("/metrics"))
    return int(float(found[1])) if found else 0


def wait_until_recorded(gateway: Server, count: int) -> None:
    """Entries are recorded after the answer: wait for them, as long as a person would who types the next line."""
    deadline = time.monotonic() + _RECORDING_S
    while recorded(gateway) < count and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
