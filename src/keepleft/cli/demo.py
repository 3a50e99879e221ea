"""keepleft demo"""

from __future__ import annotations

SOURCE, TARGET = ("Je", "suis", "heureux"), ("I", "am", "happy")
SCORES = ((0.8, 0.6, 0.4), (0.3, 0.7, 0.5), (0.2, 0.4, 0.9))
FAMILIES = ("vaswani", "gpt", "gpt2", "gpt3", "llama", "t5", "mt5", "bart", "marian", "bert")


def demo(prompt: str = "The capital of France is") -> int:
    """See masks, the three attentions, every family of models, and real weights at work.

    Args:
        prompt: what the installed model, if there is one, goes on from
    """
    masks()
    attentions()
    models()
    continuation(prompt)
    print("\nNext: `make test` proves what you saw; README.md says which seven files to read, in which order.")
    return 0


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if _terminal() else f"\n{text}")


def masks() -> None:
    import keepleft as kl

    heading("1. A mask says who may look at whom: ■ may look, · may not (a line is a reader, a column what it reads)")
    texts = ["causal", "causal & window(3)", "causal & window(3) | prefix(1)", "causal | block(3)"]
    drawn = [kl.draw(kl.mask(text), 6).splitlines() for text in texts]
    print("   ".join(f"{text:30}" for text in texts))
    for lines in zip(*drawn, strict=True):
        print("   ".join(f"{line:30}" for line in lines))
    print("What is wrong with causal | prefix(2)?", "; ".join(kl.faults(kl.causal | kl.prefix(2), 3)))


def attentions() -> None:
    """One worked example: the same scores, three sights. Values are the unit vectors, so what comes out are the weights."""
    import torch

    import keepleft as kl

    heading("2. The three attentions, on the same scores: softmax over what is in sight, exactly 0 elsewhere")
    scores, blank, one_each = torch.tensor(SCORES)[None, None], torch.zeros(1, 1, 3, 3), torch.eye(3)[None, None]
    for title, mask, columns in (("self-attention (encoder)", kl.full, TARGET),
                                 ("masked self-attention (decoder)", kl.causal, TARGET),
                                 ("cross-attention (decoder reads encoder)", kl.full, SOURCE)):
        weights = kl.attend(blank, blank, one_each, kl.see(mask, kl.Grid(3, 3)), bias=scores)[0, 0]
        print(f"{title}\n{'':8}" + "".join(f"{column:>9}" for column in columns))
        for reader, row in zip(TARGET, weights.tolist(), strict=True):
            print(f"{reader:8}" + "".join(f"{weight:9.4f}" for weight in row))


def models() -> None:
    import torch

    import keepleft as kl

    heading("3. Every family, as data: its published size, and a small one of the same kind at work")
    for name in FAMILIES:
        design = getattr(kl.presets, name)
        model = kl.build(kl.presets.small(design), generator=torch.Generator().manual_seed(0)).eval()
        tokens = torch.tensor([[5, 6, 7, 8, 9]])
        with torch.no_grad():
            out = model(tokens, tokens) if isinstance(model, kl.EncoderDecoder) else model(tokens)
        kind = {kl.Encoder: "encoder", kl.Decoder: "decoder", kl.EncoderDecoder: "encoder-decoder"}[type(model)]
        weights = sum(p.numel() for p in model.parameters())
        print(f"{name:8} {kind:16} {kl.parameters(design):>15,} weights; small: {weights:>7,} weights, "
              f"{tuple(tokens.shape)} tokens → {tuple(out.shape)}")


def continuation(prompt: str) -> None:
    import torch

    import keepleft as kl
    from keepleft.cli.found import installed_weights

    heading("4. Real weights")
    path = installed_weights().get("SmolLM2-135M-Instruct")
    if path is None:
        print("None are installed here. `make weights` fetches two small models; then `make demo` again.")
        return
    try:
        model, tokenizer = kl.load(path)
    except ImportError as error:
        print(f"SmolLM2-135M-Instruct is installed, but {error}")
        return
    assert tokenizer is not None
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    out = [int(token) for token in kl.greedy(model, tokens, limit=24, end=[model.notes["eos_token_id"]])]  # type: ignore[arg-type]
    print("SmolLM2-135M-Instruct goes on, token by token from its cache:")
    print(f"  {prompt}\033[1m{tokenizer.decode(out)}\033[0m" if _terminal() else f"  {prompt} →{tokenizer.decode(out)}")


def _terminal() -> bool:
    import sys

    return sys.stdout.isatty()
