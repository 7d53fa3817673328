"""Inference engines behind one small protocol: real vLLM in this process, and a scripted one for tests and demos."""

from semkv.engines.base import Engine, EnginePrompt, EngineResult, MediaError

__all__ = ["Engine", "EnginePrompt", "EngineResult", "MediaError"]
