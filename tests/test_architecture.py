"""The packages, their doors and the habits of docs/architecture.md, checked on the source."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import onebasin

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PAPERS = ROOT / "onebasin", ROOT / "onebasin_papers"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted([*PACKAGE.rglob("*.py"), *PAPERS.rglob("*.py")])
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# Files that may touch torch's global generator, and why.
GLOBAL_RANDOMNESS = {
    "onebasin/functional/call.py": "constructors and forward passes draw from the global one; forked and restored",
}
WHITELIST = "onebasin/data/cifar.py"  # batches of CIFAR are pickles; its unpickler finds functions of its own file only
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


def package_of(module: str) -> str:
    """onebasin.symmetry.group -> symmetry; the top of the tree is "" and the papers are "papers"."""
    parts = module.split(".")
    if parts[0] == "onebasin_papers":
        return "papers"
    return parts[1] if len(parts) > 1 else ""


def table_under(heading: str) -> list[list[str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]  # without the head and the rule


PACKAGES = {row[0]: {name.strip() for name in row[1].split(",")} - {"-", ""} for row in table_under("Packages")}


def nodes(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """Every node below; without those under `if TYPE_CHECKING:` unless `types`."""
    for node in ast.iter_child_nodes(tree):
        if not types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from nodes(node, types=types)


def offered(package: str) -> set[str]:
    """Names that the `__init__` of a package imports: they hide files of the same name."""
    path = MODULES.get(package)
    bodies = TREES[path].body if path is not None and path.name == "__init__.py" else []
    return {alias.asname or alias.name for node in bodies if isinstance(node, ast.ImportFrom) for alias in node.names}


def imported(path: Path, *, types: bool = True) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, at any depth; name is "" for `import module`, and for modules of a package."""
    for node in nodes(TREES[path], types=types):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)} line {node.lineno}: imports are written in full"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                is_module = module in MODULES and alias.name not in offered(node.module or "")
                yield (module, "") if is_module else (node.module or "", alias.name)


def imports(path: Path, *, types: bool = True) -> Iterator[str]:
    yield from (module for module, _ in imported(path, types=types))


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def test_the_table_lists_the_packages_that_exist() -> None:
    existing = {package_of(module) for module in MODULES} - {"", "__main__"}
    assert set(PACKAGES) == existing, "docs/architecture.md, table of packages"
    assert set().union(*PACKAGES.values()) <= set(PACKAGES), "a package may import only packages of the table"
    assert all(len(row) == 3 and len(row[2]) > 10 for row in table_under("Packages"))


def test_imports_keep_to_the_table_and_to_the_doors() -> None:
    """A package imports those of its row, and of them only what their `__init__` offers; nothing private."""
    leaves = {"errors", "state"}  # single files
    for path in FILES:
        own = package_of(module_name(path))
        for target, name in imported(path):
            if target.split(".")[0] not in ("onebasin", "onebasin_papers"):
                continue
            other = package_of(target)
            where = f"{name_of(path)} imports {name} of {target}"
            if other == own:
                continue
            if own == "papers":
                assert (target, name) == ("onebasin", ""), f"{where}; papers use the public names alone"
                continue
            allowed = PACKAGES.get(own, set(PACKAGES) - {"cli", "papers"}) | {"errors"}
            allowed = {"cli"} if own == "__main__" else allowed
            assert other in allowed, f"{where}; {own or 'the front door'} may import {sorted(allowed)}"
            door = target.count(".") <= 1 or other in leaves | {"papers", "cli"}
            assert door or (own == "cli" and other == "papers"), f"{where}, below the door of {other}"
            assert not name.startswith("_"), f"{where}, which is private there"


def test_no_package_touches_private_attributes_of_objects_of_another() -> None:
    """`thing._name` is allowed where a class or function of the same package has that name, or torch's own does."""
    own_names: dict[str, set[str]] = {}
    for path in FILES:
        defined = own_names.setdefault(package_of(module_name(path)), set())
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    foreign = {"_buffers", "_parameters", "_modules", "_replace", "_asdict", "_fields"}  # of torch and named tuples
    everywhere = set().union(*own_names.values()) - foreign
    for path in FILES:
        own = own_names[package_of(module_name(path))]
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr in everywhere - own:
                raise AssertionError(
                    f"{name_of(path)} line {node.lineno}: {ast.unparse(node)} is private to another package"
                )


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


