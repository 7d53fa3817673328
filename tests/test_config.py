"""Settings from programs, flags, variables, files and presets: of the declared types, in range, or refused by name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import invoke
from semkv.command_line import Environment, parse
from semkv.config import PRESETS, CacheConfig
from semkv.errors import ConfigError, StoreError
from semkv.types import CacheMode, EmbeddingLayer, PolicyName
from semkv_gateway.settings import ServerSettings, secret_of
from semkv_lab.settings import resolve
from semkv_stores.settings import _declared
from semkv_vllm import KVSettings, read_settings

PROMPT = EmbeddingLayer("prompt", 384, 0.8)
SECRET = "a secret of sufficient length"


WRONG: list[tuple[str, Any]] = [
    *(("cache_dir", value) for value in (" ", "a\0b", None, "~nobody-of-this-name")),
    ("mode", "OFF"),
    ("policy", "nope"),
    ("similarity_threshold", 1.1),
    *(("max_entries", value) for value in (math.nan, 1.5, 0)),
    *(("max_error_rate", value) for value in (0.0, 1.0)),
    ("calibration", "c.json"),
    ("verify_rate", -0.1),
    ("image_roots", "/tmp"),
    ("embedding_layers", ["prompt"]),
    *(
        ("embedding_layers", [replace(PROMPT, **wrong)])
        for wrong in ({"threshold": 1.7}, {"dim": 2.5}, {"name": ""})
    ),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_what_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        CacheConfig(**{"cache_dir": Path(), "embedding_hook": "prompt", name: value})
    assert raised.value.key == _declared(CacheConfig)[name][0]


def test_a_variable_is_a_flag() -> None:
    given = {"SEMKV_MODE": "off", "SEMKV_SECRET": SECRET, "SEMKV_TTL": " "}
    # What Kubernetes sets for Services named semkv and semkv-redis:
    given |= {
        "SEMKV_PORT": "tcp://10.0.0.1:80",
        "SEMKV_PORT_80_TCP_ADDR": "10.0.0.1",
        "SEMKV_SERVICE_PORT_HTTP": "80",
    }
    given |= {"SEMKV_REDIS_SERVICE_HOST": "10.0.0.2", "SEMKV_REDIS_PORT": "tcp://10.0.0.2:6379"}
    given |= {
        "SEMKV_HOST": "0.0.0.0",
        "SEMKV_WORKERS": "2",
    }  # of a gateway with the same environment
    settings = parse(ServerSettings, ["--mode", "dry-run"], Environment(given))
    assert settings == ServerSettings(mode=CacheMode.DRY_RUN)
    assert parse(ServerSettings, [], Environment(given)) == ServerSettings(mode=CacheMode.OFF)
    with pytest.raises(
        ConfigError, match=r"SEMKV_CACHE_MODE.*one name for --cache-mode, which SEMKV_MODE gives"
    ):
        parse(ServerSettings, [], Environment({"SEMKV_MODE": "off", "SEMKV_CACHE_MODE": "live"}))
    layers = {
        "SEMKV_EMBEDDING_LAYERS": "prompt:384:0.8, vision:512",
        "SEMKV_EMBEDDING_HOOK": "prompt_vision",
    }
    assert len(parse(CacheConfig, [], Environment(layers)).embedding_layers) == 2


@pytest.mark.parametrize("name", ["SEMKV_TLL", "SEMKV_NO_SALT", "SEMKV_LOG_LEVEL"])
def test_a_variable_that_is_no_flag_is_named_without_its_value(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"environment: '{name}' is not allowed; expected one of .*SEMKV_TTL,"
    ) as error:
        parse(ServerSettings, [], Environment({name: SECRET}))
    assert SECRET not in str(error.value)


def test_every_flag_of_the_command_may_be_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("semkv_gateway.serve.run_server", lambda *_, **more: started.append(more))
    for name, value in {"HOST": "::1", "PORT": "81", "WORKERS": "2"}.items():
        monkeypatch.setenv(f"SEMKV_{name}", value)
    assert invoke(["serve"]).exit_code == 0
    assert started == [{"host": "::1", "port": 81, "workers": 2, "drain_timeout": 20.0}]


def served(monkeypatch: pytest.MonkeyPatch, *flags: str) -> ServerSettings:
    """The settings that ``semkv serve`` makes of its flags."""
    found: list[ServerSettings] = []
    monkeypatch.setattr(
        "semkv_gateway.serve.run_server", lambda settings, *_, **more: found.append(settings)
    )
    assert invoke(["serve", *flags]).exit_code == 0
    return found[0]


@pytest.mark.parametrize("value", [None, "", "~/answers", "answers"])
def test_every_part_means_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SEMKV_CACHE_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("SEMKV_CACHE_DIR", value)
    folders = {
        served(monkeypatch).cache_dir,
        ServerSettings().cache_dir,
        parse(ServerSettings, [], Environment(os.environ)).cache_dir,
        read_settings(KVSettings, None).cache_dir,
        resolve().cache.cache_dir,
    }
    assert folders == {Path(value).expanduser() if value else tmp_path / ".cache" / "semkv"}


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    given = ServerSettings(cache_dir=tmp_path)
    assert secret_of(given, {}) == secret_of(given, {})
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "secret").unlink()
    os.mkfifo(tmp_path / "secret")
    with pytest.raises(StoreError, match="secret is not a regular file"):
        secret_of(given, {})
    with pytest.raises(ConfigError, match="SEMKV_SECRET"):
        secret_of(ServerSettings(cache_dir=tmp_path, store="redis://localhost"), {})


@pytest.mark.parametrize(
    ("name", "value"), [("TTL", "soon"), ("SEMANTIC", "maybe"), ("MEMORY_MIB", "0")]
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"SEMKV_{name}: .*{value}"):
        parse(ServerSettings, [], Environment({f"SEMKV_{name}": value}))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--donor-search=http://me:hush@host", "'http://host' .* a redis:// or redis"),
        ("--donor-search=redis://host --no-semantic", "donor-search: .*near-repeats"),
        ("--near-rule=model:a=off --no-semantic", "near-rule: .*near-repeats"),
        ("--holdout=0.1 --no-semantic", "holdout: .*near-repeats"),
        ("--near-rule=model:a=off --mode off", "near-rule: .*no --mode off"),
        ("--holdout=0.1 --mode off", "holdout: .*--mode live"),
        ("--holdout=0.1 --mode dry-run", "holdout: .*--mode live"),
        ("--policy=judge --judge-model=m --mode dry-run", "judge-model: .*--mode live"),
        ("--similarity-threshold=0.8 --no-semantic", "similarity-threshold: .*near-repeats"),
        ("--no-guards --mode off", "no-guards: .*near-repeats"),
        ("--max-error-rate=0.2", "max-error-rate: .*--policy bounded"),
        ("--judge-threshold=0.2", "judge-threshold: .*--judge or --policy judge"),
        ("--judge-url=http://host", "judge-url: .*--judge or --policy judge"),
        ("--judge --policy=bounded --judge-model=m --no-semantic", "policy: .*near-repeats"),
        ("--judge --policy=judge", "judge: .*--policy bounded"),
        ("--policy=judge --judge-threshold=0.93", "judge-threshold: 0.93.*which is 0.92"),
        ("--policy=judge --similarity-threshold=0.7", "judge-threshold: 0.75.*which is 0.7"),
        ("--policy=judge --judge-model=Bundled", "judge-model: 'Bundled'.*in small letters"),
        (
            "--peer=host:1",
            "peer: .*left out, or given together with --kv-hints and as many --upstream",
        ),
        ("--store=memory --store-mib=8", "store-mib: 8 .* a --store that is not memory"),
        ("--ttl=0 --stale=60", "stale: 60.0 .* a --ttl other than 0"),
    ],
)
def test_a_setting_that_others_make_void_is_said(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--{said}" if said[0] != "'" else said) as error:
        parse(ServerSettings, flags.split(), Environment({}))
    assert "hush" not in str(error.value)


class TestFile:
    @pytest.fixture
    def write(self, tmp_path: Path) -> Callable[[str], str]:
        def write(text: str) -> str:
            (tmp_path / "gateway.toml").write_text(text, "utf-8")
            return str(tmp_path / "gateway.toml")

        return write

    def test_the_example_of_the_page_loads(
        self, write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = Path(__file__).parent.parent / "docs" / "operations.md"
        text = "".join(re.findall(r"```toml\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
        started: list[Any] = []
        monkeypatch.setattr(
            "semkv_gateway.serve.run_server",
            lambda settings, *_, **more: started.append((settings, more)),
        )
        assert invoke(["serve", "--config", write(text)]).output == ""
        ((settings, more),) = started
        assert more["port"] == 8080
        assert settings == ServerSettings(
            ttl=3600,
            ttl_rules=("prompt:*weather*=5m", "model:*-news=1h,stale=60"),
            similarity_threshold=0.95,
            salt=False,
            default_temperature=0.0,
            sampled_rules=("model:o4-*=keep",),
            prices=("gpt-4o-mini*=input=0.15 output=0.6", "text-embedding-*=input=0.02"),
        )

    def test_flags_override_variables_and_variables_the_file(
        self, write: Callable[[str], str]
    ) -> None:
        variables = {
            "SEMKV_CONFIG": write('ttl = 1\nstale = 1\nstore-mib = 1\ntag-rule = ["model:a=a"]\n')
        }
        variables |= {"SEMKV_STALE": "2", "SEMKV_TTL": "2"}
        found = parse(ServerSettings, ["--ttl=3"], Environment(variables))
        assert found == ServerSettings(ttl=3, stale=2, store_mib=1, tag_rules=("model:a=a",))

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            (
                "secret = 'not to be told'",
                "gateway.toml: 'secret' is not allowed; expected one of ",
            ),
            ("[serve]\nttl = 1", "gateway.toml: 'serve' is not allowed; expected one of "),
            ("no-salt = true", "gateway.toml: 'no-salt' is not allowed; expected one of "),
            ("ttl = -1", "gateway.toml: ttl: -1.0 is not allowed; expected 0 or a positive number"),
            ("ttl = [1]", "gateway.toml: ttl: '[1]' is not allowed; expected a valid number"),
            (
                "salt = 'maybe'",
                "gateway.toml: salt: 'maybe' is not allowed; expected a valid boolean",
            ),
            (
                "mode = 'dry'",
                "gateway.toml: mode: 'dry' is not allowed; expected 'off', 'dry-run' or 'live'",
            ),
            (
                "trusted-proxy = ['foo']",
                "gateway.toml: trusted-proxy: 'foo' is not allowed; expected networks such as ",
            ),
            ("port = 7.5", "gateway.toml: port: '7.5' is not allowed; expected a valid integer"),
            ("ttl = ", "gateway.toml: not valid TOML (Invalid value"),
        ],
    )
    def test_what_is_wrong_in_it_is_named(
        self, write: Callable[[str], str], text: str, named: str
    ) -> None:
        said = invoke(["serve", "--config", write(text)])
        assert said.exit_code == 2
        assert named in said.stderr
        assert "not to be told" not in said.output

    def test_a_value_given_elsewhere_is_not_the_files_fault(
        self, write: Callable[[str], str]
    ) -> None:
        assert invoke(["serve", "--config", write("ttl = 1"), "--ttl=-1"]).stderr.startswith(
            "semkv: --ttl: -1.0 is not"
        )
        assert (
            "--config: '/nowhere' is not allowed"
            in invoke(["serve", "--config", "/nowhere"]).stderr
        )


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.sampled_from([*CacheMode, *PolicyName, PROMPT, Path("x"), 10**400, Decimal(1), np.float32(0.5)]),
)  # fmt: skip


@given(
    name=st.sampled_from(sorted(get_type_hints(CacheConfig))),
    value=anything | st.lists(anything, max_size=2),
)
def test_every_value_is_taken_as_what_is_declared_or_refused(name: str, value: Any) -> None:
    try:
        config = CacheConfig(**{"cache_dir": Path(), "embedding_hook": "prompt", name: value})
    except ConfigError:
        return
    default = CacheConfig(Path(), embedding_hook="prompt")
    kept, plain = getattr(config, name), getattr(default, name)
    assert kept is None or plain is None or isinstance(kept, type(plain))
    assert not isinstance(kept, float) or math.isfinite(kept)
    assert replace(config) == config


# -- presets fill in what was not given; any flag overrides ----------------------------------------------------------


def test_every_preset_resolves() -> None:
    for name, preset in PRESETS.items():
        settings = resolve(preset=name)
        assert settings.model == preset.model
        assert settings.trust_remote_code is preset.trust_remote_code
        assert settings.cache.embedding_hook == preset.embedding_hook
        assert len(settings.cache.embedding_layers) == len(preset.embedding_layers)
    default = resolve()
    assert (default.preset, default.dataset, default.cache.fusion) == ("minigqa", "minigqa", True)
    assert default.cache.vision_encoder == default.model
    assert resolve(model="", preset="") == default
    other = resolve(model="facebook/opt-125m")
    assert (other.preset, other.dataset, other.cache.embedding_layers) == ("", "gqa", ())


def test_flags_override_the_preset() -> None:
    flags: dict[str, Any] = {
        "model": "other/model",
        "trust_remote_code": False,
        "max_tokens": 3,
        "dataset": "jsonl",
    }
    cache: dict[str, Any] = {"embedding_layer": ("prompt:384:0.8",), "embedding_hook": "prompt"}
    cache |= {"similarity_threshold": 0.0, "enable_fusion_cache": False}
    settings = resolve(preset="internvl3.5-2b", **flags, **cache)
    assert {name: getattr(settings, name) for name in flags} == flags
    assert settings.cache.embedding_layers == (PROMPT,)
    assert (settings.cache.similarity_threshold, settings.cache.fusion) == (0.0, False)
    assert settings.instruction == ""  # GQA's instruction belongs to GQA's questions
    assert [layer.name for layer in resolve(embedding_hook="prompt").cache.embedding_layers] == [
        "prompt"
    ]
    assert resolve(embedding_hook="none").cache.embedding_layers == ()
    twice = resolve({"embedding-layers": ["prompt:384"]}, embedding_layer=["vision:6912:0.9"])
    assert twice.cache.embedding_layers == (EmbeddingLayer("vision", 6912, 0.9),), (
        "of two names the last one counts"
    )


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        (
            {"preset": "nope"},
            "--preset",
            "internvl3.5-2b, minigqa, opt-125m, qwen2.5-vl-7b, qwen3-vl-2b",
        ),
        ({"dataset": "vqa"}, "--dataset", "gqa, jsonl, minigqa"),
        (
            {"chunk_source": "words"},
            "--chunk-source",
            "'question', 'semantic', 'group', 'combined' or 'full'",
        ),
        ({"engine": "tpu"}, "--engine", "labels, scripted, transformers, vllm"),
        ({"embedding_layer": ("prompt:384:7",)}, "--embedding-layer", "from 0 to 1"),
        ({"embedding_layer": ("a:3", "a:3")}, "--embedding-layer", "once"),
        (
            {"preset": "opt-125m", "embedding_layer": ("prompt:384",)},
            "--embedding-hook",
            "prompt_vision",
        ),
        ({"max_samples": "null"}, "--max-samples", "integer"),
        ({"max_cached_blocks": -1}, "--max-cached-blocks", "positive"),
        ({"dataset_root": Path("/no/such/place")}, "--dataset-root", "exists"),
        ({"samples_out": Path("/")}, "--samples-out", "a file"),
        ({"tenant": ["a", "b"]}, "--tenant", "string"),
    ],
)
def test_a_wrong_value_names_flag_value_and_what_is_allowed(
    flags: dict[str, Any], key: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert caught.value.key == key
    assert expected in str(caught.value)
