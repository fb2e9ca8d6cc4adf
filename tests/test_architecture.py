"""The walls and the habits of docs/architecture.md, checked on the source."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import onebasin

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "onebasin"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# Who may touch torch's global generator, and why.
GLOBAL_RANDOMNESS = {
    "onebasin/calling.py": "constructors and forward passes of others draw from the global one; forked and restored",
}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "base", "core"}
RANDOM_CALLS = {
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson",
    "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_",
}  # fmt: skip
HEAVY = ("torch._dynamo", "transformers", "matplotlib", "scipy", "sklearn", "PIL", "pandas", "click", "rich")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def room_of(module: str) -> str:
    """onebasin.symmetry.group -> symmetry; the package itself is the front door, called "" here."""
    return module.split(".")[1] if "." in module else ""


def table_under(heading: str) -> list[list[str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]  # without the head and the rule


ROOMS = {row[0]: {name.strip() for name in row[1].split(",")} - {"-", ""} for row in table_under("Rooms")}


def absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def nodes(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """Every node below; without those under `if TYPE_CHECKING:` unless `types`."""
    for node in ast.iter_child_nodes(tree):
        if not types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from nodes(node, types=types)


def imports(path: Path, *, types: bool = True) -> Iterator[str]:
    """Every imported module, at any depth; `from package import module` counts as the module."""
    for node in nodes(TREES[path], types=types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(path, node)
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def test_the_room_table_lists_the_rooms_that_exist() -> None:
    existing = {room_of(module) for module in MODULES} - {"", "__main__"}
    assert set(ROOMS) == existing, "docs/architecture.md, table of rooms"
    assert set().union(*ROOMS.values()) <= set(ROOMS), "a room may import only rooms of the table"


def test_every_room_has_a_reason() -> None:
    assert all(len(row) == 3 and len(row[2]) > 10 for row in table_under("Rooms"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_keep_to_the_table(path: Path) -> None:
    room = room_of(module_name(path))
    for target in imports(path):
        if target.split(".")[0] != "onebasin":
            continue
        other = room_of(target)
        if room == "__main__":
            allowed = {"cli"}
        elif room == "":
            allowed = set(ROOMS) - {"cli"}
        else:
            allowed = ROOMS[room] | {"errors", room}
        assert other in allowed, f"{name_of(path)} imports {target}; {room or 'the front door'} may import {allowed}"


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A closed path of the graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for follower in sorted(graph.get(node, ())):
            if found := visit(follower, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_the_cycle_finder_finds() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_cycles_between_rooms_nor_between_modules() -> None:
    assert cycle(ROOMS) == []
    # Inside a room two files may name each other's types in annotations: nothing is imported when the program runs.
    modules = {
        module: {target for target in imports(path, types=False) if target in MODULES and target != module}
        for module, path in MODULES.items()
    }
    assert cycle(modules) == []


def test_nobody_imports_the_command_line() -> None:
    allowed = {"onebasin.__main__"} | {module for module in MODULES if room_of(module) == "cli"}
    users = {
        module for module, path in MODULES.items() if any(room_of(t) == "cli" for t in imports(path) if t in MODULES)
    }
    assert users <= allowed


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_say_what_is_inside(path: Path) -> None:
    assert not {part.removesuffix(".py").strip("_") for part in path.relative_to(PACKAGE).parts} & FORBIDDEN_NAMES


def test_the_exceptions_are_needed_and_explained() -> None:
    assert set(GLOBAL_RANDOMNESS) <= {name_of(path) for path in FILES}
    assert all(len(reason) > 10 for reason in GLOBAL_RANDOMNESS.values())


def test_the_public_names_are_the_documented_ones() -> None:
    documented = [row[0].strip("`") for row in table_under("Public names")]
    assert sorted(documented) == sorted(onebasin.__all__)
    assert list(onebasin.__all__) == sorted(onebasin.__all__)
    assert all(hasattr(onebasin, name) for name in onebasin.__all__)


def test_the_front_door_only_reexports() -> None:
    for node in TREES[PACKAGE / "__init__.py"].body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign)
        assert is_docstring or is_for_types or plain, ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_randomness_is_an_argument(path: Path) -> None:
    if name_of(path) in GLOBAL_RANDOMNESS:
        return
    assert not {"random", "numpy.random"} & set(imports(path)), "use a torch.Generator"
    for call, function in calls(path):
        assert function not in ("torch.manual_seed", "torch.seed", "torch.random.manual_seed"), function
        assert not re.match(r"(np|numpy)\.random\.", function), function
        assert not re.match(r"(torch\.)?(nn\.)?init\.", function), f"{function} draws from the global generator"
        if function.split(".")[-1] in RANDOM_CALLS:
            given = {keyword.arg for keyword in call.keywords}
            assert "generator" in given, f"{name_of(path)} line {call.lineno}: {function} without generator="


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_unpickled(path: Path) -> None:
    between_processes = path.parent == PACKAGE / "cluster"  # of one user, which send each other functions
    text = path.read_text(encoding="utf-8")
    if not between_processes:
        assert not {"cloudpickle", "dill", "joblib", "shelve", "marshal"} & {t.split(".")[0] for t in imports(path)}
        assert set(re.findall(r"\bpickle\.(\w+)", text)) <= {"UnpicklingError"}  # caught, and told to the user
    assert set(re.findall(r"from pickle import (.+)", text)) <= {"UnpicklingError"}
    for call, function in calls(path):
        if function == "torch.load":
            safe = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
            assert [ast.unparse(value) for value in safe] == ["True"], f"{name_of(path)} line {call.lineno}"
        if function in ("np.load", "numpy.load"):
            allowed = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "allow_pickle"]
            assert allowed in ([], ["False"]), f"{name_of(path)} line {call.lineno}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_left_undone_or_tied_to_a_device(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"NotImplementedError|\b(TODO|FIXME|XXX)\b", text)
    assert not re.search(r"\.cuda\(|[\"']cuda[:\"']", text)


def test_only_declared_packages_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {"scikit-learn": "sklearn", "pillow": "PIL"}  # where package and module have two names
    declared = {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in project["dependencies"]}
    declared = {named.get(name, name) for name in declared}
    extras = {name for name in project["optional-dependencies"] if name != "dev"} | {"huggingface_hub"}
    used = {target.split(".")[0] for path in FILES for target in imports(path)} - {"onebasin"}
    assert used - set(sys.stdlib_module_names) - extras <= declared
    # numpy is torch's own: it warns at start without it
    assert declared - used <= {"numpy"}


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    assert {re.split(r"[<>=!~\[; ]", requirement)[0].lower() for requirement in wanted} <= pinned


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, onebasin; print('torch' in sys.modules); [getattr(onebasin, name) for name in onebasin.__all__]; "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.split("\n")[:2] == ["False", "[]"]


def test_a_function_with_the_name_of_its_room_is_what_one_gets() -> None:
    code = "import onebasin, onebasin.align, onebasin.predict.crowd; print(callable(onebasin.align), onebasin.predict)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.startswith("True <function predict")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        onebasin.nothing  # noqa: B018 - asking is the test
    assert set(onebasin.__all__) <= set(dir(onebasin))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert onebasin.__version__ == project["version"]
