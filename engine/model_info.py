"""What a model folder contains, found out without loading it: fast enough to refuse a bad one before anything starts.

The fingerprint tells whether two workers run the same weights. Hashing gigabytes would take longer than loading them,
so it covers the configuration, the size and header of each weight file (names, shapes, types, offsets of every tensor),
and evenly spread samples of its bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelError
from engine.families import GGUF_ARCHITECTURES, complete, describe, refusal
from engine.layers import Attention, Layer

SAMPLES = 64
SAMPLE_BYTES = 4096
HEADER_BYTES = 1 << 20

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be served. Sizes are those of the configuration, for one rank.

    `layers` says what each decoder layer keeps of a sequence.

    `gguf_file` is the name of the GGUF file in `path`, None for safetensors.
    """

    path: Path
    architecture: str
    layers: tuple[Layer, ...]
    vocab_size: int
    max_position_embeddings: int
    gguf_file: str | None
    fingerprint: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "vocab_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)


def inspect_model(path: Path) -> ModelInfo:
    """Look into a local model folder: safetensors, or one GGUF file.

    Raises:
        ModelError: it is missing, incomplete, or of a kind that cannot be served; the message says which and why.
    """
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise ModelError(f"model folder {path} {what}; --model takes a local Hugging Face folder")
    if (path / "config.json").is_file():
        gguf = _only_gguf(path) if not list(path.glob("*.safetensors*")) else None
        if gguf is None:
            return _inspect_safetensors(path)
        return _inspect_gguf(path, gguf)
    gguf = _only_gguf(path)
    if gguf is None:
        raise ModelError(f"model folder {path} has neither a config.json nor a .gguf file")
    return _inspect_gguf(path, gguf)


def _only_gguf(path: Path) -> Path | None:
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"model folder {path} has {len(files)} .gguf files; keep one of {[f.name for f in files]}")
    return files[0] if files else None


def _inspect_safetensors(path: Path) -> ModelInfo:
    written = _read_json(path / "config.json")
    if not isinstance(written, dict):
        raise ModelError(f"{path / 'config.json'} is not a model configuration")
    try:
        config = complete(written)
        reason = refusal(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{path / 'config.json'} is not a model configuration: {error!r}") from error
    if reason is not None:
        raise ModelError(f"model {path} cannot be served: {reason}")
    weights = _weight_files(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"model folder {path} is incomplete: it has no tokenizer ({', '.join(TOKENIZER_FILES)})")
    try:
        return ModelInfo(
            path=path,
            architecture=config["architectures"][0],
            max_position_embeddings=int(config["max_position_embeddings"]),
            gguf_file=None,
            fingerprint=_fingerprint(json.dumps(written, sort_keys=True).encode(), weights),
            **read_sizes(config),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{path / 'config.json'} lacks or garbles a size: {error!r}") from error


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """What pages and tokens are measured with, of a complete configuration, by its names in `ModelInfo`."""
    return {"layers": describe(config), "vocab_size": int(config["vocab_size"])}


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        parsed = _read_json(index)
        try:
            names = sorted({str(name) for name in parsed["weight_map"].values()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} has no weight_map") from error
        if not names:
            raise ModelError(f"{index} has an empty weight_map")
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        hint = "; convert pytorch_model.bin to safetensors" if list(path.glob("*.bin")) else ""
        raise ModelError(f"model folder {path} is incomplete: {', '.join(missing)} missing{hint}")
    files = [path / name for name in names]
    for file in files:
        _check_safetensors(file)
    return files


def _check_safetensors(file: Path) -> None:
    """A file that was cut off still has its header, which says how long it has to be."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            raise ModelError(f"{file} is damaged: its header does not fit into its {size} bytes")
        try:
            header = json.loads(stream.read(length))
            end = max(int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is damaged: its header cannot be read ({error!r})") from error
    if size != 8 + length + end:
        raise ModelError(f"{file} is damaged: it has {size} bytes, its header speaks of {8 + length + end}")


def _inspect_gguf(path: Path, file: Path) -> ModelInfo:
    from gguf import GGUFReader  # takes a while to import, and most folders need none of it

    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise ModelError(f"{file} cannot be read as GGUF: {error}") from error

    fields = reader.fields

    def value(name: str) -> Any:
        field = fields.get(name)
        return None if field is None else field.contents()

    kind = value("general.architecture")
    if kind not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file} is of GGUF architecture {kind!r}, which cannot be served; supported are "
            f"{', '.join(sorted(GGUF_ARCHITECTURES))}"
        )
    scaled = (value(f"{kind}.rope.scaling.type") or "none") != "none"
    if scaled or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ModelError(f"{file} scales its rotary embedding, which is lost in loading; use a safetensors folder")
    if value(f"{kind}.expert_count"):
        raise ModelError(f"{file} is a mixture of experts, which cannot be served")
    try:
        num_heads = int(value(f"{kind}.attention.head_count"))
        head_dim = int(value(f"{kind}.attention.key_length") or int(value(f"{kind}.embedding_length")) // num_heads)
        attention = Attention(
            num_kv_heads=int(value(f"{kind}.attention.head_count_kv") or num_heads),
            key_dim=head_dim,
            value_dim=head_dim,
        )
        return ModelInfo(
            path=path,
            architecture=GGUF_ARCHITECTURES[kind],
            layers=(Layer(attention=attention),) * int(value(f"{kind}.block_count")),
            vocab_size=int(value(f"{kind}.vocab_size") or len(fields["tokenizer.ggml.tokens"].data)),
            max_position_embeddings=int(value(f"{kind}.context_length")),
            gguf_file=file.name,
            fingerprint=_fingerprint(b"gguf", [file]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file} lacks or garbles a size: {error!r}") from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _fingerprint(config: bytes, weights: list[Path]) -> str:
    digest = hashlib.sha256(config)
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(HEADER_BYTES))
            for sample in range(SAMPLES):
                stream.seek(sample * size // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
