"""Where artefacts go: never inside the package folders."""

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """`${EYRIE_CACHE:-~/.cache/eyrie}/parts...`, created if absent."""
    root = Path(os.environ.get("EYRIE_CACHE") or Path.home() / ".cache" / "eyrie").expanduser()
    folder = root.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
