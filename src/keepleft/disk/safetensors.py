"""Safetensors files, single or sharded: read some rows at a time, with checksums; written atomically."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepleft.disk.atomic import sync
from keepleft.disk.regular_file import MAX_JSON_BYTES, exists_in, open_file_in, read_file_in, resolve_file_in

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_SHARD_BYTES = 5 << 30
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
CHECKSUMS_KEY = "keepleft.crc32"  # in a file's metadata: the checksum of each tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """One safetensors file of a directory.

    Opening it checks what it is, header and size. A tensor that is read in order, from first row to last, is
    checked against its checksum where the file has one. Raises ValueError for a damaged file, or one that is
    not regular.
    """

    def __init__(self, folder: Path, name: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.name = name
        self.path = path = folder / name
        with open_file_in(folder, name) as raw:
            header_size = int.from_bytes(raw.read(8), "little")
            header_text = raw.read(header_size) if header_size <= MAX_HEADER_BYTES else b""
        try:
            if header_size > MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {header_size:,} bytes; {MAX_HEADER_BYTES:,} are allowed")
            # the library's own checks: header, offsets, size
            with safe_open(resolve_file_in(folder, name), framework="pt") as file:
                metadata = file.metadata() or {}
            self.header: dict[str, Any] = json.loads(header_text)
            self.checksums: dict[str, int] = dict(json.loads(metadata.get(CHECKSUMS_KEY, "{}")))
        except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a whole safetensors file ({error}): copy or download it again"
            ) from error
        self.header.pop("__metadata__", None)
        self.data_start = 8 + header_size
        # by tensor: how many of its bytes were read in order, and their checksum
        self.running_checksums: dict[str, tuple[int, int]] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.header[name]["shape"])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows begin … end - 1 of a tensor; a scalar has one row."""
        entry = self.header[name]
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"the tensor {name!r} in {self.path} is of type {entry['dtype']}: there are "
                f"{', '.join(DTYPES)}"
            )
        dtype = DTYPES[entry["dtype"]]
        _, *row_shape = entry["shape"] or [1]
        row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
        start, stop = entry["data_offsets"]
        data = bytearray((end - begin) * row_bytes)
        with open_file_in(self.folder, self.name) as raw:
            raw.seek(self.data_start + start + begin * row_bytes)
            num_read = raw.readinto(data)  # type: ignore[attr-defined]
        if num_read != len(data):
            raise ValueError(f"{self.path} was cut short while it was read: load it again once it is written")
        self._verify_checksum(name, data, begin * row_bytes, stop - start)
        if not data:
            return torch.empty(0, *row_shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(end - begin, *row_shape)

    def _verify_checksum(self, name: str, data: bytearray, offset: int, total: int) -> None:
        """Add bytes that were read in order to a tensor's checksum; compare it after the last of them."""
        if name not in self.checksums:
            return
        num_checked, crc = self.running_checksums.get(name, (0, 0))
        if offset == 0:
            num_checked, crc = 0, 0
        if offset != num_checked:
            return
        num_checked += len(data)
        crc = zlib.crc32(data, crc)
        self.running_checksums[name] = (num_checked, crc)
        if num_checked == total and crc != self.checksums[name]:
            raise ValueError(
                f"the tensor {name!r} in {self.path} is damaged (its checksum differs): copy or download it "
                "again"
            )


class ShardedDirectory:
    """The tensors of a model directory, in one file or in shards. Raises ValueError if some are missing."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, SafetensorsFile] = {}
        if exists_in(folder, INDEX_FILE):
            for shard, names in _read_index(folder).items():
                if not exists_in(folder, shard):
                    raise ValueError(
                        f"{folder / shard} is missing, though {INDEX_FILE} names it: copy or download it "
                        "again"
                    )
                file = SafetensorsFile(folder, shard)
                if missing := [name for name in names if name not in file.header]:
                    raise ValueError(
                        f"{folder / shard} lacks {missing[0]!r}, though {INDEX_FILE} promises it there"
                    )
                self.files |= dict.fromkeys(names, file)
        elif exists_in(folder, SINGLE_FILE):
            file = SafetensorsFile(folder, SINGLE_FILE)
            self.files = dict.fromkeys(file.header, file)
        else:
            raise ValueError(_no_weights_message(folder))

    def names(self) -> list[str]:
        return list(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[name].shape(name)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return self.files[name].rows(name, begin, end)


def _read_index(folder: Path) -> dict[str, list[str]]:
    """The names of the tensors in each shard."""
    content = read_file_in(folder, INDEX_FILE, max_bytes=MAX_JSON_BYTES)
    try:
        weight_map = json.loads(content.decode())["weight_map"]
        if not isinstance(weight_map, dict):
            raise TypeError("its weight_map is no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder / INDEX_FILE} is not a shard index ({error}): copy or download it again"
        ) from error
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise ValueError(f"{folder / INDEX_FILE} names the shard {shard!r}: shards must lie beside it")
        shards.setdefault(shard, []).append(name)
    return shards


def _no_weights_message(folder: Path) -> str:
    pickles = sorted(path for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        return pickle_message(pickles[0])
    return f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}: is it a model directory?"


def pickle_message(path: Path) -> str:
    """Why a pickled checkpoint is not read, and what to do with it."""
    return (
        f"{path} is a pickle, which can run any code when it is opened, so keepleft does not. Convert it "
        "where you trust it: load it with the program that made it and save it as safetensors "
        "(in transformers: model.save_pretrained(folder))"
    )


def save(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    text_files: Mapping[str, str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors, as one file or as shards, and text files (content by name) such as config.json.

    Everything is written under temporary names first, so that an error leaves the old files as they were.
    Then files are renamed: the old config.json is removed first and the new one comes last, so that nobody
    reads old and new files together.
    """
    _remove_parts(folder)
    try:
        part_paths = _write_parts(tensors, folder, text_files, max_shard_bytes)
    except BaseException:
        _remove_parts(folder)
        raise
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / INDEX_FILE, folder / SINGLE_FILE):
        stale.unlink(missing_ok=True)
    for name, part in part_paths.items():
        os.replace(part, folder / name)


