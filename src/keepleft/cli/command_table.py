"""The commands: one row each, in the order of the list that `keepleft` prints.

Nothing is imported here: a row names its function, whose module is imported when the command is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

FIRST_STEPS = "First steps"
USE = "Use a model"
TRAIN = "Train and evaluate"
CHECK = "Check and look inside"
SHARE = "Serve and share"
MACHINE = "This machine"


class Command(NamedTuple):
    """A command.

    Its function has the options: a sentence for each is in the docstring, whose first paragraphs say what the
    command does. `options` are the ones that --help shows, by title; --help-all shows the others too.
    """

    name: str
    function: str  # module:name, below keepleft.cli
    group: str  # what one wants to do
    summary: str  # at most 31 characters
    example: str  # for the list of commands; at most 45 characters
    examples: tuple[str, str, str]  # for --help; they work as they are where the files exist
    arguments: str = ""  # what follows the name in the usage line
    options: Mapping[str, str] = MappingProxyType({})  # title: names of options, as the function has them

    def load(self) -> Callable[..., int]:
        """The function of the command."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(f"keepleft.cli.{module}"), name)

    @property
    def usage(self) -> str:
        return " ".join(filter(None, ["keepleft", self.name, self.arguments, "[options]"]))


COMMANDS = (
    Command(
        name="demo",
        function="demo:demo",
        group=FIRST_STEPS,
        summary="see what keepleft does",
        example="keepleft demo",
        examples=("keepleft demo", "keepleft demo --steps 0", "keepleft demo --phrases data"),
        options={"What to show": "steps prompt", "Files": "out phrases"},
    ),
    Command(
        name="compare",
        function="compare:compare",
        group=FIRST_STEPS,
        summary="see what the causal mask is for",
        example="keepleft compare",
        examples=(
            "keepleft compare",
            "keepleft compare --lengths 16 64 --steps 100",
            "keepleft compare --out out/compare --json",
        ),
        options={"The experiment": "lengths steps", "Results": "out json"},
    ),
    Command(
        name="translate",
        function="translate:translate",
        group=USE,
        summary="translate texts",
        example='keepleft translate "I am happy" --to fr',
        arguments="[MODEL] [TEXT ...]",
        examples=(
            'keepleft translate "Where is the station?" --to fr',
            "keepleft translate --input lettre.txt --output letter.txt --to en",
            'keepleft translate runs/translate/model "I am happy" --num-beams 4',
        ),
        options={
            "Texts": "to input output n_best json stream",
            "Decoding": "tag num_beams max_new_tokens",
            "Look inside": "plot alignments",
            "Machine": "workers dtype device threads",
        },
    ),
    Command(
        name="generate",
        function="generate:generate_text",
        group=USE,
        summary="answer or continue a text",
        example='keepleft generate "Why is the sky blue?"',
        arguments="[MODEL] [TEXT ...]",
        examples=(
            'keepleft generate "What is the capital of France?"',
            'keepleft generate runs/lm/model "Once upon a time" --do-sample --seed 1',
            "keepleft generate runs/lm/model --input prompts.txt --output stories.txt",
        ),
        options={
            "Texts": "input output raw json",
            "Length": "max_new_tokens stop_strings",
            "Sampling": "do_sample temperature top_p seed",
            "Structured output": "json_schema regex",
            "Machine": "dtype device threads",
        },
    ),
    Command(
        name="chat",
        function="chat:chat_with_model",
        group=USE,
        summary="talk to an instruct model",
        example="keepleft chat",
        arguments="[MODEL]",
        examples=(
            "keepleft chat",
            'keepleft chat SmolLM2-135M-Instruct --system "You are a pirate."',
            "keepleft chat --load talk.json --temperature 0.3",
        ),
        options={
            "The conversation": "system load no_history",
            "Decoding": "max_new_tokens temperature top_p seed",
            "Machine": "dtype device threads",
        },
    ),
    Command(
        name="summarize",
        function="summarize:summarize",
        group=USE,
        summary="summarize texts",
        example="keepleft summarize MODEL --input news.txt",
        arguments="MODEL [TEXT ...]",
        examples=(
            'keepleft summarize runs/summarize/model "$(cat article.txt)"',
            "keepleft summarize runs/summarize/model --input news.txt --output short.txt",
            "keepleft summarize facebook/bart-large-cnn --input news.txt --num-beams 4",
        ),
        options={
            "Texts": "input output json stream",
            "Length": "max_new_tokens min_new_tokens",
            "Decoding": "num_beams length_penalty no_repeat_ngram_size",
            "Machine": "workers dtype device threads",
        },
    ),
    Command(
        name="classify",
        function="predict:classify",
        group=USE,
        summary="label texts",
        example='keepleft classify MODEL "What a fine day"',
        arguments="MODEL [TEXT ...]",
        examples=(
            'keepleft classify runs/classify/model "What a fine day"',
            "keepleft classify runs/classify/model --input reviews.txt --output labels.tsv",
            "tail -f log.txt | keepleft classify runs/classify/model --json --batch-size 1",
        ),
        options={"Texts": "input output json", "Machine": "workers batch_size dtype device threads"},
    ),
    Command(
        name="fill",
        function="predict:fill",
        group=USE,
        summary="fill gaps in a text (BERT)",
        example='keepleft fill MODEL "Paris is in [MASK]."',
        arguments="MODEL [TEXT ...]",
        examples=(
            'keepleft fill runs/mlm/model "Paris is in [MASK]."',
            'keepleft fill google-bert/bert-base-uncased "Paris is in [MASK]." --count 10',
            "keepleft fill runs/mlm/model --input gaps.txt --json",
        ),
        options={"Texts": "input count json", "Machine": "dtype device threads"},
    ),
    Command(
        name="score",
        function="predict:score",
        group=USE,
        summary="tell how likely texts are",
        example='keepleft score MODEL "The sea is calm."',
        arguments="MODEL [TEXT ...]",
        examples=(
            'keepleft score runs/lm/model "The sea is calm."',
            'keepleft score SmolLM2-135M-Instruct "The sea is calm." --tokens',
            "keepleft score runs/lm/model --input lines.txt --output scores.tsv",
        ),
        options={"Texts": "input output tokens json", "Machine": "workers dtype device threads"},
    ),
    Command(
        name="embed",
        function="predict:embed",
        group=USE,
        summary="turn texts into vectors",
        example='keepleft embed MODEL "The sea is calm."',
        arguments="MODEL [TEXT ...]",
        examples=(
            'keepleft embed all-MiniLM-L6-v2 "The sea is calm."',
            "keepleft embed all-MiniLM-L6-v2 --input lines.txt --output vectors.tsv",
            "keepleft embed all-MiniLM-L6-v2 --input 'texts/*.jsonl' --output vectors",
        ),
        options={"Texts": "input output json", "Machine": "workers dtype device threads"},
    ),
    Command(
        name="train",
        function="train:train_model",
        group=TRAIN,
        summary="train a model on your files",
        example="keepleft train --task lm --train corpus.txt",
        examples=(
            "keepleft train --task lm --train corpus.txt",
            "keepleft train --task translate --train.src a.en --train.tgt a.fr",
            "keepleft train --task classify --train reviews.tsv --size tiny",
        ),
        options={
            "What to train": "task size init_from preset",
            "Data": "train train.src train.tgt valid",
            "The run": "out config dry_run resume",
            "How long, and where": "minutes recipe.steps recipe.lr device",
        },
    ),
    Command(
        name="eval",
        function="eval:evaluate_model",
        group=TRAIN,
        summary="measure BLEU, accuracy, …",
        example="keepleft eval MODEL test.tsv",
        arguments="MODEL DATA [DATA]",
        examples=(
            "keepleft eval runs/translate/model test.tsv",
            "keepleft eval translator test.en test.fr --to fr --baseline other.fr",
            "keepleft eval runs/lm/model test.txt --fail-under 20",
        ),
        options={
            "What to measure": "task to baseline limit fail_under json",
            "Decoding": "tag num_beams max_new_tokens",
            "Machine": "dtype device threads",
        },
    ),
    Command(
        name="audit",
        function="audit:audit_model",
        group=CHECK,
        summary="find out whether a model leaks",
        example="keepleft audit my/model.py:build",
        arguments="[MODEL]",
        examples=(
            "keepleft audit my/model.py:build",
            'keepleft audit runs/lm/model --claim "causal & window(3)" --html audit.html',
            "keepleft audit --hf-config config.json --arch LlamaForCausalLM",
        ),
        options={
            "What to check": "claim checks budget watch",
            "Without running": "explain",
            "Models of transformers": "hf_config arch with zoo",
            "Reports": "html junit sarif json",
        },
    ),
    Command(
        name="show",
        function="show:show",
        group=CHECK,
        summary="see attention in a web page",
        example='keepleft show MODEL "The sea" --html sea.html',
        arguments="MODEL [TEXT]",
        examples=(
            'keepleft show runs/lm/model "The sea is calm" --html sea.html',
            'keepleft show translator --source "I am happy" --to fr --html happy.html',
            "keepleft show runs/lm/model --html all.html --runs runs --compare out/compare",
        ),
        options={
            "The page": "html views",
            "What it shows": "source to runs compare",
            "Machine": "dtype device threads",
        },
    ),
    Command(
        name="serve",
        function="serve:serve",
        group=SHARE,
        summary="serve a web page and an API",
        example="keepleft serve",
        arguments="[MODEL]",
        examples=(
            "keepleft serve",
            "keepleft serve SmolLM2-135M-Instruct --port 8080 --dtype int8",
            "keepleft serve runs/lm/model --host 0.0.0.0 --api-key-file keys.txt",
        ),
        options={
            "Address": "host port",
            "Access": "api_key api_key_file allow_origin",
            "Model": "served_model_name dtype device",
            "Capacity": "replicas max_model_len max_num_seqs kv_cache_memory threads",
        },
    ),
    Command(
        name="export",
        function="export:export",
        group=SHARE,
        summary="write GGUF, ONNX, CTranslate2",
        example="keepleft export MODEL --to gguf --out m.gguf",
        arguments="MODEL",
        examples=(
            "keepleft export runs/lm/model --to gguf --out model.gguf",
            "keepleft export runs/translate/model --to ctranslate2 --out ct2",
            "keepleft export runs/lm/model --to hf --out hf --force",
        ),
        options={
            "What to write": "to out force",
            "Data type": "quantization dtype",
            "Verification": "text no_verify json",
        },
    ),
    Command(
        name="push",
        function="push:push_model",
        group=SHARE,
        summary="publish a model on the hub",
        example="keepleft push MODEL OWNER/NAME --dry-run",
        arguments="MODEL REPO",
        examples=(
            "keepleft push runs/translate/model OWNER/NAME --dry-run",
            "keepleft push runs/translate/model OWNER/NAME --license apache-2.0 --private",
            "keepleft push runs/lm/model OWNER/NAME --card card.md --license mit",
        ),
        options={
            "The repository": "private revision message",
            "The model card": "license language card",
            "Before it is pushed": "dry_run no_audit",
        },
    ),
    Command(
        name="fetch",
        function="fetch:fetch",
        group=MACHINE,
        summary="download small models",
        example="keepleft fetch SmolLM2-135M-Instruct",
        arguments="[NAME ...]",
        examples=(
            "keepleft fetch",
            "keepleft fetch SmolLM2-135M-Instruct all-MiniLM-L6-v2",
            "keepleft fetch HuggingFaceTB/SmolLM2-360M-Instruct",
        ),
        options={"Output": "json", "Machine": "threads"},
    ),
    Command(
        name="doctor",
        function="doctor:doctor",
        group=MACHINE,
        summary="list versions, devices, models",
        example="keepleft doctor",
        examples=("keepleft doctor", "keepleft doctor --json", "keepleft doctor --json > machine.json"),
        options={"Output": "json", "Machine": "threads"},
    ),
    Command(
        name="completion",
        function="completion:print_completion",
        group=MACHINE,
        summary="complete commands with Tab",
        example="keepleft completion bash",
        arguments="SHELL",
        examples=(
            "keepleft completion bash > ~/.local/share/bash-completion/completions/keepleft",
            'keepleft completion zsh > "${fpath[1]}/_keepleft"',
            "keepleft completion fish > ~/.config/fish/completions/keepleft.fish",
        ),
    ),
)


def find_command(name: str) -> Command:
    """The command of this name. Raises ValueError, with a similar name or all of them, if there is none."""
    for command in COMMANDS:
        if command.name == name:
            return command
    if name == "version":
        raise ValueError("there is no command 'version': keepleft --version prints the version")
    names = [command.name for command in COMMANDS]
    close = get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    raise ValueError(f"there is no command {name!r}: {hint}")
