"""What `mkdocs build` changes: the README is its first page, and links outside of it become names.

The tables of the reference stand in its pages already (`reference.py` writes them).
"""

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP: Final = Path(__file__).parents[1]

_OUTSIDE: Final = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")
"""A link to a file that is no page of the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Begin with the README, whose links start at the top of the checkout."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - what MkDocs calls it with
    """Name files outside of the site instead of linking to them."""
    folder = (TOP / "docs" / page.file.src_uri).parent

    def named(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(TOP / "docs"):
            return match[0]
        if not target.exists():
            message = f"{page.file.src_uri}: there is no {match[2]}"
            raise PluginError(message)
        name = f"`{target.relative_to(TOP)}`"
        return name if match[1].strip("`") in name else f"{match[1]} ({name})"

    return _OUTSIDE.sub(named, markdown)
