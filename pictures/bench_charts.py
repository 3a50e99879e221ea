"""The charts of the benchmark page: each is a table of bench/results/, with its date, machine and command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench_tables import Row, number, read_table
from draw import both_versions, from_file
from keepleft.plots.charts import bar_chart, line_chart

Series = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Record:
    """Where the numbers of a chart come from. Date and command must be in the file as they are given here."""

    file: str
    date: str
    machine: str
    command: str

    def captions(self) -> list[tuple[str, str]]:
        return [
            ("measured", f"{self.date}, {self.machine}"),
            ("command", self.command),
            ("record", f"bench/results/{self.file}"),
        ]

    def verify(self, folder: Path) -> None:
        """Raise ValueError where the file does not say what the chart says of it."""
        text = (folder / self.file).read_text("utf-8")
        _, script, options = f"{self.command} ".split(" ", 2)
        for part in (self.date, script, options.strip()):
            if part not in text:
                raise ValueError(f"bench/results/{self.file} does not have {part!r}: look at its chart again")


@dataclass(frozen=True)
class Bars:
    """One chart: its title, groups along the axis, and a bar of each series in each group."""

    title: str
    record: Record
    read: Callable[[Path], tuple[list[str], Series]]
    y_label: str
    x_label: str = ""

    def draw(self, folder: Path) -> tuple[str, str]:
        groups, series = self.read(folder / self.record.file)
        write = lambda path: bar_chart(
            path,
            series,
            groups,
            title=self.title,
            x_label=self.x_label,
            y_label=self.y_label,
            captions=self.record.captions(),
        )
        return from_file(write), _describe(self.title, self.y_label, groups, series)


@dataclass(frozen=True)
class Lines:
    """A chart of peak memory over length."""

    title: str
    record: Record
    cases: Sequence[str] = field(default_factory=tuple)

    def draw(self, folder: Path) -> tuple[str, str]:
        rows = read_table(folder / self.record.file, "peak memory on the CPU", ("case", "T", "peak MB"))
        series = {
            case: [(number(row["T"]), number(row["peak MB"])) for row in rows if row["case"] == case]
            for case in self.cases
        }
        write = lambda path: line_chart(
            path,
            series,
            title=self.title,
            x_label="tokens in a row",
            y_label="peak memory, MB",
            captions=self.record.captions(),
        )
        ends = "; ".join(
            f"{case}: {points[-1][1]:g} MB at {points[-1][0]:g} tokens" for case, points in series.items()
        )
        return from_file(write), f"{self.title}. {ends}."


def draw_charts(folder: Path) -> dict[str, str]:
    """File name → SVG of every chart, for light and for dark pages."""
    out = {}
    for name, chart in CHARTS.items():
        chart.record.verify(folder)
        out |= both_versions(f"bench-{name}", *chart.draw(folder))
    return out


def _describe(title: str, unit: str, groups: Sequence[str], series: Series) -> str:
    values = "; ".join(
        f"{group}: " + ", ".join(f"{name} {numbers[n]:g}" for name, numbers in series.items())
        for n, group in enumerate(groups)
    )
    return f"{title}. {unit}. {values}."


def _read_groups(
    groups: Mapping[str, Mapping[str, str]], series: Mapping[str, Sequence[str]], rows: Sequence[Row]
) -> tuple[list[str], Series]:
    """`groups` says by which cells the row of a group is found, `series` in which columns its number is."""
    chosen = {
        name: next(row for row in rows if all(row.get(column) == cell for column, cell in wanted.items()))
        for name, wanted in groups.items()
    }
    return list(groups), {
        name: [number(next(row[column] for column in columns if column in row)) for row in chosen.values()]
        for name, columns in series.items()
    }


def _decode_gpu(rows: str) -> Callable[[Path], tuple[list[str], Series]]:
    def read(path: Path) -> tuple[list[str], Series]:
        table = read_table(
            path, "python bench/race_decode_gpu.py", ("model", "rows", "beams", "ours", "static")
        )
        groups = {
            "GPT-2 124M": {"model": "gpt2", "rows": rows, "beams": "1"},
            "encoder-decoder": {"model": "base", "rows": rows, "beams": "1"},
            "the same, 4 beams": {"model": "base", "rows": rows, "beams": "4"},
            "LLaMA 7B shape": {"model": "7b", "rows": rows, "beams": "1"},
        }
        return _read_groups(groups, {"keepleft": ["ours"], "transformers": ["static", "default"]}, table)

    return read


def _decode_cpu(dtype: str) -> Callable[[Path], tuple[list[str], Series]]:
    def read(path: Path) -> tuple[list[str], Series]:
        columns = ("model", "beam", "batch", f"packed {dtype}", f"ct2 {dtype}")
        table = read_table(path, "race_decode_cpu.py --seconds 4", columns)
        groups = {
            f"{name}, {batch}": {"model": model, "beam": "1", "batch": batch}
            for model, name in (("base", "base"), ("small", "small"))
            for batch in ("1", "8", "32")
        }
        return _read_groups(groups, {"keepleft": [columns[3]], "CTranslate2": [columns[4]]}, table)

    return read


def _serve_gpu(path: Path) -> tuple[list[str], Series]:
    rows = read_table(path, "2026-11-16", ("model", "side", "tok/s"))
    groups = {
        "base: static cache": ("base", "static cache"),
        "base: batches of 32": ("base", "batches"),
        "GPT-2: continuous batching": ("gpt2", "continuous"),
    }
    speed = lambda model, side: next(
        number(row["tok/s"]) for row in rows if (row["model"], row["side"]) == (model, side)
    )
    return list(groups), {
        "keepleft": [speed(model, "ours") for model, _ in groups.values()],
        "transformers, in this way": [speed(model, side) for model, side in groups.values()],
    }


def _serve_cpu(path: Path) -> tuple[list[str], Series]:
    rows = read_table(path, "after later changes", ("model", "side", "tok/s"))
    sides = {"keepleft": "ours", "CTranslate2, batches": "batches", "CTranslate2, two workers": "queue"}
    find = lambda model, side: next(
        row["tok/s"] for row in rows if (row["model"], row["side"]) == (model, side)
    )
    return ["small", "base"], {
        name: [number(find(model, side)) for model in ("small", "base")] for name, side in sides.items()
    }


def _train_gpu(path: Path) -> tuple[list[str], Series]:
    gpt2 = read_table(path, "gpt2:half+compile:64", ("way", "tok/s"))
    pairs = read_table(path, "marian:transformers:3072", ("way", "tok/s"))
    speed = lambda rows, way: number(next(row["tok/s"] for row in rows if row["way"] == way))
    return ["GPT-2 124M", "encoder-decoder base"], {
        "keepleft": [speed(gpt2, "half+compile"), speed(pairs, "half+compile+graph")],
        "plain PyTorch, compiled (left); transformers (right)": [
            speed(gpt2, "plain+compile"),
            speed(pairs, "transformers"),
        ],
    }


def _train_cpu(path: Path) -> tuple[list[str], Series]:
    rows = read_table(path, "python bench/cpu_train.py", ("batches", "ours ms", "transformers ms"))
    groups = {"the same batches": "the same", "packed": "packed", "sorted by length": "sorted"}
    return _read_groups(
        {name: {"batches": cell} for name, cell in groups.items()},
        {"keepleft": ["ours ms"], "transformers": ["transformers ms"]},
        rows,
    )


def _forward_cpu(path: Path) -> tuple[list[str], Series]:
    rows = read_table(path, "a forward pass of GPT-2", ("batch", "tokens", "ours ms", "transformers ms"))
    groups = {
        f"{row['batch']} × {row['tokens']}": {"batch": row["batch"], "tokens": row["tokens"]} for row in rows
    }
    return _read_groups(groups, {"keepleft": ["ours ms"], "transformers": ["transformers ms"]}, rows)


def _threads(path: Path) -> tuple[list[str], Series]:
    works = {
        "generation": "generation, batch 1",
        "batch of 16": "generation, batch 16",
        "serving": "serving, 16 requests",
        "training": "training",
        "the audit": "audit",
    }
    column = "beside, of one thread"
    settings = {"keepleft": "keepleft", "OpenMP's default": "all, OpenMP's default"}
    tables = {
        name: {row["setting"]: row for row in read_table(path, heading, ("setting", column))}
        for name, heading in works.items()
    }
    return list(works), {
        name: [number(table[setting][column]) for table in tables.values()]
        for name, setting in settings.items()
    }


H200 = "one NVIDIA H200, torch 2.11, transformers 5.17, bfloat16"
TWO_CORES = "two CPU cores, torch 2.13"
DECODE_GPU = Record("h200-decode.txt", "2026-11-15", H200, "python bench/race_decode_gpu.py --rounds 4")
DECODE_CPU = Record(
    "cpu.txt",
    "2026-11-15",
    f"{TWO_CORES}, ctranslate2 4.8.4",
    "python bench/race_decode_cpu.py --seconds 4 --models base small --no-transformers",
)
CPU = "two cores shared with other work, torch 2.13, transformers 5.22.2"

CHARTS: dict[str, Bars | Lines] = {
    "decode-gpu-1": Bars("Decoding one sequence on a GPU", DECODE_GPU, _decode_gpu("1"), "tokens per second"),
    "decode-gpu-32": Bars(
        "Decoding 32 sequences on a GPU", DECODE_GPU, _decode_gpu("32"), "tokens per second"
    ),
    "decode-cpu-int8": Bars(
        "Greedy decoding on a CPU, int8",
        DECODE_CPU,
        _decode_cpu("int8"),
        "tokens per second",
        "model, batch size",
    ),
    "decode-cpu-float32": Bars(
        "Greedy decoding on a CPU, float32",
        DECODE_CPU,
        _decode_cpu("float32"),
        "tokens per second",
        "model, batch size",
    ),
    "serve-gpu": Bars(
        "512 requests at once on a GPU: encoder-decoder base, GPT-2 124M",
        Record("h200-serve.txt", "2026-11-16", H200, "python bench/race_serve_gpu.py --static"),
        _serve_gpu,
        "tokens per second",
    ),
    "serve-cpu": Bars(
        "Serving translations on a CPU: int8, 32 clients, over HTTP",
        Record(
            "cpu-serve.txt",
            "2026-11-16",
            f"{TWO_CORES}, ctranslate2 4.8.4",
            "python bench/race_serve_cpu.py --rounds 3 --seconds 8",
        ),
        _serve_cpu,
        "tokens per second",
    ),
    "train-gpu": Bars(
        "Training on a GPU",
        Record(
            "h200-gpu_train.txt",
            "2026-11-15",
            H200,
            "python bench/gpu_train.py --variants gpt2:plain+compile:64 gpt2:half+compile:64",
        ),
        _train_gpu,
        "tokens per second",
    ),
    "train-cpu": Bars(
        "A training step of a small encoder-decoder on a CPU (lower is better)",
        Record("cpu.txt", "2026-11-15", CPU, "python bench/cpu_train.py"),
        _train_cpu,
        "milliseconds",
    ),
    "forward-cpu": Bars(
        "A forward pass of GPT-2 124M on a CPU (lower is better)",
        Record(
            "cpu.txt",
            "2026-11-15",
            "two cores shared with other work, torch 2.13, float32",
            "python bench/race_forward.py --threads 1",
        ),
        _forward_cpu,
        "milliseconds",
        "batch × tokens",
    ),
    "memory-cpu": Lines(
        "Peak memory of attention grows linearly with length",
        Record(
            "cpu.txt", "2026-11-15", "CPU, float32, 2 rows, 8 heads of 64", "python bench/attention_memory.py"
        ),
        ("causal", "right-padded", "packed", "causal & window(256)"),
    ),
    "threads": Bars(
        "Speed beside one other busy process, as a share of what a single thread reaches there",
        Record("threads.txt", "2026-11-18", TWO_CORES, "python bench/threads.py --rounds 3 --seconds 1.5"),
        _threads,
        "share of one thread's speed",
    ),
}
