"""``semkv serve`` and ``semkv warm``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from semkv.config import Variables, command_line
from semkv.errors import SemkvError
from semkv.server.settings import ServerSettings

serve = command_line(
    Variables(ServerSettings, os.environ),
    help_epilogue="""Examples:

```
  semkv serve --upstream http://127.0.0.1:8000 --port 8080
      in front of a vLLM server; clients use port 8080 instead
  semkv serve --upstream http://127.0.0.1:8000 --ttl 86400 --no-semantic
      exact repeats only, for a day
  SEMKV_SECRET=... semkv serve --upstream http://127.0.0.1:8000 --store redis://127.0.0.1:6379/0
      several gateways share their responses
  SEMKV_ADMIN_KEY=... semkv serve --upstream http://127.0.0.1:8000
      with the dashboard, at http://127.0.0.1:8080/semkv
```""",
)
warm = command_line()


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise SemkvError(f"this command needs {error.name}: in a checkout of semkv, pip install '.[server]'") from error


@serve.default
def _serve(
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8080,
    log_level: str = "info",
    settings: Annotated[ServerSettings | None, Parameter(name="*")] = None,
) -> None:
    """Answer repeated requests in front of a server.

    Any OpenAI-compatible server will do; near-repeats are answered too, unless --no-semantic is given.

    Secrets come from the environment: SEMKV_SECRET (keys of stored responses), SEMKV_ADMIN_KEY (dashboard, admin
    routes). So may any flag, as SEMKV_UPSTREAM or SEMKV_TTL.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        log_level: debug, info, warning or error.
    """
    with _extra():
        from semkv.server.serve import run_server

    run_server(settings or ServerSettings(), os.environ, host=host, port=port, log_level=log_level)


@warm.default
def _warm(
    prompts: Path,
    /,
    *,
    url: str = "http://127.0.0.1:8080",
    model: str = "",
    concurrency: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 8,
    max_tokens: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 512,
) -> None:
    """Send the prompts of a file through a gateway, so that its cache has them.

    The API key is taken from OPENAI_API_KEY.

    Args:
        prompts: JSON lines: a prompt as a string, or a whole request body.
        url: The gateway.
        model: For lines that name none.
        concurrency: Requests at once.
        max_tokens: For lines that are prompts.
    """
    with _extra():
        from semkv.server.warm import warm_up

    key = os.environ.get("OPENAI_API_KEY", "")
    counts = warm_up(prompts, url, model=model, concurrency=concurrency, max_tokens=max_tokens, key=key)
    print(f"{counts.sent} sent, {counts.there} there already, {counts.failed} failed")
    if counts.failed:
        print(f"first failure: {counts.why}", file=sys.stderr)
        sys.exit(1)
