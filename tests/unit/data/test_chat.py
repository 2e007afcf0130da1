"""The assistant-only mask: GLM's stop rule, other templates, what is refused."""

import copy

import pytest

from fullspan.data.chat import encode_chat, learn_format
from fullspan.data.report import FieldError
from fullspan.data.schema import check_row
from fullspan.errors import DataError

USER = {"role": "user", "content": "U"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

CHATML = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}

<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}
"""
# Role markers that are no special tokens, text arguments only, an eos that ends a turn.
DEEPSEEK = """{%- for m in messages -%}
{%- if m.role == 'user' -%}<|User|>{{ m.content }}
{%- elif m.role == 'tool' -%}<result>{{ m.content }}</result>
{%- else -%}<|Assistant|></think>{{ m.content }}
{%- for c in m.tool_calls or [] -%}<call>{{ c.function.name + c.function.arguments }}</call>
{%- endfor -%}<|endoftext|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|Assistant|>{{ '<think>' if thinking else '</think>' }}
{%- endif -%}
"""


def variant(tokenizer, template, special=(), plain=()):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(list(special), special_tokens=True)
    other.add_tokens(list(plain))
    other.chat_template = template
    return other


@pytest.fixture
def chatml(tokenizer):
    return variant(tokenizer, CHATML, special=["<|im_start|>", "<|im_end|>"])


@pytest.fixture
def deepseek(tokenizer):
    return variant(tokenizer, DEEPSEEK, plain=["<|User|>", "<|Assistant|>"])


def marked(tokenizer, messages, tools=None):
    """The rendered text with every learned run between { and }."""
    chat = learn_format(tokenizer)
    row = check_row({"messages": messages, "tools": tools}, "messages", {})
    tokens, trained = encode_chat(
        tokenizer, chat, row["messages"], row.get("tools"), tokenizer.eos_token_id
    )
    assert len(tokens) == len(trained)
    out, before = "", False
    for token, learned in zip([*tokens, None], [*trained, False]):
        out += {(False, True): "{", (True, False): "}"}.get((before, learned), "")
        out += tokenizer.decode([token]) if token is not None else ""
        before = learned
    return out


def test_last_turn_learns_an_eos_that_the_template_does_not_write(tokenizer):
    messages = [USER, {"role": "assistant", "content": "A"}]
    assert marked(tokenizer, messages) == (
        "[gMASK]<sop><|user|>U<|assistant|></think>{A<|endoftext|>}"
    )


def test_next_role_marker_ends_the_turn_and_is_learned(tokenizer):
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "T"},
        {"role": "assistant", "content": "A"},
        USER,
        {"role": "assistant", "content": "B"},
    ]
    assert marked(tokenizer, messages) == (
        "[gMASK]<sop><|user|>U<|assistant|></think>"
        "{<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><|observation|>}"
        "<tool_response>T</tool_response><|assistant|></think>{A<|user|>}U"
        "<|assistant|></think>{B<|endoftext|>}"
    )


def test_reasoning_is_learned_after_the_tag_that_the_prompt_opens(tokenizer):
    answer = {"role": "assistant", "content": "A", "reasoning_content": "R"}
    assert marked(tokenizer, [USER, answer, USER, answer]) == (
        "[gMASK]<sop><|user|>U<|assistant|></think>{A<|user|>}U"
        "<|assistant|><think>{R</think>A<|endoftext|>}"
    )


def test_markers_that_are_no_stop_are_not_learned(tokenizer):
    answer = {"role": "assistant", "content": "A"}
    messages = [USER, answer, {"role": "system", "content": "S"}, USER, answer, answer]
    assert marked(tokenizer, messages) == (
        "[gMASK]<sop><|user|>U<|assistant|></think>{A}<|system|>S<|user|>U"
        "<|assistant|></think>{A}<|assistant|></think>{A<|endoftext|>}"
    )


def test_conversation_that_ends_with_the_user(tokenizer):
    messages = [USER, {"role": "assistant", "content": "A"}, USER]
    assert marked(tokenizer, messages).endswith("</think>{A<|user|>}U")


def test_no_assistant_turn_learns_nothing(tokenizer):
    assert marked(tokenizer, [USER]) == "[gMASK]<sop><|user|>U"


def test_end_of_turn_token(chatml):
    messages = [
        USER,
        {"role": "assistant", "content": "A"},
        USER,
        {"role": "assistant", "content": "B", "tool_calls": [CALL]},
    ]
    assert marked(chatml, messages) == (
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n{A<|im_end|>}\n"
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
        '{B\n<tool_call>f {"a": 1}</tool_call><|im_end|>}\n'
    )


def test_eos_as_end_of_turn_is_not_doubled(deepseek):
    messages = [
        USER,
        {"role": "assistant", "content": "A", "tool_calls": [CALL]},
        {"role": "tool", "content": "T"},
        {"role": "assistant", "content": "B"},
    ]
    assert marked(deepseek, messages) == (
        '<|User|>U<|Assistant|></think>{A<call>f{"a": 1}</call><|endoftext|>}<result>T</result>'
        "<|Assistant|></think>{B<|endoftext|>}"
    )


@pytest.mark.parametrize(
    ("messages", "tools", "where"),
    [
        ([{"role": "user", "content": "x<|assistant|>y"}], None, "messages[0].content"),
        ([USER, {"role": "assistant", "content": "<|user|>"}], None, "messages[1].content"),
        ([{"role": "tool", "content": "<|endoftext|>"}], None, "messages[0].content"),
        (
            [USER, {"role": "assistant", "content": "A", "reasoning_content": "[gMASK]"}],
            None,
            "messages[1].reasoning_content",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"k": ["<sop>"]}'}]}],
            None,
            "messages[0].tool_calls[0].function.arguments.k[0]",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"<|user|>": 1}}]}],
            None,
            "messages[0].tool_calls[0].function.arguments.<|user|>",
        ),
        ([USER], [{"name": "f", "description": "<|user|>"}], "tools[0].description"),
    ],
)
def test_control_tokens_in_a_message_are_refused(tokenizer, messages, tools, where):
    with pytest.raises(FieldError) as caught:
        marked(tokenizer, messages, tools)
    assert caught.value.where == where
    assert "control token" in caught.value.reason


def test_role_markers_that_are_no_special_tokens_are_refused_too(deepseek):
    for text in ("<|User|>", "<|Assistant|>"):
        with pytest.raises(FieldError, match="control token"):
            marked(deepseek, [{"role": "user", "content": f"a {text} b"}])


def test_tags_in_a_message_are_allowed(tokenizer):
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "A"}]
    assert "<|user|><think><|assistant|></think>{A" in marked(tokenizer, messages)


def test_what_the_template_would_leave_out_is_refused(tokenizer, chatml):
    answer = {"role": "assistant", "content": "A", "reasoning_content": "R"}
    with pytest.raises(FieldError, match="renders no reasoning"):
        marked(chatml, [USER, answer])
    with pytest.raises(FieldError, match="renders no tools"):
        marked(chatml, [USER], TOOLS)
    silent = variant(tokenizer, tokenizer.chat_template.replace("message.tool_calls", "none"))
    with pytest.raises(FieldError, match="renders no tool calls"):
        marked(silent, [USER, {"role": "assistant", "content": "A", "tool_calls": [CALL]}])


def test_a_conversation_that_the_template_refuses(tokenizer):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user\nfirst') }}{% endif %}"
    with pytest.raises(FieldError, match="refuses it: user first'"):
        marked(
            variant(tokenizer, strict + tokenizer.chat_template),
            [{"role": "system", "content": "S"}],
        )


def test_a_template_that_leaves_out_a_turn(tokenizer):
    template = tokenizer.chat_template.replace(
        "'assistant' -%}", "'assistant' and message.content != 'X' -%}"
    )
    template = template.replace("{{- raise_exception('unknown role ' ~ message.role) -}}", "")
    with pytest.raises(FieldError, match="renders 0 of 1 assistant turns"):
        marked(variant(tokenizer, template), [USER, {"role": "assistant", "content": "X"}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ nothing.at.all }}", "fails on a plain chat"),
        ("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}", "no generation prompt"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            "opens assistant turns without a special token",
        ),
        (
            "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else ' User: ' }}"
            "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "ends assistant turns without a special token",
        ),
    ],
)
def test_unusable_templates(tokenizer, template, reason):
    with pytest.raises(DataError, match=reason):
        learn_format(variant(tokenizer, template))


def test_long_reasoning_and_content_are_kept_verbatim(tokenizer):
    """At inference the same template renders the same text: only the appended eos is ours."""
    answer = {"role": "assistant", "content": "A\n\n  b", "reasoning_content": "R\n" * 50}
    row = check_row({"messages": [USER, answer]}, "messages", {})["messages"]
    tokens, _ = encode_chat(tokenizer, learn_format(tokenizer), row, None, tokenizer.eos_token_id)
    assert tokenizer.decode(tokens[:-1]) == tokenizer.apply_chat_template(row, tokenize=False)
    assert tokens[-1] == tokenizer.eos_token_id
