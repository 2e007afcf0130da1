"""Chat rows into tokens and an assistant-only mask, through the tokenizer's own chat template.

Learned: what a model has to write itself at inference. Of an assistant turn that is everything
after the generation prompt (so neither the role header nor a `<think>` that the prompt already
opens), up to and including the token that ends the turn. GLM has no end-of-turn token: the next
role marker, <|user|> or <|observation|>, ends the turn and is learned. The last turn learns an eos,
appended when the template writes none. A marker that no user or tool turn begins with (two
assistant turns in a row, a system message in between) is not a stop, and is not learned.

How a template does this is found by rendering probes once, not by a list of models. The mask comes
from the rendered text, and that is safe because a message that spells out a role marker or another
control token is refused with line and field. Reasoning is left to the template: GLM drops it from
turns before the last user message, as it does at inference. Leaves out templates that end turns
with ordinary text.
"""

import json
import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fullspan.data.report import FieldError, brief
from fullspan.data.schema import walk_texts
from fullspan.errors import DataError

Message = dict[str, Any]

_USER, _ANSWER, _NEXT, _LAST = "probeuser", "probeanswer", "probenext", "probelast"
_TOOL, _VALUE, _RESULT, _REASON = "probetool", "probevalue", "proberesult", "probereason"
_TURNS = [
    {"role": "user", "content": _USER},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
    {"role": "assistant", "content": _LAST},
]
_SIGNATURE = {
    "name": _TOOL,
    "description": _TOOL,
    "parameters": {"type": "object", "properties": {}},
}
# What a template lets through when it cannot render a conversation.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)
# Thinking on and off, under the names that GLM, Qwen and DeepSeek templates give the switch.
_SWITCHES = tuple({name: on} for name in ("enable_thinking", "thinking") for on in (True, False))


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """What a chat template does, as far as the mask needs it."""

    header: str
    """opens every assistant turn, e.g. <|assistant|>"""
    prompts: tuple[str, ...]
    """generation prompts, longest first; a turn that starts with one is learned from its end on"""
    stops: frozenset[str]
    """tokens that end an assistant turn"""
    reserved: re.Pattern[str]
    """control tokens; no message may spell one out"""
    tool_calls: str
    """how arguments reach the template: "object", "text", or "" when it renders no tool calls"""
    tools: bool
    reasoning: bool


def learn_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Renders probes. Raises DataError when there is no template or no token that ends a turn."""
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template, which data.format messages needs")
    try:
        text = _render(tokenizer, _TURNS)
        prompts = _generation_prompts(tokenizer)
    except _TEMPLATE_ERRORS as error:
        raise DataError(f"the chat template fails on a plain chat: {brief(error)}") from error
    if "" in prompts:
        raise DataError("the chat template has no generation prompt to tell the answer by")
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    between = _between(text, _USER, _ANSWER)
    names = {token.content for token in added}
    header = _header(prompts, between, names)
    gap = _between(text, _ANSWER, _NEXT)
    stop = _first(special, gap)
    if not stop or gap[: gap.index(stop)].strip():
        raise DataError("the chat template ends assistant turns without a special token")
    opening = {name for name in names if name in gap} | {_first(names, header)}
    tool_calls, tool_stop = _tool_calls(tokenizer, special)
    return ChatFormat(
        header=header,
        prompts=tuple(sorted({*prompts, header}, key=len, reverse=True)),
        stops=frozenset({stop, tool_stop} - {""}),
        reserved=_any_of(special | opening),
        tool_calls=tool_calls,
        tools=_TOOL
        in _try(tokenizer, _TURNS, tools=[{"type": "function", "function": _SIGNATURE}]),
        reasoning=_REASON
        in _try(tokenizer, [*_TURNS[:3], {**_TURNS[3], "reasoning_content": _REASON}]),
    )


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    eos: int,
) -> tuple[list[int], list[bool]]:
    """Token ids, and for each whether it is learned. Raises FieldError.

    Text is tokenised in pieces that end where the mask changes, as at inference, where the prompt
    ends there as well.
    """
    _check_supported(chat, messages, tools)
    _check_reserved(chat, messages, tools)
    text = _render_row(tokenizer, chat, messages, tools)
    turns = learned_spans(chat, text)
    expected = sum(message["role"] == "assistant" for message in messages)
    if len(turns) != expected:
        raise FieldError(
            "messages", f"the chat template renders {len(turns)} of {expected} assistant turns"
        )
    tokens: list[int] = []
    trained: list[bool] = []
    at = 0
    for start, end in turns:
        for piece, learned in ((text[at:start], False), (text[start:end], True)):
            ids = _ids(tokenizer, piece)
            tokens += ids
            trained += [learned] * len(ids)
        at = end
    rest = _ids(tokenizer, text[at:])
    tokens += rest
    trained += [False] * len(rest)
    if turns and at == len(text) and not text.endswith(tuple(chat.stops)):
        tokens.append(eos)
        trained.append(True)
    return tokens, trained


def learned_spans(chat: ChatFormat, text: str) -> list[tuple[int, int]]:
    """[start, end), in characters, of what each rendered assistant turn learns, stop included."""
    spans: list[tuple[int, int]] = []
    at = text.find(chat.header)
    while at >= 0:
        prompt = next(prompt for prompt in chat.prompts if text.startswith(prompt, at))
        start = at + len(prompt)
        marker = chat.reserved.search(text, start)
        end = len(text)
        if marker:
            end = marker.end() if marker.group() in chat.stops else marker.start()
        spans.append((start, end))
        at = text.find(chat.header, start)
    return spans


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not text:
        return []
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    switches: dict[str, Any] | None = None,
) -> str:
    settings: dict[str, Any] = {"tools": tools or None, "tokenize": False, **(switches or {})}
    text = tokenizer.apply_chat_template(messages, **settings)
    assert isinstance(text, str)
    return text


def _try(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Rendered text, or "" when the template refuses such a conversation."""
    try:
        return _render(tokenizer, messages, tools)
    except _TEMPLATE_ERRORS:
        return ""


