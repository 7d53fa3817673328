"""The order in which samples are asked, and how often they come back: without repeats a hit rate says little.

Pure functions of samples and `Trace`; the same seed gives the same requests.
"""

# The command line reads the annotations of fields: they must be values, not texts.

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, count, cycle, islice
from typing import Annotated

from cyclopts import Parameter

from semkv.config import POSITIVE, Allowed, check
from semkv_lab.datasets import Sample

# YCSB's default for requests over keys (Cooper et al., "Benchmarking Cloud Serving Systems with YCSB", SoCC 2010).
ZIPF_EXPONENT = 0.99
# GQA's testdev asks 12,578 questions on 398 images: a user asks so many of one image on average.
SESSION_QUESTIONS = 31.6
SESSION_USERS = 8  # at the same time; a choice, no measurement


class TraceKind(StrEnum):
    """How requests are drawn from samples.

    - ``in-order``: as the data set has them.
    - ``shuffled``: every sample once before any comes again.
    - ``zipf``: an image by a Zipf law over a random ranking, then one of its questions, with repeats.
    - ``sessions``: `SESSION_USERS` users, each with one image for a geometric number of questions (`SESSION_QUESTIONS`
      on average), interleaved at random; a session never asks the same twice before it has asked all.
    """

    IN_ORDER = "in-order"
    SHUFFLED = "shuffled"
    ZIPF = "zipf"
    SESSIONS = "sessions"


REQUESTS = Parameter(group="Order of requests")


@dataclass(frozen=True)
class Trace:
    """A workload.

    Attributes:
        kind: in-order, shuffled, zipf (over images) or sessions.
        seed: Seed of every draw.
        requests: So many requests, samples repeating as need be; by default as many as there are samples.
        exponent: Exponent of zipf; 0 draws images evenly.
    """

    kind: Annotated[TraceKind, Parameter(name="--trace"), REQUESTS] = TraceKind.IN_ORDER
    seed: Annotated[int, Parameter(name="--trace-seed"), REQUESTS] = 0
    requests: Annotated[int | None, POSITIVE, Parameter(name="--trace-requests"), REQUESTS] = None
    exponent: Annotated[
        float, Allowed("a number from 0 to 10", lambda n: 0 <= n <= 10), Parameter(name="--trace-exponent"), REQUESTS
    ] = ZIPF_EXPONENT

    def __post_init__(self) -> None:
        check(self)


def arrange(samples: Sequence[Sample], trace: Trace) -> list[Sample]:
    """The requests of a trace.

    A sample that comes again gets an id of its own, ``<id>#2``, ``<id>#3`` ..., those left out that the data set uses.
    """
    if not samples:
        return []
    draw = {
        TraceKind.IN_ORDER: lambda s, t: cycle(s),
        TraceKind.SHUFFLED: _shuffled,
        TraceKind.ZIPF: _zipf,
        TraceKind.SESSIONS: _sessions,
    }[trace.kind]
    requests = len(samples) if trace.requests is None else trace.requests
    return _with_own_ids(islice(draw(samples, trace), requests), {sample.sample_id for sample in samples})


def _shuffled(samples: Sequence[Sample], trace: Trace) -> Iterator[Sample]:
    draws = random.Random(trace.seed)  # noqa: S311 (an order, no secret)
    while True:
        yield from draws.sample(samples, len(samples))


def _zipf(samples: Sequence[Sample], trace: Trace) -> Iterator[Sample]:
    draws = random.Random(trace.seed)  # noqa: S311
    images = list(_by_image(samples).values())
    draws.shuffle(images)
    weights = list(accumulate(rank**-trace.exponent for rank in range(1, len(images) + 1)))
    while True:
        (questions,) = draws.choices(images, cum_weights=weights)
        yield draws.choice(questions)


def _sessions(samples: Sequence[Sample], trace: Trace) -> Iterator[Sample]:
    draws = random.Random(trace.seed)  # noqa: S311
    images = list(_by_image(samples).values())
    users = [_user(images, draws) for _ in range(SESSION_USERS)]
    while True:
        yield next(draws.choice(users))


def _user(images: Sequence[Sequence[Sample]], draws: random.Random) -> Iterator[Sample]:
    while True:
        questions = draws.choice(images)
        asked = cycle(draws.sample(questions, len(questions)))
        yield next(asked)
        while draws.random() >= 1 / SESSION_QUESTIONS:
            yield next(asked)


def _by_image(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.image_name, []).append(sample)
    return found


def _with_own_ids(requests: Iterator[Sample], taken: Collection[str]) -> list[Sample]:
    times: dict[str, Iterator[int]] = {}
    named = []
    for sample in requests:
        name = sample.sample_id
        if name in times:
            own = next(own for n in times[name] if (own := f"{name}#{n}") not in taken)
            named.append(replace(sample, sample_id=own, repeats=name))
        else:
            times[name] = count(2)
            named.append(sample)
    return named
