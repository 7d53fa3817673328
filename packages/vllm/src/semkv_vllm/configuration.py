"""All that an engine is started with, as JSON values: what is not known to be harmless tells two engines apart.

Every field of vLLM's configuration counts, of whatever class, and so do the variables of the environment that vLLM and
the libraries below it read, and the versions of the packages that vLLM needs. `HARMLESS` has what does not, with the
reasons. A field, variable or package that nobody has reviewed counts.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import platform
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from semkv_stores.digests import digest

HARMLESS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("harmless.toml").read_text()
)
"""By class of vLLM's configuration, or ``environment`` or ``packages``: names, and why each changes no value."""

# A variable's name where Python code reads it.
_READ = re.compile(
    rb"""(?:environ(?:\.get|\.setdefault|\.pop)?\s*[\[(]|getenv\s*\()\s*["'](\w+)["']"""
    rb"""|["'](\w+)["']\s+(?:not\s+)?in\s+os\.environ"""
)
_FAMILIES = (  # of variables that libraries below vLLM, and its plugins, read
    "AITER_",
    "ATEN_",
    "CUBLAS",
    "CUDNN_",
    "DG_",
    "DNNL_",
    "FLASHINFER_",
    "FLASH_ATTENTION_",
    "HIPBLAS",
    "HIP_",
    "MIOPEN_",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_",
    "PYTORCH_",
    "ROCBLAS_",
    "TORCH",
    "TRITON_",
    "VLLM_",
    "XLA_",
)
# Kubernetes sets such variables for a service named "vllm".
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT(_\d+_\w+)?$")
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
_DOTTED = re.compile(
    r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*"
)  # as a class is named by its module
_OF_WEIGHTS = frozenset(  # folders that are in the namespace as weights, as `hf_config`, or as the tokens of a prompt
    (
        "ModelConfig.model",
        "ModelConfig.model_weights",
        "ModelConfig.tokenizer",
        "ModelConfig.hf_config_path",
        "SpeculativeConfig.model",
    )
)
_MANY = 4096  # files of a folder
_LARGE = 64 << 20  # bytes of a folder
_KNOWN_CODE = ("vllm", "semkv_vllm", "torch", "transformers")  # packages of a known version
_OURS = {"semkv", "semkv-vllm"}  # every file that they store names the version of its format
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")


class UnknownError(Exception):
    """Something is not known for certain, so nothing may be kept; the text says what, and the remedy."""


def configuration(config: Any, *, without: Iterable[str] = ()) -> dict[str, object]:
    """The fields of one of vLLM's configurations and those below it, but for harmless ones.

    Args:
        config: such as a ``VllmConfig``.
        without: more of its fields that do not count.

    Raises:
        UnknownError: a value has no form that is the same at each start.
    """
    left_out = {*without}.union(*(HARMLESS.get(kind.__name__, {}) for kind in type(config).__mro__))
    found: dict[str, object] = {"class": type(config).__name__}
    for item in dataclasses.fields(config):
        if item.name not in left_out:
            value = getattr(config, item.name, None)
            found[item.name] = _field(f"{type(config).__name__}.{item.name}", value)
    return found


def _field(name: str, value: Any) -> object:
    if name == "ModelConfig.hf_overrides" and callable(value):
        return "a function"  # hf_config holds the configuration that it made
    if name in _OF_WEIGHTS:
        return None if value is None else str(value)
    try:
        return plain(value)
    except UnknownError as error:
        raise UnknownError(
            f"{name} has {error}, which may mean something else at the next start"
        ) from None


def plain(value: Any) -> object:
    """A JSON value that stands for ``value`` in every process; of the name of a file also its content.

    Raises:
        UnknownError: there is none.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, enum.Enum):
        return [_name(type(value)), value.name]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, Mapping):
        return [
            "mapping",
            *sorted(([plain(key), plain(held)] for key, held in value.items()), key=json.dumps),
        ]
    if isinstance(value, set | frozenset):
        return ["set", *sorted((plain(part) for part in value), key=json.dumps)]
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return _object(value)


def _object(value: Any) -> object:
    import torch

    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, functools.partial):
        return ["partial", plain(value.func), plain(value.args), plain(value.keywords)]
    if inspect.isroutine(value):
        if _is_known(str(value.__module__)):
            return _name(value)
        raise UnknownError(f"a function of its own ({value.__qualname__})")
    if isinstance(value, type):
        return [_name(value), code_of(str(value.__module__))]
    if hasattr(value, "to_json_string"):  # a configuration of transformers
        return str(value.to_json_string(use_diff=False))
    if dataclasses.is_dataclass(value):
        return configuration(value)
    # vLLM's and torch's protocols for what plugins and passes are.
    for own in (
        "compute_hash",
        "uuid",
    ):
        if hasattr(value, own):
            return [_name(type(value)), str(getattr(value, own)())]
    raise UnknownError(f"a {_name(type(value))}")


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in (*_KNOWN_CODE, "builtins")


def code_of(module: str) -> list[object]:
    """The Python files of the package that a module belongs to, each as `plain` has a file; none of a package whose
    version is known. A version that somebody develops stays the same while its code changes.

    Raises:
        UnknownError: the package has no files.
    """
    if not module or _is_known(module):
        return []
    package = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        spec = None
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        raise UnknownError(f"code that cannot be found ({module})")
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return [plain(file) for file in sorted(files or [Path(str(spec.origin))])]


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _text(text: str) -> object:
    """A text. A path also has the digest of what is there, a class's name also the code of its package."""
    path = Path(text)
    try:
        if text and path.is_file():
            return ["file", text, _digest_of(path)]
        if os.sep in text and path.is_dir():
            return ["folder", text, _digest_below(path)]
    except ValueError:  # a path has no such characters
        return text
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise UnknownError(f"a path that cannot be read ({error})") from error
    return _with_code(text) if _DOTTED.fullmatch(text) else text


