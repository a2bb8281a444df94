"""Data from anywhere: every row is a dialogue or a Drop with a reason, every file gives rows or one line."""

import gzip
import io
import json
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load

import fuzz
from conf.errors import UserError
from data.documents import Document, Drop
from data.log import RoundLog
from data.quarantine import Quarantine
from data.rows import Dialogue, parse_row
from data.server_states import ServerStates
from data.sources import read_dialogues, sources_of
from data.store import StateStore
from data.tokens import to_documents
from eval.prompts import load_prompts
from models.chat import render_text
from tiny import CHATML, tiny_tokenizer, tiny_verifier

USER, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ROWS = (
    {"id": "a", "category": "c", "source": "s", "messages": [{"role": "system", "content": "Be."}, USER, ANSWER]},
    {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}], "system": "Be."},
    {"messages": [USER, ANSWER | {"tool_calls": [CALL]}, {"role": "tool", "content": "2"}, ANSWER], "tools": [TOOL]},
    {"messages": [USER, ANSWER | {"reasoning_content": "hm"}]},
    {"turns": ["one", "two"], "question_id": 7},
    {"prompt": "Hi?", "completion": "Yes."},
    {"text": "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"},
    {"input_ids": [1, 5, 6, 7, 2], "answer_start": 2},
    {"input_ids": [1, 5, 6, 7, 2], "spans": [[2, 3], [4, 5]], "prompt_span": [0, 1], "conversations": [USER, ANSWER]},
)


@cache
def verifier():
    return tiny_verifier(hidden=32, vocab=300, aux_layers=[2, 4, 5])


def sound(dialogue: Dialogue) -> None:
    assert all(isinstance(message["content"], str) for message in dialogue.messages)
    for text in (dialogue.id, dialogue.source, dialogue.category, dialogue.text or ""):
        text.encode()
    json.dumps(dialogue.messages, ensure_ascii=False).encode()
    assert dialogue.messages or dialogue.text or dialogue.input_ids


@fuzz.fuzz(fuzz.jsons(*ROWS), json.dumps(ROWS[0]).encode(), refusals=(Drop,))
def test_rows(data, folder):
    dialogue = parse_row(data.decode("utf-8", errors="surrogateescape"), "x", "file:1")
    sound(dialogue)


@fuzz.fuzz(fuzz.jsons(*ROWS), json.dumps(ROWS[0]).encode(), refusals=(Drop, UserError))
def test_documents_of_rows(data, folder):
    """Under a template, to token ids."""
    for document in to_documents(parse_row(data.decode("utf-8", errors="surrogateescape"), "x"), verifier()):
        assert all(0 <= token < 300 for token in document.input_ids)


def read_all(path: Path) -> list[Dialogue]:
    counts: Counter[str] = Counter()
    with Quarantine(path.with_name("quarantine.jsonl")) as quarantine:
        found = list(read_dialogues(sources_of(str(path)), counts, quarantine))
    for dialogue in found:
        sound(dialogue)
    noted = path.with_name("quarantine.jsonl")
    for line in noted.read_text(encoding="utf-8").split("\n")[:-1] if noted.exists() else ():
        assert set(json.loads(line)) == {"place", "reason", "text"}
    return found


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
some_lines = st.lists(fuzz.jsons(*ROWS), max_size=4).map(b"\n".join)


def table(kind: str) -> bytes:
    rows = pa.Table.from_pylist([{"messages": [USER, ANSWER], "id": str(n), "n": n} for n in range(5)])
    stream = io.BytesIO()
    if kind == "parquet":
        pq.write_table(rows, stream)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(stream, rows.schema) as writer:
            writer.write_table(rows)
    return stream.getvalue()


def file_of(name: str):
    def check(data, folder):
        path = folder / name
        (folder / "quarantine.jsonl").unlink(missing_ok=True)
        path.write_bytes(data)
        read_all(path)

    check.__name__ = f"test_{name}"
    return check


test_jsonl = fuzz.fuzz(some_lines | fuzz.files(LINES), LINES)(file_of("a.jsonl"))
PACKED = gzip.compress(LINES, mtime=0)
packed = fuzz.files(PACKED) | some_lines.map(lambda lines: gzip.compress(lines, mtime=0))
test_gz = fuzz.fuzz(packed, PACKED)(file_of("a.jsonl.gz"))
test_json = fuzz.fuzz(fuzz.jsons(list(ROWS), {"train": list(ROWS)}), json.dumps(ROWS).encode())(file_of("a.json"))
test_text = fuzz.fuzz(fuzz.files(b"one\n\ntwo\n") | fuzz.texts().map(fuzz.utf8), b"one\n")(file_of("a.txt"))
test_parquet = fuzz.fuzz(fuzz.files(table("parquet")), table("parquet"))(file_of("a.parquet"))
test_arrow_file = fuzz.fuzz(fuzz.files(table("file")), table("file"))(file_of("a.arrow"))
test_arrow_stream = fuzz.fuzz(fuzz.files(table("stream")), table("stream"))(file_of("b.arrow"))


