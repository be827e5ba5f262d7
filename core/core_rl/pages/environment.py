"""The templates of a kind of page, on top of the style that all pages share."""

from __future__ import annotations

from pathlib import Path

import jinja2

__all__ = ["page_environment"]

SHARED = Path(__file__).parent


def page_environment(*directories: Path) -> jinja2.Environment:
    """The environment of the templates in ``directories``, which may extend ``base.html.jinja``.

    Text is escaped, and a name that is missing is an error. ``style`` is the shared style with the ``style.css`` of
    each directory behind it.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*directories, SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sheets = (SHARED / "page.css", *(directory / "style.css" for directory in directories))
    environment.globals["style"] = "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    return environment