def _digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_below(folder: Path) -> str:
    """Of the files of a folder: their names, and what is in them; where that is much, their sizes and times. Hidden
    ones do not count: Kubernetes keeps copies there, under the time of the mount.

    Raises:
        UnknownError: there are too many.
    """
    files: list[Path] = []
    for place, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if name[0] != ".")
        files += [Path(place, name) for name in sorted(names) if name[0] != "."]
        if len(files) > _MANY:
            raise UnknownError(f"a folder of more than {_MANY} files ({folder})")
    files = [file for file in files if file.is_file()]
    states = [file.stat() for file in files]
    is_small = sum(state.st_size for state in states) <= _LARGE
    said = [
        _digest_of(file) if is_small else f"{state.st_size} {state.st_mtime_ns}"
        for file, state in zip(files, states, strict=True)
    ]
    return digest("folder", *map(str, files), *said)


def _with_code(text: str) -> object:
    try:
        files = code_of(text.replace(":", "."))
    except UnknownError:
        return text  # nothing that can be imported
    return [text, files] if files else text


def files_in(value: object) -> Iterator[Path]:
    """The files whose content `plain` has taken in, and their folders."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        if len(value) == 3 and value[0] in ("file", "folder"):
            path = Path(str(value[1]))
            yield from [path, *path.rglob("*")] if value[0] == "folder" else [path]
        for part in value:
            yield from files_in(part)


def environment() -> dict[str, object]:
    """The variables that are set and read by vLLM or the libraries below it, but for harmless ones; of one that names a
    file or a folder also its content.

    Raises:
        UnknownError: as `plain`.
    """
    read, _ = _code_of_vllm()
    return {
        name: _field(name, value)
        for name, value in sorted(os.environ.items())
        if (name in read or name.startswith(_FAMILIES))
        and name not in HARMLESS["environment"]
        and not _OF_A_SERVICE.search(name)
    }


@functools.cache
def _code_of_vllm() -> tuple[frozenset[str], str]:
    """The variables that vLLM registers, and those that its code reads without; and the digest of its code, which may
    have been changed where it is installed (half a second for its 2,600 files)."""
    import vllm
    from vllm import envs

    found = set(envs.environment_variables)
    digest = hashlib.sha256()
    root = Path(str(vllm.__file__)).parent
    for file in sorted(root.rglob("*.py")):
        code = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(code)} ".encode() + code)
        if b"environ" in code or b"getenv" in code:
            found |= {(one or other).decode() for one, other in _READ.findall(code)}
    return frozenset(found), digest.hexdigest()


def code() -> dict[str, object]:
    """What is computed with: vLLM's Python code and that of its plugins.

    Raises:
        UnknownError: as `code_of`.
    """
    modules = {point.module for point in _plugin_points()}
    return {
        "vllm": _code_of_vllm()[1],
        "plugins": [code_of(module) for module in sorted(modules)],
    }


def versions() -> dict[str, str]:
    """Of vLLM, torch, transformers and Python, of the packages that vLLM needs, and of its plugins but for semkv."""
    import torch
    import transformers
    import vllm

    loaded = {module.__name__: str(module.__version__) for module in (torch, transformers, vllm)}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **_installed(), **loaded}


@functools.cache
def _installed() -> dict[str, str]:
    found = {}
    for name in _needed() | _plugins():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # of another system, or not wanted
    return found


def _needed() -> set[str]:
    names = {"transformers", "torchvision", "triton", "numpy", "pillow"}
    for distribution in metadata.packages_distributions().get("vllm", []):
        requirements = metadata.requires(distribution) or []
        names |= {found[0] for line in requirements if (found := _REQUIREMENT.match(line))}
    return {_canonical(name) for name in names} - set(HARMLESS["packages"])


def _plugin_points() -> list[metadata.EntryPoint]:
    points = [point for group in _PLUGINS for point in metadata.entry_points(group=group)]
    return [p for p in points if p.dist is None or _canonical(p.dist.name) not in _OURS]


def _plugins() -> set[str]:
    return {_canonical(point.dist.name) for point in _plugin_points() if point.dist is not None}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hardware() -> list[str]:
    """The kind of device, and the instructions that a processor's kernels are chosen by."""
    import torch
    from vllm.platforms import current_platform

    try:
        device = str(current_platform.get_device_name())
    except (NotImplementedError, RuntimeError):
        device = ""
    capability = torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else ""
    toolkit = f"{torch.version.cuda} {torch.version.hip}"
    return [str(current_platform.device_type), platform.machine(), device, str(capability), toolkit]
