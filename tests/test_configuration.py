"""What is not known to be harmless is part of the namespace; and what is known to be has a reason and leaves hits."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import pkgutil
import random
import shutil
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from kv_engines import Engine, connector, differs, in_child, prompt, token_ids
from semkv_vllm import configuration as ours
from semkv_vllm import identity
from semkv_vllm.configuration import HARMLESS, UnknownError, environment, plain
from semkv_vllm.identity import begun, check_settled, model_facts, weights_identity
from vllm_forks import prepare

pytestmark = pytest.mark.engine

REVIEWED = tomllib.loads((Path(__file__).parent / "reviewed_fields.toml").read_text())
LATER = {"CacheConfig.simple_cpu_offload_num_blocks", "VllmConfig.watchdog_config"}  # of vLLM 0.33
EARLIER = {"RAY_CGRAPH_get_timeout"}  # vLLM 0.33 reads it no more


@functools.cache
def classes() -> dict[str, set[str]]:
    """Every class of the installed vLLM's configuration, with its fields."""
    import vllm.config

    found = {}
    for module in pkgutil.iter_modules(vllm.config.__path__):
        made = importlib.import_module(f"vllm.config.{module.name}")
        for name, kind in vars(made).items():
            if (
                inspect.isclass(kind)
                and dataclasses.is_dataclass(kind)
                and kind.__module__ == made.__name__
            ):
                found[name] = {field.name for field in dataclasses.fields(kind)}
    return found


def test_every_field_of_the_installed_vllm_was_reviewed() -> None:
    """A field that fails here is new: it separates today. See what it does, and put it into `reviewed_fields.toml`, or
    with a reason into `harmless.toml`."""
    elsewhere = set(REVIEWED["elsewhere"]["classes"].split())
    new = {
        f"{kind}.{name}"
        for kind, names in classes().items()
        if kind not in elsewhere
        for name in names
        - set(REVIEWED["counts"].get(kind, "").split())
        - set(HARMLESS.get(kind, {}))
    }
    assert not new


def test_every_harmless_name_is_one_and_has_a_reason() -> None:
    tables = {
        kind: names for kind, names in HARMLESS.items() if kind not in ("environment", "packages")
    }
    named = {f"{kind}.{name}" for kind, names in tables.items() for name in names}
    assert (
        named - {f"{kind}.{name}" for kind, names in classes().items() for name in names} <= LATER
    )
    both = {
        f"{kind}.{name}" for kind, names in REVIEWED["counts"].items() for name in names.split()
    } & named
    assert not both, "harmless, and counted as not"
    unread = HARMLESS["environment"].keys() - ours._code_of_vllm()[0] - EARLIER
    assert all(name.startswith(ours._FAMILIES) for name in unread)
    assert all(reason.strip() for table in HARMLESS.values() for reason in table.values())


@dataclasses.dataclass
class Made:
    later: object = None


def test_a_field_that_nobody_reviewed_separates() -> None:
    assert ours.configuration(Made(1)) != ours.configuration(Made(2))
    assert ours.configuration(Made({"b": 1, "a": {3, 1, 2}})) == ours.configuration(
        Made({"a": {2, 3, 1}, "b": 1})
    )
    different = ["1", 1, True, 1.0, [1], {"1"}, {1: 1}, b"1", "31", "", None, Made, Made(1)]
    assert len({json.dumps(plain(value)) for value in different}) == len(different)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, functools.partial(lambda: 1), types.SimpleNamespace(a=1), [object()]],
)
def test_what_has_no_form_of_its_own_is_not_guessed(value: object) -> None:
    with pytest.raises(UnknownError, match=r"Made\.later"):
        ours.configuration(Made(value))


