"""Pages of the site that are no files in docs/: the front page, the reference, the examples; a hook of mkdocs.

The reference has a page per package with every public name, found in the source and not imported. Other pages are shown
as they are, without the comments that only the tests read.
"""

import ast
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURES = ROOT / ".cache" / "gallery"  # where docs/site/pictures.py puts them
COPIES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
DOORS = ("metrics", "reporting", "data", "errors", "examples", "parallel", "storage")  # entered as `ob.NAME`
PACKAGES = ("symmetry", "population", "inference", "alignment", "posterior", "evaluation")  # first, in this order
_CODE_OR_COMMENT = re.compile(r"(^```.*?^```$)|^<!--.*?-->\n*", re.DOTALL | re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:]+)((?:#[^)]*)?)\)")


def public_names() -> dict[str, dict[str, str]]:
    """Public names by package: name as it is written behind ``ob.`` -> where it is defined."""
    packages: dict[str, dict[str, str]] = {package: {} for package in PACKAGES}
    for name, place in _imports("onebasin").items():
        if name not in DOORS:
            packages.setdefault(place.split(".")[1], {})[name] = _defined(place)
    for door in DOORS:
        known = packages.setdefault(door, {})
        places = {f"{door}.{name}": _defined(f"onebasin.{door}.{name}") for name in _listed(door)}
        known |= {name: place for name, place in places.items() if place not in known.values()}
    return packages


def reference(package: str, names: dict[str, str]) -> str:
    """One page of the reference: what the package says of itself, and all its names."""
    summary = (ast.get_docstring(_tree(f"onebasin.{package}")) or "").replace("``", "`")
    options = "    options:\n      heading: ob.{0}\n      toc_label: {0}"
    entries = [f"::: {names[name]}\n{options.format(name)}" for name in sorted(names, key=str.lower)]
    return "\n\n".join([f"# {package}", summary, *entries]) + "\n"


def reference_index(packages: dict[str, dict[str, str]]) -> str:
    """All names on one page, with links."""
    parts = [
        "# Reference",
        "Everything that `import onebasin as ob` offers, by package. What is not here may change without notice.",
    ]
    for package, names in packages.items():
        links = ", ".join(f"[`{name}`]({package}.md#{place})" for name, place in names.items())
        parts += [f"## {package}", f"{_first_line(package)}", links]
    return "\n\n".join(parts) + "\n"


def examples() -> str:
    """The scripts in examples/, whole."""
    parts = [
        "# Examples",
        "Scripts of the folder `examples/`; each runs on embedded data, as `python examples/NAME.py`.",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text(encoding="utf-8").rstrip()
        parts += [f"## {path.name} {{ #{path.stem} }}", f"```python\n{code}\n```"]
    return "\n\n".join(parts) + "\n"


class Doctests(griffe.Extension):
    """An extension of griffe that shows doctests as code wherever they stand in a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each doctest of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the pictures of the gallery."""
    packages = public_names()
    made = {name: (ROOT / source).read_text(encoding="utf-8") for name, source in COPIES.items()}
    made["license.md"] = f"# License\n\n```text\n{(ROOT / 'LICENSE').read_text(encoding='utf-8')}```\n"
    made["examples.md"] = examples()
    made["reference/index.md"] = reference_index(packages)
    made |= {f"reference/{package}.md": reference(package, names) for package, names in packages.items()}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    for picture in sorted(PICTURES.glob("*.png")):
        files.append(File.generated(config, f"gallery/{picture.name}", abs_src_path=str(picture)))
    group: Any = next(entry for entry in config.nav or [] if "Reference" in entry)
    group["Reference"] = [
        "reference/index.md",
        *(f"reference/{package}.md" for package in packages),
        "cli.md",
        "glossary.md",
    ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out comments, lead links to the pages of the site, and put pictures under the code that draws them."""
    text = _CODE_OR_COMMENT.sub(lambda found: found[1] or "", markdown)
    text = _LINK.sub(
        lambda found: f"]({_target(found[1])}{found[2]})" if "/" not in page.url.rstrip("/") else found[0], text
    )
    return with_pictures(text) if page.file.src_uri == "gallery.md" else text


def with_pictures(text: str) -> str:
    """The gallery with its pictures, as far as they were drawn."""
    head, *entries = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return head + "".join(entry.rstrip() + _pictures(entry) + "\n\n" for entry in entries)


def _pictures(entry: str) -> str:
    title = entry.splitlines()[0].removeprefix("## ")
    picture = PICTURES / f"{slug(title)}.png"
    return f"\n\n![{title}](gallery/{picture.name})" if picture.exists() else "\n\n*`make site` draws the picture.*"


def slug(title: str) -> str:
    """A heading as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _target(link: str) -> str:
    """The page of the site for a link of README.md, or of a page in docs/."""
    path = re.sub(r"^(\.\./)?(docs/)?", "", link)
    if found := re.fullmatch(r"examples/(\w+)\.py", path):
        return f"examples.md#{found[1]}"
    return {source: name for name, source in COPIES.items()}.get(path, "license.md" if path == "LICENSE" else path)


def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _imports(module: str) -> dict[str, str]:
    """Names that a module imports from onebasin -> where from."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onebasin.")
        for alias in node.names
    }


def _defined(place: str) -> str:
    """Follow a name through the doors to the file that defines it."""
    module, _, name = place.rpartition(".")
    further = _imports(module).get(name)
    return place if further is None else _defined(further)


def _listed(package: str) -> list[str]:
    """The list `__all__` of a package; of a file, its public classes and functions."""
    tree = _tree(f"onebasin.{package}")
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    kinds = ast.ClassDef | ast.FunctionDef
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _first_line(package: str) -> str:
    return (ast.get_docstring(_tree(f"onebasin.{package}")) or "").split("\n")[0].replace("``", "`")
