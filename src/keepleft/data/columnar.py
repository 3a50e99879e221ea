"""Records of Parquet files and Hugging Face datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keepleft.data.columns import Columns, extract, keys
from keepleft.data.records import Record, RecordSource, basename
from keepleft.data.text_file import open_text

BATCH_ROWS = 1000  # rows read at a time
HUB_PREFIX = "hf:"
SPLIT_NAMES = ("train", "validation", "valid", "val", "dev", "test", "unsupervised", "all")


@dataclass(frozen=True)
class ParquetSource(RecordSource):
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
            raise ImportError(
                f"to read {self.path} you need pyarrow: pip install 'keepleft[parquet]'"
            ) from error
        import pyarrow  # type: ignore

        try:
            file = parquet.ParquetFile(self.path)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{self.path} is not a Parquet file: {error}") from error
        with file:
            if not file.metadata.num_rows:
                raise ValueError(f"{self.path} holds no text: it has no rows")
            names = keys(_column_names(file.schema_arrow), self.columns, self.fields, str(self.path))
            root_columns = [
                root
                for root in file.schema_arrow.names
                if any(name == root or name.startswith(root + ".") for name in names)
            ]
            n = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=root_columns):
                for row in batch.to_pylist():
                    yield extract(row, names, partial(self.location, n))
                    n += 1

    def location(self, n: int) -> str:
        return f"{self.path} row {n + 1}"


@dataclass(frozen=True)
class DatasetSource(RecordSource):
    """One split of a dataset of the `datasets` library, from the hub or a folder."""

    name_or_path: str
    columns: tuple[str | int, ...] | None
    fields: tuple[str, ...]
    size: int | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.name_or_path if self.name_or_path.startswith(HUB_PREFIX) else basename(self.name_or_path)

    def __iter__(self) -> Iterator[Record]:
        dataset = self._load()
        features = dataset.features
        nested_columns = [
            column
            for name in features
            for column in (
                [f"{name}.{key}" for key in features[name]]
                if isinstance(features[name], dict)
                else [f"{name}.{key}" for key in getattr(features[name], "languages", ())] or [name]
            )
        ]
        names = keys(
            list(dict.fromkeys([*features, *nested_columns])), self.columns, self.fields, self.name_or_path
        )
        root_columns = [
            root for root in features if any(name == root or name.startswith(root + ".") for name in names)
        ]
        # class labels are stored as integers
        label_names = {
            root: features[root].int2str for root in root_columns if hasattr(features[root], "int2str")
        }
        n = 0
        for batch in dataset.select_columns(root_columns).iter(batch_size=BATCH_ROWS):
            for values in zip(*(batch[root] for root in root_columns), strict=True):
                row: dict[str, Any] = dict(zip(root_columns, values, strict=True))
                for root, int2str in label_names.items():
                    if isinstance(row[root], int) and row[root] >= 0:
                        row[root] = int2str(row[root])
                yield extract(row, names, partial(self.location, n))
                n += 1
        if not n:
            raise ValueError(f"{self.name_or_path} holds no text: it has no rows")

    def location(self, n: int) -> str:
        return f"{self.name_or_path} row {n + 1}"

    def _load(self) -> Any:
        try:
            import datasets  # type: ignore
        except ImportError as error:
            raise ImportError(
                f"to read {self.name_or_path} you need datasets: pip install 'keepleft[datasets]'"
            ) from error
        if not self.name_or_path.startswith(HUB_PREFIX):
            return datasets.load_from_disk(self.name_or_path)
        name, config, split = hub_name(self.name_or_path)
        try:
            # datasets 4 and newer run no code of a dataset; which dataset to trust is the user's choice
            return datasets.load_dataset(name, config, split=split)  # nosec B615
        except Exception as error:  # its own, its HTTP client's or the system's
            raise ValueError(
                f"{self.name_or_path}: the dataset {name!r}, configuration {config!r}, split {split!r}, "
                f"cannot be had: {error}"
            ) from error


def parquet_file(path: str, columns: Columns | None, fields: tuple[str, ...]) -> ParquetSource:
    file = open_text(path)
    return ParquetSource(
        file.path, None if columns is None else tuple(columns), fields, basename(file.name), file.size
    )


def dataset(name_or_path: str, columns: Columns | None, fields: tuple[str, ...]) -> DatasetSource:
    """The source of a name such as "hf:glue:sst2:train", or of a folder written by save_to_disk()."""
    folder = Path(name_or_path).expanduser()
    size = None
    if not name_or_path.startswith(HUB_PREFIX):
        if (folder / "dataset_dict.json").exists():
            splits = sorted(
                str(Path(name_or_path) / state_file.parent.name) for state_file in folder.glob("*/state.json")
            )
            raise ValueError(f"{name_or_path} holds several splits: name one of {', '.join(splits)}")
        name_or_path, size = str(folder), sum(file.stat().st_size for file in folder.glob("*.arrow"))
    else:
        hub_name(name_or_path)
    return DatasetSource(name_or_path, None if columns is None else tuple(columns), fields, size)


def is_dataset(name_or_path: str) -> bool:
    folder = Path(name_or_path).expanduser()
    return (
        name_or_path.startswith(HUB_PREFIX)
        or (folder / "dataset_dict.json").is_file()
        or (folder / "state.json").is_file()
    )


def hub_name(dataset_name: str) -> tuple[str, str | None, str]:
    """NAME, CONFIG and SPLIT of hf:NAME[:CONFIG][:SPLIT].

    A single word after the name is a split if it is one of SPLIT_NAMES, else a configuration.
    """
    # do not split at the colon of train[:10%]
    parts = re.split(r":(?![^\[]*\])", dataset_name.removeprefix(HUB_PREFIX))
    if not parts[0] or len(parts) > 3:
        raise ValueError(
            f"{dataset_name!r} is not hf:NAME, hf:NAME:SPLIT, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
        )
    if len(parts) == 2:
        parts.insert(1 if re.split(r"[\[+]", parts[1])[0] in SPLIT_NAMES else 2, "")
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or "train"


def _column_names(schema: Any) -> list[str]:
    """Column names, and those nested in struct columns, as "translation.en"."""
    nested = [
        f"{field.name}.{field.type.field(i).name}"
        for field in schema
        if _is_struct(field.type)
        for i in range(field.type.num_fields)
    ]
    return [*schema.names, *nested]


def _is_struct(arrow_type: Any) -> bool:
    return str(arrow_type).startswith("struct")