def test_the_content_of_a_file_counts(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    first = plain({"mm_encoder_fp8_scale_path": str(scales)})
    scales.write_text("2")
    second = plain({"mm_encoder_fp8_scale_path": str(scales)})
    assert first != second
    assert list(ours.files_in({"a": [second]})) == [scales]


def test_so_does_the_content_of_one_that_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tuned"
    folder.mkdir()
    tuned = folder / "E=8.json"
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(folder))
    found = []
    for text in ("1", "2"):
        tuned.write_text(text)
        found.append(environment())
    (folder / "..data").mkdir()  # of a mount of Kubernetes
    assert environment() == found[1]
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tuned))
    found.append(environment())
    assert len({json.dumps(one) for one in found}) == 3
    assert {*ours.files_in(found[0])} == {folder, tuned, folder / "..data"}
    assert list(ours.files_in(found[2])) == [tuned]
    monkeypatch.setattr(ours, "_MANY", 0)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(folder))
    with pytest.raises(UnknownError, match="VLLM_TUNED_CONFIG_FOLDER has a folder of more than 0"):
        environment()


def test_a_file_may_be_named_without_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("scales.json", "scales")
    before = [plain({"path": name}) for name in names]
    for name in names:
        (tmp_path / name).write_text("1")
    assert all(plain({"path": name}) != one for name, one in zip(names, before, strict=True))
    long = "{% if a/b %}" * 1000  # as long as no path
    assert plain(long) == long
    assert plain("a\0b") == "a\0b"


def test_code_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import ParallelConfig

    package = tmp_path / "workers_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    config = ParallelConfig(worker_cls="workers_of_mine.worker.Worker")
    found = []
    for text in ("", "SCALE = 2"):
        (package / "helper.py").write_text(text)
        found.append(ours.configuration(config))
    assert found[0] != found[1]
    assert package / "helper.py" in ours.files_in(found[0])
    assert ours.plain({"of.no.package": "a.b"}) == ["mapping", ["of.no.package", "a.b"]]
    assert package / "helper.py" in ours.files_in(ours.plain("workers_of_mine.helper:make"))
    assert not any(ours.code()["plugins"])  # none beside vLLM's own and ours


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment()
    for name in (
        "VLLM_LOGGING_LEVEL",
        "VLLM_SERVICE_HOST",
        "VLLM_PORT_8000_TCP_ADDR",
        "TRITON_CACHE_DIR",
        "VLLM_DIST_IDENT",
        "HOSTNAME",
    ):
        monkeypatch.setenv(name, "another")
        assert environment() == before, name
    for name in (
        "VLLM_BATCH_INVARIANT",
        "VLLM_DISABLED_KERNELS",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "FLA_TRIL_PRECISION",  # which vLLM reads without having it in its list
        "FORCE_NUM_KV_SPLITS",
        "VLLM_OF_A_PLUGIN",
    ):
        monkeypatch.setenv(name, "1")
        assert environment() != before, name
        before = environment()


def test_versions_of_what_vllm_needs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    found = ours.versions()
    assert {"vllm", "torch", "transformers", "pillow", "numpy", "safetensors"} <= set(found)
    assert not {"fastapi", "openai", "semkv", "semkv-vllm", *HARMLESS["packages"]} & set(found)
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "9.9")
        assert ours.versions() != found
    monkeypatch.setattr(ours, "_installed", ours._installed.__wrapped__)
    version = ours.metadata.version
    monkeypatch.setattr(
        ours.metadata, "version", lambda name: "9.9" if name == "pillow" else version(name)
    )
    assert ours.versions() == found | {"pillow": "9.9"}


def test_another_processor_or_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.platforms import current_platform

    seen = [ours.hardware()]
    ways: list[tuple[Any, str]] = [
        (ours.platform, "machine"),
        (torch.backends.cpu, "get_cpu_capability"),
        (type(current_platform), "get_device_name"),
    ]
    for owner, name in ways:
        if name == "get_cpu_capability" and not current_platform.is_cpu():
            continue  # kernels of another device are not chosen by it
        monkeypatch.setattr(owner, name, lambda *_, **__: "another")
        assert ours.hardware() not in seen, name
        seen.append(ours.hardware())


# -- the same at each start -------------------------------------------------------------------------------------------

