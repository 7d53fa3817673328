"""The settings of a MiniGQA data set, and the names of what returns in it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from semkv.errors import ConfigError


class Order(StrEnum):
    """``grouped``: all questions of a picture together, as 96.8% of GQA's are. ``shuffled``: all questions mixed."""

    GROUPED = "grouped"
    SHUFFLED = "shuffled"


class QuestionVariant(StrEnum):
    """What a question is to the earlier one it was made from; see `Knobs`."""

    ORIGINAL = "original"
    REPEAT = "repeat"
    CASE = "case"
    WHITESPACE = "whitespace"
    PARAPHRASE = "paraphrase"
    NEGATIVE = "negative"


class ImageVariant(StrEnum):
    """What a picture is to the one it was made from; see `Knobs`."""

    ORIGINAL = "original"
    REENCODED = "reencoded"
    RESIZED = "resized"
    BRIGHTNESS = "brightness"
    SHIFTED = "shifted"
    LOOKALIKE = "lookalike"


@dataclass(frozen=True, slots=True)
class Knobs:
    """The size of a data set and the rates of what returns in it. Raises `ConfigError` on a value out of range.

    The defaults describe a service whose users come back; `gqa()` gives the rates of GQA's balanced testdev split
    itself, where almost nothing returns (12,578 questions on 398 images, 8 of them exact repeats).

    Attributes:
        images: base pictures.
        questions_per_image: mean number of questions on a base picture; GQA has 31.6.
        questions_spread: standard deviation of that number.
        repeat: share of the questions on a base picture that repeat an earlier one, byte for byte.
        case: share that repeat an earlier one in other case.
        whitespace: share that repeat an earlier one with other white space.
        paraphrase: share that ask an earlier one in other words.
        negative: share that take an earlier one's sentence with another argument, nearly always with another answer.
        reencoded: derived pictures per base picture: the same, encoded at JPEG quality 60.
        resized: the same at 120 x 120 pixels.
        brightness: the same, 6% brighter.
        shifted: the same, moved by one pixel.
        lookalike: the same scene with one object in another colour.
        asked_again: share of a base picture's questions that are asked of each picture derived from it.
        order: whether the questions of a picture come together.
    """

    images: int = 12
    questions_per_image: float = 31.6
    questions_spread: float = 7.0
    repeat: float = 0.06
    case: float = 0.03
    whitespace: float = 0.03
    paraphrase: float = 0.10
    negative: float = 0.12
    reencoded: float = 0.17
    resized: float = 0.17
    brightness: float = 0.17
    shifted: float = 0.17
    lookalike: float = 0.25
    asked_again: float = 0.25
    order: Order = Order.GROUPED

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ConfigError("minigqa.images", self.images, "at least 1")
        if not 1 <= self.questions_per_image <= 200:
            raise ConfigError("minigqa.questions_per_image", self.questions_per_image, "1 to 200")
        if self.questions_spread < 0:
            raise ConfigError("minigqa.questions_spread", self.questions_spread, "0 or more")
        for field in fields(self)[3:14]:
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise ConfigError(f"minigqa.{field.name}", value, "a share from 0 to 1")
        if self.repeat + self.case + self.whitespace + self.paraphrase + self.negative > 0.8:
            raise ConfigError("minigqa", "the rates of the question variants", "a sum of at most 0.8")
        object.__setattr__(self, "order", Order(self.order))

    @classmethod
    def gqa(cls, images: int = 398) -> Knobs:
        """GQA's balanced testdev split: 31.6 questions an image, 0.06% exact repeats, 5.7% near-equal neighbours."""
        none = dict.fromkeys(("case", "whitespace", "reencoded", "resized", "brightness", "shifted", "lookalike"), 0.0)
        return cls(images=images, repeat=0.0006, paraphrase=0.02, negative=0.037, **none)  # type: ignore[arg-type]
