"""The package's page is the README, whose links to other files of the repository lead nowhere there.

hatchling calls this when it builds. With `Source` in pyproject.toml's `[project.urls]` the links are made absolute, to
the tag of this version. Without it the address of the repository is not known, and only the text of a link is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\[\]]+)\]\((?!https?://|#)([^)\s]+)\)")
"""A link to a file, perhaps to a heading in it; not one to a heading of the page itself, nor to another site."""


class PackagePage(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set it from README.md."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": page(readme, f"{source}/blob/v{metadata['version']}" if source else None),
        }


def page(readme: str, files: str | None) -> str:
    """Return the README with links to the files at this address, or without such links."""
    return LINK.sub(rf"[\1]({files}/\2)" if files else r"\1", readme)
