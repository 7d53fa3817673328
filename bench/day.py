"""A day of mixed traffic at a gateway, and pictures of its pages.

    python bench/day.py --share 0.15 --pictures docs/pictures      the pictures of docs/operations.md
    python bench/day.py --all FOLDER                               each page, desktop and phone, light and dark
    python bench/day.py --keep                                     and the gateway stays, to be looked at

Three teams ask four models, by the hour as people do: new questions, repeats, the same in other words, and what only
looks alike. In the afternoon a model fails, then the store. Requests are drawn from a seed, and the clock of the pages
runs so that a day takes some minutes; times of answers are those of this machine. The upstream is that of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import logging
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from gateway_helpers import ADMIN, PATIENT, Pair
from semkv.errors import StoreError
from semkv_gateway.response_cache import ResponseCache

SEED = 7
QUARTERS = 96
QUARTER_S = 900
BUSY = (1, 1, 1, 1, 1, 1, 2, 4, 8, 11, 12, 10, 8, 9, 12, 12, 10, 8, 5, 4, 3, 2, 2, 1)
"""Requests of a quarter of an hour, by the hour."""

TEAMS = {"Support desk": "sk-support", "Web shop": "sk-shop", "Engineering": "sk-engineering"}
CHATS = {"Support desk": "llama-3.1-8b", "Web shop": "gpt-4o-mini", "Engineering": "qwen3-coder"}
EMBEDDER = "bge-m3"
PRICES = (
    "gpt-4o-mini=input=150 output=600",
    "llama-*=input=50 output=80",
    "qwen3-coder=input=300 output=1200",
    "bge-*=input=20",
)
"""A thousand times what such models cost: the answers are as short as the questions."""

ANSWER_S = 0.08
MODEL_FAILS = range(54, 57)  # quarters from 13:30 on
STORE_FAILS = range(64, 65)  # from 16:00 on
PAGES = ("overview", "worth", "entries", "requests", "faults")
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
SHOWN = (
    ("overview", "desktop", "light"),
    ("requests", "desktop", "dark"),
    ("worth", "phone", "light"),
)


@dataclass
class Day:
    """The traffic, drawn from a seed.

    Attributes:
        pair: the gateway, in front of a scripted upstream.
        now: the time of the pages, in seconds since the epoch.
        asked: what each team has asked, to ask again.
        sent: how many requests.
        share: of the traffic that is sent.
    """

    pair: Pair
    now: float
    asked: dict[str, list[str]] = field(default_factory=lambda: {team: [] for team in TEAMS})
    sent: int = 0
    share: float = 1.0
    draw: random.Random = field(default_factory=lambda: random.Random(SEED))  # noqa: S311

    def __post_init__(self) -> None:
        self.similar = _pairs("paraphrases.jsonl")
        self.unlike = _pairs("traps.jsonl")
        self.draw.shuffle(self.similar)
        self.draw.shuffle(self.unlike)

    def run(self) -> None:
        history = self.pair.app.gateway.metrics.history
        assert history is not None
        history.clock = lambda: self.now
        for quarter in range(QUARTERS):
            with _failing(self.pair) if quarter in STORE_FAILS else _nothing():
                busy = BUSY[quarter // 4] + self.draw.randrange(3)
                for _ in range(math.ceil(busy * self.share)):
                    self._one(quarter)
            self.pair.app.gateway.worth.publish()
            history.write()
            self.now += QUARTER_S if quarter < QUARTERS - 1 else 0
        self._afterwards()

    def _one(self, quarter: int) -> None:
        """One request of a team."""
        team = self.draw.choices(list(TEAMS), (5, 4, 2))[0]
        lot = self.draw.random()
        known = self.asked[team]
        if team == "Web shop" and lot < 0.3:
            text = self.draw.choice(self.similar[:40])[0]
            self._send(team, EMBEDDER, text)
        elif known and lot < 0.5:
            self._ask(team, known[int(len(known) * self.draw.random() ** 2)], quarter)
        elif lot < 0.75:
            for text in self.similar.pop()[:2]:
                self._ask(team, text, quarter)
        elif lot < 0.88:
            for text in self.unlike.pop()[:2]:
                self._ask(team, text, quarter)
        elif team == "Engineering":
            self._send(team, CHATS[team], f"Name a variable, number {self.sent}", temperature=0.7)
        else:
            self._ask(team, f"[length] Tell me all about order {self.sent}", quarter)

    def _ask(self, team: str, text: str, quarter: int) -> None:
        self.asked[team].append(text)
        model = CHATS[team]
        self.pair.upstream.script[text] = {"delay": str(ANSWER_S)}
        if model == "llama-3.1-8b" and quarter in MODEL_FAILS:
            self.pair.upstream.script[text] = {"status": "503"}
        self._send(team, model, text, temperature=0)
        self.pair.upstream.script.pop(text, None)
        self._rest()

    def _send(self, team: str, model: str, text: str, **more: Any) -> httpx.Response:
        self.sent += 1
        headers = {
            "Authorization": f"Bearer {TEAMS[team]}",
            "X-Request-Id": f"day-{self.sent:04}",
        }
        chat = {"messages": [{"role": "user", "content": text}]}
        path, body = (
            ("embeddings", {"input": text}) if model == EMBEDDER else ("chat/completions", chat)
        )
        url = f"{self.pair.url}/v1/{path}"
        given = {"model": model, **body, **more}
        return httpx.post(url, json=given, headers=headers, timeout=60)

    def _rest(self) -> None:
        """Until what was computed is recorded."""
        deadline = time.monotonic() + 60
        while self.pair.app.gateway.background and time.monotonic() < deadline:
            time.sleep(0.001)

    def _afterwards(self) -> None:
        """A client calls a hit wrong, and somebody guesses at the admin key."""
        pair = self.similar.pop()
        for text in pair[:1] * 2:
            answer = self._send("Support desk", CHATS["Support desk"], text, temperature=0)
        told = {"id": answer.headers["x-semkv-hit"]}
        headers = {"Authorization": f"Bearer {TEAMS['Support desk']}"}
        httpx.post(f"{self.pair.url}/v1/semkv/feedback", json=told, headers=headers)
        for number in range(3):
            self.pair.admin("stats", key=f"guess {number}")


def _pairs(name: str) -> list[tuple[str, str]]:
    lines = (ROOT / "bench" / "data" / name).read_text(encoding="utf-8").splitlines()
    return [(found["a"], found["b"]) for found in map(json.loads, lines)]


@contextmanager
def _failing(pair: Pair) -> Iterator[None]:
    """The store does not answer."""
    store = pair.app.gateway.cache.responses._store
    get, put = store.get, store.put

    def fails(*_: Any) -> Any:
        raise StoreError("the disk does not answer")

    store.get = store.put = fails
    try:
        yield
    finally:
        store.get, store.put = get, put
        until = time.monotonic() + 2 * ResponseCache.__init__.__kwdefaults__["pause_s"]
        while time.monotonic() < until:
            time.sleep(0.05)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# -- pictures ---------------------------------------------------------------------------------------------------------


def _browse(take: Callable[[Any], None]) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        take(browser)
        browser.close()


def _opened(browser: Any, url: str, page_name: str, size: str, scheme: str) -> Any:
    """One page of the dashboard, ready to be looked at."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.set_default_timeout(60_000)
    page.goto(f"{url}/semkv/")
    page.fill("#key", ADMIN)
    page.click("#login button")
    page.wait_for_selector("#board:not([hidden])")
    if page.locator("#overview").is_visible():
        page.click("#overview .windows button:has-text('24 hours')")
        page.wait_for_selector("#overview .windows [aria-pressed=true]:has-text('24 hours')")
    page.click(f"#nav a[href='#{page_name}']")
    page.wait_for_selector(f"#{page_name}:not([hidden])")
    if page_name == "entries":
        page.wait_for_selector("#stored li")
    if page_name == "requests":
        page.wait_for_selector("#rows li")
    page.wait_for_timeout(300)
    return page


