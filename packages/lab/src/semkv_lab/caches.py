"""Semantic caches behind one interface: plain rules, peers, and semkv by policy; and how streams and pairs meet them.

All get the same vectors. Each peer runs with its own index, store and decision, in this process.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import resource
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semkv.cache import SemanticCache
from semkv.config import BUNDLED, CacheConfig, PolicyConfig
from semkv.encoders.text import TextEncoder
from semkv.errors import SemkvError
from semkv.tiers.bounded import Bounded
from semkv.tiers.policies import Calibration, build_policy
from semkv.types import Exactness, Namespace, Request, ReuseReport, TextSegment
from semkv_gateway.request_key import CanonicalRequest, Deployment, canonicalise
from semkv_guards import veto, wording
from semkv_lab.labels import Asked, Pair, logistic

if TYPE_CHECKING:
    from semkv.encoders.text import Matrix


class Cache:
    """One cache under one setting; empty at first.

    A runner calls `lookup`, then `hit` or `store`. Requests of different groups never meet. ``settings`` are what a
    reader needs to run the same; a cache that ``learns`` from requests is warmed up before pairs.
    """

    name = ""
    learns = False
    judge: ScriptedJudge | None = None

    def __init__(self, encoder: TextEncoder) -> None:
        self.encoder = encoder
        self.settings: dict[str, Any] = {}

    def lookup(self, asked: Asked) -> str | None:
        """The answer for a request, or None."""
        raise NotImplementedError

    def store(self, asked: Asked) -> None:
        """The request just looked up was answered by the engine, with its own answer."""
        raise NotImplementedError

    def hit(self, asked: Asked, *, right: bool) -> bool:
        """The request just looked up was answered from the cache; whether the cache had the engine answer it too."""
        return False

    def confidence(self, a: str, b: str) -> float:
        """How much a cache trusts that one answer serves two texts; 0 where it never would. Orders pairs."""
        return float(self.vector(a) @ self.vector(b))

    def vector(self, text: str) -> Any:
        """Unit vector, float32 [dim]."""
        return self.encoder.encode([text])[0]

    def close(self) -> None:
        """Delete its files."""


# -- plain rules ------------------------------------------------------------


class Cosine(Cache):
    """The nearest text's answer above a threshold; exhaustive search."""

    def __init__(self, encoder: TextEncoder, threshold: float) -> None:
        super().__init__(encoder)
        self.name = f"cosine {threshold:g}"
        self.settings = {"cosine": threshold}
        self._threshold = threshold
        self._answers: dict[str, list[str]] = defaultdict(list)
        self._vectors: dict[str, Matrix] = defaultdict(
            lambda: np.zeros((16, encoder.dim), np.float32)
        )

    def nearest(self, asked: Asked) -> tuple[int, float]:
        """Place and cosine; (-1, 0.0) where there is none."""
        count = len(self._answers[asked.group])
        if not count:
            return -1, 0.0
        scores = self._vectors[asked.group][:count] @ self.vector(asked.text)
        place = int(scores.argmax())
        return place, float(scores[place])

    def lookup(self, asked: Asked) -> str | None:
        place, score = self.nearest(asked)
        return self._answers[asked.group][place] if score >= self._threshold else None

    def store(self, asked: Asked) -> None:
        count = len(self._answers[asked.group])
        rows = self._vectors[asked.group]
        if count == len(rows):
            rows = self._vectors[asked.group] = np.concatenate([rows, np.zeros_like(rows)])
        rows[count] = self.vector(asked.text)
        self._answers[asked.group].append(asked.answer)


class _Curve(NamedTuple):
    """How likely an answer is right at a cosine: a logistic curve, with its threshold's standard deviation."""

    threshold: float
    steepness: float
    deviation: float


