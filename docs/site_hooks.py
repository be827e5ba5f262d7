"""mkdocs hooks: README.md is the home page; a link to a file of the repository leads to a page that shows the file."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}


def outside(page: str, link: str) -> str | None:
    """Path below the repository root of a ``link`` of ``page`` that leaves ``docs``; None for any other link."""
    target = normpath(f"docs/{page}/../{link}")
    return None if re.match(r"[a-z]+:|\.\./\.\./", link) or target.startswith(("docs/", "..")) else target


def source_page(target: str) -> str:
    """Path below ``docs`` of the page that shows ``target``."""
    return f"source/{target if target.endswith('.md') else target + '.md'}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page, and a page for each file of the repository that a page links to."""
    root = Path(config.config_file_path).parent
    files.append(
        File.generated(config, "index.md", content=_home((root / "README.md").read_text(encoding="utf-8")))
    )
    for file in list(files.documentation_pages()):
        text = FENCED.sub("", file.content_string)
        targets = {outside(file.src_uri, link) for _, link, _, _ in LINK.findall(text)} - {None}
        for target in sorted(str(target) for target in targets):
            path, uri = root / target, source_page(target)
            if path.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=_shown(path, target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave ``docs`` to the pages that `on_files` added; one without a page breaks the build."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    up = "../" * uri.count("/")

    def moved(match: re.Match[str]) -> str:
        target = outside(uri, match[2])
        return (
            match[0] if target is None else f"{match[1]}{up}{source_page(target)}{match[3] or ''}{match[4]}"
        )

    return LINK.sub(moved, markdown)


def _home(readme: str) -> str:
    """README.md as a page of ``docs``."""
    return re.sub(
        r"\]\((?![a-z]+:)([^)]+)\)",
        lambda link: f"]({normpath('../' + link[1]).removeprefix('../docs/')})",
        readme,
    )


def _shown(path: Path, target: str) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":  # its own links lead into the repository
        return re.sub(r"!?\[([^\]]*)\]\((?![a-z]+:)[^)]*\)", r"\1", text)
    language = LANGUAGES.get(path.suffix, "text")
    return f'# {target}\n\n````{language} linenums="1"\n{text}\n````\n'