def _save(picture: bytes, file: Path) -> None:
    """As WebP, which takes a third of PNG."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).save(file, "WEBP", quality=80, method=6)
    print(file, file.stat().st_size)


def take_all(url: str, folder: Path) -> None:
    """Each page in each form, as PNG."""

    def take(browser: Any) -> None:
        for name in PAGES:
            for size in SIZES:
                for scheme in ("light", "dark"):
                    page = _opened(browser, url, name, size, scheme)
                    page.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
                    page.close()

    folder.mkdir(parents=True, exist_ok=True)
    _browse(take)


def take_shown(url: str, folder: Path) -> None:
    """The pictures of the documentation."""

    def take(browser: Any) -> None:
        for name, size, scheme in SHOWN:
            page = _opened(browser, url, name, size, scheme)
            _save(page.screenshot(), folder / f"dashboard-{name}.webp")
            page.close()

    folder.mkdir(parents=True, exist_ok=True)
    _browse(take)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pictures", type=Path, help="folder for the pictures of the documentation"
    )
    parser.add_argument("--all", type=Path, help="folder for pictures of every page")
    parser.add_argument("--share", type=float, default=1.0, help="of the traffic")
    parser.add_argument("--keep", action="store_true", help="stay until Ctrl-C")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "names.toml"
        digests = {team: hashlib.sha256(key.encode()).hexdigest() for team, key in TEAMS.items()}
        names.write_text("".join(f'{digest} = "{team}"\n' for team, digest in digests.items()))
        settings = {**PATIENT, "semantic": True, "tenant_names": names, "prices": PRICES}
        settings |= {"similarity_threshold": 0.9, "verify_rate": 0.2, "holdout": 0.05}
        with Pair(Path(folder) / "cache", **settings) as pair:
            begins = time.time() - (QUARTERS - 1) * QUARTER_S
            day = Day(pair, now=begins, share=given.share)
            start = time.monotonic()
            day.run()
            print(f"{day.sent} requests in {time.monotonic() - start:.0f} s, gateway at {pair.url}")
            if given.all:
                take_all(pair.url, given.all)
            if given.pictures:
                take_shown(pair.url, given.pictures)
            if given.keep:
                print(f"admin key: {ADMIN}")
                asyncio.run(asyncio.Event().wait())


if __name__ == "__main__":
    main()
