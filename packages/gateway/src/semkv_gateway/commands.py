"""``semkv serve`` and ``semkv warm``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

from semkv.command_line import Environment, command_line
from semkv.errors import DatasetError, SemkvError
from semkv.user_files import read_json_lines
from semkv_gateway.settings import PORT, ServerSettings

serve = command_line(
    Environment(os.environ),
    help_epilogue="""Examples:

```
  semkv serve --upstream http://127.0.0.1:8000 --port 8080
      in front of a vLLM server; clients use port 8080 instead
  semkv serve --upstream http://127.0.0.1:8000 --ttl 3600 --no-semantic
      exact repeats only, for an hour
  semkv serve --default-temperature 0 --stateless-responses
      cache also clients that send neither a temperature nor store
  SEMKV_SECRET=... semkv serve --store redis://127.0.0.1:6379/0
      several gateways share their responses
  SEMKV_ADMIN_KEY=... semkv serve
      with the dashboard, at http://127.0.0.1:8080/semkv
```""",
)
warm = command_line()
_KEPT = "kept"
_THERE = "there"  # the request had an answer already
_AT_ONCE = 8  # requests that `warm` has under way


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise SemkvError(
            f"this command needs {error.name}: in a checkout of semkv, pip install '.[server]'"
        ) from error


@serve.default
def _serve(
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, PORT] = 8080,
    workers: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=256))] = 1,
    drain_timeout: Annotated[
        float, Parameter(validator=validators.Number(gte=0, lte=86400))
    ] = 20.0,
    config: Path | None = None,
    settings: Annotated[ServerSettings | None, Parameter(name="*")] = None,
) -> None:
    """Answer repeated requests in front of a server.

    Any OpenAI-compatible server will do; near-repeats are answered too, unless --no-semantic is given.

    Secrets come from the environment: SEMKV_SECRET (keys of stored responses), SEMKV_ADMIN_KEY (dashboard, admin
    routes). So may any flag, as SEMKV_UPSTREAM or SEMKV_TTL.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        workers: Processes that answer on the port, one a core; each loads the encoder.
        drain_timeout: Seconds that open requests get after a signal to stop; then they end with an error.
        config: A TOML file of flags without the dashes, such as `ttl = 60`; flags and variables override it.
    """
    del config  # `Environment` has read it
    with _extra():
        from semkv_gateway.serve import run_server

    run_server(
        settings or ServerSettings(),
        host=host,
        port=port,
        workers=workers,
        drain_timeout=drain_timeout,
    )


@warm.default
def _warm(
    prompts: Path,
    /,
    *,
    documents: Annotated[bool, Parameter(negative="")] = False,
    url: str = "http://127.0.0.1:8080",
    model: str = "",
) -> None:
    """Send the prompts of a file through a gateway, so that its cache has them.

    The API key is taken from OPENAI_API_KEY.

    Args:
        prompts: JSON lines: a prompt as a string, or a whole request body.
        documents: The lines are documents, as strings or token ids. Each is sent alone for one token, so that vLLM's
            KV connector stores it; no answer is kept. The URL may be vLLM's own.
        url: The gateway.
        model: The model of lines that name none.
    """
    key = os.environ.get("OPENAI_API_KEY", "")
    todo = list(_documents_of(prompts, model) if documents else _requests_of(prompts, model))
    with _extra():
        outcomes, failures = asyncio.run(_send_all(todo, url.rstrip("/"), key, keep=not documents))
    if documents:
        print(f"{outcomes.total()} sent, {len(failures)} failed")
        _end_with(failures)
        return
    kept = f"{outcomes.pop(_KEPT, 0)} kept, {outcomes.pop(_THERE, 0)} there already"
    unkept = outcomes
    print(f"{kept}, {unkept.total()} not kept, {len(failures)} failed")
    for reason, count in unkept.most_common():
        print(f"not kept: {count} ({reason})", file=sys.stderr)
    _end_with(failures)


def _end_with(failures: list[str]) -> None:
    if failures:
        print(f"first failure: {failures[0]}", file=sys.stderr)
        sys.exit(1)


def _outcome(said: str) -> str:
    """`_KEPT`, `_THERE`, or why an answer was not kept, read from its header ``X-Semkv``."""
    kind = said.partition(" ")[0]
    reason = said.partition(" reason=")[2]
    if kind == "hit":
        return _THERE
    if reason:
        return reason
    return _KEPT if kind in ("miss", "joined") else "no semkv gateway"


def _requests_of(file: Path, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of every line; blank lines are skipped.

    A line is a JSON string (a prompt) or a request body with ``messages`` or ``prompt``. Where a body has neither
    temperature nor seed, it gets temperature 0, since drawn answers are not kept.

    Raises:
        DatasetError: a line is neither; names file and line.
    """
    for number, given in read_json_lines(file):
        if isinstance(given, str):
            given = {"messages": [{"role": "user", "content": given}]}
        if not isinstance(given, dict) or not ("messages" in given or "prompt" in given):
            raise DatasetError(
                f"{file}, line {number}: neither a prompt nor a request with messages or prompt"
            )
        if model:
            given.setdefault("model", model)
        if "seed" not in given:
            given.setdefault("temperature", 0)
        given.pop("stream", None)
        given.pop("stream_options", None)
        yield ("/v1/chat/completions" if "messages" in given else "/v1/completions"), given


