"""What a vLLM KV connector must stand: does it ever load what the request would not have computed?

Each case starts engines in processes of their own, with a tiny Llama of random weights on the CPU. Greedy answers are
compared with those of an engine without a connector. A case says pass, fail or cannot, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from semkv.errors import ConfigError
from semkv_lab.console import version
from semkv_lab.local_engine import (
    BLOCK,
    Answer,
    LocalEngine,
    answered,
    connector,
    differs,
    prompt,
    token_ids,
    write_adapter,
)

LIMIT_S = 300
DIR = "$DIR"
EXTRA: dict[str, dict[str, Any]] = {
    "SemKVConnector": connector(DIR, host_bytes=64 << 20)["kv_connector_extra_config"],
    "OffloadingConnector": {"cpu_bytes_to_use": 64 << 20},
    "ExampleConnector": {"shared_storage_path": DIR},
    "LMCacheConnectorV1": {
        "lmcache.chunk_size": BLOCK,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": 0.25,
        "lmcache.local_disk": f"file://{DIR}/",
        "lmcache.max_local_disk_size": 1.0,
    },
}
"""Settings of the connectors that are known here; ``"$DIR"`` in them is a folder of the case."""
NEEDS = {"LMCacheConnectorV1": "lmcache"}
NO_CPU = {
    "LMCacheConnectorV1": "on a CPU LMCache starts and stores nothing: No supported cpu connector found"
}
PACKAGES = ("semkv", "vllm", "torch", "transformers", "lmcache")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    # On a GPU: this process must not use CUDA before it forks, and products are of float32.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TRITON_F32_DEFAULT": "ieee",
}
_RNG = random.Random(3)  # noqa: S311 - prompts
PROMPTS = [token_ids(_RNG, count) for count in (100, 180, 300)]
CROWD = [token_ids(_RNG, 150) for _ in range(16)]
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD = 32
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD * 4 * BLOCK


class Failed(Exception):  # noqa: N818 - a verdict
    """The connector did what it must not do."""


class Cannot(Exception):  # noqa: N818 - a verdict
    """The case does not exist for the connector."""


class Subject:
    """A connector under test, by its name in vLLM: its settings, and engines with it, all in one folder."""

    def __init__(
        self,
        name: str,
        extra: dict[str, Any] | None,
        folder: Path,
    ) -> None:
        if extra is None and name not in EXTRA:
            raise ConfigError(
                "--connector", name, f"one of {', '.join(EXTRA)}, or any with --extra JSON"
            )
        self.name = name
        self.extra = EXTRA[name] if extra is None else extra
        self.folder = folder
        self.model = folder / "model"
        self.store = folder / "store"
        self.references: dict[str, Any] = {}

    def config(self) -> dict[str, Any]:
        extra = json.loads(json.dumps(self.extra).replace(DIR, str(self.store)))
        return {
            "kv_connector": self.name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def engine(
        self,
        step: Callable[..., Any],
        *args: Any,
        **engine: Any,
    ) -> Any:
        """What a step finds in a new engine with the connector."""
        return _in_child(self.model, self.config(), step, args, engine)

    def plain(
        self,
        key: str,
        step: Callable[..., Any],
        *args: Any,
        **engine: Any,
    ) -> Any:
        """The same without a connector; asked once for each key."""
        if key not in self.references:
            self.references[key] = _in_child(self.model, None, step, args, engine)
        return self.references[key]

    def right(self) -> list[Answer]:
        """The answers to `PROMPTS`."""
        answers: list[Answer] = self.plain("prompts", ask)
        return answers

    def stored(self) -> list[Path]:
        """The files that an engine leaves behind that answered `PROMPTS`; raises `Cannot` where there are none."""
        same("the first engine", self.engine(ask), self.right())
        files = [path for path in self.store.rglob("*") if path.is_file()]
        if not files:
            raise Cannot("it keeps no files, as configured")
        return files


# ---------------------------------------------------------------------- steps: each in an engine of its own


def ask(
    engine: LocalEngine,
    salt: str | None = None,
    lora: Any = None,
) -> list[Answer]:
    return engine.ask([prompt(ids, salt) for ids in PROMPTS], lora=lora)


def forget(engine: LocalEngine, **how: bool) -> None:
    """Drop vLLM's own blocks: what is cached from here on, the connector loaded."""
    engine.settle()
    if not engine.llm.reset_prefix_cache(**how):
        raise Failed(f"reset_prefix_cache({', '.join(how)}) found blocks that are still held")


