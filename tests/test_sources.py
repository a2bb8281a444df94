"""What data.path stands for, and where a dialogue that is too long ends."""

import json
import os

import pytest

from conf.errors import UserError
from data.documents import Document, Drop, clip
from data.sources import sources_of


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_files_lists_folders_globs(tmp_path):
    a, b = write(tmp_path / "a.jsonl", {"prompt": "a"}), write(tmp_path / "b.jsonl", {"prompt": "b"})
    text = write(tmp_path / "notes.txt", "no")

    def files(path):
        return [file for source in sources_of(path) for file in source.files]

    assert files(str(a)) == files(a) == [a]
    assert files([str(b), str(a)]) == [b, a]
    assert files(str(tmp_path)) == files(str(tmp_path / "*.jsonl")) == [a, b]
    assert files(text) == files(str(tmp_path / "*.txt")) == [text]
    assert [source.given for source in sources_of([str(b), a])] == [str(b), str(a)]
    assert files(sources_of(a)) == [a]


def test_a_folder_is_its_files(tmp_path):
    """Neither folders named like files nor pipes, which nobody writes to."""
    (tmp_path / "b.jsonl").mkdir()
    os.mkfifo(tmp_path / "c.jsonl")
    with pytest.raises(UserError, match="files in the folder .* found none"):
        sources_of(str(tmp_path))
    a = write(tmp_path / "a.jsonl", {"prompt": "a"})
    assert sources_of(str(tmp_path))[0].files == [a]


def test_clip_keeps_what_can_be_supervised():
    document = Document("a", list(range(10)), [(2, 5), (7, 10)])
    assert clip(document, 10) is document
    for length in (5, 7, 8, 9):  # the second answer does not fit: the dialogue ends with the first
        assert clip(document, length).spans == [(2, 5)] and clip(document, length).input_ids == [0, 1, 2, 3, 4]
    assert clip(document, 4).spans == [(2, 4)] and len(clip(document, 4).input_ids) == 4
    own = Document("a", list(range(10)), [(6, 10)], prompt_span=(1, 5))
    assert clip(own, 8).prompt_span == (1, 5) and clip(own, 8).spans == [(6, 8)]
    with pytest.raises(Drop, match="beyond max_length"):
        clip(document, 3)
    with pytest.raises(Drop, match="shorter than two"):
        clip(Document("a", [1, 2], [(1, 2)]), 10)
