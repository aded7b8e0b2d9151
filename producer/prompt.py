"""Make prompts from rows of datasets; errors describe what is wrong with a row.

Values that a record cannot hold are rejected here, before admission: lone surrogates, large numbers, deep nesting.
"""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import parse_path
from penstock.errors import ConfigError, ProtocolError
from penstock.producer.sources.rows import BadLine
from penstock.protocol.images import MAX_IMAGE_BYTES, MAX_IMAGES, check_images
from penstock.records.codec import pack, unpack
from penstock.text import safe_repr

#: Placeholder for the row's next image in the text of a message.
MARK = "<image>"
#: Key of an image file's digest, in a part of a message or in an entry of the image column.
DIGEST = "sha256"
_KEYS = ("image", "image_url", "url", "path")
#: Types of image parts, and of unsupported parts, which are rejected since a template may add placeholders for them.
_IMAGES = ("image", "image_url")
_PARTS = "a prompt may have parts of types text and image only; change or remove the part."
_OTHERS = ("audio", "audio_url", "file", "input_audio", "input_file", "input_image", "video", "video_url")

Messages = list[dict[str, Any]]


def with_images(config: DatasetConfig, messages: Messages, row: dict[str, Any], where: str) -> Messages:
    """Replace image marks in messages by image parts. Raises BadLine if the numbers of marks and images differ.

        {"type": "image", "image": PATH | data:image/...;base64,... | bytes}     a part of a message
        image_key: a column of such images      one for each <image> in the texts, in order

    An image with a ``sha256`` must match it: a startup detects changed rows, but not changed image files. Paths,
    with links resolved, must be below the dataset's image folder; URLs are never opened. Workers receive bytes, so a
    record contains no path or URL.
    """
    if config.image_key is None:
        return messages
    if config.image_key not in row:
        raise BadLine(
            f"{where}: the row has no column {config.image_key!r}; correct the dataset's image_key, or set it to null."
        )
    value = row[config.image_key]
    images = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    left = iter(images)
    placed = [_insert_images(message, left) for message in messages]
    marks = sum(text.count(MARK) for message in messages for text in _texts_of(message))
    if marks != len(images):
        raise BadLine(
            f"{where}: its messages contain {marks} {MARK} marks, but {config.image_key!r} has {len(images)} images; "
            "correct the row."
        )
    return placed


def take_images(config: DatasetConfig, messages: Messages, where: str) -> tuple[Messages, list[bytes]]:
    """Return messages with bare image parts, as a chat template needs them, and the images' bytes.

    Blocks for the disk if an image is a path.

    Raises:
        BadLine: an image cannot be read, is outside the folder, is too large, or does not match its digest.
    """
    images: list[bytes] = []
    bare = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_convert_part(config, part, images, where) for part in content]
            message = {**message, "content": parts}
        bare.append(message)
    try:
        check_images(images, where)
    except ConfigError as exc:
        raise BadLine(str(exc)) from exc
    return bare, images


def folder_of(config: DatasetConfig) -> Path | None:
    """Return the folder of image paths: the configured one, or that of the dataset's file; None without one."""
    if config.image_folder is not None:
        return Path(config.image_folder)
    path = Path(parse_path(config.path)[0])
    return path.parent if path.is_file() else None


