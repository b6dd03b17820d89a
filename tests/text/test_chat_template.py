"""Chat templates: the default model's against transformers, and what templates may ask for."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from neojax.text.chat_template import TemplateError, render_chat
from neojax.text.tokenizer import Tokenizer

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_text.json").read_text())
ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize("case", GOLDENS["chats"], ids=lambda case: str(len(case["messages"])))
def test_chats_of_the_default_model_are_rendered_as_by_transformers(default_checkpoint, case):
    tokenizer = Tokenizer.from_checkpoint(default_checkpoint)
    text = render_chat(
        tokenizer.chat_template,
        case["messages"],
        add_generation_prompt=case["add_generation_prompt"],
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )
    assert text == case["text"]
    assert tokenizer.encode(text) == case["ids"]


def test_text_parts_are_joined_and_null_content_is_empty():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert render_chat(ECHO, messages) == "[user:a b][assistant:]"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {}}], "image_url"),
        ([{"type": "text"}], "text"),
        (["a"], "str"),
        (7, "int"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(content, named):
    with pytest.raises(TemplateError, match=named):
        render_chat(ECHO, [{"role": "user", "content": content}])


def test_templates_get_the_variables_and_helpers_of_transformers():
    template = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'a': '<é>'} | tojson }}{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}"
        "{% generation %}!{% endgeneration %}{{ strftime_now('%Y') }}{{ thinking }}{{ tools }}"
    )
    text = render_chat(template, [], bos_token="<s>", eos_token="</s>", thinking="on")
    assert text == f'02{{"a": "<é>"}}<s></s>True!{datetime.datetime.now().year}onNone'


def test_blocks_leave_no_blank_lines():
    assert render_chat("a\n  {% if true %}\nb\n  {% endif %}\n", []) == "a\nb\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "failed"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "failed"),
        ("{{ nothing.of.this }}", "failed"),
    ],
)
def test_a_template_that_fails_or_escapes_is_a_value_error(template, words):
    with pytest.raises(TemplateError, match=words):
        render_chat(template, [{"role": "user", "content": "x"}])


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": None}]
    render_chat(ECHO, messages)
    assert messages == [{"role": "user", "content": None}]


def test_the_last_message_is_continued_with_the_spaces_at_its_end():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab "}]
    text = render_chat(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>ab</user><assistant>ab "


@pytest.mark.parametrize("template", ["{{ messages[0].role }}", "{{ messages }}{{ messages }}"])
def test_a_template_that_does_not_show_the_last_message_once_cannot_continue_it(template: str):
    with pytest.raises(TemplateError, match="not continued"):
        render_chat(template, [{"role": "user", "content": "a"}], continue_final_message=True)
