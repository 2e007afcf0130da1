"""What a row of each format may hold. Leaves out what the tokenizer decides (encode.py, chat.py).

messages           {"messages": [{"role", "content", "reasoning_content"?, "tool_calls"?, ...}],
                    "tools"?: [...]}
prompt_completion  {"prompt": text, "completion": text}
text               {"text": text}
tokens             {"tokens": [ids], "labels"?: [id or -100], "mask"?: [0 or 1]};
                   labels are aligned with tokens, not shifted

Fields beside these are counted as unused; an unknown field inside a message is refused, since it
may carry a meaning.
"""

import json
from typing import Any

from fullspan.data.packing import IGNORE
from fullspan.data.report import FieldError

_REQUIRED = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "tokens": ("tokens",),
}
_OPTIONAL = {"messages": ("tools",), "tokens": ("labels", "mask")}
ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"observation": "tool"}
_MESSAGE_KEYS = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_CALL_KEYS = ("id", "type", "index")
_MOST_NESTED = 100


def row_format(value: dict[str, Any], expected: str) -> str:
    """The format whose fields `value` has; refuses any but `expected`, unless that is "auto"."""
    fits = [name for name, keys in _REQUIRED.items() if all(key in value for key in keys)]
    have = ", ".join(map(str, value)) or "none"
    if expected in fits:
        fits = [expected]
    if len(fits) > 1:
        raise FieldError("", f"fits several formats ({', '.join(fits)}); set data.format")
    if expected == "auto":
        if fits:
            return fits[0]
        known = ", ".join("+".join(keys) for keys in _REQUIRED.values())
        raise FieldError("", f"fields are {have}; a row needs one of: {known}")
    if fits != [expected]:
        needs = "+".join(_REQUIRED[expected])
        also = f" (mixed formats: this row is {fits[0]})" if fits else ""
        raise FieldError("", f"format {expected} needs {needs}, fields are {have}{also}")
    return expected


