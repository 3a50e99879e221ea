"""The audit of large models: seconds, the share of it spent in the model, and peak memory against one forward
and backward pass. Random weights, a process for each audit.

python bench/audit_speed.py                     GPT-2 124M and SmolLM2-135M on a CPU, quick and standard
python bench/audit_speed.py --device cuda       shapes of 7B as well
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import nn

import keepleft as kl
from command_line import add_device, make_parser, parse_arguments
from peak_memory import peak_cuda_memory, peak_rss, run_child
from report import environment, print_table, write_json

SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8_192,
}
LLAMA_7B = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4_096,
}
TINY = {**SMOLLM2, "vocab_size": 99, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2}


def of_transformers(name: str, **config: Any) -> nn.Module:
    import transformers

    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**config))


def of_keepleft(design: Any) -> nn.Module:
    return kl.build(design, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: of_keepleft(kl.presets.gpt2),
    "GPT2LMHeadModel": lambda: of_transformers("GPT2LMHeadModel"),
    "smollm2": lambda: of_keepleft(kl.presets.smollm2_135m),
    "LlamaForCausalLM": lambda: of_transformers("LlamaForCausalLM", **SMOLLM2),
    "llama-7b": lambda: of_keepleft(kl.presets.llama),
    "LlamaForCausalLM-7b": lambda: of_transformers("LlamaForCausalLM", **LLAMA_7B),
    "tiny": lambda: of_transformers("LlamaForCausalLM", **TINY),
}
ON_CPU = ("gpt2", "GPT2LMHeadModel", "smollm2", "LlamaForCausalLM")
ON_GPU = (*ON_CPU, "llama-7b", "LlamaForCausalLM-7b")
TARGET_SECONDS = {"quick": 15.0, "standard": 60.0}


def measure(name: str, budget: str, device: str) -> dict[str, Any]:
    """One audit, in this process."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.bfloat16 if "7b" in name else torch.float32)
    model = MODELS[name]().to(device)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")
    measure_peak = peak_cuda_memory if device == "cuda" else peak_rss
    weights = sum(p.numel() * p.element_size() for p in model.parameters())

    vocab = model.config.vocab_size if hasattr(model, "config") else model.design.vocab

    def forward_and_backward() -> None:
        out = model(torch.randint(vocab, (2, 13), device=device))
        logits = out if isinstance(out, torch.Tensor) else out.logits
        logits.float().logsumexp(-1).sum().backward()

    one_pass = measure_peak(forward_and_backward)
    model.zero_grad(set_to_none=True)
    reports = []
    audited = measure_peak(lambda: reports.append(kl.audit(model, budget=budget)))
    report = reports[0]
    return {
        "model": name,
        "budget": budget,
        "verdict": report.verdict,
        "kinds": len(report.checked),
        "calls": report.calls,
        "seconds": round(report.seconds, 1),
        "target": TARGET_SECONDS[budget],
        "in the model": round(report.model_seconds / report.seconds, 2),
        "memory / pass": round((weights + audited) / (weights + one_pass), 2),
        "not applicable": [line for line in report.skipped if line.split(":")[0] in ("labels", "packing")],
        "blocked": list(report.blocked),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--budgets", nargs="+", default=["quick", "standard"], choices=TARGET_SECONDS)
    parser.add_argument("--child", action="store_true", help="measure one audit and print it as JSON")
    options = parse_arguments(parser, argv, models=["tiny"], budgets=["quick"])
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.child:
        print(json.dumps(measure(options.models[0], options.budgets[0], device)))
        return
    print(f"{time.strftime('%Y-%m-%d')}, {environment()}")
    rows = []
    for name in options.models or (ON_GPU if device == "cuda" else ON_CPU):
        for budget in options.budgets:
            arguments = ["--child", "--models", name, "--budgets", budget, "--device", device]
            rows.append(run_child(__file__, *arguments))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    details = ("not applicable", "blocked")
    print_table(
        "The audit of large models",
        [{key: value for key, value in row.items() if key not in details} for row in rows],
    )
    write_json(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