@fuzz.fuzz(some_lines | fuzz.files(LINES), LINES)
def test_suites(data, folder):
    (folder / "suite.jsonl").write_bytes(data)
    assert all(prompt.input_ids for prompt in load_prompts(verifier(), str(folder / "suite.jsonl")))


# --- caches ---------------------------------------------------------------------------------------------------


@cache
def rounds() -> bytes:
    with TemporaryDirectory() as folder:
        log = RoundLog(Path(folder) / "rows.jsonl")
        log.append([{"id": "a"}, {"id": "b"}], 2, Counter(used=2), 1.0)
        log.append([{"id": "c"}], 3, Counter(used=1), 0.5)
        return log.path.read_bytes()


@fuzz.fuzz(fuzz.files(rounds()) | fuzz.jsons(json.loads(rounds().splitlines()[-1])), rounds(), refuses=False)
def test_round_log(data, folder):
    """Whatever is in the file, it can be continued, and what was written is read again."""
    path = folder / "rows.jsonl"
    path.write_bytes(data)
    before = len(RoundLog(path))
    log = RoundLog(path)
    assert len(log) == len(list(log)) == before  # the first look has settled it
    log.append([{"id": "new"}], log.used + 1, Counter(used=1), 0.1)
    again = RoundLog(path)
    assert len(again) == before + 1 and again.used == log.used and list(again)[-1]["id"] == "new"


DOCUMENTS = [Document(str(n), list(range(3 + n, 15 + n)), [(4, 12)]) for n in range(4)]


@cache
def stored() -> fuzz.Folder:
    with TemporaryDirectory() as folder:
        StateStore.capture(verifier(), DOCUMENTS, Path(folder), shard_tokens=24)
        return fuzz.Folder({path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()})


def stores():
    whole, others = stored(), {}
    for name, data in whole.items():
        if name.endswith(".safetensors"):
            others[name] = fuzz.tensor_files(load(data))
        elif name.endswith(".json"):
            others[name] = fuzz.jsons(json.loads(data))
    return fuzz.folders(whole, others)


@fuzz.fuzz(stores(), stored())
def test_state_store(files, folder):
    """What is damaged is told or computed anew; states are never other than they were."""
    store = StateStore.capture(verifier(), DOCUMENTS, files.put(folder), shard_tokens=24)
    store.verify()
    states = store.states(range(4))
    assert states.aux_BTAD.shape == (1, 48, 3, 32) and torch.equal(states.aux_BTAD, expected().aux_BTAD)


@cache
def expected():
    with TemporaryDirectory() as folder:
        return StateStore.capture(verifier(), DOCUMENTS, stored().put(Path(folder)), shard_tokens=24).states(range(4))


# --- servers --------------------------------------------------------------------------------------------------

STATES = {"hidden_states": torch.zeros(12, 4, 32), "token_ids": torch.arange(3, 15)}


@cache
def states_reader() -> ServerStates:
    reader = ServerStates.__new__(ServerStates)
    reader.url, reader.layers, reader.verifier, reader.model = "http://x", [2, 4, 5, 8], verifier(), "m"
    return reader


@fuzz.fuzz(fuzz.tensor_files(STATES), fuzz.safetensors.torch.save(STATES))
def test_states_that_a_server_wrote(data, folder):
    path = folder / "a.safetensors"
    path.write_bytes(data)
    reader = states_reader()
    assert reader._read(reader._its_own(str(path)), DOCUMENTS[0]).shape == (12, 4, 32)
    assert not path.exists()


def completion(path: str) -> dict:
    return {"choices": [{"token_ids": [3], "text": "a"}], "kv_transfer_params": {"hidden_states_path": path}}


@fuzz.fuzz(fuzz.changed(completion("/nowhere/a.safetensors")), None, takes=False)
def test_where_a_server_says_that_states_are(values, folder):
    reader = states_reader()
    reader._ask = lambda *_: values
    reader._fetch(DOCUMENTS[0])


# --- templates ------------------------------------------------------------------------------------------------

PIECES = (
    *("{{", "}}", "{%", "%}", "messages", "message", "['content']", "for", "in", "endfor", "if", "endif", "set", "x"),
    *("range(9)", "+", "'", "|", "tojson", "trim", ".", "__class__", "raise_exception('a\nb')", "loop.index0", "[0]"),
    *("strftime_now('%Y')", "namespace(a=1)", "import", "'/etc/passwd'", "(", ")", "*", "9", "\0", "{#", "macro f()"),
)
templates = st.one_of(
    fuzz.files(CHATML.encode()).map(lambda data: data.decode("utf-8", errors="replace")),
    st.lists(st.sampled_from(PIECES), max_size=8).map(" ".join),
    st.lists(st.sampled_from(PIECES), max_size=8).map(lambda words: f"{CHATML}{{{{ {' '.join(words)} }}}}"),
)


@fuzz.fuzz(templates, CHATML)
def test_chat_templates(template, folder):
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = template
    assert isinstance(render_text(tokenizer, [USER, ANSWER], True), str)
