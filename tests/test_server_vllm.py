"""The gateway before a stock vLLM server, and the middleware inside one: real model, stock OpenAI client."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway_helpers import ADMIN, PATIENT, SECRET, Served, wait_until
from semkv.encoders.text import DEFAULT_MODEL, resolve_model
from semkv_gateway.app import app_of
from semkv_gateway.settings import ServerSettings
from semkv_guards.judge import messages, one_token, verdict
from vllm_forks import prepare
from vllm_server import MODULE, VllmServer

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[1]
MODEL = "minigqa-vlm"
COMMAND = [
    str(prepare() / "python"),
    *MODULE,
    "--model",
    str(ROOT / "src/semkv/assets/minigqa-vlm"),
]
COMMAND += ["--served-model-name", MODEL, "--max-model-len", "512"]
QUESTIONS = ("What color is the large cube?", "What shape is blue?", "Is there a red sphere?")
Servers = tuple[VllmServer, VllmServer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A stock server, and one with the middleware and an API key; started side by side."""
    folder = tmp_path_factory.mktemp("servers")
    secrets = {
        "SEMKV_SECRET": SECRET,
        "SEMKV_ADMIN_KEY": ADMIN,
        "SEMKV_CACHE_DIR": str(folder / "inside"),
    }
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
    # An untrained model would fill an answer with blanks.
    plain = [
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ]
    stock = VllmServer([*COMMAND, *tools, *plain], folder / "stock.log")
    middleware = ["--middleware", "semkv_gateway.Middleware", "--api-key", "right"]
    inside = VllmServer([*COMMAND, *middleware], folder / "inside.log", **secrets)
    try:
        yield stock.ready(), inside.ready()
    finally:
        stock.stop()
        inside.stop()


@pytest.fixture(scope="module")
def gateway(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ServerSettings(
        upstreams=(servers[0].url,), cache_dir=tmp_path_factory.mktemp("front"), **PATIENT
    )
    with Served(app_of(settings, {"SEMKV_SECRET": SECRET, "SEMKV_ADMIN_KEY": ADMIN})) as served:
        yield served


def ask(
    url: str, question: str, *, picture: str = "", key: str = "right", **more: Any
) -> tuple[Any, str]:
    """The answer, and what the cache said."""
    content: Any = question
    if picture:
        data = base64.b64encode((ROOT / "docs/pictures" / picture).read_bytes()).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
        content = [image, {"type": "text", "text": question}]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 16,
    }
    raw = client.chat.completions.with_raw_response.create(**{**body, **more})
    return raw.parse(), raw.headers.get("x-semkv", "")


def text(answer: Any) -> str:
    return answer.choices[0].message.content.strip()


def streamed(pieces: Any) -> str:
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


def test_a_picture_question_repeated_reworded_and_streamed(
    gateway: Served, servers: Servers
) -> None:
    question = "What color is the large cube?"
    own, _ = ask(servers[0].url, question, picture="scene.jpg")
    first, said = ask(gateway.url, question, picture="scene.jpg")
    assert (text(first), said) == (text(own), "miss")
    again, said = ask(gateway.url, question, picture="scene.jpg")
    assert again == first
    assert said.startswith("hit tier=exact")
    for blanks in range(60):  # until a lookup ends in time
        answer, said = ask(
            gateway.url, "what color  is the large cube?" + " " * blanks, picture="scene.jpg"
        )
        if said.startswith("hit"):
            break
    # By its vector, at 1.000, where the first request is found before its text is recorded.
    assert said.startswith(("hit tier=text:normalised", "hit tier=text:semantic score=1.000"))
    assert text(answer) == text(first)
    pieces, said = ask(gateway.url, question, picture="scene.jpg", stream=True)
    assert (streamed(pieces).strip(), said.split()[0]) == (text(first), "hit")


def test_a_judge_may_be_asked(servers: Servers) -> None:
    """vLLM takes the request, and gives the chances of the one token."""
    shown = messages(["Look at it."], "Is the cube red?", "Is it a red cube?")
    assert shown is not None
    body = one_token(shown) | {"model": MODEL, "cache_salt": "a tenant's"}
    answer = httpx.post(f"{servers[0].url}/v1/chat/completions", json=body, timeout=120).json()
    (choice,) = answer["choices"]
    (token,) = choice["logprobs"]["content"]
    assert len(token["top_logprobs"]) == 5
    assert verdict(answer) in (True, False, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["responses", "messages"])
