"""Complete the metadata of the wheel: links of the project, and a README that works on a package index.

Hatchling runs this hook. The one place of the project's address is ``tool.hatch.metadata.hooks.custom.url``.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")  # relative links and images


def make_links_absolute(text: str, url: str) -> str:
    """Return Markdown with relative links below the address of a project: pages as pages, images as files."""

    def replace(match: re.Match[str]) -> str:
        mark, label, path = match.groups()
        return f"{mark}[{label}]({url}/{'raw' if mark else 'blob'}/main/{path})"

    return _LINK.sub(replace, text)


class ProjectMetadata(MetadataHookInterface):
    """Adds readme and urls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the dynamic fields of the project table."""
        url = str(self.config["url"]).rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": make_links_absolute(text, url)}
        pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
        metadata["urls"] = {
            "Homepage": url,
            "Issues": f"{url}/issues",
            **{name: f"{url}/blob/main/{path}" for name, path in pages.items()},
        }
