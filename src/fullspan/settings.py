"""Settings: a TOML file and command-line overrides become nested frozen dataclasses, and back.

A section is a keyword-only dataclass that lives beside its owner and validates its own values;
this module knows none of them. It checks names and types, says what is wrong in one line, and
writes a resolved configuration that loads back equal.

    run = load(RunConfig, Path("configs/tiny_cpu.toml"), ["--optim.lr", "1e-4"])
    text = dump_toml(run)

Field types: bool, int, float, str, Path, Literal, tuple[T, ...], list[T], unions of those, and
nested dataclasses. Leaves out: environment variables, includes, and tables with free keys.
"""

import dataclasses
import difflib
import json
import math
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fullspan.errors import ConfigError

COMMAND_LINE = "command line"

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Override:
    """The text of one command-line value; the type of its field decides how it is read."""

    text: str


def load(kind: type[Config], path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the TOML file at `path`, apply `overrides` and build `kind`.

    overrides: command-line words, `--section.key value` or `--section.key=value`; the last of two
    for one key wins, and all of them win over the file.
    Raises ConfigError with one line that names the file, the key, what was got and what is allowed.
    """
    values = read_toml(path)
    for key, override in parse_overrides(overrides).items():
        _place(values, key, override)
    return build(kind, values, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file (UTF-8, a byte-order mark is let through)."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text, byte {error.start} cannot be read") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


# ------------------------------------------------------------------------------ command line


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part command-line words into (all others, overrides): an option with a dot in its name and,
    unless it has an `=`, the word after it.
    """
    others: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or "." not in name:
            others.append(word)
            continue
        overrides.append(word)
        if not equals:
            overrides += [value for value in [next(rest, None)] if value is not None]
    return others, overrides


def parse_overrides(words: Sequence[str]) -> dict[str, Override]:
    """`["--a.b", "1", "--c.d=x"]` becomes `{"a.b": Override("1"), "c.d": Override("x")}`."""
    found: dict[str, Override] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or not name[2:]:
            raise ConfigError(
                f"{COMMAND_LINE}: unexpected {word!r}; an override is --section.key VALUE"
            )
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{COMMAND_LINE}: {name} needs a value")
            value = following
        found[name[2:]] = Override(value)
    return found


def _place(values: dict[str, Any], key: str, override: Override) -> None:
    *sections, last = key.split(".")
    table = values
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{COMMAND_LINE}: --{key}: {section} is a value, not a section")
        table = inner
    table[last] = override


# ----------------------------------------------------------------------- values to dataclasses


def build(kind: type[Config], values: Mapping[str, Any], source: str) -> Config:
    """Check `values` (tables of a TOML file, with Override leaves) against `kind` and build it.

    source: what error messages call the origin of the values that are no overrides.
    """
    return _Builder(kind, source).section(kind, values, "")


class _Builder:
    """Builds one configuration; holds what every error message needs."""

    def __init__(self, root: type, source: str):
        self.root = root
        self.source = source

    def section(self, kind: type[Config], values: Mapping[str, Any], prefix: str) -> Config:
        """One dataclass from its table; `prefix` is "" or the dotted name with a final dot."""
        hints = get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(_dataclass(kind))}
        for name, value in values.items():
            if name not in fields:
                raise ConfigError(self._unknown(prefix + name, value, list(fields), prefix))
        made: dict[str, Any] = {}
        for name, field in fields.items():
            key = prefix + name
            if name in values:
                made[name] = self._value(values[name], hints[name], key)
            elif _required(field):
                if not dataclasses.is_dataclass(hints[name]):
                    raise ConfigError(
                        f"{self.source}: {key} is required: set {name} under "
                        f"[{prefix.rstrip('.')}] or pass --{key} VALUE"
                    )
                made[name] = self.section(hints[name], {}, key + ".")
        return kind(**made)

    def _value(self, value: Any, hint: Any, key: str) -> Any:
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                got = value.text if isinstance(value, Override) else value
                raise ConfigError(
                    f"{self._origin(value)}: {key} is a section, got {got!r}: "
                    f"name one of its keys, such as {key}.{dataclasses.fields(hint)[0].name}"
                )
            # is_dataclass also lets instances through; a hint is never one.
            return self.section(hint, value, key + ".")  # pyright: ignore[reportArgumentType]
        plain = _read_text(value.text, hint) if isinstance(value, Override) else value
        try:
            return _convert(plain, hint)
        except _Mismatch as error:
            raise ConfigError(
                f"{self._origin(value)}: {key} must be {error.allowed}, "
                f"got {_describe(plain)}{error.hint}"
            ) from None

    def _origin(self, value: Any) -> str:
        """Whether a value, or all of a table, comes from the command line or from the file."""
        if isinstance(value, dict):
            origins = {self._origin(inner) for inner in value.values()}
            return origins.pop() if len(origins) == 1 else self.source
        return COMMAND_LINE if isinstance(value, Override) else self.source

    def _unknown(self, key: str, value: Any, known: list[str], prefix: str) -> str:
        what = "section" if isinstance(value, dict) else "setting"
        message = f"{self._origin(value)}: unknown {what} {key!r}"
        last = key.rpartition(".")[2]
        # A section is judged by its name. A setting may be right and only in the wrong place, or
        # misspelt here, or misspelt and in the wrong place, or written out where the setting is
        # its initials, or a setting's value.
        keys = {} if isinstance(value, dict) else dict(_keys(self.root))
        names = {other.rpartition(".")[2]: other for other in keys}
        near = [names[last]] if last in names else []
        near = near or [prefix + name for name in difflib.get_close_matches(last, known, n=1)]
        near = near or [names[name] for name in difflib.get_close_matches(last, names, n=1)]
        initials = "".join(word[:1] for word in last.split("_"))
        near = near or [names[name] for name in [initials] if name in names]
        near = near or [other for other, hint in keys.items() if last in get_args(hint)]
        if near:
            message += f"; did you mean {near[0]!r}?"
        place = f"[{prefix.rstrip('.')}]" if prefix else "the file"
        return f"{message} ({place} knows: {', '.join(known)})"


