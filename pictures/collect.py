"""What the pictures show, taken from the program as it runs: commands, attention, losses, an audit."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import keepleft as kl
from keepleft.attention.masks import mask_table
from keepleft.cli.paths import model_path
from keepleft.data.token_text import token_pieces
from keepleft.decoding.generation_config import decoder_start_token
from keepleft.models.watch import watch
from keepleft.pipelines.text_generation import GenerationConfig, TextGenerator
from terminal import Exchange

LEAKY_CLASS = "ProphetNetForCausalLM"  # of transformers: its leak shows on the plainest code path
FALCON = """\
from transformers import FalconConfig, FalconForCausalLM
config = FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
tiny = lambda: FalconForCausalLM(config)
"""
TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorials" / "audit.md"
MASK = "kl.causal & kl.window(3) | kl.prefix(1)"
COMPARE = "keepleft compare --lengths 16"
DIGITS = 4  # of weights and sizes


def collect(
    folder: Path, *, model: str, tag: str | None, to: str | None, sentence: str, phrase: str
) -> dict[str, Any]:
    """Run everything in a folder of its own. `sentence` is looked into, `phrase` is for the terminal.

    `to` is the language that the translator which comes with keepleft is asked for; a model directory has a
    `tag` instead.
    """
    translator = _translate_command(folder, model, tag, to)
    return {
        "about": _about(),
        "terminal": [asdict(exchange) for exchange in _terminal(folder, translator(phrase))],
        "attentions": _attentions(model, tag, sentence),
        "alignment": _plot(folder, [*translator(sentence), "--num-beams", "1"]),
        "beam_tree": _plot(folder, [*translator(sentence), "--num-beams", "3", "--n-best", "3"]),
        "loss": _compare(folder),
        "audit": _audit(),
        "audit_tutorial": _audit_tutorial(folder),
    }


def _about() -> dict[str, str]:
    import transformers

    return {
        "date": date.today().isoformat(),
        "keepleft": kl.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


# -- commands ----------------------------------------------------------------------------------


def _translate_command(folder: Path, model: str, tag: str | None, to: str | None) -> Any:
    """A function from a text to the command that translates it."""
    if to is not None:
        return lambda text: ["keepleft", "translate", text, "--to", to]
    (folder / "en-fr").symlink_to(Path(model_path(model)).resolve(), target_is_directory=True)
    options = [] if tag is None else ["--tag", tag]
    return lambda text: ["keepleft", "translate", "en-fr", text, *options]


def _run(folder: Path, command: str, *, fails: bool = False) -> str:
    """What a command prints, run by a shell as a reader would; `fails`: an exit code of 1 is expected."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "TERM": "dumb", "TRANSFORMERS_VERBOSITY": "error"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if ran.returncode and not fails:
        raise RuntimeError(f"{command} ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return ran.stdout


def _terminal(folder: Path, translate: list[str]) -> list[Exchange]:
    (folder / "falcon.py").write_text(FALCON, "utf-8")
    quote = lambda word: f'"{word}"' if " " in word else shlex.quote(word)
    commands = {
        " ".join(map(quote, translate)): False,
        "cat falcon.py": False,
        "keepleft audit falcon.py:tiny --budget quick --claim causal | head -n 5": True,
        f'python -c "import keepleft as kl; print(kl.draw({MASK}, 6))"': False,
    }
    return [Exchange(command, _run(folder, command, fails=fails)) for command, fails in commands.items()]


def _plot(folder: Path, command: list[str]) -> dict[str, str]:
    """The picture that a command draws with --plot, and the command."""
    shown = shlex.join([*command, "--plot", "out.svg"])
    output = _run(folder, shown)
    return {"command": shown, "output": output, "svg": (folder / "out.svg").read_text("utf-8")}


def show(folder: Path, model: str, source: str) -> Path:
    """The page of the explorer about one source, as a file."""
    _run(folder, shlex.join(["keepleft", "show", model, "--source", source, "--html", "page.html"]))
    return folder / "page.html"


def _compare(folder: Path) -> dict[str, Any]:
    _run(folder, f"{COMPARE} --out compare", fails=True)
    result = json.loads((folder / "compare" / "compare.json").read_text("utf-8"))
    fields = ("mask", "curve", "loss", "accuracy", "honest", "words", "exact", "samples")
    return {
        "command": COMPARE,
        **{side: {name: result[side][name] for name in fields} for side in ("masked", "unmasked")},
    }


# -- inside the model --------------------------------------------------------------------------


@torch.no_grad()
def _attentions(model_name: str, tag: str | None, sentence: str) -> dict[str, Any]:
    """One head of each of the three attentions of an encoder-decoder, on a translation of its own."""
    model, tokenizer = kl.load(model_path(model_name))
    if not isinstance(model, kl.EncoderDecoder) or tokenizer is None:
        raise ValueError(
            f"{model_name} is no encoder-decoder with a tokenizer: the three attentions need one"
        )
    generator = TextGenerator(model, tokenizer)
    options = generator.resolve(GenerationConfig())
    ((completion,),) = generator.generate([sentence], options, tag=tag)
    source = completion.prompt
    target = [decoder_start_token(options), *completion.tokens]
    with watch(model) as maps:
        model(torch.tensor([source]), torch.tensor([target[:-1]]))
    source_words = token_pieces(tokenizer, source)
    read_words = token_pieces(tokenizer, target[:-1])
    written_words = token_pieces(tokenizer, target, 1)
    visible = mask_table(kl.causal, len(read_words))
    panels = {
        "self-attention": ("encoder.*.self", source_words, source_words, "reads all of the source"),
        "masked self-attention": ("decoder.*.self", written_words, read_words, "sees what is written"),
        "cross-attention": ("decoder.*.cross", written_words, source_words, "looks at the source"),
    }
    out = {}
    for name, (pattern, queries, keys, meaning) in panels.items():
        layer, head, weights = _sharpest_head(maps, pattern)
        out[name] = {
            "place": f"{layer}, head {head}",
            "meaning": meaning,
            "queries": queries,
            "keys": keys,
            "weights": _rounded(weights),
            "visible": visible.tolist() if "masked" in name else torch.ones_like(weights).bool().tolist(),
        }
    return {"sentence": sentence, "translation": completion.text, "panels": out}


def _sharpest_head(maps: dict[str, Tensor], pattern: str) -> tuple[str, int, Tensor]:
    """The head of the last layer that says most about words: large weights on its inner columns.

    The first and last columns are tags, start tokens and end tokens, where heads look that have nothing to
    look for.
    """
    name = max(fnmatch.filter(maps, pattern), key=lambda name: int(name.split(".")[1]))
    heads = maps[name][0].float()
    sharpness = heads[:, :, 1:-1].max(-1).values.mean(-1)
    head = int(sharpness.argmax())
    return name, head, heads[head]


def _audit() -> dict[str, Any]:
    from keepleft.auditing.zoo.tiny_models import tiny_model

    model, example = tiny_model(LEAKY_CLASS)
    return _shorten(json.loads(kl.audit(model, example, budget="quick").json()))


def _audit_tutorial(folder: Path) -> dict[str, Any]:
    """The audit of the model that the tutorial plants a leak in, by the command of the tutorial."""
    page = TUTORIAL.read_text("utf-8")
    block = re.search(r'^```python title="my_model.py"\n(.*?)^```$', page, re.M | re.S)
    if block is None:
        raise ValueError(f"{TUTORIAL.name} has no block with the title my_model.py")
    (folder / "my_model.py").write_text(block[1], "utf-8")
    command = "keepleft audit my_model.py:build --budget quick --claim causal --json"
    return _shorten(json.loads(_run(folder, command, fails=True)))


def _shorten(report: dict[str, Any]) -> dict[str, Any]:
    """What the picture of a report shows, with fewer digits."""
    measured = [[round(size, DIGITS) if size > 1e-3 else size for size in row] for row in report["measured"]]
    findings = [
        {field: finding[field] for field in ("kind", "module", "message", "path", "line")}
        for finding in report["findings"]
    ]
    fields = ("subject", "claim", "verdict", "checked", "claimed")
    return {**{field: report[field] for field in fields}, "findings": findings, "measured": measured}


def _rounded(table: Tensor) -> list[list[float]]:
    return [[round(number, DIGITS) for number in row] for row in table.tolist()]
