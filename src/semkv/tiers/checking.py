"""Checking hits: which approximate hits are also computed without the cache, and the error rate found by that.

A hit stays open under its id from the lookup until it is checked, reported wrong, or pushed out by newer ones. The
caller runs the unchanged request of a hit that was selected, compares the two answers, and hands in the outcome.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from semkv.counting import Tally
from semkv.encoders.text import at_unit_length
from semkv.latest import Latest
from semkv.stores.catalog import Catalog
from semkv.tiers.policies import Decider, Decision
from semkv.types import Entry, Exactness, Match, Request, ReuseReport, TextSegment
from semkv_guards import said_otherwise
from semkv_guards.folding import normalise
from semkv_guards.judge import VERSION
from semkv_stores.digests import digest
from semkv_stores.files import read_bytes, replace_text

if TYPE_CHECKING:
    from semkv.encoders.text import TextEncoder

FORMAT = 1  # of what is kept
FILE = "policy.json"
_OPEN_HITS = 65_536
_BARRED_MOST = 2  # a donor found wrong for so many texts is removed
_SAVE_AFTER = 256  # outcomes between two writes of what was learned
_SHORT = 6  # words up to which answers are compared as strings
_ARTICLE = re.compile(r"(?:the|a|an) ")
_SAME_MEANING = 0.9


VETO = "veto:"  # what the reasons of guards begin with
TOO_FAR = "below the threshold"

Comparator = Callable[[str, str], bool]
"""Whether two answers to one request say the same."""


def same_text(first: str, second: str) -> bool:
    """Equal but for case, white space, a leading article and a final stop: for short answers, as in GQA."""
    return _bare(first) == _bare(second)


def _bare(answer: str) -> str:
    text = " ".join(normalise(answer).casefold().split()).rstrip(" .!")
    article = _ARTICLE.match(text)
    return text[article.end() :] if article else text


class SameMeaning:
    """Short answers by `same_text`; longer ones by the guards and the cosine of their sentence vectors, since ``you
    can`` and ``you cannot`` have a cosine above any threshold. It errs towards another answer (``docs/quality.md``).
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def __call__(self, first: str, second: str) -> bool:
        if same_text(first, second):
            return True
        if min(len(first.split()), len(second.split())) <= _SHORT:
            return False
        are_whole = self._encoder.fits(first) and self._encoder.fits(second)
        if not are_whole or said_otherwise(first, second):
            return False
        a, b = at_unit_length(self._encoder.encode([first, second]))
        return float(a @ b) >= _SAME_MEANING


