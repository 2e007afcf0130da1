"""The tiny tokenizer: every text round-trips, its ids and its template behave as GLM's."""

import json

import pytest
from transformers import AutoTokenizer

from fullspan.data.load import load_tokenizer, model_vocab_size
from fullspan.data.tiny_tokenizer import VOCAB_SIZE, write_tokenizer
from fullspan.errors import DataError

CALL = {"type": "function", "function": {"name": "look", "arguments": {"n": 1, "s": "a<b"}}}


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "  \r\n\t x ",
        "héllo 日本 \U0001f600",
        "".join(map(chr, range(0x300))),
        "a <think> b",
    ],
)
def test_round_trip(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_a_byte_is_its_own_id(tokenizer):
    text = "aé\x00\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())


def test_ids(tokenizer, tmp_path):
    ids = write_tokenizer(tmp_path)
    names = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert ids.eos_token_id == tokenizer.convert_tokens_to_ids(names)
    assert ids.pad_token_id == ids.eos_token_id[0] == tokenizer.pad_token_id
    assert ids.vocab_size == VOCAB_SIZE >= len(tokenizer)


def test_loads_beside_a_model_config(tmp_path):
    ids = write_tokenizer(tmp_path)
    config = {"model_type": "glm_moe_dsa", "vocab_size": ids.vocab_size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer("<|user|>é")["input_ids"] == [ids.eos_token_id[1], *"é".encode()]
    assert model_vocab_size(tmp_path) == VOCAB_SIZE


def render(tokenizer, messages, **settings):
    return tokenizer.apply_chat_template(messages, tokenize=False, **settings)


def test_template_turns(tokenizer):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "same"},
        {"role": "assistant", "content": " A ", "reasoning_content": "dropped"},
        {"role": "user", "content": "same"},
        {"role": "assistant", "content": "", "reasoning_content": " R ", "tool_calls": [CALL]},
        {"role": "tool", "content": "T1"},
        {"role": "observation", "content": "T2"},
        {"role": "assistant", "content": "B"},
    ]
    assert render(tokenizer, messages) == (
        "[gMASK]<sop><|system|>S<|user|>same<|assistant|></think>A<|user|>same<|assistant|>"
        "<think>R</think><tool_call>look<arg_key>n</arg_key><arg_value>1</arg_value>"
        "<arg_key>s</arg_key><arg_value>a<b</arg_value></tool_call><|observation|>"
        "<tool_response>T1</tool_response><tool_response>T2</tool_response>"
        "<|assistant|></think>B"
    )


def test_template_arguments_as_text_and_tools(tokenizer):
    call = {"name": "look", "arguments": '{"n": 1}'}
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = render(tokenizer, messages, tools=[{"type": "function", "function": {"name": "é"}}])
    assert '\n{"name": "é"}\n' in text
    assert text.endswith('<tool_call>look{"n": 1}</tool_call>')


@pytest.mark.parametrize(
    ("switch", "tag"), [({}, "<think>"), ({"enable_thinking": False}, "</think>")]
)
def test_template_generation_prompt(tokenizer, switch, tag):
    messages = [{"role": "user", "content": "U"}]
    text = render(tokenizer, messages, add_generation_prompt=True, **switch)
    assert text == f"[gMASK]<sop><|user|>U<|assistant|>{tag}"


def test_missing_and_damaged_tokenizer(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        load_tokenizer(tmp_path / "none")
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(DataError, match="cannot load") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