_FACTS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from vllm.engine.arg_utils import EngineArgs
from semkv_vllm import identity
config = EngineArgs(model=sys.argv[1], dtype="float32", max_model_len=512, max_num_seqs=int(sys.argv[3]),
    speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    enable_lora=True, max_lora_rank=8, compilation_config={"custom_ops": ["+rms_norm"]}).create_engine_config()
groups = SimpleNamespace(kv_cache_groups=[])
facts = identity.model_facts(config, Path(sys.argv[2])) | identity.kv_facts(config, groups)
del facts["environment"]  # an import of vLLM sets variables, which a fork does not have
print("FACTS", json.dumps(facts, sort_keys=True))
"""


def test_another_process_comes_to_the_same_facts(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path
) -> None:
    """In full: with no address, no number of a process and no order of a set in them.

    One process is a fork, in which all is imported already, with a hash seed that was drawn. The other one is new.
    """
    from vllm import envs

    model = checkpoint("llama")
    newest = max(place.lstat().st_ctime for place in [model, *model.rglob("*")])
    time.sleep(max(0.0, newest + 3.0 - time.time()))  # what is as young as a process is refused
    noted = Path(envs.VLLM_CACHE_ROOT, "modelinfos")  # without it vLLM imports itself once more
    said = []
    for python, seqs in ((prepare() / "python", "8"), (sys.executable, "32")):
        folder = tmp_path / seqs
        folder.mkdir()
        if noted.exists():  # by now the fork has made it
            shutil.copytree(noted, folder / "modelinfos")
        env = os.environ | {
            "PYTHONHASHSEED": "1",
            "VLLM_CACHE_ROOT": str(folder),
            "VLLM_PORT": f"200{seqs}",
        }
        command = [python, "-c", _FACTS, str(model), str(tmp_path), seqs]
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=folder, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
        assert lines, done.stderr[-2000:]
        said += lines
    assert said[0] == said[1]
    assert " at 0x" not in said[0]


def _restarted(given_model: str, folder: str) -> None:
    model = Path(given_model)
    rng = random.Random(5)
    asked = [prompt(token_ids(rng, count)) for count in (110, 170)]
    settings: list[dict[str, Any]] = [
        {},
        {},
        {
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 1 << 27,
            "max_num_batched_tokens": 512,
            "seed": 7,
        },
        {"served_model_name": "another", "max_logprobs": 3, "disable_log_stats": True},
    ]
    answers = []
    for given in settings:
        with Engine(model, connector(folder), **given) as engine:
            answers.append(engine.ask(asked))
            engine.settle()
    for later in answers[1:]:
        assert [answer["loaded"] for answer in later] == [96, 160]
        assert not any(differs(one, first) for one, first in zip(later, answers[0], strict=True))
    with Engine(model, connector(folder), max_model_len=512) as engine:
        assert [answer["loaded"] for answer in engine.ask(asked)] == [0, 0]


def test_a_restart_finds_everything_and_so_does_one_with_other_harmless_settings(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path
) -> None:
    in_child(_restarted, checkpoint("llama"), tmp_path)


# -- weights ----------------------------------------------------------------------------------------------------------


def loaded(model: Path | str, **fields: Any) -> tuple[Any, Any]:
    """What `weights_identity` reads of a ModelConfig and a LoadConfig."""
    config = types.SimpleNamespace(
        to_json_string=lambda **_: "{}", _commit_hash=fields.pop("commit", None), auto_map=None
    )
    load = types.SimpleNamespace(
        load_format=fields.pop("load_format", "auto"), download_dir=fields.pop("hub", None)
    )
    config.auto_map = fields.pop("auto_map", None)
    usual = {
        "model": str(model),
        "model_weights": "",
        "revision": None,
        "code_revision": None,
        "seed": 0,
    }
    made = types.SimpleNamespace(
        **(usual | {"trust_remote_code": True, "hf_config": config} | fields)
    )
    return made, load


A, B = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"load_format": "tensorizer"}, "load format tensorizer"),
        ({"load_format": "ipc_cache"}, "--load-format auto"),
        ({"load_format": "somebody's own"}, "load format"),
        ({"model_weights": "s3://bucket/weights"}, "serve a copy on the disk"),
        ({"model": "someone/model"}, "--revision"),
        ({"model": "someone/model", "revision": "main"}, "--revision"),
        ({"model": "someone/model", "commit": B}, "while the engine started"),
        ({"auto_map": {"AutoModel": "someone/code--modeling.Model"}}, "--code-revision"),
        (
            {
                "model": "other/model",
                "commit": A,
                "code_revision": "main",
                "auto_map": {"AutoModel": "m.M"},
            },
            "--code-revision",
        ),
    ],
)
def test_weights_that_cannot_be_told_are_not_guessed(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    refs = tmp_path / "models--someone--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(A)
    model, load = loaded(**({"model": tmp_path / "model", "hub": str(tmp_path)} | fields))
    with pytest.raises(UnknownError, match=says):
        weights_identity(model, load, tmp_path / "cache", 9e9)


def test_weights_that_a_trainer_may_exchange_are_not_known(tmp_path: Path) -> None:
    from vllm.config import VllmConfig, WeightTransferConfig

    config = VllmConfig(weight_transfer_config=WeightTransferConfig())
    with pytest.raises(UnknownError, match="leave out --weight-transfer-config"):
        model_facts(config, tmp_path)


def test_weights_that_are_known(tmp_path: Path) -> None:
    def name(**fields: Any) -> str:
        return weights_identity(
            *loaded(**({"model": "someone/model", "hub": str(tmp_path)} | fields)), tmp_path, 9e9
        )

    assert name(commit=A) == name(revision=A) != name(commit=B)
    assert name(commit=A, model="other/model") != name(commit=A)
    assert (
        name(load_format="dummy")
        == name(load_format="dummy", revision="main")
        != name(load_format="dummy", seed=1)
    )


@pytest.mark.parametrize(
    "how", ["written", "replaced", "added", "folder exchanged", "link turned", "linked file"]
)
def test_weights_that_are_younger_than_the_engine_are_not_known(tmp_path: Path, how: str) -> None:
    """The engine may have read what was there before, or half of it."""
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "a.safetensors").write_bytes(b"weights")
    (tmp_path / "blob").write_bytes(b"weights")
    (model / "b.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "link").symlink_to(model)
    given = tmp_path / "link"
    newest = max(place.lstat().st_ctime for place in (tmp_path, *tmp_path.rglob("*")))
    started = newest + identity._CLOCK_S + 0.01
    check_settled(identity._checkpoint_places(given), started)
    time.sleep(max(0.0, started - identity._CLOCK_S + 0.05 - time.time()))
    weights = model / "part" / "a.safetensors"
    if how == "written":
        weights.write_bytes(b"WEIGHTS")
    elif how == "replaced":
        (tmp_path / "new").write_bytes(b"WEIGHTS")
        shutil.copystat(weights, tmp_path / "new")
        (tmp_path / "new").rename(weights)
    elif how == "added":
        (model / "part" / "c.safetensors").write_bytes(b"more")
    elif how == "folder exchanged":
        model.rename(tmp_path / "old")
        other.rename(model)
    elif how == "link turned":
        given.unlink()
        given.symlink_to(other)
    else:
        (tmp_path / "blob").write_bytes(b"WEIGHTS")
    with pytest.raises(UnknownError, match="start it again"):
        check_settled(identity._checkpoint_places(given), started)


def test_when_an_engine_began() -> None:
    """When its configuration was made, or the process, where vLLM does not say."""
    now = time.time()
    assert begun(types.SimpleNamespace(instance_id=str(int((now - 5) * 1e9)))) == pytest.approx(
        now - 5, abs=0.01
    )
    for name in ("ab12f", "12345", str(int((now + 3600) * 1e9))):
        assert begun(types.SimpleNamespace(instance_id=name)) < now
        assert begun(types.SimpleNamespace(instance_id=name)) > now - 30 * 86400
