"""The commands that README.md and docs/*.md show: in code blocks, in the text, and as alternatives in a table's cell.

`python -m data task=tokenize` (or `vocab`, `data.path=FILE`)   the value, or the first setting, is another one
`python -m eval run=DIR` (`temperature=1`)                      the setting is added, or changed
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```.*?^```$|^    .*?$", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(python -m .+|make .+)")
ALTERNATIVE = re.compile(r"[\w.]+|[\w.]+=\S+( [\w.]+=\S+)*")


def commands(page: str) -> list[str]:
    """Those of a page, each once, in its order but blocks first. Words are one space apart."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    found = [plain(re.sub(r"\s+#\s.*|\s&(\s.*)?$", "", line)) for line in lines]
    for line in re.sub(r"\n(?!\n|\|)", " ", BLOCK.sub("", text)).splitlines():
        cells = line.split("|") if line.startswith("|") else []
        found += [command for cell in cells for command in spoken(cell)] or map(plain, SPAN.findall(line))
    return list(dict.fromkeys(filter(None, found)))


def plain(line: str) -> str | None:
    """The command of a line; without what is for the shell, "[overrides]", and the brackets of "[temperature=T]"."""
    match = COMMAND.fullmatch(" ".join(line.split()))
    words = match[1].split() if match else []
    return " ".join(re.sub(r"^\[(\w.*)\]$", r"\1", word) for word in words if word != "[overrides]") or None


def spoken(cell: str) -> list[str]:
    """The commands of a cell, each followed by its alternatives: in brackets, or after a comma or stroke."""
    found: list[str] = []
    last, between, end = None, "", 0
    for span in SPAN.finditer(cell):
        between, end = between + cell[end : span.start()], span.end()
        if command := plain(span[1]):
            found.append(command)
            last, between = command, ""
        elif last and re.fullmatch(r"( \((or )?| / |, | or )+", between) and ALTERNATIVE.fullmatch(span[1]):
            found.append(changed(last, span[1], first="(or" in between))
        else:
            last = None
    return found


def changed(command: str, alternative: str, first: bool) -> str:
    """`alternative` in place of the word of its name; of the first setting; or of the first value that is one."""
    start, words = command.split()[:3], command.split()[3:]
    name, given, _ = alternative.partition("=")
    if given:
        places = [i for i, word in enumerate(words) if word.startswith(f"{name}=")] or ([0] if first else [len(words)])
    else:
        places = [i for i, word in enumerate(words) if not word.rpartition("=")[2].isupper()]
        alternative = "".join([*words[places[0]].rpartition("=")[:2], alternative])
    words[places[0] : places[0] + 1] = [alternative]
    return " ".join([*start, *words])
