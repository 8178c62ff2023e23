"""Writes docs/configuration.md from the configuration classes: python scripts/config_reference.py."""

import enum
import sys
from pathlib import Path
from typing import Final

from mooncake_mesh.cli import values
from mooncake_mesh.cli.settings import Setting, settings_of
from mooncake_mesh.cli.values import Unit
from mooncake_mesh.config import SECTIONS

PAGE: Final = Path(__file__).resolve().parents[1] / "docs/configuration.md"
_HEAD: Final = """\
# Configuration

<!-- Written by scripts/config_reference.py from services/mooncake_mesh/config*.py. -->

Each setting has one name everywhere: `prefill.chunk_tokens` is `chunk_tokens` in the table `[prefill]` of a TOML
file (`--config`), the variable `MOONCAKE_PREFILL_CHUNK_TOKENS` and the flag `--chunk-tokens` of `mooncake prefill`;
`prefill.fake.layers` is `layers` in `[prefill.fake]`, `MOONCAKE_PREFILL_FAKE_LAYERS` and `--fake-layers`. Flags win
over variables, variables over the file, the file over the defaults. What nobody knows is refused. `--print-config`
prints what would be used, as TOML. Sizes take `KiB`, `MiB`, `GiB` and `TiB`.
"""


def page() -> str:
    """The whole page, the same on every machine."""
    parts = [_HEAD]
    for section, cls in SECTIONS.items():
        summary = (cls.__doc__ or "").split("\n")[0]
        parts.append(f"## `[{section}]`\n\n{summary}\n\n| setting | type | default | |\n|---|---|---|---|")
        parts += [_row(setting) for setting in settings_of(cls)]
        parts.append("")
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    text = setting.help_text.replace("|", "\\|")
    return f"| `{setting.key}` | {_kind(setting)} | {_default(setting)} | {text} |"


def _kind(setting: Setting) -> str:
    if issubclass(setting.kind, enum.Enum):
        return ", ".join(f"`{choice}`" for choice in values.choices(setting.kind).split(", "))
    if setting.unit is Unit.BYTES:
        return "size"
    return {bool: "yes or no", int: "whole number", float: "number", Path: "path"}.get(setting.kind, "text")


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "none"
    if setting.key.endswith("run_dir"):
        return "`$XDG_RUNTIME_DIR/mooncake`"  # else it would be that of whoever writes this page
    return f"`{values.to_text(setting.unit, setting.default) or ' '}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
