"""One caller's stream while another asks the explorer: how long are the gaps between its tokens?

A stream of a given number of tokens, alone and beside each of: beam search with 8 beams of 40 tokens, the
audit of the page, the attention maps of a long text. The other caller asks up to `--questions` times, and
leaves when the stream has ended. Every repetition has a server of its own, since a server audits its model
once. The numbers are medians over the repetitions: of the median gap, of the longest, and of how many answers
the other caller got meanwhile. `--source` measures another checkout.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from report import environment, print_table, write_json
from soak import make_model

SOURCE = Path(__file__).resolve().parents[1] / "src"
PROMPT = "Once upon a time, in a village by the sea,"
SENTENCE = "The old man by the wall mends his nets while the ship sails on and the sea is calm. "
Row = dict[str, Any]


def neighbours(num_beams: int, num_tokens: int, num_sentences: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """What another caller asks for: path and body."""
    beam = {"text": PROMPT, "num_beams": num_beams, "max_new_tokens": num_tokens}
    attention = {"input": SENTENCE * num_sentences, "layers": ["decoder.0.self"], "heads": [0]}
    return {
        "beam search": ("/explore/beam", beam),
        "audit": ("/explore/audit", {"wait": True}),
        "attention maps": ("/v1/attention", attention),
    }


@contextmanager
def served(model: str, source: Path, options: Sequence[str]) -> Iterator[str]:
    """The address of a server that runs meanwhile."""
    environment_variables = {**os.environ, "PYTHONPATH": str(source)}
    child = subprocess.Popen(
        [sys.executable, "-m", "keepleft", "serve", model, "--port", "0", "--log-level", "error", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment_variables,
    )
    assert child.stderr is not None
    try:
        line = child.stderr.readline()
        yield "http://127.0.0.1:" + line.split("127.0.0.1:")[1].split("/")[0]
    finally:
        child.kill()
        child.wait(60)
        child.stderr.close()


async def stream_gaps(http: httpx.AsyncClient, num_tokens: int, started: asyncio.Event) -> list[float]:
    """Milliseconds between the chunks of a stream; `started` is set with the first."""
    body = {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "min_new_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
    }
    times = []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                started.set()
    return [1000 * (after - before) for before, after in itertools.pairwise(times)]


async def gaps_beside(
    http: httpx.AsyncClient, num_tokens: int, num_questions: int, path: str, body: dict[str, Any]
) -> tuple[list[float], int]:
    """The gaps of a stream beside a caller that asks several times, and the number of its answers."""
    started = asyncio.Event()
    num_answers = 0

    async def ask() -> None:
        nonlocal num_answers
        await started.wait()
        while num_answers < num_questions:
            response = await http.post(path, json=body)
            response.raise_for_status()
            num_answers += 1
            if response.json().get("state") == "done":  # the audit: there is no second one
                return

    asking = asyncio.create_task(ask())
    gaps = await stream_gaps(http, num_tokens, started)
    if asking.done():
        await asking  # raises what went wrong
    asking.cancel()
    return gaps, num_answers


async def alone_and_beside(
    address: str, num_tokens: int, num_questions: int, path: str, body: dict[str, Any]
) -> tuple[list[float], list[float], int]:
    """The gaps of a stream alone, after a warm-up, and beside the other caller; the number of its answers."""
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        await stream_gaps(http, num_tokens, asyncio.Event())
        alone = await stream_gaps(http, num_tokens, asyncio.Event())
        return alone, *(await gaps_beside(http, num_tokens, num_questions, path, body))


def measure(
    model: str,
    source: Path,
    options: Sequence[str],
    num_tokens: int,
    num_questions: int,
    path: str,
    body: dict[str, Any],
) -> Row:
    """One repetition: a warm-up, the stream alone, and the stream beside the other caller."""
    with served(model, source, options) as address:
        alone, beside, num_answers = asyncio.run(
            alone_and_beside(address, num_tokens, num_questions, path, body)
        )
    return {
        "alone median": statistics.median(alone),
        "alone max": max(alone),
        "beside median": statistics.median(beside),
        "beside max": max(beside),
        "answers": num_answers,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--source", type=Path, default=SOURCE, help="the src folder of another checkout")
    parser.add_argument("--tokens", type=int, default=200, help="of the stream")
    parser.add_argument("--questions", type=int, default=3, help="of the other caller, at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the server")
    options = parse_arguments(parser, argv, model="", tokens=20, repeats=1, threads=1)
    sizes = (2, 2, 1) if options.smoke else (8, 40, 22)
    serve_options = ["--kv-cache-memory", "0.02" if options.smoke else "1"]
    serve_options += [] if options.threads is None else ["--threads", str(options.threads)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            make_model(Path(folder))
        selected = list(neighbours(*sizes).items())[: 1 if options.smoke else None]
        for name, (path, body) in selected:
            samples = [
                measure(
                    options.model or folder,
                    options.source,
                    serve_options,
                    options.tokens,
                    options.questions,
                    path,
                    body,
                )
                for _ in range(options.repeats)
            ]
            row = {column: statistics.median(sample[column] for sample in samples) for column in samples[0]}
            row |= {
                "median ratio": row["beside median"] / row["alone median"],
                "max ratio": row["beside max"] / row["alone max"],
            }
            rows.append({"beside": name, **row})
            print(name, row, file=sys.stderr, flush=True)
    print_table("gaps between the tokens of a stream (ms), and answers of the other caller meanwhile", rows)
    print(json.dumps(environment()))
    write_json(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