def test_answers_of_other_routes_are_kept_where_the_server_holds_no_state(
    gateway: Served, route: str, stream: bool
) -> None:
    """The model says few words of its own accord, so most answers to a few questions are whole."""
    openais = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0, timeout=120)
    anthropics = anthropic.Anthropic(base_url=gateway.url, api_key="k", max_retries=0, timeout=120)

    def ask_it(question: str) -> tuple[list[Any], str]:
        if route == "responses":
            more: dict[str, Any] = {
                "input": question,
                "store": False,
                "temperature": 0,
                "max_output_tokens": 16,
            }
            raw: Any = openais.responses.with_raw_response.create(
                model=MODEL, stream=stream, **more
            )
        else:
            more = {
                "messages": [{"role": "user", "content": question}],
                "extra_body": {"temperature": 0},
            }
            raw = anthropics.messages.with_raw_response.create(
                model=MODEL, max_tokens=16, stream=stream, **more
            )
        return list(raw.parse()) if stream else [raw.parse()], raw.headers["x-semkv"]

    kept = 0
    for question in QUESTIONS:
        (first, said), (again, repeated) = ask_it(question), ask_it(question)
        last = first[-1]
        if route == "responses":
            whole = (last.response if stream else last).status == "completed"
        else:
            ends = [event.delta.stop_reason for event in first if event.type == "message_delta"]
            whole = (ends[0] if stream else last.stop_reason) == "end_turn"
        assert said == "miss"
        assert repeated.startswith("hit tier=exact" if whole else "miss")
        assert not whole or first == again
        kept += whole
    assert kept


def test_what_is_not_cached_does_not_share_the_servers_prefixes_either(gateway: Served) -> None:
    question = "What shape is the small green thing? " * 30

    def cached(key: str) -> int:
        answer, said = ask(gateway.url, question, key=key, extra_headers={"X-Semkv-Bypass": "1"})
        assert said.startswith("pass")
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("first") == 0
    assert cached("first") > 0
    assert cached("second") == 0


def test_inside_vllm(servers: Servers) -> None:
    url, question = servers[1].url, "What color is the large cube?"
    first, said = ask(url, question, picture="scene.jpg")
    again, repeated = ask(url, question, picture="scene.jpg")
    assert (said, repeated.split()[0], first) == ("miss", "hit", again)
    for _ in range(2):
        with pytest.raises(openai.AuthenticationError):
            ask(url, question, picture="scene.jpg", key="wrong")
    pieces, said = ask(url, "What shape is blue?", picture="scene.jpg", stream=True)
    content = streamed(pieces)
    whole, repeated = ask(url, "What shape is blue?", picture="scene.jpg")
    assert (said, repeated.split()[0], whole.choices[0].message.content) == ("miss", "hit", content)
    prompt = "What shape is to the left of the large cube? " * 30
    body = {"model": MODEL, "input": prompt, "max_output_tokens": 4, "temperature": 0}
    cached = []
    for salt in ("mine", "mine", "another"):
        headers = {"Authorization": "Bearer right"}
        passed = httpx.post(
            f"{url}/v1/responses", json={**body, "cache_salt": salt}, headers=headers, timeout=120
        )
        assert passed.headers["x-semkv"] == "pass reason=store"
        cached.append(passed.json()["usage"]["input_tokens_details"]["cached_tokens"])
    assert (cached[0], cached[1] > 0, cached[2]) == (0, True, 0)
    assert httpx.post(f"{url}/v1/responses", json=body, timeout=120).status_code == 401
    assert "vllm:" in httpx.get(f"{url}/metrics").text, "vLLM's own metrics stay where they are"
    assert "semkv_requests_total" in httpx.get(f"{url}/semkv/metrics").text
    admin = {"Authorization": f"Bearer {ADMIN}"}  # a request is counted when it has ended
    wait_until(
        lambda: (
            httpx.get(f"{url}/semkv/api/stats", headers=admin)
            .json()["totals"]["tiers"]
            .get("exact")
            == 2
        )
    )


