"""Records of column stores: Parquet files, Hugging Face datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keepleft.data.columns import Columns, keys, taken
from keepleft.data.reading import found
from keepleft.data.records import Record, Source, short

ROWS = 1000  # read at a time
HUB = "hf:"
SPLITS = ("train", "validation", "valid", "val", "dev", "test", "unsupervised", "all")


@dataclass(frozen=True)
class Parquet(Source):
    """One Parquet file, read row group by row group."""

    path: Path
    columns: tuple[str | int, ...] | None
    fields: tuple[str, ...]
    name: str
    size: int | None

    def __iter__(self) -> Iterator[Record]:
        try:
            import pyarrow.parquet as parquet  # type: ignore
        except ImportError as error:
            raise ImportError(f"to read {self.path} you need pyarrow: pip install 'keepleft[parquet]'") from error
        import pyarrow  # type: ignore
        try:
            file = parquet.ParquetFile(self.path)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{self.path} is not a Parquet file: {error}") from error
        with file:
            if not file.metadata.num_rows:
                raise ValueError(f"{self.path} holds no text: it has no rows")
            names = keys(_leaves(file.schema_arrow), self.columns, self.fields, str(self.path))
            tops = [top for top in file.schema_arrow.names if any(name == top or name.startswith(top + ".") for name in names)]
            n = 0
            for batch in file.iter_batches(batch_size=ROWS, columns=tops):
                for row in batch.to_pylist():
                    yield taken(row, names, partial(self.where, n))
                    n += 1

    def where(self, n: int) -> str:
        return f"{self.path} row {n + 1}"


@dataclass(frozen=True)
class Dataset(Source):
    """One split of a dataset of the `datasets` library, from its hub or a folder."""

    place: str
    columns: tuple[str | int, ...] | None
    fields: tuple[str, ...]
    size: int | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.place if self.place.startswith(HUB) else short(self.place)

    def __iter__(self) -> Iterator[Record]:
        dataset = self._loaded()
        features = dataset.features
        every = [leaf for name in features for leaf in
                 ([f"{name}.{inner}" for inner in features[name]] if isinstance(features[name], dict) else
                  [f"{name}.{inner}" for inner in getattr(features[name], "languages", ())] or [name])]
        names = keys(list(dict.fromkeys([*features, *every])), self.columns, self.fields, self.place)
        tops = [top for top in features if any(name == top or name.startswith(top + ".") for name in names)]
        words = {top: features[top].int2str for top in tops if hasattr(features[top], "int2str")}  # labels stored as numbers
        n = 0
        for batch in dataset.select_columns(tops).iter(batch_size=ROWS):
            for values in zip(*(batch[top] for top in tops), strict=True):
                row: dict[str, Any] = dict(zip(tops, values, strict=True))
                for top, word in words.items():
                    if isinstance(row[top], int) and row[top] >= 0:
                        row[top] = word(row[top])
                yield taken(row, names, partial(self.where, n))
                n += 1
        if not n:
            raise ValueError(f"{self.place} holds no text: it has no rows")

    def where(self, n: int) -> str:
        return f"{self.place} row {n + 1}"

    def _loaded(self) -> Any:
        try:
            import datasets  # type: ignore
        except ImportError as error:
            raise ImportError(f"to read {self.place} you need datasets: pip install 'keepleft[datasets]'") from error
        if not self.place.startswith(HUB):
            return datasets.load_from_disk(self.place)
        name, config, split = hub_name(self.place)
        try:
            return datasets.load_dataset(name, config, split=split)
        except Exception as error:  # its own, its HTTP client's or the system's
            raise ValueError(f"{self.place}: the dataset {name!r}, configuration {config!r}, split {split!r}, "
                             f"cannot be had: {error}") from error


def parquet_file(given: str, columns: Columns | None, fields: tuple[str, ...]) -> Parquet:
    file = found(given)
    return Parquet(file.path, None if columns is None else tuple(columns), fields, short(file.name), file.size)


def dataset(given: str, columns: Columns | None, fields: tuple[str, ...]) -> Dataset:
    """Of a name such as "hf:glue:sst2:train" or a folder of save_to_disk()."""
    folder = Path(given).expanduser()
    size = None
    if not given.startswith(HUB):
        if (folder / "dataset_dict.json").exists():
            splits = sorted(str(Path(given) / inner.parent.name) for inner in folder.glob("*/state.json"))
            raise ValueError(f"{given} holds several splits: name one of {', '.join(splits)}")
        given, size = str(folder), sum(file.stat().st_size for file in folder.glob("*.arrow"))
    else:
        hub_name(given)
    return Dataset(given, None if columns is None else tuple(columns), fields, size)


def is_dataset(given: str) -> bool:
    folder = Path(given).expanduser()
    return given.startswith(HUB) or (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def hub_name(given: str) -> tuple[str, str | None, str]:
    """NAME, CONFIG, SPLIT of hf:NAME[:CONFIG][:SPLIT]. One word after the name is a split if splits are called so."""
    parts = re.split(r":(?![^\[]*\])", given.removeprefix(HUB))  # not at the colon of train[:10%]
    if not parts[0] or len(parts) > 3:
        raise ValueError(f"{given!r} is not hf:NAME, hf:NAME:SPLIT, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    if len(parts) == 2:
        parts.insert(1 if re.split(r"[\[+]", parts[1])[0] in SPLITS else 2, "")
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or "train"


def _leaves(schema: Any) -> list[str]:
    """Column names, and those within a column that is itself a row."""
    inner = [f"{field.name}.{field.type.field(i).name}" for field in schema if _is_row(field.type)
             for i in range(field.type.num_fields)]
    return [*schema.names, *inner]


def _is_row(kind: Any) -> bool:
    return str(kind).startswith("struct")