class VCache(Cosine):
    """vCache's rule by our reading of the paper (Schroeder et al., arXiv:2502.03771), not its authors' code.

    Every stored text keeps the cosines at which it was nearest, each with whether its answer was right. To them a
    logistic curve with threshold t and steepness g is fitted, and t is moved to the end of a confidence interval. The
    engine is asked with the chance tau = min over e of 1 - rate / (1 - (1 - e) L(s; t'(e), g)). A text for which the
    nearest one's answer was right is not stored.
    """

    learns = True
    _LEAST = 6  # observations before a text is used
    _RIDGE = 0.01
    _LEVELS = tuple(
        (NormalDist().inv_cdf(1 - e), e)
        for e in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
    )

    def __init__(self, encoder: TextEncoder, rate: float, seed: int) -> None:
        super().__init__(encoder, 0.0)
        self.name = f"vcache rule {rate:g}"
        self.settings = {"max error rate": rate, "least observations": self._LEAST}
        self._rate = rate
        self._random = Random(seed)  # noqa: S311
        self._seen: dict[tuple[str, int], list[tuple[float, bool]]] = defaultdict(list)
        self._fits: dict[tuple[str, int], _Curve] = {}
        self._near: tuple[int, float] = (-1, 0.0)

    def lookup(self, asked: Asked) -> str | None:
        place, score = self._near = self.nearest(asked)
        explore = self._random.random() < self._tau((asked.group, place), score)
        return None if explore else self._answers[asked.group][place]

    def store(self, asked: Asked) -> None:
        place, score = self._near
        right = place >= 0 and self._answers[asked.group][place] == asked.answer
        if place >= 0:
            self._seen[asked.group, place].append((score, right))
            self._fits.pop((asked.group, place), None)
        if not right:
            super().store(asked)

    def _tau(self, key: tuple[str, int], score: float) -> float:
        if key[1] < 0 or len(self._seen[key]) < self._LEAST:
            return 1.0
        if key not in self._fits:
            self._fits[key] = self._fit([(0.0, False), (1.0, True), *self._seen[key]])
        curve = self._fits[key]
        found = 1.0
        for z, e in self._LEVELS:
            odds = curve.steepness * (score - curve.threshold - z * curve.deviation)
            within = max(-500.0, min(500.0, odds))
            right = (1 - e) / (1 + math.exp(-within))
            found = min(found, 1 - self._rate / max(1e-9, 1 - right))
        return max(0.0, found)

    def _fit(self, seen: Sequence[tuple[float, bool]]) -> _Curve:
        """By penalized likelihood; the deviation by the delta method."""
        table = np.array([(1.0, score) for score, _ in seen])
        wrong = np.array([float(not right) for _, right in seen])
        weights = -logistic(table, wrong, np.full(2, self._RIDGE), [(None, None), (None, -0.1)])
        bias, steepness = weights
        p = 1 / (1 + np.exp(-table @ weights))
        hessian = (table.T * (p * (1 - p))) @ table + self._RIDGE * np.eye(2)
        slope = np.array([-1 / steepness, bias / steepness**2])
        variance = float(slope @ np.linalg.solve(hessian, slope))
        return _Curve(
            threshold=-bias / steepness,
            steepness=steepness,
            deviation=math.sqrt(max(0.0, variance)),
        )


class Krites(Cosine):
    """Krites' policy by our reading of the paper (Singh et al., arXiv:2602.13165), not its authors' code.

    A cosine threshold decides, first over curated texts, then over all. A request whose nearest curated text is just
    below the threshold goes to a judge meanwhile; where that approves, the request's text gets the curated answer.
    Curated are the texts that the engine answered among the first requests of a group, as if mined from a log. The
    judge knows the stream's answers: a real one errs.
    """

    # requests of the log; least cosine that is judged. Ours: the paper tunes both
    _CURATED = 400
    _LEAST = 0.7

    def __init__(self, encoder: TextEncoder, threshold: float) -> None:
        super().__init__(encoder, threshold)
        self.name = f"krites {threshold:g}"
        self.settings |= {
            "requests of the log": self._CURATED,
            "judged from": self._LEAST,
            "judge": "never errs",
        }
        self._asked: Counter[str] = Counter()
        self._curated: Counter[str] = Counter()  # by group, the first so many of its texts
        self._judged: set[tuple[str, str]] = set()

    def lookup(self, asked: Asked) -> str | None:
        group = asked.group
        answers = self._answers[group]
        vector = self.vector(asked.text)
        self._asked[group] += 1
        scores = self._vectors[group][: len(answers)] @ vector
        curated = scores[: self._curated[group]]
        first = -1
        score = 0.0
        if len(curated):
            first = int(curated.argmax())
            score = float(curated[first])
        place = first
        if score < self._threshold:
            place = int(scores.argmax()) if len(scores) else -1
        hit = place >= 0 and bool(scores[place] >= self._threshold)
        if self._LEAST <= score < self._threshold and (group, asked.text) not in self._judged:
            self._judged.add((group, asked.text))
            if hit and answers[first] == asked.answer:
                self.store(asked)  # the curated answer, which is the request's own
        return answers[place] if hit else None

    def store(self, asked: Asked) -> None:
        super().store(asked)
        if self._asked[asked.group] <= self._CURATED:
            self._curated[asked.group] = len(self._answers[asked.group])


