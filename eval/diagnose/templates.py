"""The chat template that prompts come in, and the one that the head was trained with."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from conf.errors import UserError
from models.chat import template_hash

SHOWN = 12  # characters of a hash


@dataclass(frozen=True)
class Templates:
    """serving: tokenizer of the prompts as they come. training: with the head's template; None where that is the same.

    said: how the two stand, in words. missing: why a mismatch can't be asked for; None: it is.
    """

    serving: object
    training: object | None
    said: str
    missing: str | None = None


def templates_of(tokenizer, named: str | None, file: str | None) -> Templates:
    """tokenizer: the verifier's. named: hash of the template that the head was trained with, None where it names none.

    file: the template that one of the two has instead of the verifier's. Raises UserError where the head's template is
    neither, and for a file that can't be read.
    """
    own = template_hash(tokenizer)
    other = None if file is None else with_template(tokenizer, _read(file))
    theirs = None if other is None else template_hash(other)
    if named is not None and named not in (own, theirs):
        found = f"{own[:SHOWN]}" + (f" and {file} is {theirs[:SHOWN]}" if file else "")
        raise UserError(
            f"the head was trained with another chat template ({named[:SHOWN]}) than the verifier has ({found}): give "
            "the one of training, template=FILE.jinja, to see what that costs"
        )
    if other is None or theirs == own:
        said = "not known: the head names no template" if named is None else f"the same ({own[:SHOWN]})"
        return Templates(tokenizer, None, said, "the head names no template" if named is None else said)
    if named == theirs:
        return Templates(tokenizer, other, f"trained with {file}, prompts in the verifier's own")
    return Templates(other, tokenizer, f"trained with the verifier's own, prompts in {file}")


def with_template(tokenizer, template: str):
    """A copy of the tokenizer with another chat template."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected a chat template (Jinja) in template={file}: {error}") from error
