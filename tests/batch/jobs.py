"""Files and tiny models for batch jobs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import keepleft as kl
from serving.tiny_services import CHAT, LoadedModel, decoder, encoder, translator

WORDS = "the sea is calm and the ship sails on".split()
LABELS = kl.ClassificationHead(3)


def save(loaded: LoadedModel, folder: Path) -> str:
    kl.save(*loaded[:2], folder)
    return str(folder)


def save_models(folder: Path) -> dict[str, str]:
    models = {
        "decoder": decoder(),
        "talker": decoder(chat_template=CHAT),
        "translator": translator(),
        "classifier": encoder(LABELS),
    }
    return {name: save(model, folder / name) for name, model in models.items()}


def make_texts(count: int) -> list[str]:
    """Texts of one to eight words, all different while there are so many."""
    return [" ".join(WORDS[(n // 9**k) % 9] for k in range(1 + n % 4)) + f" {n}" for n in range(count)]


def write_rows(path: Path, texts: list[str], first_id: int | None = None) -> Path:
    """A file of rows in the format of its name."""
    ids = [{} if first_id is None else {"id": f"row-{first_id + n}"} for n in range(len(texts))]
    if path.name.endswith(".parquet"):
        import pyarrow as pa
        from pyarrow import parquet

        rows = [{**row_id, "text": text, "other": 1} for row_id, text in zip(ids, texts, strict=True)]
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        return path
    lines = texts
    if ".jsonl" in path.name:
        lines = [json.dumps({**row_id, "text": text}) for row_id, text in zip(ids, texts, strict=True)]
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read_results(folder: Path) -> list[dict]:
    """The records of all parts, in the order of their names."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("part-*.jsonl"))
        for line in path.read_text("utf-8").splitlines()
    ]


def assert_same(found: object, expected: object) -> None:
    """Equal, but for the last digits of numbers: they may depend on the texts beside one."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, float):
        assert abs(found - expected) <= 1e-3 * max(1, abs(expected))
    else:
        assert found == expected
