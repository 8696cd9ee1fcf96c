"""Hooks of mkdocs: pages may link to files outside docs/, as on a repository host.

Reports and figures of results/ become part of the site. Links to other files, such as sources, become code.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the reports and the figures of results/."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in (".md", ".png"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave docs/."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        if "://" in target or page.file.src_uri.startswith("results/"):
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/"):
            return match[0]
        if path.startswith("results/") and path.endswith((".md", ".png")):
            return f"{mark}[{text}]({posixpath.relpath(path, folder or '.')}{anchor or ''})"
        return text if text.startswith("`") else f"{text} (`{path}`)"

    return _LINK.sub(rewritten, markdown)
