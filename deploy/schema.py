"""The settings as flat keys (`engine.block_size`): which exist, what each takes, how its text is read.

Derived from the structs in `deploy.settings`, so that a key exists as soon as its field does.
"""

from __future__ import annotations

import difflib
import types
import typing
from typing import Annotated, Any, Literal, Union

import msgspec
import yaml

from deploy.errors import SettingError
from deploy.settings import Settings
from deploy.units import BYTES, SECONDS, parse_bytes, parse_seconds


class Setting(msgspec.Struct, frozen=True):
    """One key with its type (as annotated) and default."""

    key: str
    type: Any
    default: Any


def _collect(struct: type[msgspec.Struct], prefix: str) -> tuple[dict[str, Setting], dict[str, type[msgspec.Struct]]]:
    settings: dict[str, Setting] = {}
    sections: dict[str, type[msgspec.Struct]] = {prefix.rstrip("."): struct}
    for field in msgspec.structs.fields(struct):
        key = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            inner, inner_sections = _collect(field.type, key + ".")
            settings |= inner
            sections |= inner_sections
        else:
            default = field.default
            if default is msgspec.NODEFAULT:
                default = typing.cast(Any, field.default_factory)()
            settings[key] = Setting(key, field.type, default)
    return settings, sections


SETTINGS, SECTIONS = _collect(Settings, "")
"""Every key, and every section ("" is the whole) with its struct."""


def unknown_key(key: str, source: str) -> SettingError:
    """The refusal of a key that does not exist, naming the nearest one that does."""
    known = [*SETTINGS, *filter(None, SECTIONS)]
    last = key.rpartition(".")[2]
    same_name = [candidate for candidate in SETTINGS if candidate.rpartition(".")[2] == last]
    near = same_name or difflib.get_close_matches(key, known, n=1)
    if not near:
        by_name = {candidate.rpartition(".")[2]: candidate for candidate in known}
        near = [by_name[name] for name in difflib.get_close_matches(last, by_name, n=1)]
    advice = f"did you mean {near[0]}?" if near else "`kvferry config show` lists every key"
    return SettingError(f"unknown setting {key} ({source}); {advice}")


def parse_text(setting: Setting, text: str) -> Any:
    """The value that a flag or a variable means: text for a text setting, otherwise read as YAML."""
    if str in _alternatives(setting.type) or any(isinstance(option, str) for option in _options(setting.type)):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def convert(setting: Setting, value: Any, source: str) -> Any:
    """`value` as the setting's type.

    Raises:
        SettingError: naming the key, the value, where it came from and what was expected.
    """
    try:
        return msgspec.convert(_with_unit(setting, value), setting.type, strict=True)
    except (ValueError, msgspec.ValidationError) as error:
        raise SettingError(f"{setting.key} is {value!r} ({source}); expected {expected(setting)}") from error


def expected(setting: Setting) -> str:
    """What a setting takes, in words."""
    options = _options(setting.type)
    if options:
        return "one of " + ", ".join(str(option) for option in options)
    kinds = _alternatives(setting.type)
    if int in kinds and setting.key.endswith("_bytes"):
        what = 'a size in bytes, such as 1073741824 or "1GiB" (' + ", ".join(filter(None, BYTES)) + ")"
    elif float in kinds and setting.key.endswith("_s"):
        what = 'seconds, such as 30 or "500ms" (' + ", ".join(filter(None, SECONDS)) + ")"
    elif bool in kinds:
        what = "true or false"
    elif int in kinds:
        what = "a whole number"
    elif float in kinds:
        what = "a number"
    elif str in kinds:
        what = "text"
    else:
        what = "a mapping of names to numbers"
    bounds = _bounds(setting.type)
    return " ".join(filter(None, (what, bounds, "or null" if type(None) in kinds else "")))


def _with_unit(setting: Setting, value: Any) -> Any:
    kinds = _alternatives(setting.type)
    if isinstance(value, str) and str not in kinds:
        if int in kinds and setting.key.endswith("_bytes"):
            return parse_bytes(value)
        if float in kinds and setting.key.endswith("_s"):
            return parse_seconds(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    return value


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(kind for option in typing.get_args(annotation) for kind in _alternatives(option))
    return (annotation,)


def _options(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def _bounds(annotation: Any) -> str:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " ".join(filter(None, (_bounds(option) for option in typing.get_args(annotation))))
    words = []
    for meta in getattr(annotation, "__metadata__", ()):
        for sign, bound in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le)):
            if bound is not None:
                words.append(f"{sign} {bound}")
        if meta.pattern is not None:
            words.append(f"matching {meta.pattern}")
    return " and ".join(words)
