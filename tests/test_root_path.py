"""The middleware below a path, vLLM's ``--root-path``: behind a proxy that takes it off, and one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest

from gateway_helpers import ADMIN, SECRET, Served, chat
from semkv.server import Middleware
from semkv.server.http import route_path


@pytest.mark.parametrize(
    ("root", "path", "found"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/api", "/api/v1/models", "/v1/models"),
        ("/api/", "/api/v1/models", "/v1/models"),
        ("/api", "/v1/models", "/v1/models"),
        ("/api", "/apiary/v1/models", "/apiary/v1/models"),
        ("/api", "/api", "/api"),
    ],
)
def test_the_route_is_what_follows_the_root(root: str, path: str, found: str) -> None:
    assert route_path({"path": path, "root_path": root}) == found


def test_both_kinds_of_proxy_share_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"CACHE_DIR": str(tmp_path), "SECRET": SECRET, "ADMIN_KEY": ADMIN, "SEMANTIC": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SEMKV_{name}", value)
    seen: list[dict[str, Any]] = []
    app = fastapi.FastAPI(root_path="/api")

    @app.post("/v1/chat/completions")
    @app.post("/v1/embeddings")
    async def answer(request: fastapi.Request) -> dict[str, Any]:
        seen.append(await request.json())
        return {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}]}

    app.add_middleware(Middleware)  # type: ignore[arg-type]
    with Served(app) as served:
        told = []
        for prefix in ("/api", "", "/api"):
            reply = httpx.post(f"{served.url}{prefix}/v1/chat/completions", json=chat("a"))
            assert (reply.status_code, reply.json()["choices"][0]["message"]["content"]) == (200, "yes")
            told.append(reply.headers["x-semkv"].split(" ")[0])
        assert told == ["miss", "hit", "hit"]
        for prefix in ("/api", ""):
            assert httpx.post(f"{served.url}{prefix}/v1/embeddings", json={"input": "a"}).status_code == 200
            page = httpx.get(f"{served.url}{prefix}/semkv/metrics")
            assert "semkv_requests_total" in page.text
    assert len(seen) == 3
    assert all(len(body["cache_salt"]) == 64 for body in seen)