def _render_row(
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
) -> str:
    if chat.tool_calls == "text":
        messages = [_with_text_arguments(message) for message in messages]
    try:
        return _render(tokenizer, messages, tools)
    except _TEMPLATE_ERRORS as error:
        raise FieldError("messages", f"the chat template refuses it: {brief(error)}") from error


def _generation_prompts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    prompts: set[str] = set()
    for switch in ({}, *_SWITCHES):
        plain = _render(tokenizer, _TURNS[:1], switches=switch)
        full = _render(tokenizer, _TURNS[:1], switches={**switch, "add_generation_prompt": True})
        prompts.add(full.removeprefix(plain) if full.startswith(plain) else "")
    return prompts


def _header(prompts: set[str], between: str, added: set[str]) -> str:
    """The longest text that opens every generation prompt and every rendered assistant turn.

    `between` is what the template writes from the user's text to the answer; the turn begins where
    its last occurrence of the prompts' first added token is.
    """
    # An added token is one unit here: <think> and </think> share no prefix.
    unit = re.compile(f"{_any_of(added).pattern}|.", re.DOTALL)
    shared = _shared_start([unit.findall(prompt) for prompt in prompts])
    marker = _first(added, shared)
    if not marker or marker not in between:
        raise DataError("the chat template opens assistant turns without a special token")
    turn = between[between.rindex(marker) - shared.index(marker) :]
    return _shared_start([unit.findall(shared), unit.findall(turn)])


def _tool_calls(tokenizer: PreTrainedTokenizerBase, special: set[str]) -> tuple[str, str]:
    """How arguments are given ("object", "text" or ""), and the token that ends a turn of calls."""
    call = {"name": _TOOL, "arguments": {"probekey": _VALUE}}
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "probecall", "function": call}],
    }
    result = {"role": "tool", "content": _RESULT, "tool_call_id": "probecall", "name": _TOOL}
    for kind, turn in (("object", message), ("text", _with_text_arguments(message))):
        text = _try(tokenizer, [_TURNS[0], turn, result, _TURNS[3]])
        if _VALUE in text:
            end = _between(text, _VALUE, _RESULT) if _RESULT in text else ""
            return kind, _first(special, end)
    return "", ""


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _check_supported(
    chat: ChatFormat, messages: list[Message], tools: list[dict[str, Any]] | None
) -> None:
    """Refuses what the template would leave out without a word."""
    if tools and not chat.tools:
        raise FieldError("tools", "the tokenizer's chat template renders no tools")
    for index, message in enumerate(messages):
        if "tool_calls" in message and not chat.tool_calls:
            raise FieldError(
                f"messages[{index}].tool_calls",
                "the tokenizer's chat template renders no tool calls",
            )
        if message.get("reasoning_content") and not chat.reasoning:
            raise FieldError(
                f"messages[{index}].reasoning_content",
                "the tokenizer's chat template renders no reasoning",
            )


def _check_reserved(
    chat: ChatFormat, messages: list[Message], tools: list[dict[str, Any]] | None
) -> None:
    for where, text in [*walk_texts(messages, "messages"), *walk_texts(tools or [], "tools")]:
        found = chat.reserved.search(text)
        if found:
            raise FieldError(
                where,
                f"holds the control token {found.group()} at character {found.start() + 1}, "
                "which would become a real one and could move the mask; reword it",
            )


def _between(text: str, before: str, after: str) -> str:
    start = text.find(before) + len(before)
    end = text.find(after, start)
    if start < len(before) or end < 0:
        raise DataError("the chat template leaves out a message of a plain conversation")
    return text[start:end]


def _shared_start(texts: list[list[str]]) -> str:
    return "".join(units[0] for units in takewhile(lambda u: len(set(u)) == 1, zip(*texts)))


def _any_of(words: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))


def _first(words: set[str], text: str) -> str:
    """The word that occurs first in `text`, or ""."""
    found = _any_of(words).search(text) if words else None
    return found.group() if found else ""