# -- peers ------------------------------------------------------------


class GPTCache(Cache):
    """GPTCache with SQLite and FAISS, a cache for each group.

    Its threshold t is a share of the distance's range: squared distances from 0 to 4, so a cosine of 2 t - 1. Its
    default is 0.8.
    """

    def __init__(self, encoder: TextEncoder, threshold: float = 0.8) -> None:
        super().__init__(encoder)
        import gptcache.utils
        from gptcache.adapter import api

        logging.getLogger("gptcache").setLevel(logging.ERROR)

        def refuse(package: str, warn: bool = False) -> None:
            raise ModuleNotFoundError(f"GPTCache wants {package}", name=package)

        gptcache.utils.prompt_install = refuse  # it would install what it lacks
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Every group's database stays open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.name = f"gptcache {threshold:g}"
        self.settings = {"similarity_threshold": threshold, "cosine": round(2 * threshold - 1, 4)}
        self._threshold = threshold
        self._folder = Path(tempfile.mkdtemp())
        self._caches: dict[str, Any] = {}
        self._api = api
        # After its own writes at an exit.
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)

    def _cache(self, group: str) -> Any:
        if group not in self._caches:
            from gptcache import Cache as Peer
            from gptcache import Config
            from gptcache.manager import manager_factory
            from gptcache.processor.pre import get_prompt
            from gptcache.similarity_evaluation.distance import SearchDistanceEvaluation

            folder = str(self._folder / str(len(self._caches)))
            made = Peer()
            self._caches[group] = made
            made.init(
                pre_embedding_func=get_prompt,
                embedding_func=lambda text, **_: self.vector(text),
                data_manager=manager_factory(
                    "sqlite,faiss", folder, vector_params={"dimension": self.encoder.dim}
                ),
                similarity_evaluation=SearchDistanceEvaluation(),
                config=Config(similarity_threshold=self._threshold),
            )
        return self._caches[group]

    def lookup(self, asked: Asked) -> str | None:
        found: str | None = self._api.get(asked.text, cache_obj=self._cache(asked.group))
        return found

    def store(self, asked: Asked) -> None:
        self._api.put(asked.text, asked.answer, cache_obj=self._cache(asked.group))

    def close(self) -> None:
        self._caches.clear()


class RedisVL(Cache):
    """RedisVL's SemanticCache on the server that REDIS_URL names; groups are values of a tag.

    The value is a number: a comma in it would make two values, and case would not count.
    """

    def __init__(self, encoder: TextEncoder, threshold: float) -> None:
        super().__init__(encoder)
        if not os.environ.get("REDIS_URL"):
            raise SemkvError("REDIS_URL names no Redis server with the search module")
        from redisvl.extensions.cache.llm import SemanticCache as Peer
        from redisvl.utils.vectorize import CustomTextVectorizer

        self.name = f"redisvl {1 - threshold:g}"
        self.settings = {"distance_threshold": round(1 - threshold, 4), "cosine": threshold}
        self._peer = Peer(
            "semkv-bench",
            distance_threshold=1 - threshold,
            vectorizer=CustomTextVectorizer(lambda text, **_: self.vector(text).tolist()),
            filterable_fields=[{"name": "section", "type": "tag"}],
            redis_url=os.environ["REDIS_URL"],
            overwrite=True,
        )
        self._peer.clear()
        self._groups: dict[str, str] = {}

    def _section(self, group: str) -> str:
        return self._groups.setdefault(group, f"g{len(self._groups)}")

    def lookup(self, asked: Asked) -> str | None:
        from redisvl.query.filter import Tag

        vector = self.vector(asked.text).tolist()
        found = self._peer.check(
            vector=vector, filter_expression=Tag("section") == self._section(asked.group)
        )
        return str(found[0]["response"]) if found else None

    def store(self, asked: Asked) -> None:
        vector = self.vector(asked.text).tolist()
        self._peer.store(
            asked.text,
            asked.answer,
            vector=vector,
            filters={"section": self._section(asked.group)},
        )

    def close(self) -> None:
        self._peer.delete()


# -- semkv ------------------------------------------------------------


