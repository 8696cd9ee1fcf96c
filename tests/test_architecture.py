"""Architecture rules of docs/explanation/architecture.md: imports between packages, lengths of functions, and names."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from torchtitan_scape.methods.registry import METHODS

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("torchtitan_scape", "kernels", "topology", "scripts")
LINKED = ("kernels", "topology")  # folders of the repository that are packages of torchtitan_scape
# Folders of torchtitan_scape and the other packages, lowest first. A folder imports only folders to its left.
ORDER = (
    *(("kernels", "topology"), ("core",), ("titan",), ("optimizers",), ("methods",), ("sharding",), ("replica",)),
    *(("config",), ("checkpoint",), ("data",), ("models",), ("planner",), ("huggingface",), ("observe",), ("report",)),
    *(
        ("runtime",),
        ("evaluation",),
        ("trainer",),
        ("train", "evaluate", "export", "doctor", "api"),
        ("start",),
        ("__main__",),
        ("scripts",),
    ),
)
LONGEST_BODY = 60
# Files outside methods/ that quote a method's name: the default of `[sync] method`, and TAGC on the shard axis.
QUOTE_METHODS = {"torchtitan_scape.config.job_config", "torchtitan_scape.sharding.options"}


def module_of(path: Path) -> str:
    package, *names = path.relative_to(ROOT).with_suffix("").parts
    first = f"torchtitan_scape.{package}" if package in LINKED else package
    return ".".join((first, *names)).removesuffix(".__init__")


FILES = {module_of(path): path for root in PRODUCT for path in sorted((ROOT / root).rglob("*.py"))}


@cache
def imports_of(path: Path) -> set[str]:
    """Return the names that a file imports, also in functions and for type annotations."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def named(imported: str) -> str | None:
    """Return the module of an imported name: `a.b.name` is a name in `a.b`, or a module itself."""
    while imported and imported not in FILES:
        imported = imported.rpartition(".")[0]
    return imported or None


def graph() -> dict[str, set[str]]:
    """Return the product modules that every module imports."""
    found = {}
    for module, path in FILES.items():
        found[module] = {name for name in map(named, imports_of(path)) if name not in (None, module)}
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return a cycle of modules that import each other, or [] if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folder(module: str) -> str | None:
    """Return the package, or the folder or module of torchtitan_scape; None for torchtitan_scape/__init__.py."""
    package, *names = module.split(".")
    return package if package != "torchtitan_scape" else names[0] if names else None


def lines(pattern: str, files: dict[str, Path]) -> Iterator[str]:
    for module, path in sorted(files.items()):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line):
                yield f"{module}:{number}: {line.strip()}"


def test_kernels_and_topology_import_neither_each_other_nor_the_rest() -> None:
    wrong = [
        f"{module} -> {other}"
        for module, others in graph().items()
        for other in others
        if folder(module) in LINKED and folder(other) != folder(module)
    ]
    assert not wrong


def test_linked_folders_are_packages_of_torchtitan_scape_only() -> None:
    """Without `__init__.py`, a folder of a clone on sys.path does not hide an installed package of the same name."""
    for name in LINKED:
        link = ROOT / "torchtitan_scape" / name
        assert link.is_symlink() and link.resolve() == ROOT / name
        assert not (ROOT / name / "__init__.py").exists()
    imported = {name for path in FILES.values() for name in imports_of(path)}
    assert [name for name in imported if name.split(".")[0] in LINKED] == []


def test_there_are_no_import_cycles() -> None:
    """Neither at import time, nor in functions, nor in type annotations."""
    assert circle(graph()) == []


def test_functions_fit_a_screen() -> None:
    """Docstrings and Triton kernels, which cannot be divided, do not count."""
    long_functions = {
        f"{module}.{function.name}": lines
        for module, path in FILES.items()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        and (lines := body_lines(function)) > LONGEST_BODY
    }
    assert long_functions == {}


