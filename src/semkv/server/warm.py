"""``semkv warm``: sends the requests of a file through the gateway, so that answers are there before anyone asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from semkv.errors import DatasetError


@dataclass(slots=True)
class Counts:
    """What came of it. ``why``: the first failure."""

    sent: int = 0
    there: int = 0
    failed: int = 0
    why: str = ""


def requests_of(file: Path, *, model: str, max_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of every line; blank lines are skipped.

    A line is a JSON string (a prompt) or a request body with ``messages`` or ``prompt``. Where a body has neither
    temperature nor seed, it gets temperature 0, since drawn answers are not kept.

    Raises:
        DatasetError: a line is neither; names file and line.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except ValueError:
            raise DatasetError(f"{file}, line {number}: no JSON") from None
        if isinstance(given, str):
            given = {"messages": [{"role": "user", "content": given}], "max_tokens": max_tokens}
        if not isinstance(given, dict) or not ("messages" in given or "prompt" in given):
            raise DatasetError(f"{file}, line {number}: neither a prompt nor a request with messages or prompt")
        if model:
            given.setdefault("model", model)
        if "seed" not in given:
            given.setdefault("temperature", 0)
        given.pop("stream", None)
        given.pop("stream_options", None)
        yield ("/v1/chat/completions" if "messages" in given else "/v1/completions"), given


def warm_up(file: Path, url: str, *, model: str, concurrency: int, max_tokens: int, key: str) -> Counts:
    """Send every request of ``file``, with a progress bar on standard error.

    Raises:
        DatasetError: the file cannot be read.
    """
    todo = list(requests_of(file, model=model, max_tokens=max_tokens))
    return asyncio.run(_send_all(todo, url.rstrip("/"), concurrency, key))


async def _send_all(todo: list[tuple[str, dict[str, Any]]], url: str, concurrency: int, key: str) -> Counts:
    counts, waiting = Counts(), iter(todo)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(todo))
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

            async def work() -> None:
                for path, body in waiting:
                    await _send(session, url + path, body, counts)
                    progress.advance(bar)

            await asyncio.gather(*(work() for _ in range(concurrency)))
    return counts


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any], counts: Counts) -> None:
    why = ""
    try:
        async with session.post(url, json=body) as response:
            text = await response.text()
            if response.status != 200:
                why = f"status {response.status}: {text[:200]}"
            elif response.headers.get("x-semkv", "").startswith("hit"):
                counts.there += 1
            else:
                counts.sent += 1
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        counts.failed += 1
        counts.why = counts.why or why
