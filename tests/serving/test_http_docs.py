"""docs/serving.md is true: its commands and code run against a server, and its tables are complete."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import keepleft as kl
from keepleft.serving.http.limits import Limits
from serving.test_http_serve import served
from serving.tiny_services import CHAT, decoder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_every_block_runs(tmp_path):
    model_folder = tmp_path / "runs" / "novel" / "model"
    kl.save(*decoder(chat_template=CHAT)[:2], model_folder)
    with served(model_folder) as (address, _, _):
        assert "/v1/models" in blocks("bash")[0]
        for block in blocks("bash"):
            for command in re.split(r"\n\n", block.strip()):
                assert "curl " in command
                command = command.replace("localhost:8000", address.removeprefix("http://"))
                command = command.replace("curl ", "curl -sS --fail-with-body ", 1)
                completed = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", command],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert completed.returncode == 0, (command, completed.stdout, completed.stderr)
                assert completed.stdout
        for code in blocks("python"):
            namespace = {}
            exec(code.replace("http://127.0.0.1:8000", address), namespace)
            if "client" in namespace:
                namespace["client"].close()


def test_every_limit_is_documented_with_its_default():
    table = PAGE[PAGE.index("| limit |") : PAGE.index("## Logs")]
    documented = {}
    for names, numbers in re.findall(r"^\| (`.+?) \| (.+?) \|", table, re.M):
        values = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", numbers)]
        documented |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    assert documented == {field.name: float(field.default) for field in fields(Limits)}


def test_every_status_of_an_error_is_documented():
    table = PAGE[PAGE.index("| status |") : PAGE.index("## Limits")]
    documented = {
        int(status) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for status in row.split(",")
    }
    code = "".join(
        path.read_text("utf-8") for path in (ROOT / "src" / "keepleft" / "serving" / "http").rglob("*.py")
    )
    raised = {int(status) for status in re.findall(r"APIError\(\s*(\d{3}),", code)}
    assert documented == raised | {405}  # Starlette's


def test_every_route_and_metric_is_documented():
    from keepleft.serving.engine.continuous import ContinuousBatchingEngine
    from keepleft.serving.http.app import make_app
    from keepleft.serving.http.middleware.auth import APIKey, APIKeys
    from serving.tiny_services import client

    keys = APIKeys([APIKey("a-key"), APIKey("the-operator", operator=True)])
    with client(decoder(), ContinuousBatchingEngine, keys=keys) as http_client:
        bearers = [{"authorization": f"Bearer {key}"} for key in ("a-key", "the-operator")]
        document = make_app(http_client.service).openapi()
        http_client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers=bearers[0])
        names = {
            name
            for bearer in bearers
            for name in re.findall(
                r"^# TYPE (keepleft_\w+)", http_client.get("/metrics", headers=bearer).text, re.M
            )
            if not name.startswith("keepleft_engine") and not name.endswith("_created")
        }
    for path in document["paths"]:
        assert re.sub(r"\{\w+", "{", path).split("{")[0] in PAGE, path
    assert names == {
        name for name in re.findall(r"`(keepleft_\w+)", PAGE) if not name.startswith("keepleft_engine")
    }
