"""From defaults, a TOML file, the environment and flags to one valid configuration object.

Later sources win: defaults < file < environment < flags. What nobody knows is refused. Every ConfigError names the
dotted path, what is allowed, and where the value came from.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from mooncake_mesh.cli import values
from mooncake_mesh.cli.settings import PREFIX, Setting, flat, section_of, settings_of
from mooncake_mesh.cli.values import Value
from mooncake_mesh.config import SECTIONS, FakeConfig, RoleConfig
from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_mesh.config_layerwise import LayerwiseConfig
from mooncake_mesh.config_pipeline import PipelineConfig
from mooncake_mesh.config_rdma import ALIASES, RdmaConfig
from mooncake_mesh.config_swap import SwapConfig
from mooncake_mesh.errors import ConfigError

C = TypeVar("C", bound=RoleConfig)

_TABLES: Final[dict[str, type]] = {
    "etcd": EtcdConfig,
    "fake": FakeConfig,
    "layerwise": LayerwiseConfig,
    "pipeline": PipelineConfig,
    "rdma": RdmaConfig,
    "swap": SwapConfig,
}
"""Nested tables, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value that somebody gave, and who: a flag, a variable or a file."""

    value: Value
    source: str


def load(cls: type[C], *, flags: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> C:
    """The effective configuration; *flags* as :func:`mooncake_mesh.cli.settings.add_flags` has them parsed."""
    section = section_of(cls)
    settings = {setting.key: setting for setting in settings_of(cls)}
    given: dict[str, Given] = {}
    if flags.config is not None:
        given |= _from_file(flags.config, section, settings)
    given |= _from_environment(environ, section, settings)
    given |= _from_flags(flags, section, settings)
    return _build(cls, section, given)


def _from_file(file: Path, section: str, settings: Mapping[str, Setting]) -> dict[str, Given]:
    given = {}
    for key, value in flat(_table(file, section)):
        if value == {} and any(known.startswith(f"{key}.") for known in settings):
            continue  # an empty [prefill.fake]
        setting = _setting(key, str(file), section, settings)
        with _named(section, key, str(file)):
            given[key] = Given(value=values.from_toml(setting.kind, setting.unit, value), source=str(file))
    return given


def _table(file: Path, section: str) -> dict[str, Any]:
    """The table of one role; the others are left to their own processes, but their names are checked."""
    try:
        document = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", path="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}", path="config") from error
    for name, table in document.items():
        if name not in SECTIONS:
            raise ConfigError(f"no such table{_allowed(name, SECTIONS)} (from {file})", path=name)
        if not isinstance(table, dict):
            raise ConfigError(f"expected a table, got {table!r} (from {file})", path=name)
    own: dict[str, Any] = document.get(section, {})
    return own


def _from_environment(environ: Mapping[str, str], section: str, settings: Mapping[str, Setting]) -> dict[str, Given]:
    keys = {setting.variable(section): key for key, setting in settings.items()}
    prefix = f"{PREFIX}_{section.upper()}_"
    given = _from_aliases(environ, section, settings)
    for variable in sorted(name for name in environ if name.startswith(prefix)):
        key = keys.get(variable, variable.removeprefix(prefix).lower())
        setting = _setting(key, variable, section, settings)
        given[key] = _from_text(section, setting, variable, environ[variable])
    return given


def _from_aliases(environ: Mapping[str, str], section: str, settings: Mapping[str, Setting]) -> dict[str, Given]:
    """RDMA settings under the names that Mooncake's transfer engine gives them; our own names win over these."""
    known = {variable: f"rdma.{field}" for variable, field in ALIASES.items() if f"rdma.{field}" in settings}
    return {
        key: _from_text(section, settings[key], variable, environ[variable])
        for variable, key in known.items()
        if environ.get(variable)
    }


def _from_flags(flags: argparse.Namespace, section: str, settings: Mapping[str, Setting]) -> dict[str, Given]:
    given = {}
    for key, value in vars(flags).items():
        if key in settings:
            setting = settings[key]
            text = values.to_text(setting.unit, value) if isinstance(value, bool) else value
            given[key] = _from_text(section, setting, setting.flag, text)
    return given


def _from_text(section: str, setting: Setting, source: str, text: str) -> Given:
    """The empty text unsets a setting that may be unset."""
    if setting.optional and not text:
        return Given(value=None, source=source)
    with _named(section, setting.key, source):
        return Given(value=values.from_text(setting.kind, setting.unit, text), source=source)


def _build(cls: type[C], section: str, given: Mapping[str, Given]) -> C:
    arguments: dict[str, Any] = {key: item.value for key, item in given.items() if "." not in key}
    for table, nested in _TABLES.items():
        prefix = f"{table}."
        own = {key.removeprefix(prefix): item.value for key, item in given.items() if key.startswith(prefix)}
        if own:
            arguments[table] = _construct(nested, own, f"{section}.{table}", given, prefix)
    return _construct(cls, arguments, section, given, "")


T = TypeVar("T")


def _construct(cls: type[T], arguments: dict[str, Any], where: str, given: Mapping[str, Given], prefix: str) -> T:
    """Build *cls*; its own checks name the field in front of a colon."""
    try:
        return cls(**arguments)
    except ValueError as error:
        field, _, message = str(error).partition(": ")
        source = given.get(prefix + field)
        raise ConfigError(message + (f" (from {source.source})" if source else ""), path=f"{where}.{field}") from error


def _setting(key: str, source: str, section: str, settings: Mapping[str, Setting]) -> Setting:
    if key not in settings:
        raise ConfigError(f"no such setting{_allowed(key, settings)} (from {source})", path=f"{section}.{key}")
    return settings[key]


def _allowed(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"


@contextmanager
def _named(section: str, key: str, source: str) -> Iterator[None]:
    """Turn a ValueError into a ConfigError that says which setting, and who gave it."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{error} (from {source})", path=f"{section}.{key}") from error