def wilson(wrong: int, checked: int) -> tuple[float, float]:
    """Wilson's score interval of a share, 95%; (0, 1) where nothing was checked.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    if not checked:
        return 0.0, 1.0
    z = 1.96
    share, spread = wrong / checked, z * z / checked
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


class _OpenHit(NamedTuple):
    """A hit that may still be checked or reported wrong."""

    match: Match
    pair: str  # names the request's text together with the donor
    selected: bool  # to be checked
    sampled: bool  # in the plain random sample, from which the error rate is estimated
    decision: Decision


class Checking:
    """The open hits, the sample that is checked, the pairs found wrong or judged, and what outcomes teach the policy.

    Pairs are kept in the ``catalog``, for all processes; what the policy learned in a file beside it, for scores of the
    encoder with this ``fingerprint``. Any thread may call any method. ``rate`` is the share of approximate hits in the
    random sample; ``remove`` deletes an entry, by its id; ``share`` tells other directories of a pair found wrong;
    ``judge`` names the model whose verdicts count.
    """

    def __init__(
        self,
        rate: float,
        decider: Decider,
        same: Comparator,
        remove: Callable[[str], object],
        share: Callable[[str, str], object],
        catalog: Catalog,
        fingerprint: str,
        tally: Tally,
        judge: str = "",
    ) -> None:
        self._rate = rate
        self._judge = judge
        self._decider = decider
        self._same = same
        self._remove = remove
        self._share = share
        self._catalog = catalog
        self._fingerprint = fingerprint
        self._tally = tally
        self._file = catalog.path.with_name(FILE)
        self._random = Random(0)  # noqa: S311
        self._open: Latest[str, _OpenHit] = Latest(_OPEN_HITS)
        self._lock = threading.Lock()
        self._outcomes = 0
        with tally.boundary("policy"):
            self._restore()

    # -- open hits ----------------------------------------------------------------------------------------------

    def open(self, request: Request, match: Match, decision: Decision | None = None) -> str:
        """Remember a hit; returns its id, which cannot be guessed. Approximate ones may be selected for a check, also
        as the policy asks, unless nothing is to be checked."""
        hit_id = secrets.token_hex(12)
        pair = pair_of(request, match.entry_id)
        decision = decision or Decision(True)
        approximate = match.exactness is Exactness.APPROXIMATE and self._rate > 0.0
        with self._lock:
            lot = self._random.random()
            selected = approximate and lot < max(self._rate, decision.check)
            sampled = approximate and lot < self._rate
            self._open[hit_id] = _OpenHit(match, pair, selected, sampled, decision)
        return hit_id

    def selected(self, hit_id: str) -> bool:
        """Whether an open hit is to be checked."""
        with self._lock:
            hit = self._open.get(hit_id)
            return hit is not None and hit.selected

    def blocked(self, request: Request, entry_id: str) -> bool:
        """Whether a donor was found wrong for a request's text, by this process or another."""
        return self._catalog.is_barred(pair_of(request, entry_id))

    def verdict(self, request: Request, donor: Entry) -> bool | None:
        """What the judge said of a request and a donor, in this process or another; None where it was not asked."""
        return self._catalog.verdict(self._judged_pair(request, donor))

    def keep_verdict(self, request: Request, donor: Entry, *, same: bool) -> None:
        """Remember what the judge said."""
        pair = self._judged_pair(request, donor)
        self._catalog.judge(pair, request.namespace.tenant, same=same)

    def _judged_pair(self, request: Request, donor: Entry) -> str:
        """The name of all that a verdict depends on: the judge and what it is asked, the tenant and model, the texts of
        the whole request, and the donor's."""
        space = request.namespace
        shown = (segment.text for segment in request.segments if isinstance(segment, TextSegment))
        own = (request.chunk_text, donor.chunk_text, donor.question)
        return digest("judged", VERSION, self._judge, space.tenant, space.model, *own, *shown)

    # -- outcomes -----------------------------------------------------------------------------------------------

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers say the same; False where the comparison fails."""
        with self._tally.boundary("comparison"):
            return self._same(first, second)
        return False

    def checked(self, hit_id: str, correct: bool) -> bool:
        """Take the outcome of a check; whether the hit was open."""
        with self._lock:
            hit = self._open.pop(hit_id, None)
        if hit is None:
            return False
        if hit.sampled:
            self._tally.add("checked")
            self._tally.add("checked wrong", 0 if correct else 1)
        if hit.match.exactness is Exactness.APPROXIMATE:
            with self._tally.boundary("catalog"):
                if not correct:
                    self._note_wrong(hit.pair, hit.match.entry_id)
            self._observe(hit.match, correct=correct, served=hit.decision)
        return True

    def report_wrong(self, hit_id: str) -> bool:
        """Take a user's word that an answer was wrong; whether the hit was open. Raises what ``remove`` raises, and
        `sqlite3.Error`; then the hit stays open."""
        with self._lock:
            hit = self._open.get(hit_id)
        if hit is None:
            return False
        approximate = hit.match.exactness is Exactness.APPROXIMATE
        if approximate:
            self.bar(hit.pair, hit.match.entry_id)
        else:
            self._remove(hit.match.entry_id)
        with self._lock:
            if self._open.pop(hit_id, None) is None:  # reported twice at once
                return False
        self._tally.add("reported wrong")
        if approximate:
            self._observe(hit.match, correct=False, served=hit.decision)
        return True

    def bar(self, pair: str, entry_id: str) -> None:
        """Let a donor never answer a text again; one that was wrong for several texts goes."""
        if self._note_wrong(pair, entry_id) >= _BARRED_MOST:
            self._remove(entry_id)

    def _note_wrong(self, pair: str, entry_id: str) -> int:
        """Keep a pair that was wrong, here and in other directories; for how many texts its donor was."""
        texts = self._catalog.bar(pair, entry_id)
        self._share(pair, entry_id)
        return texts

    def learn(self, report: ReuseReport, response: str) -> None:
        """What an answer to the unchanged request tells of a donor: one that was refused, or one of a dry run."""
        if report.rewritten or not self._decider.learns:
            return
        if report.near is not None and not is_guarded(report.near[2]):
            match, donor = report.near[:2]
            self._observe(match, correct=self.same_answer(donor.response, response), served=None)
        elif not report.plan.substituted and report.hit_id and report.donor_response is not None:
            self.checked(report.hit_id, self.same_answer(report.donor_response, response))

    def _observe(self, match: Match, *, correct: bool, served: Decision | None) -> None:
        with self._tally.boundary("decider"):
            self._decider.observe(match, correct=correct, served=served)
        self._outcomes += 1
        if self._outcomes % _SAVE_AFTER == 0:
            self.save()

    # -- across restarts ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Keep what was learned, where anything was; of several caches that share a folder, the last one's stays."""
        policy = None
        with self._tally.boundary("decider"):
            policy = self._decider.state()
        if policy is not None:
            body = {
                "format": FORMAT,
                "fingerprint": self._fingerprint,
                "policy": policy,
            }
            with self._tally.boundary("policy"):
                replace_text(self._file, json.dumps(body), private=True)

    def _restore(self) -> None:
        """Take up what was kept for this encoder. Raises for what is damaged."""
        try:
            body = json.loads(read_bytes(self._file))
        except FileNotFoundError:
            return
        if body["format"] != FORMAT:
            raise ValueError(f"{self._file} is of another version")
        is_ours = body["fingerprint"] == self._fingerprint and body["policy"] is not None
        if is_ours and self._decider.learns:
            self._decider.restore(body["policy"])


def is_guarded(reason: str) -> bool:
    """Whether a match was turned down before the policy was asked."""
    return reason == TOO_FAR or reason.startswith(VETO)


def pair_of(request: Request, entry_id: str) -> str:
    """The name of a request's text and media together with a donor."""
    space = request.namespace
    media = (segment.media_id for segment in request.media)
    return digest("pair", space.tenant, space.model, request.chunk_text, entry_id, *media)
