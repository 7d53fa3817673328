"""What ordinary clients hit: each asks one question twice as it does by default, through a gateway with README's flags.

    python bench/gateway_clients.py --out bench/results/cpu/gateway_clients.json --clients-python PATH

The clients run under the Python that is named, which need not have semkv; those that it lacks are left out. Of each
the file has the requests of its second call, how many of them were hits, how many of a call with another key were, and
how many values of headers came that nobody has reviewed. Every such value is a tenant of its own, so one that is new at
each request allows no hit. LlamaIndex sends temperature 0.1 by default, so it is given 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France?"
SAID: list[Any] = [{"role": "user", "content": QUESTION}]
MODEL = "gpt-4o-mini"  # a name that every client knows
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def _openai_chat() -> None:
    import_module("openai").OpenAI().chat.completions.create(model=MODEL, messages=SAID)


def _openai_stream() -> None:
    client = import_module("openai").OpenAI()
    list(client.chat.completions.create(model=MODEL, messages=SAID, stream=True))


def _openai_tools() -> None:
    client = import_module("openai").OpenAI()
    client.chat.completions.create(model=MODEL, messages=SAID, tools=TOOLS)


def _openai_second_turn() -> None:
    """The answer goes back as the client gave it."""
    client = import_module("openai").OpenAI()
    answer = client.chat.completions.create(model=MODEL, messages=SAID)
    turns = [*SAID, answer.choices[0].message, {"role": "user", "content": "And of Spain?"}]
    client.chat.completions.create(model=MODEL, messages=turns)


def _openai_items_back() -> None:
    """The items of a response go back as the client gave them."""
    client = import_module("openai").OpenAI()
    answer = client.responses.create(model=MODEL, input=SAID)
    more = {"role": "user", "content": "And of Spain?"}
    client.responses.create(model=MODEL, input=[*SAID, *answer.output, more])


def _openai_responses() -> None:
    import_module("openai").OpenAI().responses.create(model=MODEL, input=QUESTION)


def _openai_responses_stream() -> None:
    list(
        import_module("openai").OpenAI().responses.create(model=MODEL, input=QUESTION, stream=True)
    )


def _openai_embeddings() -> None:
    import_module("openai").OpenAI().embeddings.create(model="e", input=QUESTION)


def _anthropic() -> None:
    client = import_module("anthropic").Anthropic()
    client.messages.create(model="claude", max_tokens=64, messages=SAID)


def _anthropic_second_turn() -> None:
    client = import_module("anthropic").Anthropic()
    answer = client.messages.create(model="claude", max_tokens=64, messages=SAID)
    turns = [*SAID, {"role": "assistant", "content": answer.content}]
    more = {"role": "user", "content": "And of Spain?"}
    client.messages.create(model="claude", max_tokens=64, messages=[*turns, more])


def _langchain_second_turn() -> None:
    model = import_module("langchain_openai").ChatOpenAI(model=MODEL)
    turns = [("user", QUESTION), model.invoke(QUESTION), ("user", "And of Spain?")]
    model.invoke(turns)


def _litellm_second_turn() -> None:
    ask_model = import_module("litellm").completion
    base = f"openai/{MODEL}"
    answer = ask_model(model=base, messages=SAID).choices[0].message
    more = {"role": "user", "content": "And of Spain?"}
    ask_model(model=base, messages=[*SAID, answer, more])


def _anthropic_stream() -> None:
    client = import_module("anthropic").Anthropic()
    with client.messages.stream(model="claude", max_tokens=64, messages=SAID) as stream:
        stream.get_final_text()


def _litellm() -> None:
    import_module("litellm").completion(model=f"openai/{MODEL}", messages=SAID)


def _langchain_openai() -> None:
    import_module("langchain_openai").ChatOpenAI(model=MODEL).invoke(QUESTION)


def _llama_index() -> None:
    base = os.environ["OPENAI_BASE_URL"]
    import_module("llama_index.llms.openai").OpenAI(
        model=MODEL, temperature=0, api_base=base
    ).complete(QUESTION)


def _pydantic_ai() -> None:
    import_module("pydantic_ai").Agent(f"openai:{MODEL}").run_sync(QUESTION)


def _dspy() -> None:
    dspy = import_module("dspy")
    dspy.LM(f"openai/{MODEL}", cache=False)(QUESTION)


def _openai_agents() -> None:
    agents = import_module("agents")
    # The default client outlives its event loop, and would send a request of the next one twice.
    agents.set_default_openai_client(import_module("openai").AsyncOpenAI(), use_for_tracing=False)
    asyncio.run(agents.Runner.run(agents.Agent(name="a", model=MODEL), QUESTION))


CLIENTS: list[tuple[str, str, Callable[[], None]]] = [
    ("openai", "chat", _openai_chat),
    ("openai", "chat, streamed", _openai_stream),
    ("openai", "chat with tools", _openai_tools),
    ("openai", "chat of two turns", _openai_second_turn),
    ("openai", "responses", _openai_responses),
    ("openai", "responses of two turns", _openai_items_back),
    ("openai", "responses, streamed", _openai_responses_stream),
    ("openai", "embeddings", _openai_embeddings),
    ("anthropic", "messages", _anthropic),
    ("anthropic", "messages of two turns", _anthropic_second_turn),
    ("anthropic", "messages, streamed", _anthropic_stream),
    ("litellm", "chat", _litellm),
    ("litellm", "chat of two turns", _litellm_second_turn),
    ("langchain-openai", "chat", _langchain_openai),
    ("langchain-openai", "chat of two turns", _langchain_second_turn),
    ("llama-index-llms-openai", "chat", _llama_index),
    ("pydantic-ai-slim", "responses", _pydantic_ai),
    ("dspy", "chat", _dspy),
    ("openai-agents", "responses", _openai_agents),
]


def ask(url: str) -> None:
    """Let every client that is there ask, and print a line of JSON for each."""
    os.environ.update(
        OPENAI_BASE_URL=f"{url}/v1", ANTHROPIC_BASE_URL=url, OPENAI_AGENTS_DISABLE_TRACING="1"
    )
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    for package, what, call in CLIENTS:
        try:
            found = {"client": package, "version": version(package), "asks": what}
        except PackageNotFoundError:
            continue
        key = f"key of {package}, {what}"
        os.environ.update(OPENAI_API_KEY=key, ANTHROPIC_API_KEY=key)
        start = figures(url)
        call()
        before = figures(url)
        call()
        after = figures(url)
        os.environ.update(OPENAI_API_KEY=f"other {key}", ANTHROPIC_API_KEY=f"other {key}")
        call()
        # Of some clients a call sends an equal request twice, so the first call has a hit of its own, too.
        own = before["hits"] - start["hits"]
        found["hits_of_another_key"] = figures(url)["hits"] - after["hits"] - own
        found["requests"] = after["requests"] - before["requests"]
        found["hits"] = after["hits"] - before["hits"]
        found["unreviewed_header_values"] = after["values"] - start["values"]
        print(json.dumps(found), flush=True)


def figures(url: str) -> dict[str, int]:
    """What the gateway has counted."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()  # noqa: S310

    def total(pattern: str) -> int:
        return int(
            sum(float(value) for value in re.findall(rf"^{pattern}.* (\S+)$", text, re.MULTILINE))
        )

    return {
        "requests": total("semkv_requests_total"),
        "hits": total('semkv_requests_total.*tier="exact"'),
        "values": total("semkv_header_values_total"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients-python", default=sys.executable)
    parser.add_argument("--ask", metavar="URL", help="be the clients of a gateway that runs")
    given = parser.parse_args()
    if given.ask:
        ask(given.ask)
        return
    import tempfile

    from common import ROOT, machine, write_json

    sys.path.insert(0, str(ROOT / "tests"))
    from gateway_helpers import Pair

    as_readme = partial(Pair, default_temperature=0.0, stateless_responses=True)

    with tempfile.TemporaryDirectory() as folder, as_readme(Path(folder)) as pair:
        command = [given.clients_python, __file__, "--ask", pair.url]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    for one in found:
        print(one)
    write_json(given.out, {"machine": machine(), "clients": found})


if __name__ == "__main__":
    main()
