from __future__ import annotations

import re
from typing import Any

import pytest

from dilocox.data.chat_template import ChatTemplate, TemplateError, marks_of
from dilocox.errors import DataError
from tests.data.chat_templates import CHATML, GENERATION, INST, PLAIN, THINKING

SPECIAL = frozenset(["<|im_start|>", "<|im_end|>", "</s>"])
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "3"},
]


def template(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"} | variables, SPECIAL)


def learned(source: str, messages: list[dict[str, Any]], loss_on: str = "assistant") -> list[str]:
    text, spans = template(source).learned(messages, None, loss_on)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("source", [CHATML, GENERATION])
def test_the_assistants_messages_are_learned_with_the_token_that_ends_them(source: str) -> None:
    assert learned(source, TALK) == ["2<|im_end|>", "3<|im_end|>"]
    assert learned(source, TALK, "last") == ["3<|im_end|>"]
    assert learned(source, TALK, "all") == [template(CHATML).render(TALK)]
    silent = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    assert learned(source, silent) == ["3<|im_end|>"]
    assert learned(source, TALK[:2]) == []


def test_a_block_that_holds_its_end_is_not_made_longer() -> None:
    inside = GENERATION.replace(
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>\\n' }}",
        "{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}",
    )
    assert inside != GENERATION
    assert learned(inside, TALK) == ["2<|im_end|>", "3<|im_end|>"]


def test_templates_without_a_beginning_of_the_message() -> None:
    assert learned(INST, TALK[1:]) == [" 2 </s>", " 3 </s>"]
    assert learned(PLAIN, TALK) == ["2</s>", "3</s>"]


def test_a_refusal_of_the_template_is_shown() -> None:
    with pytest.raises(TemplateError, match=r"refuses .*: Only user and assistant roles are supp"):
        learned(INST, TALK)


def test_a_template_that_changes_what_was_said_is_refused() -> None:
    """As the earlier message is not what the model would have written."""
    with pytest.raises(TemplateError, match=r"message 3 .* differently when messages follow"):
        learned(THINKING, TALK)
    assert learned(THINKING, TALK, "last") == ["<think>\n</think>\n3<|im_end|>"]
    assert learned(THINKING, TALK[:3]) == ["<think>\n</think>\n2<|im_end|>"]
    with pytest.raises(TemplateError, match="begins with a message of the assistant"):
        learned(CHATML, TALK[2:])
    assert learned(GENERATION, TALK[2:]) == ["2<|im_end|>", "3<|im_end|>"]


def test_what_a_template_would_leave_out_in_silence_is_refused() -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    with pytest.raises(TemplateError, match="has tool_calls, for which the chat template has no"):
        learned(CHATML, [*TALK, {"role": "assistant", "content": "", "tool_calls": [call]}])
    with pytest.raises(TemplateError, match="has tools, for which"):
        template(CHATML).render(TALK, [{"name": "add"}])


def test_a_template_that_ends_each_conversation_with_end_of_text() -> None:
    """As Phi 3's: the text up to a message ends with a token that is not there in the whole."""
    ended = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    assert learned(ended, TALK) == ["2<|im_end|>", "3<|im_end|>\n</s>"]
    assert learned(ended, TALK, "last") == ["3<|im_end|>\n</s>"]


def test_parts_of_answers_that_are_not_learned_need_not_be_found() -> None:
    silent = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    assert learned(THINKING, silent) == ["<think>\n</think>\n3<|im_end|>"]


def test_thoughts_that_a_template_would_leave_out_are_refused() -> None:
    thought = [*TALK[:4], TALK[4] | {"reasoning_content": "Two and one."}]
    with pytest.raises(TemplateError, match=r"message 5 has reasoning_content, for which the"):
        learned(CHATML, thought)
    assert learned(THINKING, thought, "last") == ["<think>\nTwo and one.</think>\n3<|im_end|>"]
    old = [*TALK[:2], TALK[2] | {"thinking": "Hm."}, *TALK[3:]]
    with pytest.raises(TemplateError, match="message 3 has thinking"):
        learned(CHATML + "{# enable_thinking #}", old)
    assert learned(CHATML, old, "last") == ["3<|im_end|>"]
    assert learned(CHATML, [each | {"reasoning": " "} for each in TALK]) != []
    assert template(CHATML).render(thought) == template(CHATML).render(TALK)


def test_calls_of_templates_that_want_null_content_and_arguments_as_text() -> None:
    """As DeepSeek's."""
    source = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for call in m['tool_calls'] %}"
        "{{ '<call>' + call['function']['name'] + call['function']['arguments'] + '<|im_end|>' }}"
        "{% endfor %}{% else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
    )
    function = {"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    expected = '<call>add{"a": 1, "b": "\u00e9"}<|im_end|>'
    assert learned(source, [TALK[1], call]) == [expected]
    assert template(source).render([TALK[1], call]) == "<user>Two?" + expected


def test_a_developer_is_a_system_where_the_template_does_not_know_the_role() -> None:
    new = [TALK[0] | {"role": "developer"}, *TALK[1:]]
    assert template(CHATML).render(new) == template(CHATML).render(TALK)
    knowing = "{# developer #}" + CHATML
    assert "<|im_start|>developer" in template(knowing).render(new)


def test_dates_do_not_change_from_day_to_day() -> None:
    dated = "{{ strftime_now(\"%d %b %Y\") }} {{ strftime_now('%Y-%m-%d') }}|" + CHATML
    assert template(dated).render(TALK) == "26 Jul 2024 2024-07-26|" + template(CHATML).render(TALK)


def test_text_that_is_no_template_is_refused() -> None:
    with pytest.raises(DataError, match=r"chat template: line 2: .*; correct it"):
        template("a\n{% for %}").render(TALK)


def test_marks() -> None:
    assert marks_of(CHATML + PLAIN) == ["<|im_start|>", "<|im_end|>"]
    assert marks_of("[INST] a [/INST]<start_of_turn><<SYS>><\uff5cUser\uff5c>") == [
        *("[INST]", "[/INST]", "<start_of_turn>", "<<SYS>>", "<\uff5cUser\uff5c>")
    ]
    assert marks_of("{{ '<|' + m.role + '|>' }} a < b | c > d") == []


def test_no_date_format_is_lost() -> None:
    assert re.search("2024", template('{{ strftime_now( "%Y" ) }}').render(TALK))
