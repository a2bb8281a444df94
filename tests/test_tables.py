"""Parquet, Arrow, saved datasets, the hub's layout: the same rows give the same dialogues, and faults are one line."""

import json
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.errors import UserError
from data import tables
from data.quarantine import Quarantine
from data.sources import Part, read_dialogues, sources_hash, sources_of

datasets.disable_progress_bars()
ASKED, TOLD = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALLS = [
    {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"y": "z"}}},
]
ROWS = [
    {"id": "one", "messages": [ASKED, TOLD], "category": "c"},
    {"messages": [ASKED, {"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "content": "r", "name": "f"}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "integer"}}}},
               {"type": "function", "function": {"name": "g", "parameters": {"y": {"type": "string"}}}}]},
    {"messages": [ASKED, TOLD | {"reasoning_content": "hm"}], "source": "s"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "p", "completion": "c"},
    {"turns": ["q", "r"]},
    {"text": "<|im_start|>"},
    {"input_ids": [1, 2, 3], "spans": [[1, 2], [2, 3]], "prompt_span": [0, 1]},
]  # fmt: skip


def read(path, counts=None, quarantine=None):
    return list(read_dialogues(sources_of(path), Counter() if counts is None else counts, quarantine))


def write(kind, folder, rows=ROWS):
    """A file or folder with the rows, all called rows."""
    path, keys = folder / f"rows.{kind}", dict.fromkeys(key for row in rows for key in row)
    table = pa.Table.from_pylist([dict.fromkeys(keys) | row for row in rows])
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps({"data": rows}))
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
    elif kind == "arrow":  # as datasets writes it
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    elif kind == "file.arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "saved":
        datasets.Dataset(table).save_to_disk(folder / "rows", num_shards=min(2, len(rows)))
        return folder / "rows"
    elif kind == "splits":
        parts = {"test": datasets.Dataset(table).select([0]), "train": datasets.Dataset(table)}
        datasets.DatasetDict(parts).save_to_disk(folder / "rows")
        return folder / "rows"
    else:
        inner = folder / "rows" / "data"
        inner.mkdir(parents=True)
        for split, some in (("train", rows), ("test", rows[:1])):
            write(kind.removeprefix("hub-"), inner, some).rename(inner / f"{split}-0.{kind.removeprefix('hub-')}")
        return {"path": folder / "rows", "split": "train"}
    return path


KINDS = ["jsonl", "json", "parquet", "arrow", "file.arrow", "saved", "splits", "hub-parquet", "hub-jsonl"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_are_the_same_dialogues(tmp_path, kind):
    counts = Counter()
    found = read(write(kind, tmp_path), counts)
    (tmp_path / "plain").mkdir()
    assert found == read(write("jsonl", tmp_path / "plain"))
    assert not counts and [d.id for d in found] == ["one", *(f"rows:{n}" for n in range(2, 9))]
    assert [d.place.rpartition(":")[2] for d in found] == [str(n) for n in range(1, 9)]
    calls, tools = found[1].messages[1]["tool_calls"], found[1].tools
    assert [call["function"]["arguments"] for call in calls] == [{"x": 1}, {"y": "z"}], "without a table's nulls"
    assert [list(tool["function"]["parameters"]) for tool in tools] == [["x"], ["y"]]


def test_text_gives_the_prompts(tmp_path):
    (tmp_path / "rows.txt").write_text("q\nr\n")
    assert read(tmp_path / "rows.txt") == read(write("parquet", tmp_path, [{"prompt": "q"}, {"prompt": "r"}]))


BAD = [{"prompt": "q"}, {"prompt": None}, {"prompt": " "}, {"prompt": "a\0"}, {"prompt": "r"}]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "hub-jsonl"])
def test_bad_rows_of_tables(tmp_path, kind):
    source = write(kind, tmp_path, BAD)
    with Quarantine(tmp_path / "bad.jsonl") as quarantine:
        counts = Counter()
        assert [d.messages[0]["content"] for d in read(source, counts, quarantine)] == ["q", "r"]
    assert counts == {"empty or null turn": 2, "NUL character in a turn": 1}
    bad = [json.loads(line) for line in quarantine.path.read_text().splitlines()]
    assert [(row["place"].rpartition(":")[2], row["text"]) for row in bad] == [
        ("2", "{'prompt': 'None'}"), ("3", "{'prompt': ' '}"), ("4", "{'prompt': 'a\\x00'}")
    ]  # fmt: skip


