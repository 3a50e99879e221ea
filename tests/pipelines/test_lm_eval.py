"""What the harness is told is what the model says: likelihoods, rolling likelihoods and texts, alone and through a task."""

from __future__ import annotations

import string
import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, processors

import keepleft as kl
import peers
from keepleft.pipelines.lm_eval import cut_at_stop, lm_eval_model

pytest.importorskip("lm_eval")

LENGTH = 31


def tokenizer(front: bool = False) -> Tokenizer:
    """Each letter a token, "<s>" and "</s>" beside them."""
    alphabet = string.ascii_letters + string.digits + string.punctuation + " éü是да"
    made = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, **{c: n + 2 for n, c in enumerate(alphabet)}}, []))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>"])
    if front:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return made


@pytest.fixture(scope="module")
def model():
    design = kl.presets.small(kl.presets.gpt2).but(
        vocab=tokenizer().get_vocab_size(), position=kl.LearnedPositions(LENGTH)
    )
    made = kl.build(design, generator=torch.Generator().manual_seed(3), dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(3.0)  # so that it has opinions
    made.notes = {"bos_token_id": 0, "eos_token_id": 1}
    return made


def asked(kind: str, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=given, idx=n) for n, given in enumerate(arguments)]


@torch.no_grad()
def directly(model, context: list[int], wanted: list[int]) -> tuple[float, bool]:
    """One token after the other, each after at most LENGTH."""
    total, same = 0.0, True
    for n, token in enumerate(wanted):
        logs = model(torch.tensor([(context + wanted[:n])[-LENGTH:]]))[0, -1].log_softmax(-1)
        total, same = total + float(logs[token]), same and int(logs.argmax()) == token
    return total, same


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_likelihoods_of_continuations(model, front, batch):
    words = tokenizer(front)
    ids = lambda text: words.encode(text, add_special_tokens=False).ids
    pairs = [
        ("The sea is", " blue"),
        ("Das Meer ", "ist grün"),
        ("", "alone"),
        ("a", "b"),
        ("q: 是?", " да"),
        ("x y", " z"),
    ]
    found = lm_eval_model(model, words, batch_size=batch).loglikelihood(asked("loglikelihood", *pairs))
    for (context, wanted), (total, same) in zip(pairs, found, strict=True):
        before = [0] if front or not context else []
        wanted = (
            context[len(context.rstrip()) :] + wanted
        )  # the harness moves a space at the end to what follows
        want = directly(model, before + ids(context.rstrip()), ids(wanted))
        assert total == pytest.approx(want[0], abs=1e-9)
        assert same == want[1]


def test_what_the_model_would_write_is_greedy(model):
    words = tokenizer()
    told = lm_eval_model(model, words)
    likeliest = told.generate_until(asked("generate_until", ("The sea", {"until": [], "max_gen_toks": 1})))[0]
    assert likeliest
    found = told.loglikelihood(
        asked("loglikelihood", ("The sea", likeliest), ("The sea", "@" if likeliest != "@" else "#"))
    )
    assert [same for _, same in found] == [True, False]


def test_a_context_too_long_is_cut_on_the_left(model):
    words = tokenizer()
    context, wanted = "many words " * 8, "end"
    found = lm_eval_model(model, words).loglikelihood(asked("loglikelihood", (context.strip(), wanted)))[0]
    whole = words.encode(context.strip() + wanted).ids[-LENGTH - 1 :]
    logs = model(torch.tensor([whole[:-1]]))[0].log_softmax(-1).detach()
    want = sum(float(logs[n - 1, whole[n]]) for n in range(len(whole) - 3, len(whole)))
    assert found[0] == pytest.approx(want, abs=1e-9)
    with pytest.raises(ValueError, match="a continuation of 40 tokens is more than the 31"):
        lm_eval_model(model, words).loglikelihood(asked("loglikelihood", ("a", "b" * 40)))


@pytest.mark.parametrize(
    "text", ["short", "a much longer text, of more letters than there are positions: " * 2, "é" * 16, ""]
)
def test_rolling_likelihoods_are_over_the_windows_of_the_harness(model, text):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    words = tokenizer()
    found = lm_eval_model(model, words, batch_size=2).loglikelihood_rolling(
        asked("loglikelihood_rolling", (text,))
    )[0]
    ids = words.encode(text).ids
    parts = map(
        make_disjoint_window,
        get_rolling_token_windows(ids, prefix_token=0, max_seq_len=LENGTH, context_len=1),
    )
    assert found == pytest.approx(sum(directly(model, *part)[0] for part in parts), abs=1e-9)


