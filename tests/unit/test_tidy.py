"""House rules that a linter does not know: sizes, docstrings, names, words, the README's map."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coordinator", "draft_service", "kernels", "specmesh", "target_service")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_PROGRAM_LINES = 200
MAX_PARAMETERS = 8
MAX_OPERATOR_PARAMETERS = 10  # of a kernel's wrapper: tensors come one by one
BANNED_MODULE_NAMES = {
    "utils",
    "util",
    "common",
    "helpers",
    "helper",
    "misc",
    "manager",
    "handlers",
}
# A task left in the code, or a note to whoever edits it next, belongs in an issue.
BANNED_WORDS = re.compile(
    r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError|\bas an AI\b|ChatGPT|Copilot|Anthropic",
    re.IGNORECASE,
)
TEXT_SUFFIXES = {".py", ".md", ".toml", ".proto", ".yaml", ".yml", ".sh", ".html", ".json", ""}
SELF = Path(__file__).resolve()


def tracked_files() -> list[Path]:
    """Files of the repository, from git where there is one, else from the tree."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = [path for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*")]
    return [path for path in paths if path.is_file()]


def own_modules() -> list[Path]:
    """Modules of the product, generated code apart."""
    return sorted(
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__pycache__" not in path.parts
    )


MODULES = own_modules()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, *names: str) -> bool:
    """Whether one of the decorators' names is among `names`."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called).rsplit(".", 1)[-1] in names:
            return True
    return False


def torch_operators(tree: ast.AST) -> set[str]:
    """Names of functions that are bodies of torch operators: custom_op("name", function, ..)."""
    return {
        argument.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("custom_op")
        for argument in node.args
        if isinstance(argument, ast.Name)
    }


def num_code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring apart."""
    assert node.end_lineno is not None
    length = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        text = node.body[0]
        assert text.end_lineno is not None
        length -= text.end_lineno - text.lineno + 1
    return length


def is_plain(node: ast.stmt) -> bool:
    """One-line properties and device functions: a docstring would only restate the name."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return decorated(node, "property", "jit") and len(node.body) == 1


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and methods of public classes without a docstring."""

    def visit(body: list[ast.stmt], owner: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            is_overload = not isinstance(node, ast.ClassDef) and any(
                ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list
            )
            if node.name.startswith("_") or is_overload or is_plain(node):
                continue
            if ast.get_docstring(node) is None:
                yield f"{owner}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{node.name}.")

    yield from visit(tree.body, "")


def test_there_are_modules_to_check() -> None:
    """The rules below see the product's code."""
    assert {path.parts[len(ROOT.parts)] for path in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_stay_small(path: Path) -> None:
    """Files up to 600 lines, functions up to 70 without their docstring, at most 8 parameters.

    Parameters that nothing can bundle are not counted: pointers, strides and constants of a Triton
    program, the arguments of a torch operator, the options of a command line. A Triton program may
    be longer: splitting it would cost registers or readability.
    """
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    tree = ast.parse(text)
    operators = torch_operators(tree)
    for node in functions(tree):
        where = f"{name_of(path)}:{node.lineno} {node.name}"
        is_program = decorated(node, "jit")
        assert num_code_lines(node) <= (MAX_PROGRAM_LINES if is_program else MAX_FUNCTION_LINES), (
            where
        )
        arguments = node.args
        names = [
            argument.arg
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if argument.arg not in ("self", "cls")
        ]
        is_free = "cli" in path.parts or decorated(node, "jit", "custom_op", "register_fake")
        is_free = is_free or node.name in operators
        allowed = MAX_OPERATOR_PARAMETERS if "kernels" in path.parts else MAX_PARAMETERS
        assert len(names) <= allowed or is_free, f"{where}: {names}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_public_names_are_documented(path: Path) -> None:
    """Every module, public class, function and method says what it is for."""
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text.strip(), f"{name_of(path)} has no module docstring"
    assert not list(undocumented(tree)), name_of(path)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_have_names_of_their_own(path: Path) -> None:
    """No drawer for everything that found no other place."""
    assert not set(path.with_suffix("").relative_to(ROOT).parts) & BANNED_MODULE_NAMES


def test_every_test_says_what_it_proves() -> None:
    """Test functions and test modules start with a docstring."""
    missing = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            missing.append(name_of(path))
        missing += [
            f"{name_of(path)}::{node.name}"
            for node in functions(tree)
            if node.name.startswith("test_") and ast.get_docstring(node) is None
        ]
    assert not missing


def test_no_banned_words() -> None:
    """Nothing unfinished is left as a comment, and the project speaks of itself alone."""
    found = []
    for path in tracked_files():
        is_generated = "_pb2" in path.name
        if path.suffix not in TEXT_SUFFIXES or path.stat().st_size > 1 << 20:
            continue
        if path == SELF or is_generated:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name_of(path)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if BANNED_WORDS.search(line)
        ]
    assert not found


def test_the_readme_names_every_part() -> None:
    """The README's map lists each top-level package and each module of the shared library."""
    readme = (ROOT / "README.md").read_text()
    parts = [f"{package}/" for package in (*PACKAGES, "protos", "k8s", "tests")]
    parts += [
        path.name if path.is_file() else f"{path.name}/"
        for path in sorted((ROOT / "specmesh").iterdir())
        if not path.name.startswith("_") and path.name not in ("py.typed",)
    ]
    missing = [part for part in parts if part not in readme]
    assert not missing