def test_bytes_that_are_no_text(tmp_path):
    words = pa.Array.from_buffers(pa.string(), 3, pa.array([b"q", b"\xff", b"r"]).buffers())
    pq.write_table(pa.table({"prompt": words}), tmp_path / "rows.parquet")
    counts = Counter()
    assert [d.id for d in read(tmp_path / "rows.parquet", counts)] == ["rows:1", "rows:3"]
    assert counts == {"not UTF-8": 1}


def test_a_number_that_is_none(tmp_path):
    table = pa.table({"prompt": ["q", "r"], "id": [float("nan"), 2.0], "answer": [float("nan"), 1.0]})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert [(d.id, len(d.messages)) for d in read(tmp_path / "rows.parquet")] == [("rows:1", 1), ("rows:2", 1)]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "hub-parquet"])
def test_columns_that_nobody_knows(tmp_path, kind):
    source = write(kind, tmp_path, [{"query": "a", "reply": "b"}])
    with pytest.raises(UserError, match="expected rows with conversations, .*, found the columns query, reply: rename"):
        read(source)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "file.arrow", "saved", "hub-parquet"])
def test_cut_short(tmp_path, kind):
    source = write(kind, tmp_path)
    file = next(path for path in sorted(tmp_path.rglob("*")) if path.suffix in (".parquet", ".arrow"))
    if kind == "hub-parquet":
        file = file.with_name("train-0.parquet")
    data = file.read_bytes()
    for cut in (0, 5, len(data) // 2):
        file.write_bytes(data[:cut])
        with pytest.raises(UserError, match="cannot read .*, which may be damaged, cut short or out of reach"):
            read(source)
        assert "\n" not in str(pytest.raises(UserError, read, source).value)


def test_columns_of_one_name_and_an_empty_state_are_one_line(tmp_path):
    column = pa.array(["a"])
    pq.write_table(pa.Table.from_arrays([column, column], ["prompt", "prompt"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="expected the column prompt of .*a.parquet once, found 2: rename"):
        read(tmp_path / "a.parquet")
    saved = write("saved", tmp_path)
    for text in ("{}", "[]"):
        (saved / "state.json").write_text(text)
        with pytest.raises(UserError, match="cannot read .*, whose state.json may be damaged"):
            read(saved)


def test_a_flipped_page_is_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"question {i}" for i in range(1000)]}), path, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)
    with pytest.raises(UserError, match="cannot read .*rows.parquet, which may be damaged"):
        read(path)


SPLITS = "expected one of the splits test, dev of {}, found {}: {{path: {}, split: NAME}}"


@pytest.mark.parametrize("layout", ["saved", "hub"])
def test_splits(tmp_path, layout, caplog):
    folder = tmp_path / "rows"
    parts = {"test": [{"prompt": "q"}], "dev": [{"prompt": "r"}]}
    if layout == "saved":
        datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()}).save_to_disk(folder)
    else:
        folder.mkdir()
        for name, rows in parts.items():
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n"
            "  - {split: test, path: test.parquet}\n  - {split: dev, path: dev.parquet}\n---\n"
        )
    assert [d.messages[0]["content"] for d in read({"path": str(folder), "split": "dev"})] == ["r"]
    with pytest.raises(UserError) as error:
        read({"path": str(folder), "split": "train"})
    assert str(error.value) == SPLITS.format(folder, "split=train", folder)
    with pytest.raises(UserError) as error:
        read(folder if layout == "saved" else {"path": folder, "name": "main"})
    assert str(error.value) == SPLITS.format(folder, "none named", folder)
    if layout == "hub":
        with pytest.raises(UserError, match=r"cannot read .*'other' not found. Available: \['main'\]"):
            read({"path": folder, "name": "other"})
    single = write("saved", tmp_path / "single") if (tmp_path / "single").mkdir() is None else None
    with pytest.raises(UserError, match="expected a dataset of several splits at .*: leave split=x out"):
        read({"path": single, "split": "x"})


