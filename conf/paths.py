"""Where artefacts go: never inside the package folders."""

import os
from pathlib import Path

from conf.errors import UserError


def cache_dir(*parts: str) -> Path:
    """`${EYRIE_CACHE:-~/.cache/eyrie}/parts...`, created if absent."""
    root = Path(os.environ.get("EYRIE_CACHE") or Path.home() / ".cache" / "eyrie").expanduser()
    return made(root.joinpath(*parts))


def made(folder: Path) -> Path:
    """A folder, created if absent. UserError where none can be, as below /proc; OSError where the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise UserError(f"cannot make the folder {folder} ({error.strerror}): choose another place") from None
    return folder
