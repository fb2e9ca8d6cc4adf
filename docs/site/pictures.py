"""Draw the pictures of docs/gallery.md, one for each block of code, where the site finds them.

``python -m docs.site.pictures`` runs the blocks in a temporary folder; `make site` does it first.
"""

import contextlib
import shutil
import tempfile

import matplotlib

from docs.site.pages import PICTURES, ROOT, slug
from onebasin.functional import global_seed
from tests.page_blocks import blocks, drawn, run_python


def main() -> None:
    """Run the gallery and save what it draws under the names of its headings."""
    page = ROOT / "docs" / "gallery.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    names: dict[str, object] = {"__name__": "gallery"}
    matplotlib.use("agg")
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), global_seed(0):
        for block in blocks(page):
            run_python(block, names)
            for figure in drawn():
                title = next(line for line in reversed(lines[: block.line]) if line.startswith("## "))
                figure.savefig(PICTURES / f"{slug(title)}.png", dpi=160, bbox_inches="tight", pad_inches=0.1)


if __name__ == "__main__":
    main()