def ask_twice(engine: LocalEngine, *salts: str | None) -> list[list[Answer]]:
    """With one salt after the other; vLLM's own blocks are dropped between."""
    found = []
    for salt in salts:
        found.append(ask(engine, salt))
        forget(engine)
    return found


def ask_adapters(engine: LocalEngine, folders: Sequence[str]) -> list[list[Answer]]:
    """Under one name, with the adapter of one folder after the other."""
    from vllm.lora.request import LoRARequest

    found = []
    for number, folder in enumerate(folders, start=1):
        found.append(ask(engine, lora=LoRARequest("adapter", number, folder)))
        forget(engine)
        engine.llm.llm_engine.remove_lora(number)
    return found


def ask_around_update(engine: LocalEngine) -> list[list[Answer]]:
    """Before and after other weights, and a reset that says so to the connector."""
    before = ask(engine)
    engine.settle()
    engine.llm.apply_model(_other_weights)
    forget(engine, reset_connector=True)
    return [before, ask(engine)]


def ask_without_room(engine: LocalEngine) -> list[list[Answer]]:
    """While files cannot grow past 16 KiB, as on a full disk, and after."""
    rng = random.Random(4)  # noqa: S311 - prompts
    # vLLM compiles at its first requests.
    engine.ask([prompt(token_ids(rng, len(ids))) for ids in PROMPTS])
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in _family(os.getpid())}
    for pid, (_, most) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (16 << 10, most))
    found = ask_twice(engine, None, None)
    for pid, limit in limits.items():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    return [*found, ask(engine)]


def ask_crowd(engine: LocalEngine, rounds: int) -> dict[str, Any]:
    """All of `CROWD` at once, in a KV cache that cannot hold them."""
    preempted = engine.count_preemptions()
    prompts = [prompt(ids) for ids in CROWD]
    found = []
    for _ in range(rounds):
        found.append([answered(output) for output in engine.outputs(prompts, 60)])
        forget(engine)
    return {"preempted": len(preempted), "answers": found}


