"""Checking hits: which approximate hits are also run cold, and what is known of their error rate.

A hit stays open under its id from the lookup until it is checked, reported wrong, or pushed out by newer ones. The
caller runs the unchanged request of a hit that was selected, compares the two answers, and hands in the outcome.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from semkv.guards import veto
from semkv.keys import digest, normalise
from semkv.stores.files import replace_text
from semkv.tiers.base import Boundary, Tally
from semkv.tiers.policies import Decider
from semkv.types import Exactness, Match, Request, ReuseReport

if TYPE_CHECKING:
    from semkv.encoders.text import TextEncoder

FORMAT = 1  # of what is kept
FILE = "policy.json"
_OPEN_HITS = 65_536
_BARRED = 65_536
_BARRED_MOST = 2  # a donor found wrong for so many texts is removed
_SAVE_AFTER = 256  # outcomes between two writes of what was learned
_SHORT = 6  # words up to which answers are compared as strings
_ARTICLE = re.compile(r"(?:the|a|an) ")
_SAME_MEANING = 0.9


class Comparator(Protocol):
    """Whether two answers to one request say the same."""

    def __call__(self, first: str, second: str) -> bool: ...


def same_text(first: str, second: str) -> bool:
    """Equal but for case, white space, a leading article and a final stop: for short answers, as in GQA."""
    return _bare(first) == _bare(second)


def _bare(answer: str) -> str:
    text = " ".join(normalise(answer).casefold().split()).rstrip(" .!")
    article = _ARTICLE.match(text)
    return text[article.end() :] if article else text


class SameMeaning:
    """Short answers by `same_text`; longer ones by the guards and the cosine of their sentence vectors.

    ``you can`` and ``you cannot``, 50 mg and 500 mg have a cosine above any threshold, so a veto means another answer.

    It errs towards another answer: of answers that say the same it took 4% of short ones and half of reworded long ones
    for different, of answers that differ none of the short ones and 2.5% (4 to 10% of other texts) for the same
    (``bench/pairs.py``).

    Args:
        encoder: of the answers; one beyond its window equals only itself.
        threshold: least cosine.
    """

    def __init__(self, encoder: TextEncoder, threshold: float = _SAME_MEANING) -> None:
        self._encoder, self._threshold = encoder, threshold

    def __call__(self, first: str, second: str) -> bool:
        if same_text(first, second):
            return True
        if min(len(first.split()), len(second.split())) <= _SHORT:
            return False
        if veto(first, second) is not None or not (self._encoder.fits(first) and self._encoder.fits(second)):
            return False
        a, b = self._encoder.encode([first, second])
        return float(a @ b) >= self._threshold


def wilson(wrong: int, checked: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share; z = 1.96 gives 95%. (0, 1) where nothing was checked.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    if not checked:
        return 0.0, 1.0
    share, spread = wrong / checked, z * z / checked
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class OpenHit:
    """A hit that may still be checked or reported wrong.

    Attributes:
        match: why the donor was chosen.
        pair: names the request's text together with the donor, for `HitLog.block`.
        selected: whether to check it.
        sampled: whether it is in the plain random sample, from which the error rate is estimated.
    """

    match: Match
    pair: str
    selected: bool = False
    sampled: bool = False

    @property
    def approximate(self) -> bool:
        return self.match.exactness is Exactness.APPROXIMATE


def pair_of(request: Request, entry_id: str) -> str:
    """The name of a request's text and media together with a donor."""
    space = request.namespace
    media = (segment.media_id for segment in request.media)
    return digest("pair", space.tenant, space.model, request.chunk_text, entry_id, *media)


class HitLog:
    """The open hits, the sample that is checked, and the pairs known to be wrong. Any thread may call any method.

    Args:
        rate: share of approximate hits in the random sample, 0 to 1.
        seed: of the sample.
        most: open hits to remember; the oldest go first.
    """

    def __init__(self, rate: float, *, seed: int = 0, most: int = _OPEN_HITS) -> None:
        self._rate, self._most = rate, most
        self._random = Random(seed)  # noqa: S311
        self._open: OrderedDict[str, OpenHit] = OrderedDict()
        self._barred: OrderedDict[str, str] = OrderedDict()  # pair -> entry
        self._entries: Counter[str] = Counter()  # barred pairs of an entry
        self._lock = threading.Lock()

    def open(self, request: Request, match: Match, check: float = 0.0) -> str:
        """Remember a hit; approximate ones may be selected for a check.

        Args:
            request, match: the hit.
            check: chance of a check that the policy asks for; without effect where nothing is to be checked.

        Returns:
            The hit's id, which cannot be guessed.
        """
        hit_id = secrets.token_hex(12)
        pair = pair_of(request, match.entry_id)
        with self._lock:
            lot = self._random.random()
            approximate = match.exactness is Exactness.APPROXIMATE and self._rate > 0.0
            selected, sampled = approximate and lot < max(self._rate, check), approximate and lot < self._rate
            self._open[hit_id] = OpenHit(match, pair, selected, sampled)
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return hit_id

    def selected(self, hit_id: str) -> bool:
        """Whether an open hit is to be checked."""
        with self._lock:
            hit = self._open.get(hit_id)
            return hit is not None and hit.selected

    def take(self, hit_id: str) -> OpenHit | None:
        """Close a hit; None for one that is unknown or closed already."""
        with self._lock:
            return self._open.pop(hit_id, None)

    def block(self, hit: OpenHit) -> int:
        """Never let this donor answer this text again. Returns how many texts the donor is barred from."""
        with self._lock:
            if hit.pair not in self._barred:
                self._barred[hit.pair] = hit.match.entry_id
                self._entries[hit.match.entry_id] += 1
            while len(self._barred) > _BARRED:
                _, entry = self._barred.popitem(last=False)
                self._entries[entry] -= 1
                if not self._entries[entry]:
                    del self._entries[entry]
            return self._entries[hit.match.entry_id]

    def blocked(self, request: Request, entry_id: str) -> bool:
        """Whether a donor was found wrong for a request's text."""
        if not self._barred:
            return False
        with self._lock:
            return pair_of(request, entry_id) in self._barred

    def state(self) -> Mapping[str, Any]:
        """The barred pairs, to keep across restarts."""
        with self._lock:
            return {"barred": dict(self._barred)}

    def restore(self, state: Any) -> None:
        """Take up kept pairs. Raises `ValueError` for damaged ones."""
        barred = state.get("barred") if isinstance(state, dict) else None
        if not isinstance(barred, dict) or not all(isinstance(v, str) for v in barred.values()):
            raise ValueError("barred pairs are damaged")
        with self._lock:
            self._barred = OrderedDict(barred)
            self._entries = Counter(self._barred.values())


