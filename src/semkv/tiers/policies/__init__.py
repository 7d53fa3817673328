"""Whether an approximate match may be used: the last word before a donor is substituted.

fixed       the threshold of the flags; a guard's veto is final
calibrated  the chance of a wrong answer at this score, wording and veto, fitted from labelled pairs
bounded     keeps the share of requests answered wrongly under what the user set; learns from checked answers
"""

from __future__ import annotations

from semkv.config import CacheConfig
from semkv.errors import ConfigError
from semkv.tiers.policies.base import Decider, Decision, FixedThreshold, Stateless
from semkv.tiers.policies.bounded import Bounded
from semkv.tiers.policies.calibrated import Calibrated, Calibration
from semkv.types import PolicyName

__all__ = [
    "Bounded",
    "Calibrated",
    "Calibration",
    "Decider",
    "Decision",
    "FixedThreshold",
    "Stateless",
    "build_policy",
    "calibration_of",
]

_PROMPT_HOOKS = ("prompt", "prompt_vision")  # whose prompt layer is the text encoder's


def calibration_of(config: CacheConfig, fingerprint: str) -> Calibration | None:
    """The calibration that the configuration names.

    Raises:
        ConfigError: it cannot be read, or was fitted for another encoder.
    """
    if config.calibration is None:
        return None
    found = Calibration.load(config.calibration)
    if found.fingerprint != fingerprint:
        raise ConfigError(
            "--calibration",
            str(config.calibration),
            f"a calibration of the encoder {config.index_encoder} ({fingerprint}); this one is for {found.fingerprint}",
        )
    return found


def build_policy(config: CacheConfig, fingerprint: str) -> Decider:
    """The policy that the configuration names.

    Args:
        config: settings.
        fingerprint: of the text encoder.

    Raises:
        ConfigError: the calibration cannot be read, or was fitted for another encoder.
    """
    fixed = FixedThreshold.of(config)
    if config.policy is PolicyName.FIXED:
        return fixed
    prompt = ["embedding:prompt"] if config.embedding_hook in _PROMPT_HOOKS else []
    tiers = frozenset(["semantic_text", *prompt])
    calibration = calibration_of(config, fingerprint)
    if config.policy is PolicyName.BOUNDED:
        return Bounded(config.max_error_rate, calibration, tiers)
    assert calibration is not None  # CacheConfig holds it
    return Calibrated(calibration, tiers, fixed)