def body_lines(function: ast.FunctionDef) -> int:
    """Return the number of lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_scripts_are_started_as_modules() -> None:
    scripts = {name: path for name, path in FILES.items() if name.startswith("scripts")}
    assert list(lines(r"\bsys\.path\b", scripts)) == []


def test_a_module_calls_its_main_function_at_its_end() -> None:
    """Functions below that call are missing with `python -m`, and present in tests, which import the module."""
    for name, path in FILES.items():
        statements = ast.parse(path.read_text()).body
        calls = [isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in statements]
        assert not any(calls[:-1]), name


def test_folders_import_only_folders_before_them() -> None:
    rank = {name: i for i, names in enumerate(ORDER) for name in names}
    upward: dict[tuple[str, str], list[str]] = {}
    for module, others in graph().items():
        for other in others:
            one, two = folder(module), folder(other)
            if one is not None and two is not None and one != two and rank[two] >= rank[one]:
                upward.setdefault((one, two), []).append(f"{module} -> {other}")
    assert upward == {}


def test_only_listed_files_quote_the_name_of_a_method() -> None:
    """`dense` is allowed, because it is also an ordinary word."""
    names = METHODS.keys() - {"dense"}
    quoting = set()
    for module, path in FILES.items():
        if not module.startswith(("scripts", "torchtitan_scape.methods")):
            constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            quoting |= {module} if constants & names else set()
    assert quoting == QUOTE_METHODS


def test_methods_are_compared_by_name_only_in_their_files() -> None:
    names = "|".join(METHODS.keys() - {"dense"})
    compared = rf"""[!=]=\s*["']({names})["']|["']({names})["']\s*[!=]=|case .*["']({names})["']"""
    # Scripts quote the methods that they compare.
    assert [
        line for line in lines(compared, FILES) if not line.startswith(("scripts.", "torchtitan_scape.methods."))
    ] == []


def test_titan_is_the_only_folder_that_imports_torchtitan() -> None:
    files = {name: path for name, path in FILES.items() if name.startswith("torchtitan_scape")}
    outside = {name: path for name, path in files.items() if not name.startswith("torchtitan_scape.titan")}
    assert list(lines(r"^\s*(from|import) torchtitan([. ]|$)", outside)) == []
    assert list(lines(r"unittest\.mock|noqa: E402", files)) == []


def test_one_module_depends_on_the_release_of_torch() -> None:
    """Others may show the version, but do not compare it, and use no function that only some releases have."""
    own = {"torchtitan_scape.topology.torch_version"}
    others = {name: path for name, path in FILES.items() if name not in own}
    compared = r"TorchVersion|release_of\(|hasattr\((torch|dist|module)\b|_fsdp_param_group|reduce_scatter_unused"
    assert list(lines(compared, others)) == []


def test_optimizers_methods_and_sharding_do_not_need_torchtitan() -> None:
    folders = ("core", "optimizers", "methods", "sharding", "replica")
    edges = graph()
    wrong = [
        f"{module} -> {other}"
        for module, others in edges.items()
        for other in others
        if module.startswith(tuple(f"torchtitan_scape.{folder}" for folder in folders))
        and other.startswith("torchtitan_scape.titan")
    ]
    assert wrong == []


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """Return all nodes of the syntax trees of product and scripts with their modules."""
    for module, path in FILES.items():
        yield from ((module, node) for node in ast.walk(ast.parse(path.read_text())))


def test_class_names_are_unique() -> None:
    found: dict[str, set[str]] = {}
    for module, node in definitions():
        if isinstance(node, ast.ClassDef) and node.name != "Config":  # nested, as TorchTitan 0.3.0 requires it
            found.setdefault(node.name, set()).add(f"{module}:{node.lineno}")
    assert {name: sorted(places) for name, places in found.items() if len(places) > 1} == {}


def test_identifiers_are_standard_terms() -> None:
    """These names of the first versions have standard replacements, such as `RankGroup`, `peers` and `owner_error`."""
    replaced = {"told", "lies", "owed", "apart", "carried", "twins", "unite", "carries", "settle"}
    replaced |= {"Lane", "Ring", "Circle"}
    fields = ("id", "attr", "arg", "name", "asname", "rest")  # names, attributes, arguments, definitions and patterns
    wrong = [
        f"{module}:{getattr(node, 'lineno', 0)}: {name}"
        for module, node in definitions()
        for name in (getattr(node, field, None) for field in fields)
        if isinstance(name, str) and name in replaced
    ]
    assert wrong == []


INTEGERS = (
    "arange",
    "randint",
    "randperm",
    "tril_indices",
    "triu_indices",
)  # int64, because their arguments are integers
FACTORIES = (
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
)


def test_tensors_are_created_with_a_dtype_and_a_device() -> None:
    """PyTorch's default dtype and device are the user's: own training loops set them."""
    wrong = []
    for module, node in definitions():
        if module.startswith("scripts") or not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).removeprefix("torch.")
        if ast.unparse(node.func) == name or name not in (*FACTORIES, *INTEGERS):
            continue
        needed = {"device"} if name in INTEGERS else {"dtype", "device"}
        if missing := needed - {keyword.arg for keyword in node.keywords}:
            wrong.append(f"{module}:{node.lineno}: torch.{name} without {' and '.join(sorted(missing))}")
    assert wrong == []