def _texts_of(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message that may contain image marks."""
    content = message.get("content")
    if isinstance(content, list):
        return [_text_of_part(part) for part in content]
    return [content] if isinstance(content, str) else []


def _text_of_part(part: Any) -> str:
    """Return the text of a text part; '' for other parts."""
    if not isinstance(part, dict) or part.get("type") not in (None, "text"):
        return ""
    text = part.get("text")
    return text if isinstance(text, str) else ""


def _insert_images(message: dict[str, Any], left: Iterator[Any]) -> dict[str, Any]:
    if not any(MARK in text for text in _texts_of(message)):
        return message
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    out: list[Any] = []
    for part in parts:
        out += _split(part, text, left) if (text := _text_of_part(part)) else [part]
    return {**message, "content": out}


def _split(part: dict[str, Any], text: str, left: Iterator[Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARK)):
        if number:
            out.append({"type": "image", "image": next(left, None)})
        if piece:
            out.append({**part, "text": piece})
    return out


def _convert_part(config: DatasetConfig, part: Any, images: list[bytes], where: str) -> Any:
    """Remove null keys from a part of a message; replace an image by a bare part and add its bytes to ``images``."""
    if not isinstance(part, dict):
        return part
    # Parts read from tables have all keys, with nulls; templates check which keys exist.
    part = {key: value for key, value in part.items() if value is not None}
    if (kind := part.get("type", next((key for key in _IMAGES if key in part), "text"))) not in _IMAGES:
        if found := {str(kind), *part} & {*_IMAGES, *_OTHERS}:
            raise BadLine(f"{where} has a part of type {safe_repr(kind)} with {', '.join(sorted(found))}: {_PARTS}")
        return part
    value = next((part[key] for key in _KEYS if key in part), None)
    if len(images) == MAX_IMAGES:
        raise BadLine(f"{where} has more than {MAX_IMAGES} images; remove some.")
    what = f"{where}, image {len(images) + 1}"
    data = _bytes_of(config, value, what)
    for holder in (part, value):
        if isinstance(holder, dict) and (digest := holder.get(DIGEST)) is not None:
            _check_digest(data, digest, what)
    images.append(data)
    return {"type": "image"}


def _check_digest(data: bytes, expected: Any, what: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if not isinstance(expected, str) or expected.lower() != found:
        raise BadLine(
            f"{what} does not match its row: its {DIGEST} is {found}, but the row has {safe_repr(expected)}; restore "
            "the image, or correct the row and start a new run."
        )


def _bytes_of(config: DatasetConfig, value: Any, what: str) -> bytes:
    if isinstance(value, dict):
        # The format of OpenAI's messages, and of images that Hugging Face datasets stores in parquet.
        value = value.get("bytes") or value.get("url") or value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise BadLine(
            f"{what} has an invalid value: use the bytes of a file, a data: URI, or a path in the image folder."
        )
    if value.startswith("data:"):
        return _decode_data_uri(value, what)
    if "://" in value:
        raise BadLine(f"{what} is a URL, which is not supported: store the file with the dataset, and use its path.")
    return _read(folder_of(config), value, what)


def _decode_data_uri(value: str, what: str) -> bytes:
    head, comma, body = value.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadLine(f"{what}: its data: URI is not base64; encode it again.")
    if len(body) > 2 * MAX_IMAGE_BYTES:
        raise BadLine(f"{what} has more than {MAX_IMAGE_BYTES:,} bytes: make it smaller.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise BadLine(f"{what}: its data: URI is not base64 ({exc}); encode it again.") from exc


def _read(folder: Path | None, value: str, what: str) -> bytes:
    if folder is None:
        raise BadLine(f"{what} is a path, but the dataset has no image folder: set its image_folder.")
    try:
        root = folder.resolve(strict=True)
        path = (root / value).resolve(strict=True)
        if not path.is_relative_to(root):
            raise BadLine(f"{what} ({value}) is outside {folder}: move it there, or set image_folder.")
        # O_NONBLOCK: opening a pipe without a writer would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise BadLine(
            f"{what} ({value}) cannot be read in {folder} ({why}): correct the path, or set image_folder."
        ) from exc
    return data


@dataclass(frozen=True, slots=True)
class Template:
    """Render chat messages, and count tokens."""

    #: (messages, template keywords) -> prompt; None if messages are not rendered.
    render: Callable[..., str] | None = None
    #: Digest of the template; templates with equal digests render equally.
    digest: str = ""
    #: Prompt -> number of tokens; None if tokens are not counted.
    count: Callable[[str], int] | None = None


class LongPrompt(BadLine):
    """Prompt with more than ``max_prompt_tokens``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt made from one row of a dataset."""

    #: Row number in the file, from 0; part of the job's id.
    index: int
    text: str | None
    ids: list[int] | None
    #: Any JSON value.
    label: Any
    metadata: dict[str, Any]
    #: Given answers, as text or token ids.
    answers: list[Any] = field(default_factory=list)
    #: Bytes of image files, in the order of their placeholders.
    images: list[bytes] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes of its text, ids (8 bytes each) and images."""
        return len(self.text or "") + 8 * len(self.ids or ()) + sum(map(len, self.images))

    @property
    def digest(self) -> bytes:
        """Return the digest of the prompt without its label; equal prompts have equal digests (T18)."""
        content = self.text if self.text is not None else json.dumps(self.ids)
        digest = hashlib.blake2b(content.encode(), digest_size=12)
        for image in self.images:
            digest.update(hashlib.blake2b(image, digest_size=12).digest())
        return digest.digest()


def read_prompt(config: DatasetConfig, template: Template | None, index: int, row: dict[str, Any]) -> Prompt:
    """Make a prompt from a row.

    Args:
        template: renders chat messages; required if prompts are lists of messages.

    Raises:
        BadLine: the row has no valid prompt; names dataset and line.
    """
    where = f"dataset {config.name}, line {index + 1}"
    if config.input_key not in row:
        raise BadLine(f"{where}: the row has no column {config.input_key!r}; correct the dataset's input_key.")
    tools = _read_tools(config, row, where)
    text, ids, images = _render(config, template, row, tools, where)
    label = _read_label(config, row, where)
    metadata = row.get(config.metadata_key) if config.metadata_key else None
    if metadata is not None and not isinstance(metadata, dict):
        raise BadLine(f"{where}: {config.metadata_key!r} is not a map; correct the row or the dataset's metadata_key.")
    answers = _read_answers(config, row, where)
    if tools:
        metadata = {"tools": tools, **(metadata or {})}
    check_writable([text, ids, label, metadata, answers], where)
    prompt = Prompt(index, text, ids, label, metadata or {}, answers, images)
    _check_length(config, template, prompt, where)
    return prompt


def _check_length(config: DatasetConfig, template: Template | None, prompt: Prompt, where: str) -> None:
    most = config.max_prompt_tokens
    num = _num_tokens(template, prompt) if most is not None else None
    if most is not None and num is not None and num > most:
        raise LongPrompt(
            f"{where}: its prompt has {num} tokens, but max_prompt_tokens is {most}: raise it, remove the line, or set "
            "the dataset's on_long_prompt to skip."
        )


def _read_label(config: DatasetConfig, row: dict[str, Any], where: str) -> Any:
    """Return the label as stored in the row; '' without a ``label_key``."""
    key = config.label_key
    if key is None:
        return ""
    if row.get(key) is None:
        raise BadLine(
            f"{where}: column {key!r} is {'null' if key in row else 'missing'}; correct the dataset's label_key, or "
            "set `label_key: null` if the reward needs no label."
        )
    label = row[key]
    try:
        json.dumps(label)
    except RecursionError:
        pass  # check_writable reports it for the complete line
    except (TypeError, ValueError) as exc:
        raise BadLine(f"{where}: its {key!r} is not a valid label ({exc}); use a JSON value.") from exc
    return label


def _read_answers(config: DatasetConfig, row: dict[str, Any], where: str) -> list[Any]:
    key = config.answer_key
    if key is None:
        return []
    if key not in row:
        raise BadLine(f"{where}: the row has no column {key!r}; correct the dataset's answer_key, or set it to null.")
    value = row[key] if row[key] is not None else []
    answers = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(answers, list) or not all(isinstance(one, str) or _is_ids(one) for one in answers):
        raise BadLine(f"{where}: {key!r} is not an answer: use text, a list of token ids, or a list of either.")
    return answers


def _num_tokens(template: Template | None, prompt: Prompt) -> int | None:
    """Return the number of tokens of a prompt; None if they are not counted."""
    if prompt.ids is not None:
        return len(prompt.ids)
    if template is None or template.count is None or prompt.text is None:
        return None
    return template.count(prompt.text)


def _read_tools(config: DatasetConfig, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the tools for the chat template; [] if the row has none."""
    key = config.tools_key
    if key is None:
        return []
    if key not in row:
        raise BadLine(f"{where}: the row has no column {key!r}; correct the dataset's tools_key, or set it to null.")
    tools = row[key] or []
    try:
        tools = (json.loads(tools) or []) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as exc:
        raise BadLine(f"{where}: {key!r} is invalid JSON ({exc}); correct the row.") from exc
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise BadLine(f"{where}: {key!r} is not a list of maps; correct the row.")
    return tools


def _render(
    config: DatasetConfig, template: Template | None, row: dict[str, Any], tools: list[dict[str, Any]], where: str
) -> tuple[str | None, list[int] | None, list[bytes]]:
    """Render the prompt; return its text or None, its ids or None, and its images."""
    value = row[config.input_key]
    if isinstance(value, str):
        if not config.apply_chat_template:
            return value, None, []
        value = [{"role": "user", "content": value}]
    if _is_ids(value):
        return None, value, []
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        if template is None or template.render is None:
            raise BadLine(
                f"{where}: the prompt is a list of chat messages; set the dataset's apply_chat_template to true."
            )
        if config.system_prompt and value[0].get("role") != "system":
            value = [{"role": "system", "content": config.system_prompt}, *value]
        value, images = take_images(config, with_images(config, value, row, where), where)
        keywords = {**config.chat_template_kwargs, **({"tools": tools} if tools else {})}
        try:
            return template.render(value, **keywords), None, images
        except Exception as exc:  # a template may raise anything
            raise BadLine(
                f"{where}: the model's chat template rejected the messages ({exc}); correct the row."
            ) from exc
    raise BadLine(f"{where}: the prompt is invalid; use text, a list of messages or a list of token ids.")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def check_writable(value: Any, where: str) -> None:
    """Raise BadLine, whose text begins with ``where``, if a record cannot hold a value."""
    try:
        # In a record the value is nested a few levels deeper.
        unpack(pack([[[value]]]), where)
    except UnicodeEncodeError as exc:
        raise BadLine(
            f"{where}: the row has half of a surrogate pair ({exc.object[exc.start : exc.end]!a}), which is not text; "
            "correct its escapes."
        ) from exc
    except OverflowError as exc:
        raise BadLine(f"{where}: the row has an integer beyond 64 bits; store it as text.") from exc
    except TypeError as exc:
        raise BadLine(f"{where}: the row has a value that JSON cannot represent ({exc}); remove it.") from exc
    except (ValueError, RecursionError, ProtocolError) as exc:
        why = exc.__cause__ if isinstance(exc, ProtocolError) else exc
        raise BadLine(f"{where}: the row is too deeply nested or too large for a record ({why}); simplify it.") from exc
