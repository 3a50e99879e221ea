"""Safetensors files, one or many: read a few rows at a time, checked before and while reading; written atomically."""

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

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SHARD = 5 << 30  # bytes
CHECKSUMS = "keepleft.crc32"  # in a file's metadata: one for each tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


class File:
    """One file. Opening it checks its header, its size and, where it carries checksums, every byte as it is read."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            with safe_open(path, framework="pt") as file:  # the library's own checks: header, offsets, size
                metadata = file.metadata() or {}
            with path.open("rb") as raw:
                size = int.from_bytes(raw.read(8), "little")
                self.header: dict[str, Any] = json.loads(raw.read(size))
            self.sums: dict[str, int] = dict(json.loads(metadata.get(CHECKSUMS, "{}")))
        except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error}): copy or download it again") from error
        self.header.pop("__metadata__", None)
        self.begin = 8 + size
        self.read: dict[str, tuple[int, int]] = {}  # how many bytes of a tensor were read in order, and their checksum

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.header[name]["shape"])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        entry = self.header[name]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"the tensor {name!r} in {self.path} is of type {entry['dtype']}: "
                             f"there are {', '.join(DTYPES)}")
        dtype, (_, *rest) = DTYPES[entry["dtype"]], entry["shape"] or [1]
        width = torch.Size(rest).numel() * dtype.itemsize
        start, stop = entry["data_offsets"]
        data = bytearray((end - begin) * width)
        with self.path.open("rb", buffering=0) as raw:
            raw.seek(self.begin + start + begin * width)
            view, done = memoryview(data), 0
            while done < len(data) and (got := raw.readinto(view[done:])):
                done += got
        self._check(name, data, begin * width, stop - start)
        return torch.frombuffer(data, dtype=dtype).view(end - begin, *rest) if data else torch.empty(0, *rest, dtype=dtype)

    def _check(self, name: str, data: bytearray, at: int, total: int) -> None:
        if name not in self.sums:
            return
        done, sum_ = self.read.get(name, (0, 0))
        if at == 0:
            done, sum_ = 0, 0
        if at != done:
            return
        done, sum_ = done + len(data), zlib.crc32(data, sum_)
        self.read[name] = (done, sum_)
        if done == total and sum_ != self.sums[name]:
            raise ValueError(f"the tensor {name!r} in {self.path} is damaged (its checksum differs): copy or download it again")


class Directory:
    """A model directory's tensors, in one file or in shards."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, File] = {}
        if (folder / INDEX).exists():
            for shard, names in _shards(folder).items():
                if not (folder / shard).exists():
                    raise ValueError(f"{folder / shard} is missing, though {INDEX} names it: copy or download it again")
                file = File(folder / shard)
                if lost := [name for name in names if name not in file.header]:
                    raise ValueError(f"{folder / shard} lacks {lost[0]!r}, though {INDEX} promises it there")
                self.files |= dict.fromkeys(names, file)
        elif (folder / SINGLE).exists():
            file = File(folder / SINGLE)
            self.files = dict.fromkeys(file.header, file)
        else:
            raise ValueError(_nothing(folder))

    def names(self) -> list[str]:
        return list(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[name].shape(name)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return self.files[name].rows(name, begin, end)


def _shards(folder: Path) -> dict[str, list[str]]:
    try:
        weight_map = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        if not isinstance(weight_map, dict):
            raise TypeError("its weight_map is no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} is not a shard index ({error}): copy or download it again") from error
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise ValueError(f"{folder / INDEX} names the shard {shard!r}: shards must lie beside it")
        shards.setdefault(shard, []).append(name)
    return shards


def _nothing(folder: Path) -> str:
    pickles = sorted(path for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return pickled(pickles[0])
    return f"{folder} holds no {SINGLE} and no {INDEX}: is it a model directory?"


def pickled(path: Path) -> str:
    return (f"{path} is a pickle, which can run any code when it is opened, so keepleft does not. Convert it where you trust "
            "it: load it with the program that made it and save it as safetensors "
            "(in transformers: model.save_pretrained(folder))")


def save(tensors: Iterable[tuple[str, Tensor]], folder: Path, texts: Mapping[str, str], *, shard: int = SHARD) -> None:
    """Write tensors, as one file or as shards, and the texts beside them, config.json among them.

    All is written under other names first, so that what goes wrong leaves the old files as they were. Then names change:
    config.json goes first and comes last, so that no one ever reads old and new files together.
    """
    _tidy(folder)
    try:
        ready = _prepared(tensors, folder, texts, shard)
    except BaseException:
        _tidy(folder)
        raise
    (folder / CONFIG).unlink(missing_ok=True)
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / INDEX, folder / SINGLE):
        old.unlink(missing_ok=True)
    for name, part in ready.items():
        os.replace(part, folder / name)


def _prepared(tensors: Iterable[tuple[str, Tensor]], folder: Path, texts: Mapping[str, str], shard: int) -> dict[str, Path]:
    """Everything written and on the disk, under the name that it will have; config.json last."""
    batches: list[list[str]] = []
    total = 0
    for number, batch in enumerate(_batches(tensors, shard), 1):
        _write(batch, folder / f"model-{number:05d}.part")
        batches.append(list(batch))
        total += sum(tensor.nbytes for tensor in batch.values())
    files = [SINGLE] if len(batches) == 1 else [f"model-{n:05d}-of-{len(batches):05d}.safetensors"
                                                for n in range(1, len(batches) + 1)]
    ready = {name: folder / f"model-{number:05d}.part" for number, name in enumerate(files, 1)}
    if len(files) > 1:
        where = {name: file for file, names in zip(files, batches, strict=True) for name in names}
        texts = {INDEX: json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n", **texts}
    for name in sorted(texts, key=lambda name: name == CONFIG):
        ready[name] = folder / f"{name}.part"
        ready[name].write_text(texts[name], "utf-8")
        sync(ready[name])
    return ready


def _tidy(folder: Path) -> None:
    """What a crash left behind goes."""
    for pattern in ("model*.part", "*.json.part", "*.jinja.part"):
        for part in folder.glob(pattern):
            part.unlink()


def _batches(tensors: Iterable[tuple[str, Tensor]], shard: int) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if batch and sum(t.nbytes for t in batch.values()) + tensor.nbytes > shard:
            yield batch
            batch = {}
        batch[name] = tensor
    yield batch


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = {name: zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data) for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt", CHECKSUMS: json.dumps(sums)})
    sync(path)