def test_embeddings_ranks_and_scores_are_kept(tmp_path: Path) -> None:
    command = [str(prepare() / "python"), *MODULE, "--model", resolve_model(DEFAULT_MODEL)]
    command += ["--served-model-name", "mini", "--runner", "pooling"]
    bodies = {
        "/v1/embeddings": {"input": ["a cat", "a dog"]},
        "/v1/rerank": {"query": "cat", "documents": ["a cat", "a dog"]},
        "/v1/score": {"text_1": "cat", "text_2": ["a cat", "a dog"]},
    }
    with VllmServer(command, tmp_path / "log") as server:
        settings = ServerSettings(
            upstreams=(server.url,), cache_dir=tmp_path / "cache", semantic=False, **PATIENT
        )
        with Served(app_of(settings, {"SEMKV_SECRET": SECRET})) as front:
            for path, body in bodies.items():
                other = json.loads(json.dumps(body).replace("a dog", "A dog"))
                asked = [
                    httpx.post(front.url + path, json={"model": "mini", **b}, timeout=120)
                    for b in (body, body, other)
                ]
                said = [answer.headers["x-semkv"].split()[0] for answer in asked]
                assert said == ["miss", "hit", "miss"], path
                assert asked[0].content == asked[1].content
            client = openai.OpenAI(
                base_url=f"{front.url}/v1", api_key="k", max_retries=0, timeout=120
            )
            first, again = (
                client.embeddings.create(model="mini", input="a bird").data[0].embedding
                for _ in range(2)
            )
            assert first == again


def test_nodes_clients(gateway: Served, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("needs Node.js and npm, such as Debian's packages nodejs and npm")
    shutil.copytree(
        ROOT / "tests" / "node", tmp_path / "node", ignore=shutil.ignore_patterns("node_modules")
    )
    quiet = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    if (
        got := subprocess.run(quiet, cwd=tmp_path / "node", capture_output=True, text=True)
    ).returncode:
        pytest.skip(f"npm cannot install the clients: {got.stderr[-300:]}")
    command = [node, "clients.js", gateway.url, MODEL, *QUESTIONS]
    done = subprocess.run(command, cwd=tmp_path / "node", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for way, asked in json.loads(done.stdout).items():
        shared = way == "chat, streamed"  # its answers are there from the way before
        for (first, ended, said), again in asked:
            assert said.startswith("hit" if shared and ended else "miss"), way
            assert again[:2] == [first, ended]
            assert again[2].startswith("hit tier=exact" if ended else "miss"), way
        assert any(ended for (_, ended, _), _ in asked), way


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_the_agents_sdk(gateway: Served, kind: str) -> None:
    import agents  # late, as is LiteLLM: both take seconds

    said: list[str] = []

    async def note(response: httpx.Response) -> None:
        said.append(response.headers["x-semkv"])

    async def ask_all() -> list[list[str]]:
        http = httpx.AsyncClient(event_hooks={"response": [note]}, timeout=120)
        client = openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=f"agent {kind}", http_client=http
        )
        form = agents.OpenAIChatCompletionsModel if kind == "chat" else agents.OpenAIResponsesModel
        settings = agents.ModelSettings(temperature=0, max_tokens=16, store=False)
        agent = agents.Agent("guide", model=form(MODEL, client), model_settings=settings)
        found = []
        async with http:
            for question in QUESTIONS:
                plain = [(await agents.Runner.run(agent, question)).final_output for _ in range(2)]
                streamed = agents.Runner.run_streamed(agent, question)
                async for _ in streamed.stream_events():
                    pass
                found.append([*plain, streamed.final_output])
        return found

    agents.set_tracing_disabled(True)
    answers = asyncio.run(ask_all())
    outcomes = [header.split()[0] for header in said]
    assert all(len(set(three)) == 1 for three in answers)
    assert len(said) == 3 * len(QUESTIONS)
    assert outcomes[0::3] == ["miss"] * len(QUESTIONS)
    assert "hit" in outcomes[1::3], "answers that came to their own end"
    for again, streamed in zip(outcomes[1::3], outcomes[2::3], strict=True):
        assert streamed == (again if kind == "chat" else "miss")


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellms_client(gateway: Served, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    import litellm

    where = f"{gateway.url}/v1" if provider == "openai" else gateway.url
    hits = 0
    for question in QUESTIONS:
        answers, said = [], []
        for _ in range(2):
            answer = litellm.completion(
                f"{provider}/{MODEL}", messages=[{"role": "user", "content": question}], api_base=where,
                api_key=f"litellm {provider}", temperature=0, max_tokens=16,
            )  # fmt: skip
            answers.append((answer.choices[0].message.content, answer.choices[0].finish_reason))
            said.append(answer._hidden_params["additional_headers"]["llm_provider-x-semkv"])
        assert answers[0] == answers[1]
        assert said[0] == "miss"
        hits += said[1].startswith("hit tier=exact")
    assert hits
