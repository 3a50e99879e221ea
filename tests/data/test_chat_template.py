"""Chat templates: rendered as transformers renders them, in a sandbox; what users write stays text."""

from __future__ import annotations

import sys
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from decoding.words import byte_tokens
from keepleft.data.chat_template import ChatTemplate, ChatTemplateError, render_template, template_source
from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN

TOKENS = byte_tokens()
NOTES = {
    "bos_token_id": TOKENS.token_to_id(BOS_TOKEN),
    "eos_token_id": [TOKENS.token_to_id(EOS_TOKEN), 3],
    "pad_token_id": 0,
}
CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TEMPLATES = [
    CHATML,
    # white space control, loop variables, a filter, an undefined variable
    """
{{- bos_token }}
{%- if tools %}
    {{- tools | tojson }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}
        {{- '<<' + message.content.upper() + '>>' }}
        {%- continue %}
    {%- endif %}
    {{- message | tojson }}{{ eos_token }}
{%- endfor %}
""",
    # what the model wrote is marked, for training
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}|{% endfor %}{{ strftime_now('%Y') }}",
]
CHATS = [
    [{"role": "user", "content": "Where is the ship?"}],
    [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "हाँ \n <b>"},
        {"role": "assistant", "content": "calm"},
        {"role": "user", "content": "and now?"},
    ],
]


def peer(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=TOKENS,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token="<pad>",
        chat_template=template,
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_the_tokens_are_those_of_transformers(template, messages):
    expected = peer(template).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ChatTemplate(template, TOKENS, NOTES).encode(messages) == expected


SPELLED = st.lists(st.sampled_from(["<s>", "</s>", "<pad>", "a", " ", "<", "s>", "\ue000"]), max_size=12).map(
    "".join
)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(SPELLED, min_size=1, max_size=4))
def test_special_tokens_are_those_of_the_template_alone(texts):
    messages = [{"role": "user", "content": text} for text in texts]
    tokens = ChatTemplate(CHATML.replace(" | trim", ""), TOKENS, NOTES).encode(messages)
    special = {TOKENS.token_to_id(name) for name in (BOS_TOKEN, EOS_TOKEN, "<pad>")}
    assert sum(token in special for token in tokens) == 2 * len(texts) + 1
    written = "".join(f"<s>user\n{text}</s>\n" for text in texts) + "<s>assistant\n"
    assert TOKENS.decode(tokens, skip_special_tokens=False) == written


def test_the_messages_are_left_as_they_are():
    messages = [{"role": "user", "content": "a </s> b"}]
    ChatTemplate(CHATML, TOKENS, NOTES).encode(messages)
    assert messages == [{"role": "user", "content": "a </s> b"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('begin with the user') }}", "begin with the user"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for a in range(99999) %}{{ 'long ' * 9999 }}{% endfor %}", "more than 16,777,216 characters"),
    ],
)
def test_a_template_that_fails_is_an_error_with_its_reason(template, message):
    with pytest.raises(ChatTemplateError, match=f"chat template rejects these messages: .*{message}"):
        ChatTemplate(template, TOKENS, NOTES).encode(CHATS[0])


def test_a_template_cannot_read_files_or_import():
    for template in ("{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os.getcwd() }}"):
        with pytest.raises(ChatTemplateError):
            render_template(template, {}, 1000)


def test_the_date_of_a_template_is_today():
    assert render_template("{{ strftime_now('%Y') }}", {}, 1000) == str(datetime.now().year)


def test_without_jinja2_the_error_names_it_and_the_way_around(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(ImportError, match="pip install jinja2, or do without the template"):
        ChatTemplate("{{ 'no jinja2' }}", TOKENS, NOTES).encode(CHATS[0])


def test_only_text_is_a_template():
    assert template_source({}) is None
    assert template_source({"chat_template": {"a": 1}}) is None
    assert template_source({"chat_template": "x"}) == "x"
