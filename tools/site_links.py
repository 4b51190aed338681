"""A hook of mkdocs: links from docs/ to other files of the repository.

On a page in the repository `[Dockerfile](../Dockerfile)` opens the file; the site has only the pages of docs/. There the text of the
link is kept without its target. A link to a file that does not exist is a warning, with which a strict build fails.
"""

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]*)(?:#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page. Returns: the text without links that leave docs/."""
    docs = Path(config["docs_dir"]).resolve()
    folder = Path(page.file.abs_src_path).resolve().parent

    def without_target(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, link[2])
        return link[1]

    return LINK.sub(without_target, markdown)
