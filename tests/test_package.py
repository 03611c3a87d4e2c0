"""The package as a whole: the direction of its imports, what importing it costs, and its public
names.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2attn

PACKAGE = Path(gpt2attn.__file__).parent
# Each module imports only from lines above its own; modules of one line do not import each other.
ORDER = [
    {"untrusted", "files", "records"},
    {"vocabulary", "jobs", "workers", "hub"},
    {"config", "attention", "tokenizer", "sampling", "lookup"},
    {"cache", "kernels"},
    {"model"},
    {"checkpoint", "generation"},
    {"beam", "scoring"},
    {"capture"},
    {"dump", "edits", "interop"},
    {"analysis"},
    {"trace"},
    {"lesson"},
    {"render"},
    {"text_generation"},
    {"language_model"},
    {"corpus"},
    {"verify", "benchmark"},
    {"cli"},
    {"__main__"},
]
# What a method of a class above imports when it is called.
LATE = {("capture", "dump"), ("capture", "interop"), ("capture", "render")}
RANK = {module: rank for rank, modules in enumerate(ORDER) for module in modules}


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports at run time, wherever the import stands."""
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth and id(node) not in typing_only:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names}
    return found - {"__version__"}


def test_every_module_imports_only_from_above():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        assert module in RANK, f"{module} has no place in ORDER"
        wrong += [
            f"{module} imports {other}"
            for other in imports_of(path) - {module}
            if RANK[other] >= RANK[module] and (module, other) not in LATE
        ]
    assert wrong == []


def test_importing_the_package_loads_nothing_heavy():
    program = (
        "import sys, gpt2attn\n"
        "gpt2attn.__all__, dir(gpt2attn)\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numba', 'numpy'}\n"
        "gpt2attn.load_tokenizer('gpt2').encode('Apple')\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "gpt2attn.load\n"
        "print(sorted((heavy - {'torch', 'numpy'}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n[]\n", result.stderr


def test_numba_may_be_missing(monkeypatch, small_model):
    for name in [name for name in sys.modules if name.startswith("gpt2attn.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    lm = gpt2attn.load(small_model, device="cpu")
    assert lm.model.compiled is None
    assert len(lm.generate("the", 1).ids) == 1


def test_every_public_name_is_there():
    for name in gpt2attn.__all__:
        assert getattr(gpt2attn, name).__doc__, name
    assert set(gpt2attn.__all__) <= set(dir(gpt2attn))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        gpt2attn.nothing  # noqa: B018
