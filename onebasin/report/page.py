"""The page: chapters, contents, style and script in one HTML file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from onebasin.record import Record
from onebasin.report.chapter import Chapter, chapter_of
from onebasin.report.escape import Names, escape, one_line
from onebasin.report.palette import style_rule


def page(records: Sequence[Record]) -> str:
    """The page that shows some records, a chapter each; the same bytes from the same records."""
    names = Names()
    for own in ("content", "tip"):  # ids of the page itself
        names.fresh(own)
    chapters = [chapter_of(record, names) for record in records]
    style = style_rule() + _package_file("page.css")
    script = _package_file("page.js")
    title = " · ".join(dict.fromkeys(one_line(record.title) for record in records))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{style}</style></head>'
        '<body><a class="skip" href="#content">To the content</a>'
        f'<div class="layout">{_contents(chapters)}<main id="content">{"".join(chapter.html for chapter in chapters)}'
        "<footer><p>Written by onebasin from stored records; nothing on this page was loaded from elsewhere.</p>"
        f"</footer></main></div><script>{script}</script></body></html>\n"
    )


def _package_file(name: str) -> str:
    return files("onebasin.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """What a browser may do with the page: draw it and run our script, by its hash; never the network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _contents(chapters: Sequence[Chapter]) -> str:
    several = len(chapters) > 1
    lists = "".join(
        (f'<p class="chapter"><a href="#{chapter.name}">{escape(one_line(chapter.title))}</a></p>' if several else "")
        + "<ol>"
        + "".join(f'<li><a href="#{word}">{escape(one_line(text))}</a></li>' for word, text in chapter.contents)
        + "</ol>"
        for chapter in chapters
    )
    return (
        '<nav class="contents" aria-label="Contents"><div class="bar"><span class="brand">onebasin</span>'
        '<button type="button" class="theme" aria-label="Light or dark">Theme: auto</button></div>'
        f"{lists}</nav>"
    )
