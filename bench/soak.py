"""A server under load for a long time: does its memory stay flat, and does every request come to an end?

A small model of made-up weights, clients of every kind: completions, streams that are left in the middle,
beams, several texts, rules, wrong requests. The server's memory is read every few seconds; after a warm-up of
a fifth of the time it may grow by no more than a given number of MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

WORDS = "the sea is calm and a ship sails on while old men mend their nets by the wall".split()


def made(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    import keepleft as kl

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({"<s>": 0, "</s>": 1, **{letter: n + 2 for n, letter in enumerate(alphabet)}}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    model = kl.build(
        kl.presets.small(kl.presets.llama3).but(vocab=tokenizer.get_vocab_size(), initial=kl.NormalInit(0.3))
    )
    model.notes = {"bos_token_id": 0, "eos_token_id": 1}
    kl.save(model, tokenizer, folder)


def asked(dice: random.Random) -> dict[str, Any]:
    said: dict[str, Any] = {
        "prompt": " ".join(dice.choices(WORDS, k=dice.randint(1, 30))),
        "max_tokens": dice.randint(1, 60),
        "user": f"user {dice.randint(0, 50)}",
    }
    return said | dice.choice(
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


async def client(http: Any, dice: random.Random, stop: float, seen: Counter[str]) -> None:
    while time.monotonic() < stop:
        said = asked(dice)
        if dice.random() < 0.3:
            async with http.stream("POST", "/v1/completions", json=said | {"stream": True}) as answer:
                left = dice.random() < 0.5
                async for _ in answer.aiter_lines():
                    if left and dice.random() < 0.3:
                        break
                seen["left" if left else f"stream {answer.status_code}"] += 1
        else:
            answer = await http.post("/v1/completions", json=said)
            seen[str(answer.status_code)] += 1


def resident(pid: int) -> float:
    """MiB that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


async def loaded(port: int, pid: int, seconds: float, clients: int) -> tuple[list[float], Counter[str], str]:
    import httpx

    seen: Counter[str] = Counter()
    sizes: list[float] = []
    begun = time.monotonic()
    stop = begun + seconds
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        works = [asyncio.create_task(client(http, random.Random(n), stop, seen)) for n in range(clients)]
        while time.monotonic() < stop:
            await asyncio.sleep(min(5.0, seconds / 40))
            sizes.append(resident(pid))
            print(
                f"\r{time.monotonic() - begun:6.0f} s  {sizes[-1]:7.1f} MiB  {sum(seen.values()):6} requests",
                end="",
                file=sys.stderr,
                flush=True,
            )
        await asyncio.gather(*works)
        metrics = (await http.get("/metrics")).text
    print(file=sys.stderr)
    return sizes, seen, metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument(
        "--growth", type=float, default=24.0, help="MiB that it may grow by after the warm-up"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made(Path(folder))
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
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        line = child.stderr.readline()
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        try:
            sizes, seen, metrics = asyncio.run(loaded(port, child.pid, 60 * chosen.minutes, chosen.clients))
        finally:
            child.terminate()
            code = child.wait(60)
    warm = sizes[len(sizes) // 5 :]
    part = max(1, len(warm) // 4)
    growth = statistics.median(warm[-part:]) - statistics.median(warm[:part])
    pages = [row for row in metrics.splitlines() if row.startswith("keepleft_") and "pages" in row]
    print(f"{sum(seen.values())} requests in {chosen.minutes:g} minutes: {dict(sorted(seen.items()))}")
    print(
        f"memory {warm[0]:.1f} MiB after the warm-up, {warm[-1]:.1f} at the end; by medians it grew by "
        f"{growth:.1f} MiB"
    )
    print("\n".join(pages))
    wrong = [name for name in seen if name.split()[-1].startswith("5")]
    fine = growth <= chosen.growth and not wrong and code == 0
    print("flat" if fine else f"NOT as it should be: growth {growth:.1f} MiB, {wrong}, exit code {code}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
