"""Rows of tables: Parquet, Arrow, datasets saved to disk and datasets of the hub, a few hundred of them in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import UserError
from data.documents import Drop
from data.json_rows import parse
from data.rows import KEYS, SHAPES

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

log = logging.getLogger(__name__)

BATCH = 256  # rows
Row = tuple[int, Any, None]


def read_parquet(path: Path) -> Iterator[Row]:
    """Numbered rows, of the known columns alone. Raises UserError, as all readers here, for what can't be read."""
    import pyarrow.parquet as pq

    with _reading(path), pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        yield from _rows(file.iter_batches(BATCH, columns=_known(file.schema_arrow.names, path)), path)


def read_arrow(path: Path) -> Iterator[Row]:
    """Of an IPC stream, as `datasets` writes them, or an IPC file."""
    import pyarrow as pa

    with _reading(path), pa.memory_map(str(path)) as stream:
        if stream.read(6) == b"ARROW1":
            file = pa.ipc.open_file(stream)
            batches: Iterable = map(file.get_batch, range(file.num_record_batches))
        else:
            stream.seek(0)
            batches = pa.ipc.open_stream(stream)
        yield from _rows(batches, path)


def read_saved(path: Path, split: str | None) -> Iterator[Row]:
    """Of a folder that `save_to_disk` wrote."""
    with _reading(path):
        yield from _rows(_saved(path, split).with_format("arrow").iter(BATCH), path)


def saved_files(path: Path, split: str | None) -> list[Path]:
    """Its files, in order."""
    with _reading(path):
        return [Path(file["filename"]) for file in _saved(path, split).cache_files]


def read_hub(path: str, split: str | None, name: str | None, revision: str | None) -> Iterator[Row]:
    """Of a dataset of the hub, or a folder laid out as there, streamed: nothing is stored, no code of it is run."""
    with _reading(path):
        parts = _builder(path, name, revision).as_streaming_dataset()
        found = parts[_split(split, list(parts), path)]
        if found.column_names is not None:
            found = found.select_columns(_known(found.column_names, path))
        yield from _rows(found.with_format("arrow").iter(BATCH), path)


def hub_files(path: str, split: str | None, name: str | None, revision: str | None) -> list[Path]:
    """Of a folder laid out as on the hub: its files, in order. Of a dataset of the hub: none."""
    with _reading(path):
        builder = _builder(path, name, revision)
        if builder.repo_id is not None:
            return []
        files = {str(part): files for part, files in builder.config.data_files.items()}
        return [Path(file) for file in files[_split(split, list(files), path)]]


def hub_commit(path: str, split: str | None, name: str | None, revision: str | None) -> list[str]:
    """What the rows of a dataset of the hub follow from."""
    with _reading(path):
        builder = _builder(path, name, revision)
        chosen = _split(split, list(builder.as_streaming_dataset()), path)
        return [builder.repo_id, builder.hash, builder.config.name, chosen]


@lru_cache
def _builder(path: str, name: str | None, revision: str | None) -> datasets.DatasetBuilder:
    """Asked once, so that hash and rows are of the same commit."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it logs of an error, the error says too
    try:
        return datasets.load_dataset_builder(path, name, revision=revision)
    except DatasetNotFoundError as error:
        raise UserError(f"no such dataset on the hub, nor file or folder here: {path} ({error}); check it") from None
    except ConnectionError as error:
        raise UserError(
            f"found no file or folder {path} here, and can't ask the hub for a dataset of that name ({error}): "
            "check the path, or the network"
        ) from None


def _saved(path: Path, split: str | None) -> datasets.Dataset:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (KeyError, TypeError, AttributeError) as error:  # of its JSON, which datasets takes as it is
        raise UserError(f"cannot read {path}, whose state.json may be damaged ({error!r}): save it again") from None
    if isinstance(found, datasets.DatasetDict):
        return found[_split(split, list(found), path)]
    if split is not None:
        raise UserError(f"expected a dataset of several splits at {path}, found a single one: leave split={split} out")
    return found


def _split(wanted: str | None, splits: list[str], path: str | Path) -> str:
    """The one wanted, "train", or the only one."""
    splits = [str(split) for split in splits]
    chosen = wanted or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
    if chosen not in splits:
        found = "found none named" if wanted is None else f"found split={wanted}"
        raise UserError(
            f"expected one of the splits {', '.join(splits)} of {path}, {found}: {{path: {path}, split: NAME}}"
        )
    if wanted is None and len(splits) > 1:
        log.info(f"{path}: split {chosen} of {', '.join(splits)}")
    return chosen


def _known(columns: list[str], path: str | Path) -> list[str]:
    known = [column for column in columns if column in KEYS]
    if not known:
        raise UserError(f"expected rows with {SHAPES} in {path}, found the columns {', '.join(columns)}: rename them")
    if twice := next((column for column in known if known.count(column) > 1), None):
        raise UserError(f"expected the column {twice} of {path} once, found {known.count(twice)}: rename the others")
    return known


def _rows(tables: Iterable[pa.Table | pa.RecordBatch], path: str | Path) -> Iterator[Row]:
    number = 0
    for table in tables:
        table = table.select(_known(table.schema.names, path))
        _check(table)
        for start in range(0, table.num_rows, BATCH):
            for row in _values(table.slice(start, BATCH)):
                number += 1
                yield number, row, None


def _check(table: pa.Table | pa.RecordBatch) -> None:
    """ArrowInvalid where values would lie outside the file's own bytes: an Arrow file is memory, used as it is."""
    import pyarrow as pa

    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        # Such rows are dropped one by one. The first fault ends the look: what stands behind it is looked at as bytes.
        for column in table.columns:
            for part in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                part = part.storage if isinstance(part, pa.ExtensionArray) else part
                part.view(_as_bytes(part.type)).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes in place of text, at any depth."""
    import pyarrow as pa

    plain = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    for is_list, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(kind):
            return make(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return plain.get(kind, kind)


def _values(table: pa.Table | pa.RecordBatch) -> list[dict | Drop]:
    types = {field.name: field.type for field in table.schema}
    try:
        return [{key: _value(value, types[key]) for key, value in row.items()} for row in table.to_pylist()]
    except (UnicodeDecodeError, SystemError, Drop) as error:  # Drop: of JSON in a column
        if table.num_rows == 1:
            return [error if isinstance(error, Drop) else Drop("not UTF-8")]
        return [value for index in range(table.num_rows) for value in _values(table.slice(index, 1))]


def _value(value: Any, kind: pa.DataType) -> Any:
    """As JSON would have it: without the nulls that stand for what an object of this row lacks. NaN is null too.

    `datasets` keeps as JSON text, in a type of its own, what rows have in several types. Raises Drop.
    """
    if value is None or (isinstance(value, float) and value != value):
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return parse(value)
    if isinstance(value, dict):
        inner = ((key, _value(item, kind.field(key).type)) for key, item in value.items())
        return {key: item for key, item in inner if item is not None}
    if isinstance(value, list) and value and not isinstance(value[0], int | tuple):
        return [_value(item, kind.value_type) for item in value]
    return value


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Turns what the libraries raise, which has no common type, into one line."""
    import httpx
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, pa.ArrowException, DatasetsError, httpx.HTTPError) as error:
        raise UserError(f"cannot read {path}, which may be damaged, cut short or out of reach ({error})") from None
