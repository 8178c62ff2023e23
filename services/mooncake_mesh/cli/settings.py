"""The names of all settings, derived from the classes of :mod:`mooncake_mesh.config`, and how they are written.

Each field has one name everywhere: ``prefill.chunk_tokens`` is ``chunk_tokens`` in the table ``[prefill]``,
``MOONCAKE_PREFILL_CHUNK_TOKENS`` and ``--chunk-tokens``; the nested ``prefill.fake.layers`` is ``layers`` in
``[prefill.fake]``, ``MOONCAKE_PREFILL_FAKE_LAYERS`` and ``--fake-layers``.
"""

import argparse
import dataclasses
import enum
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from mooncake_mesh.cli import values
from mooncake_mesh.cli.values import Unit, Value
from mooncake_mesh.config import SECTIONS, RoleConfig

PREFIX: Final = "MOONCAKE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf field. ``path`` leads to it from the role's class, ``("fake", "layers")`` for a nested one."""

    path: tuple[str, ...]
    kind: type
    optional: bool
    help_text: str
    default: Value

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def unit(self) -> Unit:
        return Unit.BYTES if self.path[-1].endswith("_bytes") else Unit.PLAIN

    def variable(self, section: str) -> str:
        return "_".join((PREFIX, section, *self.path)).upper()


def settings_of(cls: type) -> tuple[Setting, ...]:
    """All leaf fields, in the order of the class."""
    return tuple(_leaves(cls, ()))


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """A flag for each setting, and ``--config`` and ``--print-config``. The parsed values stay text."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML file with a table for each role")
    parser.add_argument("--print-config", action="store_true", help="print the effective configuration and exit")
    for setting in settings_of(cls):
        text = f"{setting.help_text} (default: {_default_text(setting)})".replace("%", "%%")
        if setting.kind is bool:
            parser.add_argument(
                setting.flag,
                dest=setting.key,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            metavar = _metavar(setting)
            parser.add_argument(setting.flag, dest=setting.key, metavar=metavar, default=argparse.SUPPRESS, help=text)


def dump(config: RoleConfig) -> str:
    """*config* as TOML with its help texts; loading it gives *config* again."""
    section = section_of(type(config))
    leaves = dict(flat({field.name: getattr(config, field.name) for field in dataclasses.fields(config)}))
    lines = [f"[{section}]"]
    table: tuple[str, ...] = ()
    for setting in sorted(settings_of(type(config)), key=lambda setting: len(setting.path)):
        if setting.path[:-1] != table:
            table = setting.path[:-1]
            lines += ["", f"[{'.'.join((section, *table))}]"]
        value = leaves[setting.key]
        shown = "" if value is None else values.to_toml(setting.unit, value)
        lines.append(f"# {setting.help_text}")
        lines.append(f"{setting.path[-1]} = {shown}" if shown else f"# {setting.path[-1]} is not set")
    return "\n".join(lines) + "\n"


def flags_of(cls: type, given: Mapping[str, object]) -> list[str]:
    """Command-line flags that give these fields of *cls* these values; nested objects give all their fields."""
    settings = {setting.key: setting for setting in settings_of(cls)}
    flags = []
    for key, value in flat(given):
        setting = settings[key]
        if setting.kind is bool:
            flags.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{setting.flag}={values.to_text(setting.unit, value)}")
    return flags


def section_of(cls: type) -> str:
    return next(name for name, known in SECTIONS.items() if known is cls)


def _leaves(cls: type, path: tuple[str, ...]) -> Iterator[Setting]:
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint, here = hints[field.name], (*path, field.name)
        if get_origin(hint) is not Annotated:
            yield from _leaves(hint, here)
            continue
        declared, help_text = get_args(hint)
        alternatives = get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)
        (kind,) = (alternative for alternative in alternatives if alternative is not types.NoneType)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield Setting(path=here, kind=kind, optional=len(alternatives) > 1, help_text=help_text, default=default)


def flat(nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf of nested mappings and dataclass objects. An empty mapping is a leaf."""
    for name, value in nested.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, dict) and value:
            yield from ((f"{name}.{key}", leaf) for key, leaf in flat(value))
        else:
            yield name, value


def _metavar(setting: Setting) -> str:
    if issubclass(setting.kind, enum.Enum):
        return "{" + values.choices(setting.kind).replace(", ", ",") + "}"
    if setting.unit is Unit.BYTES:
        return "SIZE"
    number = "SECONDS" if "_s" in setting.path[-1] else "NUMBER"
    return {int: "N", float: number, Path: "PATH"}.get(setting.kind, "TEXT")


def _default_text(setting: Setting) -> str:
    return "none" if setting.default is None else values.to_text(setting.unit, setting.default)