class ScriptedJudge:
    """A judge that knows the right answer and errs at known rates: a share of its answers to pairs of each kind."""

    wrong_yes = 0.01  # of pairs that need two answers
    wrong_no = 0.1  # of pairs that one answer serves

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)  # noqa: S311
        self.asked = 0
        self.said_yes = 0
        self.wrongly_yes = 0

    def says(self, same: bool) -> bool:
        """What it says of a pair that one answer serves, or does not serve."""
        errs = self._random.random() < (self.wrong_no if same else self.wrong_yes)
        said = same != errs
        self.asked += 1
        self.said_yes += said
        self.wrongly_yes += said and not same
        return said

    def to_json(self) -> dict[str, float]:
        return {
            "asked": self.asked,
            "yes": self.said_yes,
            "wrong yes": self.wrongly_yes,
            "rate of wrong yes": self.wrong_yes,
            "rate of wrong no": self.wrong_no,
        }


class SemKV(Cache):
    """The whole `SemanticCache` under the flags of a policy, with its catalog in a folder of its own.

    ``seed`` is of a bounded policy's draws, which have none in use. Pairs in doubt are shown to a `ScriptedJudge` where
    the policy has a judge.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        policy: PolicyConfig,
        name: str = "",
        settings: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(encoder)
        self.name = name
        self.settings = dict(settings or {})
        self._guards = policy.guards
        self._folder = Path(tempfile.mkdtemp())
        self._calibration = Calibration.load(policy.calibration) if policy.calibration else None
        flags = {item.name: getattr(policy, item.name) for item in fields(PolicyConfig)}
        config = CacheConfig(self._folder, **flags)
        decider = build_policy(config, encoder.fingerprint)
        if isinstance(decider, Bounded) and seed is not None:
            decider._random = Random(seed)  # type: ignore[assignment]  # noqa: S311
        self.learns = decider.learns
        self.approximate = self.wrong_approximate = 0  # hits
        self._cache = SemanticCache(
            config,
            text_encoder=encoder,
            decider=decider,
            same_answer=lambda a, b: a == b,
        )
        self._report: ReuseReport | None = None
        self.judge = None
        if policy.judges and not policy.judges_itself:
            self.judge = ScriptedJudge(seed or 0)

    def lookup(self, asked: Asked) -> str | None:
        self._report = self._cache.try_reuse(_request(asked))
        if self.judge is not None and self._report.doubt is not None:
            donor = self._report.doubt[1]
            same = self.judge.says(donor.response == asked.answer)
            self._cache.keep_verdict(self._report, same=same)
            self._report = self._cache.settled(self._report)
        return self._report.donor_response if self._report.plan.full else None

    def store(self, asked: Asked) -> None:
        assert self._report is not None
        self._cache.add_observation(self._report, asked.answer)

    def hit(self, asked: Asked, *, right: bool) -> bool:
        assert self._report is not None
        assert self._report.plan.match is not None
        if self._report.plan.match.exactness is Exactness.APPROXIMATE:
            self.approximate += 1
            self.wrong_approximate += not right
        if not self._cache.should_check(self._report):
            return False
        self._cache.checked(self._report.hit_id, right)
        self._cache.add_observation(self._report.unchanged(), asked.answer)
        return True

    def confidence(self, a: str, b: str) -> float:
        if self._guards and veto(a, b) is not None:
            return 0.0
        cosine = super().confidence(a, b)
        return (
            cosine
            if self._calibration is None
            else 1 - self._calibration.risk(cosine, wording(a, b))
        )

    def close(self) -> None:
        self._cache.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _request(asked: Asked) -> Request:
    """What the gateway makes of it; a user's text right before the last is a part of the same message."""
    if not asked.history:
        return Request("", Namespace(asked.group), (TextSegment(asked.text),))
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": said}]} for role, said in asked.history
    ]
    if messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": []})
    messages[-1]["content"].append({"type": "text", "text": asked.text})
    body = {
        "model": "m",
        "temperature": 0,
        "messages": messages,
    }
    canonical = canonicalise(body, Deployment("/v1/chat/completions", asked.group, b"bench"))
    assert isinstance(canonical, CanonicalRequest)
    assert canonical.request is not None
    return canonical.request


# -- which there are ------------------------------------------------------------

PEERS = ("gptcache", "redisvl")
PRECISION = 0.95  # least chance of a right answer of the calibrated policy
Maker = Callable[[int], Cache]
"""Makes a cache, empty; the argument seeds its draws."""


