"""The resolved configuration: default < file < environment < flags, every value with where it came from.

- A file is YAML, nested by section.
- `KVFERRY_ENGINE__DTYPE=float32` sets `engine.dtype`: the key in capitals, two underscores between section and name.
- `--set engine.dtype=float32`, and the short flags that stand for one key each (`--port` is `gateway.port`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from deploy.errors import SettingError
from deploy.schema import SECTIONS, SETTINGS, convert, parse_text, unknown_key
from deploy.settings import Settings

ENVIRONMENT_PREFIX = "KVFERRY_"


class Value(NamedTuple):
    """A value and where it came from, in words."""

    value: Any
    source: str


class Configuration(NamedTuple):
    """The settings, and the source of each by key."""

    settings: Settings
    sources: dict[str, str]


def resolve(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Iterable[tuple[str, str, str]] = ()
) -> Configuration:
    """Merge the sources; later ones win. `flags` are (key, text, source) in the order given.

    Raises:
        SettingError: for an unknown key or a value that cannot be, naming where it came from.
    """
    values = {key: Value(setting.default, "default") for key, setting in SETTINGS.items()}
    if file is not None:
        values |= from_file(file)
    values |= from_environment(environment or {})
    values |= from_flags(flags)
    return Configuration(_build("", values), {key: value.source for key, value in values.items()})


def from_flags(flags: Iterable[tuple[str, str, str]]) -> dict[str, Value]:
    """Values of (key, text, source) triples."""
    values = {}
    for key, text, source in flags:
        setting = SETTINGS.get(key)
        if setting is None:
            raise unknown_key(key, source)
        values[key] = Value(convert(setting, parse_text(setting, text), source), source)
    return values


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """Values of the variables that start with `KVFERRY_`."""
    return from_flags(
        (name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", "."), text, f"environment variable {name}")
        for name, text in sorted(environment.items())
        if name.startswith(ENVIRONMENT_PREFIX)
    )


def from_file(path: Path) -> dict[str, Value]:
    """Values of a YAML file, each with its line as the source."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read the configuration file {path}: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        values: dict[str, Value] = {}
        if root is not None:
            _walk(loader, root, "", str(path), values)
        return values
    except yaml.YAMLError as error:
        raise SettingError(
            f"the configuration file {path} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    finally:
        loader.dispose()


def _walk(loader: yaml.SafeLoader, node: yaml.Node, section: str, file: str, values: dict[str, Value]) -> None:
    if not isinstance(node, yaml.MappingNode):
        name = section or "the file"
        line = node.start_mark.line + 1
        raise SettingError(f"{name} is not a mapping ({file} line {line}); expected keys below it")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        source = f"{file} line {key_node.start_mark.line + 1}"
        key = f"{section}.{key_node.value}" if section else str(key_node.value)
        if key in seen:
            raise SettingError(f"{key} is given twice ({source}); keep one")
        seen.add(key)
        if key in SECTIONS:
            _walk(loader, value_node, key, file, values)
        elif key in SETTINGS:
            values[key] = Value(convert(SETTINGS[key], loader.construct_object(value_node, deep=True), source), source)
        else:
            raise unknown_key(key, source)


def _build(section: str, values: dict[str, Value]) -> Any:
    struct = SECTIONS[section]
    prefix = f"{section}." if section else ""
    fields = {}
    for field in msgspec.structs.fields(struct):
        key = prefix + field.name
        fields[field.name] = _build(key, values) if key in SECTIONS else values[key].value
    try:
        return struct(**fields)
    except (TypeError, ValueError) as error:
        given = [f"{key} from {value.source}" for key, value in values.items() if key.startswith(prefix)]
        set_by = ", ".join(entry for entry in given if not entry.endswith("from default"))
        raise SettingError(f"{error} ({set_by})") from error


def show(configuration: Configuration) -> str:
    """The resolved settings as YAML, each with its source in a comment."""
    rows = list(_rows(configuration.settings, "", 0, configuration.sources))
    width = max(len(row) for row, _ in rows)
    return "\n".join(f"{row:<{width}}  # {source}" if source else row for row, source in rows)


def _rows(struct: msgspec.Struct, prefix: str, depth: int, sources: dict[str, str]) -> Iterable[tuple[str, str]]:
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        indent = "  " * depth
        if isinstance(value, msgspec.Struct):
            yield f"{indent}{field.name}:", ""
            yield from _rows(value, f"{prefix}{field.name}.", depth + 1, sources)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
            yield f"{indent}{field.name}: {text}", sources[prefix + field.name]
