"""The harness gets what the model says: likelihoods, rolling likelihoods and texts, alone and in a task."""

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


def tokenizer(add_bos: bool = False) -> Tokenizer:
    """Each letter a token, "<s>" and "</s>" beside them."""
    alphabet = string.ascii_letters + string.digits + string.punctuation + " éü是да"
    out = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, **{c: n + 2 for n, c in enumerate(alphabet)}}, []))
    out.decoder = decoders.Fuse()
    out.add_special_tokens(["<s>", "</s>"])
    if add_bos:
        out.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return out


@pytest.fixture(scope="module")
def model():
    design = kl.presets.small(kl.presets.gpt2).but(
        vocab=tokenizer().get_vocab_size(), position=kl.LearnedPositions(LENGTH)
    )
    out = kl.build(design, generator=torch.Generator().manual_seed(3), dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in out.parameters():
            weight.mul_(3.0)  # so that it has opinions
    out.notes = {"bos_token_id": 0, "eos_token_id": 1}
    return out


def requests(kind: str, *arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=request_arguments, idx=n)
        for n, request_arguments in enumerate(arguments)
    ]


@torch.no_grad()
def score_directly(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One token after the other, each after at most LENGTH."""
    total, is_greedy = 0.0, True
    for n, token in enumerate(continuation):
        logprobs = model(torch.tensor([(context + continuation[:n])[-LENGTH:]]))[0, -1].log_softmax(-1)
        total, is_greedy = total + float(logprobs[token]), is_greedy and int(logprobs.argmax()) == token
    return total, is_greedy


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_likelihoods_of_continuations(model, add_bos, batch):
    letters = tokenizer(add_bos)
    ids = lambda text: letters.encode(text, add_special_tokens=False).ids
    pairs = [
        ("The sea is", " blue"),
        ("Das Meer ", "ist grün"),
        ("", "alone"),
        ("a", "b"),
        ("q: 是?", " да"),
        ("x y", " z"),
    ]
    results = lm_eval_model(model, letters, batch_size=batch).loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (total, is_greedy) in zip(pairs, results, strict=True):
        prefix = [0] if add_bos or not context else []
        # the harness moves a space at the end to what follows
        continuation = context[len(context.rstrip()) :] + continuation
        expected = score_directly(model, prefix + ids(context.rstrip()), ids(continuation))
        assert total == pytest.approx(expected[0], abs=1e-9)
        assert is_greedy == expected[1]


def test_what_the_model_would_write_is_greedy(model):
    letters = tokenizer()
    lm = lm_eval_model(model, letters)
    one_token = {"until": [], "max_gen_toks": 1}
    (likeliest,) = lm.generate_until(requests("generate_until", ("The sea", one_token)))
    assert likeliest
    results = lm.loglikelihood(
        requests("loglikelihood", ("The sea", likeliest), ("The sea", "@" if likeliest != "@" else "#"))
    )
    assert [is_greedy for _, is_greedy in results] == [True, False]


def test_a_context_too_long_is_cut_on_the_left(model):
    letters = tokenizer()
    context, continuation = "many words " * 8, "end"
    result = lm_eval_model(model, letters).loglikelihood(
        requests("loglikelihood", (context.strip(), continuation))
    )[0]
    sequence = letters.encode(context.strip() + continuation).ids[-LENGTH - 1 :]
    logprobs = model(torch.tensor([sequence[:-1]]))[0].log_softmax(-1).detach()
    expected = sum(float(logprobs[n - 1, sequence[n]]) for n in range(len(sequence) - 3, len(sequence)))
    assert result[0] == pytest.approx(expected, abs=1e-9)
    with pytest.raises(ValueError, match="a continuation of 40 tokens is more than the 31"):
        lm_eval_model(model, letters).loglikelihood(requests("loglikelihood", ("a", "b" * 40)))


@pytest.mark.parametrize(
    "text", ["short", "a much longer text, of more letters than there are positions: " * 2, "é" * 16, ""]
)
def test_rolling_likelihoods_are_over_the_windows_of_the_harness(model, text):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    letters = tokenizer()
    result = lm_eval_model(model, letters, batch_size=2).loglikelihood_rolling(
        requests("loglikelihood_rolling", (text,))
    )[0]
    ids = letters.encode(text).ids
    windows = map(
        make_disjoint_window,
        get_rolling_token_windows(ids, prefix_token=0, max_seq_len=LENGTH, context_len=1),
    )
    assert result == pytest.approx(sum(score_directly(model, *window)[0] for window in windows), abs=1e-9)


def test_texts_are_written_as_one_by_one_and_end_where_told(model):
    letters = tokenizer()
    prompts = ["The sea is", "a", "", "Ein etwas", "zz", "The sea"]
    full_texts = []
    for prompt in prompts:
        ids = letters.encode(prompt).ids or [0]
        full_texts.append(kl.generate(model, letters, [ids], max_new_tokens=20, eos_token_id=1)[0])
    lm = lm_eval_model(model, letters, batch_size=4)
    options = {"until": [], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}
    assert (
        lm.generate_until(requests("generate_until", *((prompt, options) for prompt in prompts)))
        == full_texts
    )
    stops = [text[len(text) // 2 :][:1] or "@" for text in full_texts]
    texts = lm.generate_until(
        requests(
            "generate_until",
            *((prompts[n], options | {"until": stop, "max_gen_toks": 5 + n}) for n, stop in enumerate(stops)),
        )
    )
    for n, (text, full_text, stop) in enumerate(zip(texts, full_texts, stops, strict=True)):
        ids = letters.encode(prompts[n]).ids or [0]
        assert (
            text == kl.generate(model, letters, [ids], max_new_tokens=5 + n, eos_token_id=1)[0].split(stop)[0]
        )
        assert stop not in text
        assert full_text.startswith(text)
    assert any(len(text) < 5 + n for n, text in enumerate(texts))


def test_a_stop_string_cuts_before_its_first_place():
    assert cut_at_stop("one\ntwo. three", ["\n", ". ", ""]) == "one"
    assert cut_at_stop("one", ["two"]) == "one"


def test_what_cannot_be_done_is_told(model):
    letters, lm = tokenizer(), lm_eval_model(model, tokenizer())
    sampled = requests("generate_until", ("a", {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8}))
    assert lm.generate_until(sampled) == lm.generate_until(sampled)
    with pytest.raises(ValueError, match="256 tokens to write leave no room"):
        lm.generate_until(requests("generate_until", ("a", {})))
    nameless = kl.build(kl.presets.small(kl.presets.gpt2)).eval()
    with pytest.raises(ValueError, match="neither bos_token_id nor eos_token_id"):
        lm_eval_model(nameless, letters)


def test_the_harness_says_the_same_of_transformers(tmp_path):
    """Its own adapter on a random GPT-2 of theirs, ours on the same directory."""
    letters = tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own making
        from lm_eval.models.huggingface import HFLM
        from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

        config = GPT2Config(
            vocab_size=letters.get_vocab_size(),
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
                tokenizer_object=letters, bos_token="<s>", eos_token="</s>", pad_token="</s>"
            ),
        )
        ours = lm_eval_model(kl.load(peers.save(peer, tmp_path / "gpt2"))[0], letters)
        pairs = requests(
            "loglikelihood", ("The sea is", " blue"), ("", "alone"), ("many words " * 6, "end"), ("a ", "b")
        )
        for (ours_total, ours_greedy), (theirs_total, theirs_greedy) in zip(
            ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True), strict=True
        ):
            assert ours_total == pytest.approx(theirs_total, rel=1e-4)
            assert ours_greedy == theirs_greedy
        texts = requests(
            "loglikelihood_rolling", ("a text of more letters than there are positions",), ("short",)
        )
        expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
        assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-4)
        prompts = requests(
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

        results = lm_eval.simple_evaluate(
            model=lm_eval_model(model, tokenizer()),
            tasks=tasks,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=TaskManager(include_defaults=False),
        )
    correct = 0
    for record in records:
        ids = lambda text: tokenizer().encode(text).ids
        logprobs = [
            score_directly(model, ids(record["question"]), ids(" " + choice))[0]
            for choice in record["choices"]
        ]
        correct += logprobs.index(max(logprobs)) == record["answer"]
    assert results["results"]["choice"]["acc,none"] == pytest.approx(correct / 5)
    assert results["results"]["writing"]["exact_match,none"] == 0.0
    from keepleft.evaluation.perplexity import perplexity

    expected = perplexity(
        model,
        tokenizer(),
        [record["text"] for record in records],
        prefix_token_id=0,
        window=LENGTH,
        stride=LENGTH,
    )
    assert results["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(expected.bits_per_byte)
