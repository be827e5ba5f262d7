"""Content policy of an HTML page against the sources that it uses."""

from __future__ import annotations

from html.parser import HTMLParser

DIRECTIVES = {
    "img": "img-src",
    "script": "script-src",
    "style": "style-src",
    "link": "style-src",
    "iframe": "frame-src",
}
"""The directive that allows the source of an element."""
INLINE = "'unsafe-inline'"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.policy: dict[str, set[str]] = {}
        self.sources: list[tuple[str, str]] = []
        """Directive and source of each use, in the words of a policy."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if values.get("http-equiv") == "Content-Security-Policy":
            parts = (part.split() for part in values["content"].split(";"))
            self.policy = {part[0]: set(part[1:]) for part in parts if part}
        if tag in DIRECTIVES:
            address = values.get("src") or values.get("href")
            scheme = f"{address.partition(':')[0]}:" if address and ":" in address else "'self'"
            self.sources.append((DIRECTIVES[tag], scheme if address else INLINE))
        if "style" in values:
            self.sources.append(("style-src", INLINE))
        if any(name.startswith("on") for name in values):
            self.sources.append(("script-src", INLINE))


def blocked_sources(page: str) -> list[tuple[str, str]]:
    """Uses that the policy of ``page`` blocks, each as directive and source. Raises where it has no policy."""
    parser = _Page()
    parser.feed(page)
    assert parser.policy.get("default-src") == {"'none'"}
    return [(kind, source) for kind, source in parser.sources if source not in parser.policy.get(kind, set())]