def check_row(value: dict[str, Any], format: str, unused: dict[str, int]) -> dict[str, Any]:
    """The fields of `format`, checked and normalised (roles, tool calls, arguments). Counts other
    fields in `unused`.
    """
    known = (*_REQUIRED[format], *_OPTIONAL.get(format, ()))
    for key in value:
        if key not in known:
            unused[key] = unused.get(key, 0) + 1
    row = {key: value[key] for key in known if value.get(key) is not None}
    if format == "messages":
        found = _list(value["messages"], "messages")
        row["messages"] = [_message(item, f"messages[{i}]") for i, item in enumerate(found)]
        if "tools" in row:
            row["tools"] = _tools(row["tools"])
    elif format == "tokens":
        _check_tokens(row)
    else:
        for key in known:
            row[key] = _text(value[key], key)
    return row


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _text(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise FieldError(where, f"expected text, got {_kind(value)}")
    if not empty and not value.strip():
        raise FieldError(where, "is empty")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            reason = f"holds half of a surrogate pair at character {error.start + 1}"
            raise FieldError(where, reason) from error
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(where, f"expected a list, got {_kind(value)}")
    if not value:
        raise FieldError(where, "is empty")
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(where, f"expected an object, got {_kind(value)}")
    return value


def check_texts(value: Any, where: str) -> None:
    """Refuses text that is not valid Unicode anywhere inside `value` (keys included)."""
    for at, text in walk_texts(value, where):
        _text(text, at, empty=True)


def walk_texts(value: Any, where: str, depth: int = 0) -> list[tuple[str, str]]:
    """[(field, text)] of every text inside a JSON value, keys included. Raises FieldError for a
    value that is nested deeper than templates and JSON writers can follow.
    """
    if isinstance(value, str):
        return [(where, value)]
    if depth > _MOST_NESTED:
        raise FieldError(where[:80], f"is nested more than {_MOST_NESTED} deep")
    found: list[tuple[str, str]] = []
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += walk_texts(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = f"{where}.{key}" if where else key
            found += [(inner, key), *walk_texts(item, inner, depth + 1)]
    return found


def _message(value: Any, where: str) -> dict[str, Any]:
    message = dict(_object(value, where))
    role = _text(message.get("role"), f"{where}.role")
    role = message["role"] = _ALIASES.get(role, role)
    if role not in ROLES:
        raise FieldError(f"{where}.role", f"unknown role {role!r}; allowed: {', '.join(ROLES)}")
    for key in message:
        if key not in _MESSAGE_KEYS[role]:
            allowed = ", ".join(_MESSAGE_KEYS[role])
            raise FieldError(f"{where}.{key}", f"unknown in a {role} message; allowed: {allowed}")
    for key in ("name", "tool_call_id", "reasoning_content", "tool_calls"):
        if key in message and message[key] is None:
            del message[key]
        elif key in message and key != "tool_calls":
            _text(message[key], f"{where}.{key}", empty=True)
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    message["content"] = _content(message, where)
    if "tool_calls" in message:
        calls = _list(message["tool_calls"], f"{where}.tool_calls")
        message["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return message


def _content(message: dict[str, Any], where: str) -> str:
    """Text, or a list of {"type": "text"} parts, which are joined. A tool may answer nothing, a
    call needs no text.
    """
    content, where = message.get("content"), f"{where}.content"
    optional = message["role"] == "tool" or "tool_calls" in message
    if content is None and "tool_calls" in message:
        return ""
    if isinstance(content, list):
        parts: list[str] = []
        for index, part in enumerate(content):
            at = f"{where}[{index}]"
            kind = _object(part, at).get("type")
            if kind != "text" or set(part) != {"type", "text"}:
                raise FieldError(at, f"only parts of type 'text' can be trained, got {kind!r}")
            parts.append(_text(part["text"], f"{at}.text", empty=True))
        content = "".join(parts)
    return _text(content, where, empty=optional)


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    """{"type", "function": {"name", "arguments"}, "id"?}; arguments become an object."""
    call = _object(value, where)
    inner, at = call, where
    if "function" in call:
        inner, at = _object(call["function"], f"{where}.function"), f"{where}.function"
    flat = inner is call
    unknown = {*inner} - {"name", "arguments"} - ({*_CALL_KEYS} if flat else set())
    unknown |= set() if flat else {*call} - {"function", *_CALL_KEYS}
    if unknown:
        raise FieldError(
            f"{where}.{min(unknown)}", "unknown in a tool call; allowed: name, arguments, id"
        )
    name = _text(inner.get("name"), f"{at}.name")
    arguments = _arguments(inner.get("arguments"), f"{at}.arguments")
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if "id" in call and call["id"] is not None:
        made["id"] = _text(call["id"], f"{where}.id", empty=True)
    return made


def _arguments(value: Any, where: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise FieldError(where, f"not JSON text: {error}") from error
    arguments = _object(value, where)
    check_texts(arguments, where)
    return arguments


def _tools(value: Any) -> list[dict[str, Any]]:
    if value == []:
        return []
    for index, tool in enumerate(_list(value, "tools")):
        where = f"tools[{index}]"
        inner = _object(tool, where).get("function", tool)
        _text(_object(inner, f"{where}.function").get("name"), f"{where}.function.name")
        check_texts(tool, where)
    return value


def _check_tokens(row: dict[str, Any]) -> None:
    tokens = _list(row["tokens"], "tokens")
    for index, token in enumerate(tokens):
        if type(token) is not int:
            raise FieldError(f"tokens[{index}]", f"expected a token id, got {_kind(token)}")
    if "labels" in row and "mask" in row:
        raise FieldError("labels", "give labels or mask, not both")
    for key in ("labels", "mask"):
        if key in row and len(_list(row[key], key)) != len(tokens):
            raise FieldError(key, f"has {len(row[key])} entries for {len(tokens)} tokens")
    for index, flag in enumerate(row.get("mask", ())):
        if flag not in (0, 1):
            raise FieldError(f"mask[{index}]", f"expected 0, 1, true or false, got {flag!r}")
    for index, (token, label) in enumerate(zip(tokens, row.get("labels", ()))):
        if type(label) is not int or label not in (IGNORE, token):
            raise FieldError(
                f"labels[{index}]",
                f"got {label!r}, expected {IGNORE} or the token itself ({token}): "
                "labels are aligned with tokens, not shifted",
            )
