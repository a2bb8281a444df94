"""The README against the tree: nothing it names is missing, and no module goes unnamed."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
ROOMS = TEXT.split("```")[1]


def test_every_command_and_link_exists():
    commands = set(re.findall(r"python -m ([\w.]+)", TEXT))
    assert {"train", "data", "eval", "models.export"} <= commands
    assert all(importlib.util.find_spec(name) for name in commands), commands
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links), links
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^    make ([a-z-]+)", TEXT, re.M)) <= targets


def test_the_rooms_are_the_tree():
    named = set(re.findall(r"\b(\w+\.py)\b", ROOMS))
    modules = {
        path.name for room in ("models", "data", "eval", "train", "conf") for path in (ROOT / room).rglob("*.py")
    }
    modules -= {"__init__.py", "__main__.py"}
    assert named >= modules, sorted(modules - named)
    assert named - modules <= {"tiny.py"}, sorted(named - modules)
