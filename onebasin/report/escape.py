"""Words of a record made harmless: for HTML, for SVG, and for names of files."""

from __future__ import annotations

import html
import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # XML forbids most of them
_CODE = re.compile("`([^`]+)`")


def readable(text: str) -> str:
    r"""A text without characters that no page may hold.

    >>> readable("a\x00b")
    'a\ufffdb'
    """
    return _UNPRINTABLE.sub("\ufffd", text)


def one_line(text: str) -> str:
    r"""A readable text without line breaks.

    >>> one_line(" a\n b ")
    'a b'
    """
    return " ".join(readable(text).split())


def escape(text: str) -> str:
    """A text as HTML, in an element or in a quoted attribute.

    >>> escape('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    return html.escape(readable(text), quote=True)


def prose(text: str) -> str:
    """A sentence as HTML; what stands between backticks is code.

    >>> prose("`a<b` holds")
    '<code>a&lt;b</code> holds'
    """
    return _CODE.sub(r"<code>\1</code>", escape(text))


class Names:
    """Words for addresses and files: lower case, hyphens, never twice.

    >>> names = Names()
    >>> names.fresh("Figure 3"), names.fresh("../figure 3"), names.fresh("§")
    ('figure-3', 'figure-3-2', 'part')
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def fresh(self, text: str) -> str:
        """A word like `text` that was not given before."""
        word = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "part"
        name, number = word, 1
        while name in self._taken:
            number += 1
            name = f"{word}-{number}"
        self._taken.add(name)
        return name
