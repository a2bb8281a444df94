"""Imports go one way: conf is a leaf, then models <- data <- eval <- train; nobody imports train."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "conf": {"conf"},
    "models": {"conf", "models"},
    "data": {"conf", "models", "data"},
    "eval": {"conf", "models", "data", "eval"},
    "train": {"conf", "models", "data", "eval", "train"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of the module"
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_import_arrow(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        wrong = (set(imported(path)) & MAY_IMPORT.keys()) - MAY_IMPORT[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"