def test_the_hub_out_of_reach_and_unknown(tmp_path, monkeypatch):
    """Tests are offline (HF_HUB_OFFLINE), as a laptop on a train is."""
    for call in (read, lambda path: sources_hash(sources_of(path))):
        with pytest.raises(UserError, match="found no file or folder owner/name here, and can't ask the hub"):
            call("owner/name")

    def missing(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/other' doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset_builder", missing)
    with pytest.raises(UserError, match="no such dataset on the hub, nor file or folder here: owner/other"):
        read("owner/other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    write("jsonl", tmp_path / "owner").rename("owner/other")
    (tmp_path / "owner/other").rename("owner/other.jsonl")
    assert len(read("owner/other.jsonl")) == 8, "what is here needs no hub"


def test_the_hash_of_a_hub_dataset_is_its_commit(monkeypatch):
    tables._builder.cache_clear()
    made, asked = {}, []

    def builder(path, name, revision=None):
        asked.append((path, name, revision))
        config = SimpleNamespace(name=name or "default", data_files={"train": ["hf://x"], "test": ["hf://y"]})
        splits = {"train": None, "test": None}
        made[name] = SimpleNamespace(repo_id=path, hash=f"commit-{revision}", config=config)
        made[name].as_streaming_dataset = lambda: splits
        return made[name]

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    variants = [{}, {"split": "test"}, {"name": "other"}, {"revision": "v2"}]
    hashes = [sources_hash(sources_of({"path": "owner/hashed"} | choice)) for choice in variants]
    assert len(set(hashes)) == 4
    assert sources_hash(sources_of({"path": "owner/hashed", "split": "train"})) == hashes[0]
    assert asked == [("owner/hashed", None, None), ("owner/hashed", "other", None), ("owner/hashed", None, "v2")]
    assert sources_of("owner/hashed")[0].files == []
    tables._builder.cache_clear()


def test_only_the_columns_that_are_read_are_in_memory(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = {"prompt": ["q"] * 4096, "picture": [b"x" * 11_000] * 4096}
    pq.write_table(pa.table(rows), path, use_dictionary=False, compression=None)
    assert path.stat().st_size > 40 << 20
    before, most = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    try:
        for _ in read_dialogues(sources_of(path), Counter()):
            most = max(most, pa.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4 << 20 and peak < 4 << 20


def test_hashes_are_of_the_content(tmp_path):
    hashes = {}
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        source = write(kind, tmp_path / kind)
        hashes[kind] = sources_hash(sources_of(source))
        assert hashes[kind] == sources_hash(sources_of(source))
        file = sources_of(source)[0].files[0]
        if kind in ("jsonl", "json", "parquet", "arrow"):
            renamed = file.rename(file.with_name(f"other.{kind}"))
            assert hashes[kind] == sources_hash(sources_of(renamed))
        else:
            assert file.is_file()
    different = write("saved", tmp_path, ROWS[:2])
    assert len({*hashes.values(), sources_hash(sources_of(different))}) == len(KINDS) + 1
    assert Part("saved", str(different)).files() == [different / f"data-0000{n}-of-00002.arrow" for n in (0, 1)]


def test_text_that_is_none_hides_no_wild_offset(tmp_path):
    """Arrow's own look ends at its first fault; a place outside the file behind it would end the process."""
    offsets, path = np.array([0, 1, 2], np.int32), tmp_path / "a.arrow"
    no_text = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets.copy()), pa.py_buffer(b"\xff\xfe")])
    wild = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"ab")])
    batch = pa.RecordBatch.from_arrays([no_text, wild], names=["prompt", "text"])
    offsets[1] = 1 << 28
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(UserError, match="may be damaged"):
        list(tables.read_arrow(path))
