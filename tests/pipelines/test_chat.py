"""Chats: the answer of a session is that of the whole conversation, and its messages are what was said."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from decoding.words import byte_tokens, writer
from keepleft.pipelines.chat import MAX_ANSWER_TOKENS, conversation
from keepleft.pipelines.text_generation import TextGenerator

TOKENS = byte_tokens()
CHAT = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
LETTERS = sorted(n for word, n in TOKENS.get_vocab().items() if word.isascii() and word.isalpha())


@cache
def talker(context: int = 512, seed: int = 0):
    design = writer(TOKENS).design.but(position=kl.Rotary(length=context))
    model = kl.build(design, generator=torch.Generator().manual_seed(seed)).double().eval()
    model.notes = {"eos_token_id": 2, "bos_token_id": 1, "chat_template": CHAT}
    return model


def session(context: int = 512, **options) -> kl.ChatSession:
    options = {"max_new_tokens": 8, "shortlist": [*LETTERS, 2], **options}
    return kl.ChatSession(talker(context), TOKENS, **options)


@settings(max_examples=6, deadline=None)
@given(
    texts=st.lists(st.text("the sea", min_size=1, max_size=12), min_size=1, max_size=4),
    system=st.sampled_from([None, "be calm"]),
    do_sample=st.booleans(),
)
def test_an_answer_is_that_of_the_whole_conversation(texts, system, do_sample):
    talk = session(do_sample=do_sample, seed=5, system=system)
    for n, text in enumerate(texts):
        messages = [*talk.messages, {"role": "user", "content": text}]
        answer = talk.answer(text)
        expected = kl.chat(talk.model, TOKENS, messages, system=system, options=talk.options.but(seed=5 + n))
        assert answer == expected
        assert talk.messages == [*messages, {"role": "assistant", "content": answer}]


def test_only_what_is_new_is_prefilled():
    talk = session()
    talk.answer("the sea is calm")
    first = talk.stats
    talk.answer("and the ship")
    assert first.reused_tokens == 0
    # the last token of the answer is in no cache yet
    assert talk.stats.reused_tokens >= first.prompt_tokens + first.new_tokens - 2
    assert talk.stats.prompt_tokens > talk.stats.reused_tokens


def test_a_text_is_one_message_and_kl_generate_stays_as_it_is():
    model = talker()
    answer = kl.chat(model, TOKENS, "the sea", system="calm", max_new_tokens=6)
    prompt = "<s>system: calm</s><s>user: the sea</s><s>assistant: "
    tokens = TOKENS.__class__.from_str(TOKENS.to_str())
    tokens.encode_special_tokens = False
    assert answer == kl.generate(model, TOKENS, [tokens.encode(prompt).ids], max_new_tokens=6)[0]
    assert kl.generate(model, TOKENS, "the sea", max_new_tokens=6)[0] != answer


def test_a_generator_answers_texts_as_messages():
    model = talker()
    generator = TextGenerator(model, TOKENS).with_chat_template("calm")
    options = generator.resolve(kl.GenerationConfig())
    assert options.max_new_tokens == MAX_ANSWER_TOKENS
    options = options.but(max_new_tokens=6)
    results = generator.generate(["the sea", "a ship"], options)
    expected = [
        kl.chat(model, TOKENS, text, system="calm", max_new_tokens=6) for text in ("the sea", "a ship")
    ]
    assert [result[0].text for result in results] == expected
    assert "".join(generator.stream("the sea", options)) == expected[0]


def test_a_model_without_a_template_is_an_error():
    model = writer(TOKENS)
    for make in (
        lambda: kl.chat(model, TOKENS, "hi"),
        lambda: kl.ChatSession(model, TOKENS),
        lambda: TextGenerator(model, TOKENS).with_chat_template(),
    ):
        with pytest.raises(ValueError, match="the model has no chat template: take an instruct model"):
            make()


@pytest.mark.parametrize("messages", [[1], [{"role": "user"}], [{"role": "user", "content": 3}], ["hi"]])
def test_what_is_no_message_is_an_error(messages):
    with pytest.raises(ValueError, match=r"message 0 is .*: it must be \{\"role\""):
        kl.chat(talker(), TOKENS, messages)


def test_two_system_messages_are_an_error():
    with pytest.raises(ValueError, match="leave one out"):
        conversation([{"role": "system", "content": "a"}], "b")


def test_undo_retry_and_reset():
    talk = session(do_sample=True, seed=1, temperature=2.0)
    assert talk.undo() is None
    with pytest.raises(ValueError, match="no message to answer again"):
        list(talk.retry())
    talk.answer("one")
    before = list(talk.messages)
    first = talk.answer("two")
    again = "".join(talk.retry())
    assert again != first  # drawn with another seed
    assert talk.messages[-2:] == [{"role": "user", "content": "two"}, {"role": "assistant", "content": again}]
    assert talk.undo() == "two"
    assert talk.messages == before
    talk.reset()
    assert talk.messages == []


def test_an_answer_that_is_stopped_keeps_what_was_written():
    talk = session(max_new_tokens=50)
    pieces = talk.stream("the sea")
    text = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    assert talk.stats.finish_reason == "interrupted"
    talk.answer("go on")
    assert talk.stats.reused_tokens > 10


def test_an_answer_that_fails_takes_the_message_back():
    talk = session()
    talk.answer("one")
    before = list(talk.messages)
    with pytest.raises(ValueError, match=r"the message makes a prompt of .* tokens, and the model reads 512"):
        talk.answer("sea " * 600)
    assert talk.messages == before
    talk.options = talk.options.but(num_beams=2)
    with pytest.raises(ValueError, match="num_beams is 2, which a chat cannot do"):
        talk.answer("two")
    with pytest.raises(ValueError, match="num_beams is 2"):
        list(talk.retry())
    assert talk.messages == before


def test_the_oldest_turns_are_dropped_where_the_context_is_full():
    talk = session(context=100, max_new_tokens=12)
    dropped = 0
    for n in range(12):
        text = f"message {n} of the sea"
        talk.answer(text)
        dropped += talk.stats.dropped_turns
        assert talk.stats.prompt_tokens + talk.stats.new_tokens <= 100
        assert talk.visible_from == 2 * dropped
        assert talk.messages[-2]["content"] == text
    assert dropped > 2
    assert len(talk.messages) == 24  # the conversation itself is whole
    while talk.undo() is not None:
        pass
    assert talk.visible_from == 0
    talk.answer("again")


def test_the_reason_why_an_answer_ended():
    talk = session(max_new_tokens=3)
    talk.answer("the sea")
    assert talk.stats.finish_reason == "length"
    talk.options = talk.options.but(shortlist=[2])
    assert talk.answer("the sea") == ""
    assert talk.stats.finish_reason == "stop"
    assert talk.messages[-1]["content"] == ""
    talk.reset()
    talk.options = talk.options.but(shortlist=LETTERS, max_new_tokens=40)
    whole = talk.answer("the sea")
    talk.reset()
    stop = whole[5:8]
    talk.options = talk.options.but(stop_strings=stop)
    assert talk.answer("the sea") == whole[: whole.index(stop)]
    assert talk.stats.finish_reason == "stop"


def test_a_saved_conversation_goes_on():
    talk = session()
    talk.answer("the sea")
    other = session()
    other.load([{"role": "system", "content": "calm"}, *talk.messages])
    assert (other.system, other.messages) == ("calm", talk.messages)
    for messages, message in [
        ([{"role": "assistant", "content": "a"}], "user and assistant take turns"),
        ([{"role": "user", "content": "a"}], "the last message has no answer"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.load(messages)
    assert other.messages == talk.messages


def test_an_ensemble_chats_with_its_kv_caches_kept():
    model = talker()
    options = {"max_new_tokens": 6, "shortlist": LETTERS}
    alone = kl.ChatSession(model, TOKENS, **options)
    twins = kl.ChatSession(kl.ensemble([model, model]), TOKENS, **options)
    for text in ("the sea", "a ship", "calm"):
        assert twins.answer(text) == alone.answer(text)
    assert twins.stats == alone.stats
    assert twins.stats.reused_tokens > 20
