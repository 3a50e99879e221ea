"""keepleft demo"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepleft.models.transformer import EncoderDecoder

SOURCE = ("Je", "suis", "heureux")
TARGET = ("I", "am", "happy")
SCORES = ((0.8, 0.6, 0.4), (0.3, 0.7, 0.5), (0.2, 0.4, 0.9))
TRANSLATIONS = (  # language to write, and text
    ("fr", "Where is the station?"),
    ("de", "We arrived late because of the rain."),
    ("hi", "What is your name?"),
    ("en", "Je n'ai pas assez d'argent."),
    ("en", "Warum bist du gestern nicht gekommen?"),
)
FAMILIES = ("vaswani", "gpt", "gpt2", "gpt3", "llama", "t5", "mt5", "bart", "marian", "bert")


def demo(
    prompt: str = "The capital of France is",
    steps: int = 750,
    out: str = "out/demo",
    phrases: str | None = None,
) -> int:
    """See a translator, masks and the three kinds of attention at work, then train a translator.

    It takes a minute or two, and needs no data and no network.

    Args:
        prompt: the text that an installed model continues, if there is one (keepleft fetch)
        steps: training steps of the translator; 0 leaves it out
        out: the folder for the plot of the translator's attention
        phrases: only write the training phrases into this folder, to try `keepleft train` with
    """
    if phrases is not None:
        return write_phrases(phrases)
    show_shipped_translator()
    show_masks()
    show_attentions()
    show_models()
    success = show_translator(steps, out) if steps else True
    show_continuation(prompt)
    print_heading("What to try next")
    print(
        "keepleft compare      why the mask: one parallel pass against the step-by-step loop\n"
        "keepleft train --task translate --train.src a.en --train.tgt a.fr     your data; docs/training.md\n"
        "keepleft --help       everything else; in a clone, CONTRIBUTING.md names seven files to read first"
    )
    return 0 if success else 1


def show_shipped_translator() -> None:
    """Real translations, by the model that comes with the program."""
    from keepleft.cli.translate import shipped_translator
    from keepleft.decoding.generation_config import GenerationConfig

    print_heading("1. A translator at work, from its KV cache: the model that comes with keepleft")
    try:
        path = shipped_translator()
    except ValueError as error:
        print(f"{str(error)[0].upper()}{str(error)[1:]}.")
        return
    from keepleft.pipelines.text_generation import load_generator
    from keepleft.pipelines.translator import LANGUAGE_NAMES, Translator

    generator = load_generator(path)
    for to, text in TRANSLATIONS:
        translator = Translator(generator, to)
        ((result,),) = translator.generate([text], translator.resolve(GenerationConfig()))
        print(f"  {text:44} → {LANGUAGE_NAMES[to]:8} {result.text}")
    print('Try your own: keepleft translate "How are you?" --to fr')


def print_heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if _is_terminal() else f"\n{text}")


def show_masks() -> None:
    import keepleft as kl

    print_heading(
        "2. A mask says who may look at whom: ■ may look, · may not (rows are queries, columns are keys)"
    )
    texts = ["causal", "causal & window(3)", "causal & window(3) | prefix(1)", "causal | block(3)"]
    pictures = [kl.draw(kl.parse_mask(text), 6).splitlines() for text in texts]
    print("   ".join(f"{text:30}" for text in texts))
    for lines in zip(*pictures, strict=True):
        print("   ".join(f"{line:30}" for line in lines))
    print("What is wrong with causal | prefix(2)?", "; ".join(kl.faults(kl.causal | kl.prefix(2), 3)))


def show_attentions() -> None:
    """One example, three masks, the same scores. The values are unit vectors: the output is the weights."""
    import torch

    import keepleft as kl

    print_heading(
        "3. The three attentions, on the same scores: softmax over visible keys, exactly 0 elsewhere"
    )
    scores = torch.tensor(SCORES)[None, None]
    zeros = torch.zeros(1, 1, 3, 3)
    unit_vectors = torch.eye(3)[None, None]
    for title, mask, columns in (
        ("self-attention (encoder)", kl.full, TARGET),
        ("masked self-attention (decoder)", kl.causal, TARGET),
        ("cross-attention (decoder to encoder)", kl.full, SOURCE),
    ):
        weights = kl.attend(zeros, zeros, unit_vectors, kl.see(mask, kl.Grid(3, 3)), bias=scores)[0, 0]
        print(f"{title}\n{'':8}" + "".join(f"{column:>9}" for column in columns))
        for query, row in zip(TARGET, weights.tolist(), strict=True):
            print(f"{query:8}" + "".join(f"{weight:9.4f}" for weight in row))


def show_models() -> None:
    import torch

    import keepleft as kl

    print_heading(
        "4. Every model family, as data: its published size, and a small one of the same design at work"
    )
    for name in FAMILIES:
        design = getattr(kl.presets, name)
        model = kl.build(kl.presets.small(design), generator=torch.Generator().manual_seed(0)).eval()
        tokens = torch.tensor([[5, 6, 7, 8, 9]])
        with torch.no_grad():
            out = model(tokens, tokens) if isinstance(model, kl.EncoderDecoder) else model(tokens)
        small_size = sum(p.numel() for p in model.parameters())
        print(
            f"{name:8} {design.kind:16} {kl.count_parameters(design):>15,} parameters; "
            f"small: {small_size:>7,} parameters, {tuple(tokens.shape)} tokens → {tuple(out.shape)}"
        )


def write_phrases(folder: str) -> int:
    """Write fr.en and fr.fr, aligned line by line, and the held-out pairs fr.held.tsv; the same for Hindi."""
    from pathlib import Path

    from keepleft.demo.phrases.corpus import split
    from keepleft.disk import atomic

    Path(folder).mkdir(parents=True, exist_ok=True)
    for language in ("fr", "hi"):
        training, held_out = split(language)
        files = {
            f"{language}.en": [english for english, _ in training],
            f"{language}.{language}": [other for _, other in training],
            f"{language}.held.tsv": [f"{english}\t{other}" for english, other in held_out],
        }
        for name, lines in files.items():
            atomic.write_text(Path(folder) / name, "".join(line + "\n" for line in lines))
            print(Path(folder) / name)
    return 0


def show_translator(steps: int, out: str) -> bool:
    """Train on the toy corpus, translate held-out sentences, and show the attention. Did it learn them?"""
    from time import perf_counter

    from keepleft.cli.progress import Bar
    from keepleft.demo import translator as demo_translator

    print_heading(
        "5. A translator from scratch: English to French and Hindi, one model, on phrases that the program "
        "makes up itself"
    )
    task = demo_translator.prepare_demo()
    num_parameters = sum(p.numel() for p in task.model.parameters())
    num_held_out = len(task.heldout["fr"])
    print(
        f"{len(task.batches.store):,} pairs, {num_parameters:,} parameters; {num_held_out} sentences of each "
        "language are held out: new combinations of known words"
    )
    start_time = perf_counter()
    with Bar("training", steps) as bar:
        for report in demo_translator.train_translator(task, steps):
            speed = f"{report.tokens_per_second:,.0f} tokens/s"
            bar.update(report.step, f"loss {report.cross_entropy:.3f}  {speed}")
    print(
        f"trained in {perf_counter() - start_time:.0f} s: loss {report.cross_entropy:.3f}, "
        f"{report.accuracy:.1%} of the words right"
    )
    success = True
    for language, name in demo_translator.LANGUAGE_NAMES.items():
        held_out = task.heldout[language]
        exact_match = demo_translator.heldout_exact_match(task, language)
        success = success and exact_match >= 0.95
        print(f"\n{name}: {exact_match:.1%} of the held-out sentences are right to the letter. Some of them:")
        samples = [english for english, _ in held_out[:4]]
        for english, other in zip(samples, demo_translator.translate(task, language, samples), strict=True):
            print(f"  {english:52} → {other}")
    audit_translator(task.model)
    english = next(english for english, french in task.heldout["fr"] if 5 <= len(french.split()) <= 7)
    source, translation, weights = demo_translator.alignment(task, "fr", english)
    if translation:
        print("\nWhat each French word attends to (cross-attention; darker is more):\n")
        print(demo_translator.alignment_text(source, translation, weights))
        print(f"\nThe same as a plot: {demo_translator.plot_alignment(source, translation, weights, out)}")
    return success


def audit_translator(model: EncoderDecoder) -> None:
    """Audit the translator, and then a copy without its causal mask, which must be caught."""
    from copy import deepcopy

    import keepleft as kl

    report = kl.audit(model, budget="quick")
    checked = ", ".join(report.checked)
    print(f"\nDoes it peek? {report.text().splitlines()[0]} ({checked}: {report.calls} calls)")
    unmasked = deepcopy(model)
    unmasked.decoder.masks = (kl.full,)
    findings = kl.audit(unmasked, budget="quick", checks=["future"]).findings
    print(f"And with its mask taken away? {findings[0] if findings else 'nothing was found'}")


def show_continuation(prompt: str) -> None:
    import keepleft as kl
    from keepleft.cli.paths import installed_weights

    print_heading("6. A published model")
    path = installed_weights().get("SmolLM2-135M-Instruct")
    if path is None:
        print(
            "None are installed. `keepleft fetch SmolLM2-135M-Instruct` downloads 93 MB; then run this again."
        )
        return
    try:
        model, tokenizer = kl.load(path)
    except ImportError as error:
        print(f"SmolLM2-135M-Instruct is installed, but {error}")
        return
    assert tokenizer is not None
    (out,) = kl.generate(model, tokenizer, prompt, max_new_tokens=24)
    print("SmolLM2-135M-Instruct continues, token by token from its KV cache:")
    print(f"  {prompt}\033[1m{out}\033[0m" if _is_terminal() else f"  {prompt} →{out}")


def _is_terminal() -> bool:
    import sys

    return sys.stdout.isatty()