def test_texts_are_written_as_one_by_one_and_end_where_told(model):
    words = tokenizer()
    prompts = ["The sea is", "a", "", "Ein etwas", "zz", "The sea"]
    free = []
    for prompt in prompts:
        ids = words.encode(prompt).ids or [0]
        free.append(kl.generate(model, words, [ids], max_new_tokens=20, eos_token_id=1)[0])
    told = lm_eval_model(model, words, batch_size=4)
    options = {"until": [], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}
    assert told.generate_until(asked("generate_until", *((prompt, options) for prompt in prompts))) == free
    stops = [text[len(text) // 2 :][:1] or "@" for text in free]
    found = told.generate_until(
        asked(
            "generate_until",
            *((prompts[n], options | {"until": stop, "max_gen_toks": 5 + n}) for n, stop in enumerate(stops)),
        )
    )
    for n, (text, whole, stop) in enumerate(zip(found, free, stops, strict=True)):
        ids = words.encode(prompts[n]).ids or [0]
        assert (
            text == kl.generate(model, words, [ids], max_new_tokens=5 + n, eos_token_id=1)[0].split(stop)[0]
        )
        assert stop not in text
        assert whole.startswith(text)
    assert any(len(text) < 5 + n for n, text in enumerate(found))


def test_a_stop_string_cuts_before_its_first_place():
    assert cut_at_stop("one\ntwo. three", ["\n", ". ", ""]) == "one"
    assert cut_at_stop("one", ["two"]) == "one"


def test_what_cannot_be_done_is_told(model):
    words, told = tokenizer(), lm_eval_model(model, tokenizer())
    drawn = asked("generate_until", ("a", {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8}))
    assert told.generate_until(drawn) == told.generate_until(drawn)
    with pytest.raises(ValueError, match="256 tokens to write leave no room"):
        told.generate_until(asked("generate_until", ("a", {})))
    nameless = kl.build(kl.presets.small(kl.presets.gpt2)).eval()
    with pytest.raises(ValueError, match="neither bos_token_id nor eos_token_id"):
        lm_eval_model(nameless, words)


def test_the_harness_says_the_same_of_transformers(tmp_path):
    """Its own adapter on a random GPT-2 of theirs, ours on the same directory."""
    words = tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own making
        from lm_eval.models.huggingface import HFLM
        from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

        config = GPT2Config(
            vocab_size=words.get_vocab_size(),
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.3,
        )
        peer = GPT2LMHeadModel(config).eval()
        theirs = HFLM(
            pretrained=peer,
            batch_size=2,
            device="cpu",
            max_length=LENGTH,
            tokenizer=PreTrainedTokenizerFast(
                tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>"
            ),
        )
        ours = lm_eval_model(kl.load(peers.keep(peer, tmp_path / "gpt2"))[0], words)
        pairs = asked(
            "loglikelihood", ("The sea is", " blue"), ("", "alone"), ("many words " * 6, "end"), ("a ", "b")
        )
        for (one, greedy), (other, same) in zip(
            ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True), strict=True
        ):
            assert one == pytest.approx(other, rel=1e-4)
            assert greedy == same
        texts = asked(
            "loglikelihood_rolling", ("a text of more letters than there are positions",), ("short",)
        )
        want = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
        assert ours.loglikelihood_rolling(texts) == pytest.approx(want, rel=1e-4)
        prompts = asked(
            "generate_until",
            *(
                (prompt, {"until": ["e"], "max_gen_toks": 9, "do_sample": False})
                for prompt in ("The sea is", "a", "zz", "much too long to be read as a whole")
            ),
        )
        assert ours.generate_until(prompts) == theirs.generate_until(prompts, disable_tqdm=True)


def test_a_task_runs_through_the_harness(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own making
        import datasets
        import lm_eval

        records = [
            {"question": f"{n} and 1?", "choices": ["yes", "no", "well"], "answer": n % 3, "text": "sea " * n}
            for n in range(5)
        ]
        rows = lambda **_: {"test": datasets.Dataset.from_list(records)}
        shared = {
            "custom_dataset": rows,
            "dataset_path": "none",
            "test_split": "test",
            "doc_to_text": "{{question}}",
        }
        tasks = [
            {
                "task": "choice",
                **shared,
                "output_type": "multiple_choice",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "answer",
                "metric_list": [{"metric": "acc"}],
            },
            {
                "task": "writing",
                **shared,
                "output_type": "generate_until",
                "doc_to_target": "{{choices[answer]}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
                "metric_list": [{"metric": "exact_match"}],
            },
            {
                "task": "rolling",
                **shared,
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "bits_per_byte"}],
            },
        ]
        from lm_eval.tasks import TaskManager

        found = lm_eval.simple_evaluate(
            model=lm_eval_model(model, tokenizer()),
            tasks=tasks,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=TaskManager(include_defaults=False),
        )
    right = 0
    for record in records:
        ids = lambda text: tokenizer().encode(text).ids
        told = [
            directly(model, ids(record["question"]), ids(" " + choice))[0] for choice in record["choices"]
        ]
        right += told.index(max(told)) == record["answer"]
    assert found["results"]["choice"]["acc,none"] == pytest.approx(right / 5)
    assert found["results"]["writing"]["exact_match,none"] == 0.0
    from keepleft.evaluation.perplexity import perplexity

    want = perplexity(
        model,
        tokenizer(),
        [record["text"] for record in records],
        prefix_token_id=0,
        window=LENGTH,
        stride=LENGTH,
    )
    assert found["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(want.bits_per_byte)
