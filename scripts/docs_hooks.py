"""For mkdocs: links from docs/ to source files become plain text, as the site has only docs/; the files must exist."""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError

_ROOT: Final = Path(__file__).resolve().parents[1]
_OUTSIDE: Final = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    def plain(link: "re.Match[str]") -> str:
        if not (_ROOT / link[2]).exists():
            raise PluginError(f"{page.file.src_path}: no such file: {link[2]}")
        return link[1]

    return _OUTSIDE.sub(plain, markdown)