def _write_parts(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, text_files: Mapping[str, str], max_shard_bytes: int
) -> dict[str, Path]:
    """Write and sync everything under temporary names: their paths by final name, config.json last."""
    names_by_shard: list[list[str]] = []
    total = 0  # bytes
    for number, shard_tensors in enumerate(_split_into_shards(tensors, max_shard_bytes), 1):
        _write_file(shard_tensors, folder / f"model-{number:05d}.part")
        names_by_shard.append(list(shard_tensors))
        total += sum(tensor.nbytes for tensor in shard_tensors.values())
    num_shards = len(names_by_shard)
    files = [SINGLE_FILE]
    if num_shards > 1:
        files = [f"model-{n:05d}-of-{num_shards:05d}.safetensors" for n in range(1, num_shards + 1)]
    part_paths = {name: folder / f"model-{number:05d}.part" for number, name in enumerate(files, 1)}
    if len(files) > 1:
        weight_map = {name: file for file, names in zip(files, names_by_shard, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text_files = {INDEX_FILE: json.dumps(index, indent=2) + "\n", **text_files}
    for name in sorted(text_files, key=lambda name: name == CONFIG_FILE):
        part_paths[name] = folder / f"{name}.part"
        part_paths[name].write_text(text_files[name], "utf-8")
        sync(part_paths[name])
    return part_paths


def _remove_parts(folder: Path) -> None:
    """Remove temporary files, of this run or of one that crashed."""
    for pattern in ("model*.part", "*.json.part", "*.jinja.part"):
        for part in folder.glob(pattern):
            part.unlink()


def _split_into_shards(
    tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard_tensors and sum(t.nbytes for t in shard_tensors.values()) + tensor.nbytes > max_shard_bytes:
            yield shard_tensors
            shard_tensors = {}
        shard_tensors[name] = tensor
    yield shard_tensors


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one file: the size of the header, the header, the data; the same tensors give the same bytes.

    (The safetensors package writes the metadata in another order each time.)
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # all are aligned
    arrays = {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, tensor in ordered
    }
    checksums = {name: zlib.crc32(arrays[name].data) for name in tensors}
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CHECKSUMS_KEY: json.dumps(checksums)}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": dtype_names[tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.data)
    sync(path)