def _documents_of(file: Path, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of every line: a document alone, of which nothing but its KV is wanted.

    A text is not given the special tokens that begin a prompt: in another prompt a document has none.

    Raises:
        DatasetError: a line is neither a text nor a list of token ids; names file and line.
    """
    for number, given in read_json_lines(file):
        ids = isinstance(given, list) and all(type(token) is int for token in given)
        if not given or not (ids or isinstance(given, str)):
            raise DatasetError(f"{file}, line {number}: neither a text nor token ids")
        body = {"prompt": given, "max_tokens": 1, "temperature": 0, "add_special_tokens": False}
        yield "/v1/completions", body | ({"model": model} if model else {})


async def _send_all(
    todo: list[tuple[str, dict[str, Any]]], url: str, key: str, *, keep: bool
) -> tuple[Counter[str], list[str]]:
    """Send requests, a few at a time. Where no answer is to be kept, none is looked for either.

    Returns how often each outcome came, and a line for each failure.
    """
    import aiohttp
    from rich.console import Console
    from rich.progress import track

    outcomes = Counter[str]()
    failures: list[str] = []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not keep:
        headers["Cache-Control"] = "no-cache, no-store"
    pool = aiohttp.TCPConnector(limit=_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    async with aiohttp.ClientSession(
        headers=headers,
        connector=pool,
        timeout=timeout,
    ) as session:

        async def send(path: str, body: dict[str, Any]) -> str:
            """The header ``X-Semkv`` of the answer. The gateway sends it before it knows whether the answer can be
            kept (it may be cut off), so a second request asks for the stored answer."""
            async with session.post(url + path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise ValueError(f"status {response.status}: {text[:200]}")
                said = response.headers.get("x-semkv", "")
            if not keep or said.startswith("hit") or "reason=" in said or not said:
                return said
            async with session.post(
                url + path, json=body, headers={"Cache-Control": "only-if-cached"}
            ) as response:
                return said if response.status == 200 else "miss reason=unfinished"

        sending = [asyncio.ensure_future(send(path, body)) for path, body in todo]
        for done in track(
            asyncio.as_completed(sending), "warming", len(todo), console=Console(stderr=True)
        ):
            try:
                outcomes[_outcome(await done)] += 1
            except ValueError as error:
                failures.append(str(error))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failures.append(f"{type(error).__name__}: {error}")
    return outcomes, failures