def test_no_cycles_between_packages_nor_between_modules() -> None:
    assert cycle(PACKAGES) == []
    # Inside a package two files may name each other's types in annotations: nothing is imported when the program runs.
    modules = {
        module: {target for target in imports(path, types=False) if target in MODULES and target != module}
        for module, path in MODULES.items()
    }
    assert cycle(modules) == []


def test_names_say_what_is_inside() -> None:
    for path in FILES:
        assert not {part.removesuffix(".py").strip("_") for part in path.relative_to(ROOT).parts} & FORBIDDEN_NAMES


def test_the_exceptions_are_needed_and_explained() -> None:
    assert set(GLOBAL_RANDOMNESS) <= {name_of(path) for path in FILES}
    assert all(len(reason) > 10 for reason in GLOBAL_RANDOMNESS.values())


def test_the_public_names_are_the_documented_ones() -> None:
    documented = [row[0].strip("`") for row in table_under("Public names")]
    assert sorted(documented) == sorted(onebasin.__all__)
    assert all(hasattr(onebasin, name) for name in onebasin.__all__)


def test_the_front_door_only_reexports() -> None:
    for node in TREES[PACKAGE / "__init__.py"].body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        is_lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign)
        assert is_docstring or is_for_types or is_lazy or plain, ast.unparse(node)


def test_randomness_is_an_argument() -> None:
    for path in FILES:
        if name_of(path) in GLOBAL_RANDOMNESS:
            continue
        assert not {"random", "numpy.random"} & set(imports(path)), "use a torch.Generator"
        for call, function in calls(path):
            assert function not in ("torch.manual_seed", "torch.seed", "torch.random.manual_seed"), function
            assert not re.match(r"(np|numpy)\.random\.", function), function
            assert not re.match(r"(torch\.)?(nn\.)?init\.", function), f"{function} draws from the global generator"
            if function.split(".")[-1] in RANDOM_CALLS:
                given = {keyword.arg for keyword in call.keywords}
                assert "generator" in given, f"{name_of(path)} line {call.lineno}: {function} without generator="


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        between_processes = path.parent == PACKAGE / "parallel"  # of one user, which send each other functions
        text = path.read_text(encoding="utf-8")
        if not between_processes:
            assert not {"cloudpickle", "dill", "joblib", "shelve", "marshal"} & {t.split(".")[0] for t in imports(path)}
            if name_of(path) != WHITELIST:
                assert set(re.findall(r"\bpickle\.(\w+)", text)) <= {"UnpicklingError"}  # caught, and told to the user
        assert set(re.findall(r"from pickle import (.+)", text)) <= {"UnpicklingError"}
        for call, function in calls(path):
            if function == "torch.load":
                safe = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
                assert [ast.unparse(value) for value in safe] == ["True"], f"{name_of(path)} line {call.lineno}"
            if function in ("np.load", "numpy.load"):
                allowed = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "allow_pickle"]
                assert allowed in ([], ["False"]), f"{name_of(path)} line {call.lineno}"


def test_nothing_is_left_undone_or_tied_to_a_device() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"NotImplementedError|\b(TODO|FIXME|XXX)\b", text)
        assert not re.search(r"\.cuda\(|[\"']cuda[:\"']", text)


def test_only_declared_packages_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {"scikit-learn": "sklearn", "pillow": "PIL"}  # where package and module have two names
    declared = {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in project["dependencies"]}
    declared = {named.get(name, name) for name in declared}
    extras = {name for name in project["optional-dependencies"] if name != "dev"}
    extras |= {"huggingface_hub", "arviz_base", "xarray", "h5netcdf"}  # modules of the extras hub and arviz
    used = {target.split(".")[0] for path in FILES for target in imports(path)} - {"onebasin", "onebasin_papers"}
    assert used - set(sys.stdlib_module_names) - extras <= declared
    # numpy is torch's own: it warns at start without it
    assert declared - used <= {"numpy"}


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [item for extra in project["optional-dependencies"].values() for item in extra]
    wanted = [item for item in (*project["dependencies"], *extras) if not item.startswith("onebasin[")]
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


def test_packages_and_functions_do_not_hide_each_other() -> None:
    code = "import onebasin.alignment, onebasin.evaluation; print(callable(onebasin.align), onebasin.predict)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.startswith("True <function predict")
    packages = {package_of(module) for module in MODULES} - {""}
    assert packages & set(onebasin.__all__) <= set(onebasin._PACKAGES), "a public function has the name of a package"
    assert set(onebasin.__all__) <= set(dir(onebasin))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert onebasin.__version__ == project["version"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(onebasin, "nothing")
