"""No bytes from outside are ever turned into code: no pickle, no eval, no shell.

Ray is the one part that serialises with pickle (cloudpickle), among its own processes: what crosses
there are the settings of this deployment and health answers, on ports that the network policies
open to the Ray cluster alone. No request, frame or file of a peer reaches it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_tidy import ROOT, own_modules

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
ERRORS = {"UnpicklingError", "PickleError"}  # what torch.load(weights_only=True) refuses with
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "importlib.import_module",
}
# Where a name is not what it seems, or comes from this repository alone: file, what, why.
ALLOWED = {
    ("kernels/bench.py", "importlib.import_module"),  # the modules of its own package
}


def dangerous(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that could turn bytes into code."""
    used = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                of_it = {use.attr for use in used if ast.unparse(use.value) == each.name}
                if each.name.split(".")[0] in MODULES and not (of_it and of_it <= ERRORS):
                    yield node.lineno, each.name
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            yield from _dangerous_call(node)


def _dangerous_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = ast.unparse(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}

    def says(argument: str, value: bool) -> bool:
        found = given.get(argument)
        return isinstance(found, ast.Constant) and found.value is value

    if name in CALLS or name in METHODS:
        yield node.lineno, name
    # torch.load unpickles unless it is told not to; weights come as safetensors or GGUF.
    if name.endswith("torch.load") and not says("weights_only", True):
        yield node.lineno, name
    if name.endswith(("np.load", "numpy.load")) and not says("allow_pickle", False):
        yield node.lineno, name
    if "shell" in given and not says("shell", False):
        yield node.lineno, f"{name}(shell)"
    if "trust_remote_code" in given and not says("trust_remote_code", False):
        yield node.lineno, f"{name}(trust_remote_code)"


@pytest.mark.parametrize("path", own_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_turns_bytes_into_code(path: Path) -> None:
    """No pickle, eval, exec, shell or remote code, and no torch.load that would unpickle."""
    name = str(path.relative_to(ROOT))
    found = [
        (line, what)
        for line, what in dangerous(ast.parse(path.read_text()))
        if not any(name.startswith(where) and what == allowed for where, allowed in ALLOWED)
    ]
    assert found == [], f"{name}: {found}"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle; pickle.loads(data)",
        "import pickle; pickle.UnpicklingError; pickle.load(file)",
        "from pickle import loads",
        "import cloudpickle.cloudpickle",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "yaml.load(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "__import__(name)",
    ],
)
def test_the_scan_sees_it(code: str) -> None:
    """Each of these would be reported."""
    assert list(dangerous(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path, weights_only=True)",
        "re.compile(text)",
        "model.eval()",
        "json.loads(text)",
        "import pickle; pickle.UnpicklingError",
    ],
)
def test_the_scan_lets_through_what_is_harmless(code: str) -> None:
    """None of these turns bytes into code."""
    assert not list(dangerous(ast.parse(code)))


def test_a_chat_template_runs_in_a_sandbox() -> None:
    """The one program that comes with a model is compiled by jinja2's immutable sandbox."""
    source = (ROOT / "specmesh" / "tokenizer.py").read_text()
    assert "jinja2.sandbox.ImmutableSandboxedEnvironment(" in source
    assert source.count("jinja2.Environment(") == 0