def _other_weights(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(1.125)


# ---------------------------------------------------------------------- cases


def same(
    what: str,
    answers: Sequence[Answer],
    reference: Sequence[Answer],
) -> None:
    """Raises `Failed` where an answer is another one."""
    for number, (own, other) in enumerate(zip(answers, reference, strict=True)):
        if why := differs(own, other):
            raise Failed(
                f"{what}: prompt {number} is answered otherwise ({why}; {own['cached']} tokens loaded)"
            )


def apart(
    what: str,
    one: Sequence[Answer],
    two: Sequence[Answer],
) -> None:
    """Raises `Cannot` where answers that should differ do not."""
    if not any(map(differs, one, two)):
        raise Cannot(f"both {what} answer alike here")


def loaded(answers: Sequence[Answer]) -> int:
    return sum(answer["cached"] or 0 for answer in answers)


def reload(subject: Subject) -> str:
    _, again = found = subject.engine(ask_twice, None, None)
    for answers in found:
        same("reload", answers, subject.right())
    if not loaded(again):
        raise Failed("nothing is loaded when vLLM's own blocks are gone")
    return f"{loaded(again)} of {sum(map(len, PROMPTS))} tokens loaded"


def salt(subject: Subject) -> str:
    found = subject.engine(ask_twice, "tenant-a", "tenant-b", None, "tenant-a")
    for answers in found:
        same("salt", answers, subject.right())
    for who, answers in (("another cache_salt", found[1]), ("no cache_salt", found[2])):
        if loaded(answers):
            raise Failed(f"{loaded(answers)} tokens of one cache_salt are loaded under {who}")
    return f"0 tokens under another salt, {loaded(found[3])} under the same"


def adapter_swap(subject: Subject) -> str:
    folders = [str(_adapter(subject.folder / f"adapter-{seed}", seed)) for seed in (1, 2)]
    lora = {"enable_lora": True, "max_lora_rank": 8}
    right = subject.plain("adapters", ask_adapters, folders, **lora)
    apart("adapters", *right)
    for answers, reference in zip(
        subject.engine(ask_adapters, folders, **lora), right, strict=True
    ):
        same("the same name with other weights", answers, reference)
    (after,) = subject.engine(ask_adapters, folders[1:], **lora)
    same("after a restart", after, right[1])
    return f"{loaded(after)} tokens loaded after a restart"


def flipped_bytes(subject: Subject) -> str:
    flipped = 0
    for path in subject.stored():
        content = bytearray(path.read_bytes())
        if not content.startswith(b"SQLite format"):
            for at in range(len(content) // 4, len(content), 512):
                content[at] ^= 0xFF
            path.write_bytes(content)
            flipped += 1
    answers = subject.engine(ask)
    same(f"bytes changed in {flipped} files", answers, subject.right())
    return f"{flipped} files changed, {loaded(answers)} tokens loaded"


def restart(subject: Subject) -> str:
    files = subject.stored()
    answers = subject.engine(ask)
    same("after a restart", answers, subject.right())
    if not loaded(answers):
        raise Failed(f"nothing is loaded from the {len(files)} files of the engine before")
    return f"{loaded(answers)} tokens loaded"


def no_room(subject: Subject) -> str:
    subject.stored()
    shutil.rmtree(subject.store)
    subject.store.mkdir()
    for answers in subject.engine(ask_without_room):
        same("without room", answers, subject.right())
    return "answers as without a connector, and after"


def weights_update(subject: Subject) -> str:
    before, after = subject.plain("update", ask_around_update)
    apart("weights", before, after)
    found = subject.engine(ask_around_update)
    same("before the update", found[0], before)
    same("after the update", found[1], after)
    same("the old weights in a new engine", subject.engine(ask), subject.right())
    return f"{loaded(found[1])} tokens of the old weights loaded"


def new_checkpoint(subject: Subject) -> str:
    subject.stored()
    right = subject.right()
    shutil.rmtree(subject.model)
    _checkpoint(subject.model, seed=1)
    other = subject.plain("checkpoint", ask)
    apart("checkpoints", other, right)
    answers = subject.engine(ask)
    same("another checkpoint at the same path", answers, other)
    return f"{loaded(answers)} tokens of the old checkpoint loaded"


def preemption(subject: Subject) -> str:
    small = {"kv_cache_memory_bytes": 24 * BLOCK_BYTES, "max_model_len": 640}
    right = [subject.plain("crowd", ask_crowd, 1)["answers"][0]] * 2
    found = subject.engine(ask_crowd, 2, **small)
    if not found["preempted"]:
        raise Cannot("no request was preempted")
    for answers, reference in zip(found["answers"], right, strict=True):
        same("concurrent requests", answers, reference)
    return f"{found['preempted']} preemptions among {2 * len(CROWD)} requests"


CASES: dict[str, tuple[Callable[[Subject], str], str]] = {
    "reload": (reload, "what vLLM dropped is loaded, and answers are unchanged"),
    "salt": (salt, "another `cache_salt` loads nothing"),
    "lora": (adapter_swap, "a LoRA adapter of the same name with other weights"),
    "restart": (restart, "a new engine loads what the one before stored"),
    "flipped": (flipped_bytes, "bytes changed in the stored files"),
    "full-disk": (no_room, "no file can grow"),
    "checkpoint": (new_checkpoint, "another checkpoint at the same path"),
    "update": (weights_update, "other weights and `reset_prefix_cache(reset_connector=True)`"),
    "preemption": (preemption, "concurrent requests in a KV cache that is too small"),
}


def run_case(
    name: str,
    connector: str,
    extra: dict[str, Any] | None,
    references: dict[str, Any],
) -> dict[str, Any]:
    """Verdict, detail and seconds of one case, in a folder of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="semkv-conformance-") as folder:
        subject = Subject(connector, extra, Path(folder))
        subject.references = references
        subject.store.mkdir()
        _checkpoint(subject.model, seed=0)
        try:
            verdict, detail = "pass", CASES[name][0](subject)
        except (Failed, Cannot) as reason:
            verdict = "fail" if isinstance(reason, Failed) else "cannot"
            detail = str(reason).replace(folder, "")
    return {
        "verdict": verdict,
        "detail": detail,
        "seconds": round(time.monotonic() - started, 1),
    }


def run(
    connectors: Sequence[str],
    cases: Sequence[str],
    extra: dict[str, Any] | None,
    said: Callable[[str], None],
) -> dict[str, Any]:
    """Every case for every connector, as JSON: versions, and verdicts by connector and case.

    Raises:
        ConfigError: an unknown case or connector, or vLLM is not installed.
    """
    if unknown := set(cases) - set(CASES):
        raise ConfigError("--only", ", ".join(sorted(unknown)), f"of {', '.join(CASES)}")
    for name in connectors:
        Subject(name, extra, Path())
    os.environ.update(_ENVIRONMENT)
    try:
        import vllm.entrypoints.llm
        import vllm.v1.engine.core  # noqa: F401 - the processes of the steps are forks of this one
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(
            "bench connector", str(error), "vLLM: in a checkout of semkv, pip install '.[cpu]'"
        ) from None
    found: dict[str, Any] = {}
    references: dict[str, Any] = {}
    for name in connectors:
        found[name] = {}
        obstacle = _obstacle(name, on_cpu=current_platform.is_cpu())
        for case in cases:
            if obstacle:
                result: dict[str, Any] = {"verdict": "cannot", "detail": obstacle}
            else:
                result = run_case(case, name, extra, references)
            said(f"{name} {case}: {result['verdict']}: {result['detail']}")
            found[name][case] = result
    versions = {package: version(package) for package in PACKAGES}
    installed = {package: number for package, number in versions.items() if number}
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    settings = {name: EXTRA[name] if extra is None else extra for name in connectors}
    return {
        "versions": installed | machine,
        "settings": settings,
        "connectors": found,
    }


def _obstacle(connector: str, *, on_cpu: bool) -> str:
    """Why no case of a connector can run here; empty where they can."""
    package = NEEDS.get(connector)
    if package and not version(package):
        return f"{package} is not installed: pip install {package}"
    return NO_CPU.get(connector, "") if on_cpu else ""


def table(found: dict[str, Any]) -> str:
    """A markdown table, a row a case: failures first, those of the connector that was named first before all."""
    columns = found["connectors"]
    rows = [["case", *columns], ["---"] * (len(columns) + 1)]
    asked = next(iter(columns.values()))
    verdicts = {case: [column[case]["verdict"] for column in columns.values()] for case in asked}
    order = ("fail", "cannot", "pass")
    cases = sorted(asked, key=lambda case: [*map(order.index, verdicts[case])])
    rows += [[CASES[case][1], *verdicts[case]] for case in cases]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---------------------------------------------------------------------- processes and checkpoints


def _in_child(
    model: Path,
    kv: dict[str, Any] | None,
    step: Any,
    args: Any,
    engine: Any,
) -> Any:
    """What a step finds in an engine in a fork of this process; one that ends or hangs is a failed case."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    try:
        asked = pool.submit(_child, model, kv, step, args, engine)
        result = asked.result(LIMIT_S)
    except TimeoutError:
        raise Failed(f"no answer within {LIMIT_S} s") from None
    except BrokenProcessPool:
        raise Failed("the engine's process ended by itself") from None
    finally:
        # What threads and native code do at an exit is not measured.
        for process in pool._processes.values():
            process.kill()
        pool.shutdown()
    if result.error:
        raise (Failed if result.started else Cannot)(result.error)
    return result.found


class _Result(NamedTuple):
    """Whether an engine started, what went wrong there, and what a step found."""

    started: bool
    error: str
    found: Any


def _child(
    model: Path,
    kv: Any,
    step: Any,
    args: Any,
    engine: Any,
) -> _Result:
    """A step in a new engine."""
    started = False
    try:
        made = LocalEngine(
            model,
            kv,
            skip_tokenizer_init=True,
            **engine,
        )
        started = True
        found = step(made, *args)
        made.settle()
        made.close()
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log can be a file that cannot grow
            traceback.print_exc()
        said = f"{type(error).__name__}: {str(error)[:300]}"
        return _Result(started, said, found=None)
    return _Result(started, error="", found=found)


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    below = [
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]
    return [pid, *(one for child in below for one in _family(child))]


def _checkpoint(folder: Path, seed: int) -> Path:
    """A Llama of random weights, large enough that it answers every prompt in its own way."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


def _adapter(folder: Path, seed: int) -> Path:
    return write_adapter(
        folder,
        seed,
        layers=[f"model.layers.{layer}.self_attn" for layer in range(LAYERS)],
        width=HEADS * HEAD,
        rows={"q_proj": HEADS * HEAD, "v_proj": KV_HEADS * HEAD},
    )
