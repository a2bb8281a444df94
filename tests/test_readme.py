"""The README's rooms against the tree: nothing they name is missing, and no module goes unnamed."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
ROOMS = TEXT.split("```")[1]


def test_the_rooms_are_the_tree():
    named = set(re.findall(r"\b(\w+\.py)\b", ROOMS))
    modules = {
        path.name for room in ("models", "data", "eval", "train", "conf") for path in (ROOT / room).rglob("*.py")
    }
    modules -= {"__init__.py", "__main__.py"}
    assert named >= modules, sorted(modules - named)
    assert named - modules <= {"tiny.py"}, sorted(named - modules)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(
        ROOMS.split("docs/ ")[1].replace(",", "").split()
    )