class Checking:
    """What outcomes teach: the hit log, the policy, and their memory in the cache directory. Any thread may call.

    Args:
        hits: the open hits.
        decider: learns from outcomes.
        same: compares answers.
        remove: deletes an entry, by its id.
        folder: the cache directory.
        fingerprint: whose scores the policy's state speaks of.
        tally: counts outcomes, and faults in a comparison or in keeping the state.
    """

    def __init__(
        self,
        hits: HitLog,
        decider: Decider,
        same: Comparator,
        remove: Callable[[str], object],
        folder: Path,
        fingerprint: str,
        tally: Tally,
    ) -> None:
        self._hits, self._decider, self._same, self._remove = hits, decider, same, remove
        self._folder, self._fingerprint, self._tally = folder, fingerprint, tally
        self._outcomes = 0
        self._restore()

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers say the same; False where the comparison fails."""
        with Boundary(self._tally, "comparison"):
            return self._same(first, second)
        return False

    def checked(self, hit_id: str, correct: bool) -> bool:
        """Take the outcome of a check; whether the hit was open."""
        hit = self._hits.take(hit_id)
        if hit is None:
            return False
        if hit.sampled:
            self._tally.add("checked")
            self._tally.add("checked wrong", 0 if correct else 1)
        else:
            self._tally.add("checked beside the sample")
        if hit.approximate:
            if not correct:
                self._hits.block(hit)
            self._observe(hit.match, correct=correct, served=True)
        return True

    def report_wrong(self, hit_id: str) -> bool:
        """Take a user's word that an answer was wrong; whether the hit was open. Raises what ``remove`` raises."""
        hit = self._hits.take(hit_id)
        if hit is None:
            return False
        self._tally.add("reported wrong")
        if hit.approximate:
            self._observe(hit.match, correct=False, served=True)
        if not hit.approximate or self._hits.block(hit) >= _BARRED_MOST:
            self._remove(hit.match.entry_id)
        return True

    def learn(self, report: ReuseReport, response: str) -> None:
        """What an answer to the unchanged request tells of a donor: one that was refused, or one of a dry run."""
        if report.plan.substituted or not self._decider.learns:
            return
        if report.near is not None:
            correct = self.same_answer(report.near.response, response)
            self._observe(report.near.match, correct=correct, served=False)
        elif report.hit_id and report.donor_response is not None:
            self.checked(report.hit_id, self.same_answer(report.donor_response, response))

    def save(self) -> None:
        """Keep what was learned, where anything was."""
        policy, hits = self._decider.state(), self._hits.state()
        if policy is None and not hits["barred"]:
            return
        with Boundary(self._tally, "policy"):
            save_memory(self._folder, self._fingerprint, {"policy": policy, "hits": hits})

    def _observe(self, match: Match, *, correct: bool, served: bool) -> None:
        self._decider.observe(match, correct=correct, served=served)
        self._outcomes += 1
        if self._outcomes % _SAVE_AFTER == 0:
            self.save()

    def _restore(self) -> None:
        with Boundary(self._tally, "policy"):
            kept = load_memory(self._folder, self._fingerprint)
            if kept is None:
                return
            self._hits.restore(kept.get("hits"))
            if kept.get("policy") is not None and self._decider.learns:
                self._decider.restore(kept["policy"])


def load_memory(folder: Path, fingerprint: str) -> Mapping[str, Any] | None:
    """What was kept for an encoder; None where there is nothing, or it belongs to another encoder.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged.
    """
    try:
        body = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"{folder / FILE} is damaged or of another version")
    return body if body.get("fingerprint") == fingerprint else None


def save_memory(folder: Path, fingerprint: str, body: Mapping[str, Any]) -> None:
    """Put it in the place of what was kept: where several caches share a folder, the last one's stays. Raises
    OSError."""
    replace_text(folder / FILE, json.dumps({"format": FORMAT, "fingerprint": fingerprint, **body}))
