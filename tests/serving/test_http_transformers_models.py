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
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        yield transformers


def save(transformers, model, folder, **options):
    """A directory as transformers writes it; the model, to compare with."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=TOKENS, bos_token="<s>", eos_token="</s>", pad_token="<pad>", **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return model.eval()


def post(http_client, where, body):
    answer = http_client.post(where, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_gpt2_of_transformers_completes_and_chats(transformers, tmp_path):
    config = transformers.GPT2Config(
        vocab_size=SIZE,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    model = save(transformers, transformers.GPT2LMHeadModel(config), tmp_path, chat_template=CHAT)
    ids = torch.tensor([TOKENS.encode("the sea").ids])
    with torch.no_grad():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, pad_token_id=0
        )
    with client(load_for_inference(str(tmp_path))) as http_client:
        result = post(
            http_client, "/v1/completions", {"prompt": "the sea", "temperature": 0, "max_tokens": 9}
        )
        assert result["choices"][0]["text"] == TOKENS.decode(expected[0, 2:].tolist())
        messages = [{"role": "user", "content": "hi"}]
        chat = post(
            http_client, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 5}
        )
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        row = peer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert chat["usage"]["prompt_tokens"] == len(row)
        assert http_client.get("/v1/models").json()["data"][0]["max_model_len"] == 64


@pytest.mark.parametrize(
    "template", [CHAT, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT}]]
)
def test_a_template_may_stand_in_the_tokenizers_configuration(transformers, tmp_path, template):
    config = transformers.GPT2Config(vocab_size=SIZE, n_positions=32, n_embd=8, n_layer=1, n_head=1)
    save(transformers, transformers.GPT2LMHeadModel(config), tmp_path)
    config_dict = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config_dict, "chat_template": template}))
    assert load_for_inference(str(tmp_path)).model.notes["chat_template"] == CHAT


def test_a_t5_of_transformers_translates(transformers, tmp_path):
    config = transformers.T5Config(
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
    model = save(transformers, transformers.T5ForConditionalGeneration(config), tmp_path)
    ids = torch.tensor([TOKENS.encode("the sea is calm").ids])
    with torch.no_grad():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, num_beams=3
        )
    with client(load_for_inference(str(tmp_path))) as http_client:
        result = post(
            http_client, "/v1/translate", {"input": "the sea is calm", "num_beams": 3, "max_new_tokens": 9}
        )
        assert result["data"][0]["text"] == TOKENS.decode(expected[0, 1:].tolist())


def test_berts_of_transformers_give_vectors_and_labels(transformers, tmp_path):
    config = transformers.BertConfig(
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
    model = save(transformers, transformers.BertModel(config), tmp_path / "vectors")
    with client(load_for_inference(str(tmp_path / "vectors"))) as http_client, torch.no_grad():
        result = post(http_client, "/v1/embeddings", {"input": "the sea is calm"})["data"][0]["embedding"]
        assert result == pytest.approx(model(ids).pooler_output[0].tolist(), abs=1e-4)
    model = save(transformers, transformers.BertForSequenceClassification(config), tmp_path / "labels")
    with client(load_for_inference(str(tmp_path / "labels"))) as http_client, torch.no_grad():
        result = post(http_client, "/v1/classify", {"input": "the sea is calm"})["data"][0]["probabilities"]
        expected = model(ids).logits[0].softmax(-1).tolist()
        assert result == pytest.approx(dict(zip(config.label2id, expected, strict=True)), abs=1e-4)


@pytest.mark.slow
def test_smollm2_answers_in_a_chat():
    path = installed_weights().get("SmolLM2-135M-Instruct")
    if path is None:
        pytest.skip("SmolLM2-135M-Instruct is not installed: make weights")
    with client(load_for_inference(str(path))) as http_client:
        assert http_client.service.max_model_len == 8192
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        result = post(
            http_client, "/v1/chat/completions", {"messages": chat, "temperature": 0, "max_tokens": 16}
        )
        assert "Paris" in result["choices"][0]["message"]["content"]
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["London", "Paris", "Rome"]}}}
        result = post(
            http_client, "/v1/chat/completions", {"messages": chat, "temperature": 0, "response_format": form}
        )
        assert json.loads(result["choices"][0]["message"]["content"]) in ("London", "Paris", "Rome")


@pytest.mark.slow
def test_minilm_knows_what_belongs_together():
    path = installed_weights().get("all-MiniLM-L6-v2")
    if path is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: make weights")
    with client(load_for_inference(str(path))) as http_client:
        texts = ["A man is eating food.", "Someone eats a piece of bread.", "The girl carries a baby."]
        response = post(http_client, "/v1/embeddings", {"input": texts})
        vectors = torch.tensor([entry["embedding"] for entry in response["data"]])
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
        # its tokenizer.json pads and truncates each text to 128 tokens, which does not count here
        assert response["usage"]["prompt_tokens"] == 25
        long = post(http_client, "/v1/embeddings", {"input": "word " * 200})
        assert long["usage"]["prompt_tokens"] == 202
