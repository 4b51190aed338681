"""Forms that templates read. What published ones read is in test_published_templates."""

import copy

import pytest

from megarl.data.template_forms import template_forms
from megarl.data.tokenizer import render_text

LOOP = "{{% for m in messages %}}{{{{ m.role }}}}:{}\n{{% endfor %}}"
CONTENT = LOOP.format("{{ m.content }}")
CALLS = LOOP.format("{{ m.content or '' }}{% for c in m.tool_calls or [] %}%s{% endfor %}")


def forms(template):
    return template_forms(template, ())


@pytest.mark.parametrize(
    "written, objects",
    [
        ("{{ c.function.arguments | tojson }}", True),
        (
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
            True,
        ),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}", True),
        ("{{ '(' + c.function.arguments + ')' }}", False),
        ("{{ c.function.arguments }}", False),  # would write Python's notation of an object
    ],
)
def test_arguments(written, objects):
    assert forms(CALLS.replace("%s", written)).argument_objects is objects


def test_null_content():
    assert forms(CALLS.replace("%s", "{{ c.function.arguments | tojson }}")).null_content
    assert not forms(CONTENT).null_content  # would write None
    assert not forms(LOOP.format("{{ ' ' + m.content }}")).null_content  # fails


def test_parts():
    assert (forms(CONTENT).content_text, forms(CONTENT).content_parts) == (True, False)
    reads_both = LOOP.format(
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    )
    assert (forms(reads_both).content_text, forms(reads_both).content_parts) == (True, True)
    parts_alone = LOOP.format("{% for p in m.content %}{{ p.text }}{% endfor %}")
    assert (forms(parts_alone).content_text, forms(parts_alone).content_parts) == (False, True)


def test_messages_are_rendered_in_the_form_that_is_read(tokenizer):
    own = copy.deepcopy(tokenizer)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    own.chat_template = CONTENT
    assert render_text(own, parts, False) == "user:a\n"
    with pytest.raises(ValueError, match="does not read content in parts, but a message of 'user' has 2"):
        render_text(own, [{"role": "user", "content": parts[0]["content"] * 2}], False)
    own.chat_template = LOOP.format("{% for p in m.content %}{{ p.text }}{% endfor %}")
    assert (
        render_text(own, [{"role": "user", "content": "a"}], False) == "user:a"
    )  # jinja trims behind blocks
    flat = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": null}'}]}]
    own.chat_template = CALLS.replace("%s", "{{ c.name }}{{ c.arguments | tojson }}")
    assert render_text(own, flat, False) == 'assistant:f{"x": null}'
    assert flat[0]["tool_calls"][0]["arguments"] == '{"x": null}'  # the caller's is not changed


def test_a_template_that_fails_on_a_type_is_a_users_error(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = LOOP.format("{{ ' ' + m.content + m.name }}")
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        render_text(own, [{"role": "user", "content": "a", "name": 3}], False)