def _keys(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a configuration class, with its type."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(_dataclass(kind)):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hints[field.name]


def _dataclass(kind: type) -> Any:
    assert dataclasses.is_dataclass(kind), f"{kind} is no section"
    return kind


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


# ------------------------------------------------------------------------------- leaf values


class _Mismatch(Exception):
    """A value that its field does not take: what is allowed, and a near match or nothing."""

    def __init__(self, allowed: str, hint: str = ""):
        super().__init__(allowed)
        self.allowed = allowed
        self.hint = hint


def _convert(value: Any, hint: Any) -> Any:
    """`value` as its field holds it; raises _Mismatch. Integers become floats, never bools ints."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint)
    if origin is Literal:
        for choice in get_args(hint):
            if type(choice) is type(value) and choice == value:
                return value
        near = difflib.get_close_matches(str(value), map(str, get_args(hint)), n=1)
        raise _Mismatch(_allowed(hint), f"; did you mean {near[0]!r}?" if near else "")
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _Mismatch(_allowed(hint))
        try:
            return origin(_convert(item, get_args(hint)[0]) for item in value)
        except _Mismatch as error:
            raise _Mismatch(_allowed(hint), error.hint) from None
    if hint is types.NoneType and value is None:
        return None
    if hint is Path and isinstance(value, str):
        return Path(value).expanduser()
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (bool, int, str) and type(value) is hint:
        return value
    raise _Mismatch(_allowed(hint))


def _convert_union(value: Any, hint: Any) -> Any:
    for member in get_args(hint):
        try:
            return _convert(value, member)
        except _Mismatch:
            continue
    raise _Mismatch(_allowed(hint))


def _allowed(hint: Any) -> str:
    """What a field takes, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_allowed(member) for member in args)
    if origin is Literal:
        choices = ", ".join(repr(choice) for choice in args)
        return f"one of {choices}" if len(args) > 1 else choices
    if origin in (list, tuple):
        return f"a list ({_allowed(args[0])} each)"
    names = {bool: "true or false", int: "a whole number", float: "a finite number"}
    names |= {str: "a string", Path: "a path", types.NoneType: "none"}
    assert hint in names, f"settings cannot hold {hint}"
    return names[hint]


def _describe(value: Any) -> str:
    """A value as TOML would write it; a table by its word."""
    if isinstance(value, dict):
        return "a section"
    if value is None:
        return "none"
    try:
        return _toml(value)
    except AssertionError:  # a date, which no field of ours takes
        return str(value)


def _read_text(text: str, hint: Any) -> Any:
    """Read the text of an override for a field: TOML where the field takes no text, else itself.

    A field that takes text and something else (`bool | str`) prefers the something else, quotes
    force a string, and `none` unsets a field that may be None.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if types.NoneType in members and text == "none":
        return None
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"] if len(table) == 1 else text
    if isinstance(value, str):
        return value
    for member in members:
        if _takes_text(member):
            continue
        try:
            _convert(value, member)
        except _Mismatch:
            continue
        return value
    return text if any(map(_takes_text, members)) else value


def _takes_text(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return all(isinstance(choice, str) for choice in get_args(hint))
    return hint in (str, Path)


# ---------------------------------------------------------------------------- dataclasses to TOML


def dump_toml(config: Any) -> str:
    """The resolved configuration as TOML that loads back equal. A value of None is left out, so a
    field that may be None has to default to it.
    """
    return "\n".join(_dump_lines(config, "")).lstrip("\n") + "\n"


def _dump_lines(config: Any, name: str) -> Iterator[str]:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    inner = {key: value for key, value in values.items() if dataclasses.is_dataclass(value)}
    if name and len(inner) < len(values):
        yield f"\n[{name}]"
    for key, value in values.items():
        if key not in inner and value is not None:
            yield f"{key} = {_toml(value)}"
    for key, value in inner.items():
        yield from _dump_lines(value, f"{name}.{key}" if name else key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's; only DEL must be escaped in TOML and need not be in JSON.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, list | tuple), f"settings cannot write {value!r}"
    return f"[{', '.join(_toml(item) for item in value)}]"