def makers(
    name: str, encoder: TextEncoder, calibration: Path, rates: Sequence[float]
) -> list[Maker]:
    """Makers of a cache, one for each setting; ``calibration`` is the file for the policies that need one."""
    threshold = PolicyConfig.similarity_threshold

    def semkv(
        value: float,
        settings: dict[str, Any],
        **policy: Any,
    ) -> Maker:
        config = PolicyConfig(**policy)
        return lambda seed: SemKV(
            encoder=encoder,
            policy=config,
            name=f"semkv {name} {value:g}",
            settings=settings,
            seed=seed,
        )

    if name == "cosine":
        return [lambda seed: Cosine(encoder, threshold)]
    if name == "vcache":
        return [partial(VCache, encoder, rate) for rate in rates]
    if name == "krites":
        return [lambda seed: Krites(encoder, threshold)]
    if name == "gptcache":
        try_out(GPTCache(encoder))
        return [lambda seed: GPTCache(encoder), lambda seed: GPTCache(encoder, (1 + threshold) / 2)]
    if name == "redisvl":
        try_out(RedisVL(encoder, threshold))
        return [lambda seed: RedisVL(encoder, threshold)]
    if name == "fixed":
        return [semkv(threshold, {"cosine": threshold})]
    if name == "calibrated":
        return [
            semkv(PRECISION, {"precision": PRECISION}, policy="calibrated", calibration=calibration)
        ]
    if name == "judge":
        return [semkv(PolicyConfig.judge_threshold, {"cosine": threshold}, policy="judge")]
    if name == "judge-bundled":
        own = {"policy": "judge", "judge_model": BUNDLED}
        return [semkv(PolicyConfig.judge_threshold, {"cosine": threshold}, **own)]
    given = {
        "policy": "bounded",
        "calibration": calibration if name == "bounded" else None,
        "judge": name == "bounded-judge",
    }
    checks = PolicyConfig(policy="bounded").checked_share
    return [
        semkv(rate, {"max error rate": rate, "checks": checks}, max_error_rate=rate, **given)
        for rate in rates
    ]


# -- playing ------------------------------------------------------------


@dataclass
class Played:
    """What a cache made of a stream.

    ``outcomes`` are (right answer, whether it hit, whether a wrong one was given).
    """

    hits: int = 0
    wrong: int = 0
    checks: int = 0
    seconds: list[float] = field(default_factory=list)
    outcomes: list[tuple[str, bool, bool]] = field(default_factory=list)

    def within(self, rate: float) -> bool:
        """Whether wrong answers were at most this share of the requests so far, at every moment."""
        wrong = np.cumsum([bad for *_, bad in self.outcomes])
        return bool((wrong <= rate * np.arange(1, len(wrong) + 1)).all())

    def to_json(self) -> dict[str, int]:
        return {
            "requests": len(self.outcomes),
            "hits": self.hits,
            "wrong": self.wrong,
            "checks": self.checks,
        }


def play(cache: Cache, stream: Iterable[Asked]) -> Played:
    """Send every request: a hit is judged by the stream's answer, a miss is stored with it."""
    found = Played()
    for asked in stream:
        start = time.perf_counter()
        answer = cache.lookup(asked)
        found.seconds.append(time.perf_counter() - start)
        wrong = answer is not None and answer != asked.answer
        if answer is None:
            cache.store(asked)
        else:
            found.hits = found.hits + 1
            found.wrong = found.wrong + wrong
            found.checks += cache.hit(asked, right=not wrong)
        found.outcomes.append((f"{asked.group} {asked.answer}", answer is not None, wrong))
    return found


def try_out(cache: Cache) -> None:
    """Raise here what a peer would raise in the middle of a bench, as where a library of its own is too new."""
    with closing(cache):
        play(cache, [Asked("one", "1"), Asked("one", "1")])


def ask_pair(
    cache: Cache,
    pair: Pair,
    group: str,
    history: tuple[tuple[str, str], ...] = (),
) -> bool:
    """Whether b hits where only a is stored. A cache that learns keeps learning."""
    play(
        cache,
        [
            Asked(
                text=pair.a,
                answer=pair.a,
                group=group,
                history=history,
            )
        ],
    )
    return bool(
        play(
            cache,
            [
                Asked(
                    text=pair.b,
                    answer=pair.a if pair.same else pair.b,
                    group=group,
                    history=history,
                )
            ],
        ).hits
    )


def pair_area(trust: Sequence[float], same: Sequence[bool]) -> float:
    """The area under precision by hit ratio (P-CHR AUC), where pairs hit in the order of ``trust``; those of equal
    trust count alike."""
    _, level = np.unique(-np.asarray(trust), return_inverse=True)
    share = np.bincount(level, weights=same) / np.bincount(level)
    right = np.cumsum(share[np.sort(level)])
    return float(np.mean(right / np.arange(1, len(right) + 1)))
