"""What it is worth: the account of tiers, tiers that do not pay, prices, days, holdout, usage of hits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from command_line import invoke
from gateway_helpers import NEAR, ONE, OTHER, Pair, a_tenant, chat, kind, wait_until
from semkv.account import SAMPLE, Account, Typical
from semkv.cache import SemanticCache
from semkv.command_line import Environment, parse
from semkv.config import CacheConfig
from semkv.engines import EngineResult
from semkv.errors import ConfigError
from semkv.types import (
    CacheMode,
    Exactness,
    Match,
    Namespace,
    Plan,
    Request,
    ReuseReport,
    Status,
    TextSegment,
    TierChoice,
)
from semkv_gateway.metrics import Metrics
from semkv_gateway.prices import Prices, parse_price
from semkv_gateway.request_key import CanonicalRequest
from semkv_gateway.settings import ServerSettings
from semkv_gateway.usage import WITHOUT_CACHE, tokens_of, zeroed
from semkv_gateway.worth import Shares, Worth
from semkv_lab.report import write_report
from semkv_lab.worth import Savings, worth
from semkv_stores import ledger as stored
from semkv_stores.ledger import OTHERS, Ledger, Saved, today

# -- the account -----------------------------------------------------------------------------------------------------


def test_a_miss_of_the_same_size_tells_what_a_hit_saves() -> None:
    typical = Typical()
    assert typical.seconds(100, 1) is None
    for seconds in (9.0, 0.2, 0.2):  # the first one was slow, as the first one is
        typical.measured(seconds, 100, 1)
    typical.measured(3.0, 5000, 1)
    assert typical.seconds(110, 1) == 0.2
    assert typical.seconds(4100, 1) == 3.0
    assert typical.seconds(1_000_000, 9) == 3.0, "the nearest size"
    typical.measured(0.4, 100, 1)
    assert typical.seconds(100, 1) == pytest.approx(0.3)


def lookups(account: Account, count: int, *, costs: float, saves: float = 0.0) -> int:
    """How many of some lookups ask the tier."""
    asked = 0
    for _ in range(count):
        pays = account.pays("meaning")
        if pays or not account.auto:
            account.spent("meaning", costs, counts=pays)
            if saves:
                account.saved("meaning", saves, counts=pays)
        asked += pays
    return asked


def test_a_tier_that_does_not_pay_is_asked_for_a_sample_until_it_pays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    account = Account(auto=True)
    assert lookups(account, 1000, costs=0.1) == 1000, "nobody knows what a hit saves"
    account.missed(1.0)
    assert lookups(account, 40, costs=0.1, saves=0.2) == 40
    asked = lookups(account, 640, costs=0.1)
    assert 60 <= asked - (640 - asked) // SAMPLE <= 90, "it has lost what it gained, and three hits"
    assert account.asked_share() == {"meaning": 1 / SAMPLE}
    assert account.figures()["meaning"].left_out == 640 - asked
    back = lookups(account, 10 * SAMPLE, costs=0.1, saves=1.0)
    assert back > 5 * SAMPLE
    assert account.asked_share() == {"meaning": 1.0}
    said = [record.getMessage() for record in caplog.records]
    assert [("costs more" in line, "pays again" in line) for line in said] == [
        (True, False),
        (False, True),
    ]


def test_one_slow_lookup_turns_no_tier_off() -> None:
    account = Account(auto=True)
    account.missed(0.002)
    assert lookups(account, 1, costs=2.0) == 1, "the first one was cold"
    assert lookups(account, 200, costs=0.001, saves=0.002) == 200
    assert account.asked_share() == {"meaning": 1.0}


def test_where_every_tier_is_asked_the_account_says_what_auto_would_leave_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    account = Account()
    account.missed(0.1)
    lookups(account, 200, costs=0.1)
    lookups(account, SAMPLE - 1, costs=0.1, saves=0.1)
    figures = account.figures()["meaning"]
    assert figures.asked == 200 + SAMPLE - 1
    assert figures.left_out > 150
    assert figures.lost_hits >= SAMPLE - 2
    assert account.asked_share() == {"meaning": 1.0}
    assert not caplog.records


def test_what_is_taken_is_taken_once() -> None:
    account = Account()
    account.spent("a", 1.0)
    assert account.take()["a"].spent_s == 1.0
    assert account.take() == {}
    account.saved("a", 2.0)
    new = account.take()["a"]
    assert (new.asked, new.spent_s, new.hits, new.saved_s) == (0, 0.0, 1, 2.0)
    assert account.figures()["a"].spent_s == 1.0


def test_the_cache_leaves_out_a_tier_and_still_records(tmp_path: Path) -> None:
    config = CacheConfig(tmp_path, semantic=False, tiers=TierChoice.AUTO)

    def asked(text: str) -> Request:
        return Request("", Namespace(), (TextSegment(text),))

    with SemanticCache(config) as cache:
        cache.account.missed(0.1)
        report = cache.try_reuse(asked("What is it?"))
        assert not report.left_out
        cache.add_observation(report, "a cat")
        assert cache.account.pays("exact_text")
        for _ in range(8):
            cache.account.spent("exact_text", 100.0)
        hits = 0
        for n in range(2 * SAMPLE):
            report = cache.try_reuse(asked(f"what is  it?{n * ' '}"))
            assert report.hit != ("exact_text" in report.left_out)
            hits += report.hit
        assert hits == 2
        new = cache.try_reuse(asked("And who is that?"))
        assert cache.add_observation(new, "a dog")
        assert cache.stats().entries == 2
    with SemanticCache(config) as again:
        assert again.stats().entries == 2
    shown = invoke(["stats", "--cache-dir", str(tmp_path)]).stdout
    assert "exact_text" in shown, "what looking cost outlives the process"


# -- what is kept of it ----------------------------------------------------------------------------------------------


def test_the_ledger_is_bounded_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MOST", 3)
    one = Saved(requests=1, money=0.5)
    day = today()
    ledger = Ledger(tmp_path, days=7)
    for n in range(6):
        ledger.add({}, {(day, f"model {n}", "them"): one})
    ledger.add({}, {(day, "model 0", "them"): one, (day - 7, "old", "them"): one})
    found = ledger.by("model", 30)
    assert {name: saved.requests for name, saved in found.items()} == {
        OTHERS: 3,
        "model 0": 2,
        "model 1": 1,
        "model 2": 1,
    }
    (total,) = ledger.by("day", 30).values()
    assert (total.requests, total.money) == (7, 3.5)
    ledger.forget(["them"])
    assert ledger.by("tenant", 30).keys() == {OTHERS}
    ledger.close()


def test_the_machines_time_is_shared() -> None:
    now = 0.0
    shares = Shares(lambda: now)
    first = shares.begin()
    now = 1.0
    second = shares.begin()
    now = 3.0
    assert shares.at - first == 2.0, "one second alone, and half of two"
    shares.end()
    now = 4.0
    assert shares.at - second == 2.0
    shares.end()
    now = 100.0
    third = shares.begin()
    now = 101.0
    assert shares.at - third == 1.0


# -- prices ----------------------------------------------------------------------------------------------------------


def test_prices_are_a_table_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "semkv.toml"
    file.write_text('[price]\n"gpt-4o*" = { input = 2.5, output = 10 }\n"*" = { input = 1 }\n')
    settings = parse(ServerSettings, [], Environment({"SEMKV_CONFIG": str(file)}))
    prices = Prices([parse_price(price) for price in settings.prices])
    assert prices.money("GPT-4o-mini", 1_000_000, 100_000) == pytest.approx(3.5)
    assert prices.money("llama", 1_000_000, 100_000) == pytest.approx(1.0)
    variable = {"SEMKV_PRICE": "a=input=1 output=2, b=output=3e-2"}
    assert len(parse(ServerSettings, [], Environment(variable)).prices) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        '[price]\n"m" = { inputs = 1 }',
        '[price]\n"m" = { input = -1 }',
        '[price]\n"m" = { input = "free" }',
        '[price]\n"m" = 3',
        '[price]\n"" = { input = 1 }',
        'price = ["m=input=1 input=2"]',
        "price = 7",
        "holdout = 1.0",
        'hit-usage = "none"',
        "worth-days = 0",
        'tiers = "some"',
    ],
)
def test_what_is_wrong_ends_the_start_and_is_named(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "semkv.toml"
    file.write_text(wrong)
    with pytest.raises(ConfigError, match=r"semkv\.toml.*expected"):
        parse(ServerSettings, [], Environment({"SEMKV_CONFIG": str(file)}))


def test_long_names_of_models_are_priced_and_not_remembered(tmp_path: Path) -> None:
    long = "m" * 1000
    prices = Prices([parse_price("m*=input=1000000")])
    assert prices.money(long, 2, 0) == 2.0
    assert prices._of.cache_info().currsize == 0
    gateway = Worth(Account(), prices, Metrics(), tmp_path, days=1)
    asked = SimpleNamespace(model=long, partition="tenant")
    gateway.computed(cast("CanonicalRequest", asked), b"{}", seconds=1.0, begun=0.0)
    assert max(map(len, gateway._paces)) <= 100


# -- usage -----------------------------------------------------------------------------------------------------------


def test_usage_is_found_in_every_form() -> None:
    usage = b'"usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}'
    inside = json.dumps({"text": 'it says "usage": {"prompt_tokens": 900}'}).encode()
    for payload in (
        b'{"choices": [' + inside + b"], " + usage + b"}",
        b'{"data": [' + b"0.1," * 100_000 + b"0], " + usage + b"}",
        b"data: {" + usage + b"}\n\ndata: [DONE]\n\n",
    ):
        assert tokens_of(payload) == (7, 3)
    events = (
        b'data: {"message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}\n\n'
        b'data: {"usage": {"output_tokens": 42}}\n\n'
    )
    assert tokens_of(events) == (5, 42)
    for odd in (b"", b'{"usage": null}', b'{"usage": {"prompt_tokens": -1}}', b'"usage": {'):
        assert tokens_of(odd) == (0, 0)
        assert json.dumps(WITHOUT_CACHE).encode() not in zeroed(odd) or b"-1" in zeroed(odd)


def test_usage_is_set_to_zero_and_keeps_what_was_spent() -> None:
    said = {
        "prompt_tokens": 7,
        "cost": 0.25,
        "tier": "größer",
        "details": {"cached": 2, "free": True},
        "list": [{"n": 3}],
    }
    answer = {"choices": [{"text": '"usage": {"n": 1}'}], "usage": said, "id": "x"}
    for given in (json.dumps(answer), json.dumps(answer, ensure_ascii=False)):
        found = json.loads(zeroed(given.encode()))
        assert found["usage"].pop(WITHOUT_CACHE) == said
        assert found == {
            **answer,
            "usage": {
                "prompt_tokens": 0,
                "cost": 0,
                "tier": "größer",
                "details": {"cached": 0, "free": True},
                "list": [{"n": 0}],
            },
        }


@pytest.mark.parametrize("head", ["", "data: "])
def test_what_a_tool_is_called_with_is_no_usage(head: str) -> None:
    """Tools may have an argument of this name."""
    spent = {"input_tokens": 7, "output_tokens": 2}
    call = {"type": "tool_use", "input": {"usage": {"hours": 8}}}
    answer = {"content": [call], "usage": spent}
    payload = head + json.dumps(answer) + "\n\n"
    found = json.loads(zeroed(payload.encode()).removeprefix(head.encode()))
    zero = {"input_tokens": 0, "output_tokens": 0, WITHOUT_CACHE: spent}
    assert found == {"content": [call], "usage": zero}


# -- the gateway -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    prices = ("scripted=input=1000000 output=2000000",)  # 1 and 2 a token
    folder = tmp_path_factory.mktemp("worth")
    with Pair(folder, prices=prices, hit_usage="zero") as running:
        yield running


def usage(answer: httpx.Response) -> dict[str, Any]:
    if not answer.text.startswith("data:"):
        return dict(answer.json()["usage"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if '"usage"' in line]
    return dict(next(event["usage"] for event in events if event["usage"]))


def test_a_hit_is_worth_what_its_answer_cost(pair: Pair) -> None:
    me = a_tenant()
    miss = pair.post("worth", headers=me)
    spent = usage(miss)
    again = pair.post("worth", headers=me)
    streamed = pair.post("worth", headers=me, stream=True, stream_options={"include_usage": True})
    for hit in (again, streamed):
        assert kind(hit) == "hit"
        assert "usage=zero" in hit.headers["x-semkv"]
        assert usage(hit)[WITHOUT_CACHE] == spent
        assert usage(hit)["completion_tokens"] == 0
    assert WITHOUT_CACHE not in spent
    price = spent["prompt_tokens"] + 2 * spent["completion_tokens"]
    worth = pair.admin("stats").json()["worth"]
    (day,) = worth["day"].values()
    assert (day["requests"], day["sent_requests"]) == (2, 1)
    assert (day["money"], day["sent_money"]) == (2 * price, price)
    assert day["output_tokens"] == 2 * spent["completion_tokens"]
    assert day["gpu_s"] > 0
    assert worth["model"]["scripted"] == day
    assert list(worth["tenant"].values()) == [day]
    assert worth["tiers"]["exact"]["hits"] == 2
    assert worth["tiers"]["exact"]["saved_s"] > 0
    assert pair.metric("semkv_tokens_saved_total") == 2 * spent["completion_tokens"]
    assert pair.metric("semkv_money_saved_total") == 2 * price
    assert pair.metric("semkv_money_spent_total") == price
    assert pair.metric("semkv_requests_saved_total") == 2
    assert pair.metric("semkv_gpu_seconds_saved_total") == pytest.approx(day["gpu_s"])
    assert pair.metric('semkv_tier_seconds_saved_total{tier="exact"}') > 0
    assert pair.metric('semkv_tier_seconds_spent_total{tier="exact"}') > 0


def test_a_request_that_joins_an_equal_one_saves_its_price(pair: Pair) -> None:
    me = a_tenant()
    before = pair.metric("semkv_requests_saved_total")
    pair.upstream.gate.clear()
    calls = len(pair.upstream.calls)
    first = pair.soon("joined", headers=me)
    wait_until(lambda: len(pair.upstream.calls) > calls)
    readers = pair.readers
    second = pair.soon("joined", headers=me)
    wait_until(lambda: pair.readers > readers)
    pair.upstream.gate.set()
    assert {kind(first.result()), kind(second.result())} == {"miss", "joined"}
    wait_until(lambda: pair.metric("semkv_requests_saved_total") == before + 1)
    assert usage(second.result())["completion_tokens"] > 0, "it was computed for both"


def test_stats_and_purge_know_what_was_saved(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        mine, theirs = a_tenant(), a_tenant()
        for who in (mine, mine, theirs, theirs, theirs):
            pair.post("again", headers=who)
    said = invoke(["stats", "--cache-dir", str(tmp_path), "--json"]).stdout
    worth = json.loads(said)["worth"]
    tenants = {name: row["requests"] for name, row in worth["by_tenant"].items()}
    assert sorted(tenants.values()) == [1, 2]
    assert sum(row["requests"] for row in worth["by_model"].values()) == 3
    shown = invoke(["stats", "--cache-dir", str(tmp_path)]).stdout
    assert "What looking cost and hits saved" in shown
    assert re.search(r"scripted.*\b3\b", shown)
    (most,) = [name for name, count in tenants.items() if count == 2]
    invoke(["purge", "--cache-dir", str(tmp_path), "--tenant", most])
    left = json.loads(invoke(["stats", "--cache-dir", str(tmp_path), "--json"]).stdout)["worth"]
    assert [row["requests"] for row in left["by_tenant"].values()] == [1]
    invoke(["purge", "--cache-dir", str(tmp_path)])
    assert not list(tmp_path.glob("worth*"))


def test_a_file_that_cannot_be_written_costs_no_request(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        gateway = pair.app.gateway
        (tmp_path / stored.FILE).mkdir()
        assert [kind(pair.post("kept")) for _ in range(2)] == ["miss", "hit"]
        gateway.worth.write()
        assert pair.metric('semkv_faults_total{part="worth"}') > 0
        assert pair.admin("stats").json()["worth"] is None
        (tmp_path / stored.FILE).rmdir()
        worth = pair.admin("stats").json()["worth"]
        assert [row["requests"] for row in worth["day"].values()] == [1], "it waited"


def test_names_of_models_that_no_text_can_hold_do_no_harm(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        for model in ("\ud800", "a\0b\n", "'; DROP TABLE saved; --", "x" * 10_000, ""):
            body = json.dumps(chat("odd", model=model))
            headers = {"Content-Type": "application/json"}
            url = f"{pair.url}/v1/chat/completions"
            said = [
                kind(httpx.post(url, content=body, headers=headers, timeout=120)) for _ in range(2)
            ]
            assert said in (["miss", "hit"], ["pass", "pass"]), said
        worth = pair.admin("stats").json()["worth"]
        assert "'; DROP TABLE saved; --" in worth["model"]
        assert pair.metric("semkv_requests_saved_total") >= 3
        assert pair.metric("semkv_faults_total") == 0
    assert "DROP" in invoke(["stats", "--cache-dir", str(tmp_path)]).stdout


def test_a_dry_run_asks_every_tier(tmp_path: Path) -> None:
    config = CacheConfig(tmp_path, semantic=False, tiers=TierChoice.AUTO, mode=CacheMode.DRY_RUN)
    with SemanticCache(config) as cache:
        assert not cache.account.auto


def test_the_gateway_leaves_out_a_tier_until_it_pays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Pair(tmp_path, **{**NEAR, "tiers": "auto"}) as pair:
        assert ServerSettings().tiers is TierChoice.AUTO
        account = pair.app.gateway.cache.account
        share = 'semkv_tier_asked_share{tier="semantic_text"}'
        pair.post(ONE)
        pair.settle()
        for _ in range(8):
            account.spent("semantic_text", 3600.0)
        assert pair.metric(share) == 1 / SAMPLE
        assert pair.post(OTHER).headers["x-semkv"] == "miss"
        assert pair.metric('semkv_tier_left_out_total{tier="semantic_text"}') == 1
        pair.settle()
        assert pair.entries == 2, "a sample may find it"
        account.saved("semantic_text", 3600.0)
        assert pair.metric(share) == 1
        assert "hit tier=text:semantic" in pair.post(f"{ONE} Please?").headers["x-semkv"]
        assert pair.metric('semkv_tier_seconds_saved_total{tier="semantic_text"}') > 3600
    said = [record.getMessage() for record in caplog.records if record.name == "semkv"]
    assert sum("the tier semantic_text" in line for line in said) == 2


# -- holdout ---------------------------------------------------------------------------------------------------------


def test_who_is_held_out_gets_no_near_hit_and_is_compared(tmp_path: Path) -> None:
    nearly_all = 1 - 2**-40  # of all keys that there are
    with Pair(tmp_path, **NEAR, holdout=nearly_all) as pair:
        pair.post(ONE)
        pair.settle()
        asked = pair.post(OTHER)
        assert asked.headers["x-semkv"] == "miss"
        assert pair.asked == [OTHER], "as it came"
        assert kind(pair.post(OTHER)) == "hit", "exact repeats are served"
        wait_until(lambda: pair.metric("semkv_holdout_answers_total") == 1)
        assert pair.metric('semkv_holdout_requests_total{group="held out"}') == 3
        assert pair.metric('semkv_holdout_near_hits_total{group="held out"}') == 1
        assert pair.metric('semkv_holdout_seconds_total{group="held out"}') > 0
        assert pair.metric('semkv_holdout_requests_total{group="served"}') == 0
        assert pair.metric("semkv_faults_total") == 0
        totals = pair.admin("stats").json()["totals"]["holdout"]
        assert totals["requests"]["held out"] == 3


def test_the_others_are_counted_beside_them(tmp_path: Path) -> None:
    with Pair(tmp_path, **NEAR, holdout=1e-12) as pair:
        pair.post(ONE)
        pair.settle()
        assert kind(pair.post(OTHER)) == "hit"
        totals = pair.admin("stats").json()["totals"]["holdout"]
        assert totals["requests"] == {"held out": 0, "served": 2}
        assert totals["near"]["served"] == 1
        assert totals["answers"] == {"same": 0, "other": 0}


# -- experiments -----------------------------------------------------------------------------------------------------

RUN = (
    *("--engine", "labels", "--dataset", "minigqa-text", "--max-samples", "12"),
    *("--disable-semantic-cache", "--no-embedding-layer", "--quiet", "--purge"),
)


def result(prompt: int, seconds: float, **more: Any) -> EngineResult:
    plain: dict[str, Any] = {
        "text": "",
        "token_ids": (),
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "loaded_tokens": None,
        "kv": Status.SKIP,
        "fusion": Status.SKIP,
        "ttft_s": seconds,
        "latency_s": 9.0,
        "finish_reason": "stop",
    }
    return EngineResult(**{**plain, **more})


def test_a_run_credits_the_tier_that_saved_something() -> None:
    account = Account()
    savings = Savings(account)
    own = (TextSegment("what is it?"),)
    donor = (TextSegment("What is it?"),)
    request = Request("", Namespace(), own)
    miss = ReuseReport(request, Plan(own), {})
    match = Match("embedding:prompt", "id", 0.9, Exactness.APPROXIMATE)
    hit = ReuseReport(request, Plan(donor, 1, match), {})
    repeat = ReuseReport(request, Plan(own, 1, replace(match, tier="exact_text")), {})
    savings.note(miss, result(100, 0.5))
    savings.note(hit, result(100, 0.2))
    savings.note(hit, result(100, 0.6))
    savings.note(miss, result(100, 0.1, kv=Status.HIT))
    savings.note(repeat, result(100, 0.4, fusion=Status.HIT))
    savings.note(repeat, result(100, 0.5))
    found = worth(account)
    assert {tier: row["hits"] for tier, row in found["tiers"].items()} == {
        "embedding": 2,
        "kv_cache": 1,
        "fusion": 1,
    }
    saved = {tier: round(row["saved_s"], 6) for tier, row in found["tiers"].items()}
    assert saved == {"embedding": 0.2, "kv_cache": 0.4, "fusion": 0.1}, "one hit was slower"
    assert found["gpu_s"] == pytest.approx(0.7)


def test_runs_and_reports_show_it(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    folders = ("--cache-dir", str(tmp_path / "cache"), "--data-dir", str(tmp_path / "data"))
    shown = invoke(["run", *RUN, *folders, "--summary-out", str(summary)])
    assert shown.exit_code == 0, shown.stdout
    assert "what looking cost and hits saved" in shown.stdout
    found = json.loads(summary.read_text())["summary"]
    assert found["worth"]["tiers"]["exact_text"]["asked"] == 12
    assert found["worth"]["tiers"]["exact_text"]["spent_s"] > 0
    log = tmp_path / "sweep.jsonl"
    log.write_text(json.dumps({"name": "one", "status": "ok", "summary": found}) + "\n")
    write_report([log], tmp_path / "report.md")
    page = (tmp_path / "report.md").read_text()
    assert "## Time that looking cost and hits saved" in page
    assert re.search(r"\| one \| exact_text \| 12 \|", page)


# -- what else operators see -----------------------------------------------------------------------------------------


def test_readyz_says_that_the_upstream_refuses_cache_salt(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        assert httpx.get(f"{pair.url}/readyz").json()["salt_refused"] is False
        pair.app.gateway.upstreams.members[0].salts.refused = True
        assert httpx.get(f"{pair.url}/readyz").json()["salt_refused"] is True
