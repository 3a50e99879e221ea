"""A server under load for a long time: does its memory stay flat, and does every request come to an end?

A small model of random weights, and clients of two API keys and of every kind: completions, streams that are
abandoned, beams, several completions, regular expressions, embeddings, scores, attention maps, questions of
the explorer, invalid requests; some leave before they have a response. The server's memory is read every few
seconds; after a warm-up of a fifth of the time it may grow by no more than a given number of MiB.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from peak_memory import status_bytes
from report import write_json

KEYS = ("first-key", "second-key")
WORDS = "the sea is calm and a ship sails on while old men mend their nets by the wall".split()


def make_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    import keepleft as kl

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({"<s>": 0, "</s>": 1, **{letter: number for number, letter in enumerate(alphabet, 2)}}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    model = kl.build(
        kl.presets.small(kl.presets.llama3).but(vocab=tokenizer.get_vocab_size(), initial=kl.NormalInit(0.3))
    )
    model.notes = {"bos_token_id": 0, "eos_token_id": 1}
    kl.save(model, tokenizer, folder)


def random_errand(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that generates nothing: its path and body."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
    return rng.choice(
        [
            ("/v1/embeddings", {"input": [text] * rng.randint(1, 8)}),
            ("/v1/score", {"input": [text] * rng.randint(1, 4)}),
            ("/v1/completions", {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 1}),
            ("/v1/attention", {"input": text[:60], "layers": ["decoder.0.self"]}),
            ("/explore/next_token", {"text": text[:60]}),
            ("/v1/embeddings", {"input": []}),
        ]
    )


def random_request(rng: random.Random) -> dict[str, Any]:
    request: dict[str, Any] = {
        "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 30))),
        "max_tokens": rng.randint(1, 60),
        "user": f"user {rng.randint(0, 50)}",
    }
    return request | rng.choice(
        [
            {},
            {"temperature": 0},
            {"num_beams": 3, "temperature": 0},
            {"n": 3},
            {"logprobs": 3},
            {"stop": ["e", "zz"]},
            {"top_p": 0.9, "top_k": 20},
            {"repetition_penalty": 1.2},
            {"regex": "[a-z ]{5,40}"},
            {"max_tokens": -1},
            {"temperature": "hot"},
            {"best_of": 4},
        ]
    )


async def run_client(http: Any, rng: random.Random, stop_at: float, outcomes: Counter[str]) -> None:
    while time.monotonic() < stop_at:
        request = random_request(rng)
        kind = rng.random()
        if kind < 0.2:
            path, body = random_errand(rng)
            try:
                async with asyncio.timeout(0.02 if rng.random() < 0.2 else 60):
                    outcomes[f"errand {(await http.post(path, json=body)).status_code}"] += 1
            except TimeoutError:
                outcomes["errand abandoned"] += 1
        elif kind < 0.45:
            async with http.stream("POST", "/v1/completions", json=request | {"stream": True}) as response:
                abandon = rng.random() < 0.5
                async for _ in response.aiter_lines():
                    if abandon and rng.random() < 0.3:
                        break
                outcomes["abandoned" if abandon else f"stream {response.status_code}"] += 1
        else:
            response = await http.post("/v1/completions", json=request)
            outcomes[str(response.status_code)] += 1


async def run_load(
    port: int, pid: int, seconds: float, clients: int
) -> tuple[list[float], Counter[str], str]:
    """The server's resident MiB over time, the number of outcomes by status, and its metrics at the end."""
    import httpx

    outcomes: Counter[str] = Counter()
    sizes: list[float] = []
    started = time.monotonic()
    stop_at = started + seconds
    async with AsyncExitStack() as stack:
        tenants = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}",
                    timeout=60,
                    headers={"authorization": f"Bearer {key}"},
                )
            )
            for key in KEYS
        ]
        http = tenants[0]
        tasks = [
            asyncio.create_task(
                run_client(tenants[number % len(tenants)], random.Random(number), stop_at, outcomes)
            )
            for number in range(clients)
        ]
        while not sizes or time.monotonic() < stop_at:
            await asyncio.sleep(min(5.0, seconds / 40))
            sizes.append(status_bytes("VmRSS", pid) / (1 << 20))
            print(
                f"\r{time.monotonic() - started:6.0f} s  {sizes[-1]:7.1f} MiB  "
                f"{sum(outcomes.values()):6} requests",
                end="",
                file=sys.stderr,
                flush=True,
            )
        await asyncio.gather(*tasks)
        metrics = (await http.get("/metrics")).text
    print(file=sys.stderr)
    return sizes, outcomes, metrics


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument(
        "--growth", type=float, default=24.0, help="MiB that it may grow by after the warm-up"
    )
    options = parse_arguments(parser, argv, minutes=0.03, clients=4, growth=1e4)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        key_file = Path(folder) / "keys.txt"
        key_file.write_text(f"{KEYS[0]} operator\n{KEYS[1]}\n")
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "keepleft",
                "serve",
                folder,
                "--port",
                "0",
                "--log-level",
                "error",
                "--kv-cache-memory",
                "0.02",
                "--api-key-file",
                str(key_file),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        line = child.stderr.readline()
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        try:
            sizes, outcomes, metrics = asyncio.run(
                run_load(port, child.pid, 60 * options.minutes, options.clients)
            )
        finally:
            child.terminate()
            code = child.wait(60)
    after_warmup = sizes[len(sizes) // 5 :]
    quarter = max(1, len(after_warmup) // 4)
    growth = statistics.median(after_warmup[-quarter:]) - statistics.median(after_warmup[:quarter])
    pages = [row for row in metrics.splitlines() if row.startswith("keepleft_") and "pages" in row]
    print(
        f"{sum(outcomes.values())} requests in {options.minutes:g} minutes: {dict(sorted(outcomes.items()))}"
    )
    print(
        f"memory {after_warmup[0]:.1f} MiB after the warm-up, {after_warmup[-1]:.1f} at the end; growth of "
        f"the medians {growth:.1f} MiB"
    )
    print("\n".join(pages))
    errors = [name for name in outcomes if name.split()[-1].startswith("5")]
    passed = growth <= options.growth and not errors and code == 0
    print("flat" if passed else f"FAILED: growth {growth:.1f} MiB, server errors {errors}, exit code {code}")
    write_json(
        options.json, {"MiB": sizes, "growth MiB": growth, "outcomes": dict(outcomes), "passed": passed}
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
