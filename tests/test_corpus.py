"""Documents on disk are the documents; a run that was stopped anywhere, or a damaged part, ends in the same bytes."""

import hashlib
import json
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data.parts
from conf.errors import UserError
from data.batches import PackedLoader
from data.convert import Conversion, Converter
from data.corpus import Columns, Corpus, content_hash
from data.documents import Document, with_prompt
from data.parts import tokenized
from data.rows import Dialogue
from data.tokens import draft_vocab, label_counts
from data.unique import document_key
from tiny import tiny_tokenizer
from tiny_writer import turns


def documents(number=50, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for index in range(number):
        length = int(rng.integers(12, 60))
        spans = [(4, 8), (8, length)] if index % 3 else [(5, length - 1)]
        prompt = (1, 3) if index % 2 else None
        made.append(Document(f"d{index}", rng.integers(3, 500, length).tolist(), spans, "made", prompt))
    return made


def plain_hash(some):
    """content_hash as stores and checkpoints of earlier versions have it."""
    return hashlib.sha256(b"".join(bytes.fromhex(document.content_hash) for document in some)).hexdigest()


@pytest.mark.parametrize("batches", [1, 4])
def test_a_corpus_is_its_documents(batches):
    plain = documents()
    size = -(-len(plain) // batches)
    parts = [Corpus.of(plain[first : first + size]) for first in range(0, len(plain), size)]
    corpus = Corpus([part._parts.parts[0].batch for part in parts])
    order = np.random.default_rng(1).permutation(50).tolist()
    wide = [with_prompt(document) for document in plain]
    for found, wanted in (
        (corpus, plain),
        (corpus[7:31:3], plain[7:31:3]),
        (corpus.select(order), [plain[index] for index in order]),
        (corpus.with_prompts(), wide),
        (corpus.with_prompts().select(order)[5:], [wide[index] for index in order[5:]]),
        (corpus[:0], []),
    ):
        assert list(found) == wanted and len(found) == len(wanted)
        assert found.lengths_N.tolist() == [len(document.input_ids) for document in wanted]
        assert found.labels_N.tolist() == [document.labels for document in wanted]
        assert found.answer_tokens_N.tolist() == [document.answer_tokens for document in wanted]
        assert found.content_hash == plain_hash(wanted) and Corpus.of(wanted).content_hash == plain_hash(wanted)
        counts_V = torch.zeros(500, dtype=torch.int64)
        for document in wanted:
            for start, end in document.spans:
                counts_V += torch.bincount(torch.tensor(document.input_ids[start + 1 : end]).long(), minlength=500)
        assert torch.equal(label_counts(found, 500), counts_V)
    assert content_hash(corpus, corpus[:3]) == plain_hash(plain + plain[:3])
    assert corpus.keys_N.tolist() == [document_key(document) for document in plain]
    assert corpus[-1] == plain[-1] and corpus[np.int64(3)] == plain[3]
    with pytest.raises(IndexError):
        corpus[50]
    assert Corpus.of(corpus) is corpus and len(Corpus.of([])) == 0 and Corpus.of([]).lengths_N.tolist() == []


def test_names_that_no_file_can_hold():
    """JSON may escape half a character."""
    (found,) = Corpus.of([Document("a\ud800b", [1, 2], [(0, 2)], "\udfff")])
    assert (found.id, found.source) == ("a?b", "?")


def test_split_is_disjoint_complete_and_by_content():
    """speculators #868: 12501 rows, a fifth held out."""
    plain = [Document(str(i), [1, i, 2 + i % 7], [(1, 3)]) for i in range(12501)]
    corpus, hashes = Corpus.of(plain), sorted(document.content_hash for document in plain)
    for wanted in (12500, 24, 0):
        train, validation = corpus.split(wanted)
        held = set(hashes[: min(wanted, 2500)])
        assert list(validation) == [document for document in plain if document.content_hash in held]
        assert list(train) == [document for document in plain if document.content_hash not in held]
    backwards = corpus.select(range(12500, -1, -1)).split(24)[1]
    assert {document.id for document in backwards} == {document.id for document in corpus.split(24)[1]}


def test_documents_of_one_question_stay_together():
    columns = Columns()
    for index in range(600):
        columns.add(Document(str(index), [1, index, 2], [(1, 3)]), question=index // 3 + 1 if index < 300 else 0)
    train, validation = Corpus([columns.batch()]).split(100)
    sides = [{int(document.id) // 3 for document in side if int(document.id) < 300} for side in (train, validation)]
    assert not sides[0] & sides[1] and len(sides[1]) > 5 and len(sides[0] | sides[1]) == 100
    assert 98 <= len(validation) <= 100 and len(train) + len(validation) == 600


def test_vocabulary_and_plan_take_the_corpus_as_it_is():
    plain = documents()
    corpus = Corpus.of(plain)
    assert draft_vocab(corpus, 500, 40)[0].ids_R.tolist() == draft_vocab(plain, 500, 40)[0].ids_R.tolist()
    loaders = [PackedLoader(SimpleNamespace(documents=some), 128, seed=3) for some in (corpus, plain)]
    assert list(loaders[0].plan(1)) == list(loaders[1].plan(1)) and loaders[0].state_dict() == loaders[1].state_dict()


# --- parts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(data.parts, "PART_ROWS", 10)


def verifier():
    return SimpleNamespace(tokenizer=tiny_tokenizer(), eos_ids=(2,), vocab_size=512, name="tiny")


def dialogues(number=64):
    """Every seventh cannot be used, every ninth is there already."""
    for index in range(number):
        question, answer = (
            f"What is {index % 9 and index}?",
            "<|im_end|>x" if index % 7 == 3 else f"It is {index % 9 and index}.",
        )
        yield Dialogue(f"n{index}", "s", turns(question, answer), place=f"file:{index + 1}")


def reader(stop_at=None):
    """Gives the dialogues, counting a bad row before every eighth; stops as a kill would at `stop_at`."""

    def read(bad, quarantine):
        for index, dialogue in enumerate(dialogues()):
            if index == stop_at:
                raise KeyboardInterrupt
            if index % 8 == 0:
                bad["made up"] += 1
                quarantine.add(f"before:{index}", "made up", "text")
            yield dialogue

    return read


def make(folder, read=None, **how):
    return tokenized(folder, Converter(verifier(), Conversion(64, **how)), read or reader())


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture
def whole(small_parts, tmp_path):
    return make(tmp_path / "whole"), bytes_of(tmp_path / "whole")


def test_parts_hold_all_that_is_left_and_the_quarantine_the_rest(whole):
    (corpus, counts), files = whole
    used = [index for index in range(64) if index % 7 != 3 and (index % 9 or index == 0)]
    assert [document.id for document in corpus] == [f"n{index}" for index in used]
    assert counts == {"made up": 8, "end-of-turn token inside an answer": 9, "duplicate document": 64 - 9 - len(used)}
    assert len([name for name in files if name.endswith(".arrow")]) == 7
    rows = [json.loads(line) for line in files["quarantine.jsonl"].splitlines()]
    assert len(rows) == counts.total()
    assert {"place": "file:4", "reason": "end-of-turn token inside an answer", "text": "What is 3?"} in rows
    entry = json.loads(files["part-00001.json"])
    assert entry["rows"] == 10 and entry["sha256"] == hashlib.sha256(files["part-00001.arrow"]).hexdigest()


@pytest.mark.parametrize("stop_at", [0, 1, 9, 10, 11, 35, 59, 63])
def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(whole, tmp_path, stop_at):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "cut", reader(stop_at))
    assert len(list((tmp_path / "cut").glob("part-*.json"))) == stop_at // 10
    (tmp_path / "cut" / "part-00000.arrow.1-ab.tmp").write_bytes(b"half")
    corpus, counts = make(tmp_path / "cut")
    assert bytes_of(tmp_path / "cut") == whole[1] and (list(corpus), counts) == (list(whole[0][0]), whole[0][1])


def test_a_source_that_shrinks_between_two_runs(small_parts, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, reader(35))
    with pytest.raises(UserError, match="expected the 10 dialogues that were read before, found 4: data.path has"):
        make(tmp_path, lambda bad, quarantine: islice(dialogues(), 4))


def test_a_complete_corpus_is_not_read_again(whole, tmp_path):
    def never(bad, quarantine):
        raise AssertionError("there is nothing to read")

    corpus, counts = make(tmp_path / "whole", never)
    assert (list(corpus), counts) == (list(whole[0][0]), whole[0][1]) and bytes_of(tmp_path / "whole") == whole[1]


@pytest.mark.parametrize("name", ["part-00002.arrow", "part-00002.json", "complete.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "empty"])
def test_damage_is_noticed_and_mended(whole, tmp_path, name, damage, caplog, fault):
    path = tmp_path / "whole" / name
    body = path.read_bytes()
    middle = len(body) // 2
    path.unlink()
    if damage != "gone":
        flipped = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        path.write_bytes({"cut": body[:middle], "flipped": flipped, "empty": b""}[damage])
    corpus, _ = make(tmp_path / "whole")
    assert list(corpus) == list(whole[0][0])
    if name == "part-00002.arrow":
        assert f"part 2 of {tmp_path / 'whole'} is damaged and will be made again" in caplog.text
        shown = "a warning: documents: part 2 of FOLDER is damaged and will be made again"
        fault(f"a file of tokenised documents is {damage}", shown, "nothing: the same bytes again")
    assert bytes_of(tmp_path / "whole") == whole[1]


def test_limits_end_the_reading(small_parts, tmp_path):
    read = []

    def endless(bad, quarantine):
        for index in count():
            read.append(index)
            yield Dialogue(f"n{index}", "s", turns(f"What is {index}?", "It is."))

    corpus, _ = make(tmp_path / "documents", endless, max_documents=23)
    assert len(corpus) == len(read) == 23
    corpus, _ = make(tmp_path / "tokens", endless, max_tokens=30)
    assert corpus.answer_tokens_N[:-1].sum() < 30 <= corpus.answer_tokens_N.sum() and len(read) == 23 + 10


def test_a_limit_and_a_kill_after_the_last_part_leave_the_same_bytes(small_parts, tmp_path):
    make(tmp_path / "cut", max_tokens=90)
    before = bytes_of(tmp_path / "cut")
    assert json.loads(before["complete.json"])["read"]["made up"] < 8, "the limit should end the reading"
    (tmp_path / "cut" / "complete.json").unlink()
    make(tmp_path / "cut", max_tokens=90)
    assert bytes_of(tmp_path / "cut") == before


def test_a_corpus_of_nothing_says_why(small_parts, tmp_path):
    def bad(counts, quarantine):
        yield from (dialogue for index, dialogue in enumerate(dialogues()) if index % 7 == 3)

    for _ in range(2):  # it is complete then, and no better
        with pytest.raises(
            UserError, match="template of tiny, could use none of 9: 9 end-of-turn token inside an answer"
        ):
            make(tmp_path / "none", bad)


def test_a_disk_that_refuses_names_the_part(small_parts, tmp_path, monkeypatch):
    monkeypatch.setattr(data.parts, "_path", lambda folder, number: folder / "missing" / f"part-{number:05d}.arrow")
    with pytest.raises(OSError, match="missing/part-00000.arrow"):
        make(tmp_path / "refused")
