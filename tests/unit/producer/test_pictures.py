"""Images of prompts: what a row names or holds becomes bytes of the job."""

import base64
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.producer import prompt as pictures
from penstock.producer.prompt import Template
from penstock.producer.sources.rows import BadLine
from tests.unit.producer.making import made

pytest.importorskip("PIL")
SHOWN = Template(lambda messages, **_: json.dumps(messages))


def png(colour: str = "red", size: tuple[int, int] = (4, 4)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def prompt(folder: Path, *images: Any, **keys: Any) -> Any:
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "colour?"}]
    row = {"prompt": [{"role": "user", "content": content}], "label": ""}
    return made(folder, [row], template=SHOWN, apply_chat_template=True, **keys)[0]


def test_paths_and_data_uris_become_bytes_and_the_template_sees_marks_alone(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png())
    uri = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    found = prompt(tmp_path, "1.png", uri)
    assert found.images == [png(), png("blue")]
    content = json.loads(found.text)[0]["content"]
    assert content == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "colour?"}]


def test_a_column_of_images_is_put_where_texts_say_so(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png())
    row = {"prompt": "see <image> here", "images": ["1.png"], "label": ""}
    found = made(tmp_path, [row], template=SHOWN, apply_chat_template=True, image_key="images")[0]
    assert found.images == [png()]
    assert [part["type"] for part in json.loads(found.text or "")[0]["content"]] == ["text", "image", "text"]
    with pytest.raises(BadLine, match="contain 1 <image> marks, but 'images' has 0"):
        made(tmp_path, [row | {"images": []}], template=SHOWN, apply_chat_template=True, image_key="images")[0]


@pytest.mark.parametrize("named", ["../out.png", "http://host/1.png", "file:///etc/passwd", "/etc/passwd", "link.png"])
def test_nothing_outside_the_folder_of_images_is_opened(tmp_path: Path, named: str) -> None:
    (tmp_path / "out.png").write_bytes(png())
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.png").symlink_to(tmp_path / "out.png")
    with pytest.raises(BadLine, match=r"is outside|URL|cannot be read in"):
        prompt(tmp_path, named, image_folder=str(inside))


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("missing.png", r"cannot be read in \S+ \(No such file or directory\): correct the path"),
        (".", r"cannot be read in \S+ \(Is a directory\): correct"),
        ("1.png\0", "cannot be read in"),
        ("pipe", "cannot be read as PNG"),
        ("data:image/png;base64,@@@", "is not base64"),
        ("data:image/png;base64,AAA", "is not base64"),
        ("data:image/png,AAAA", "is not base64"),
        ("", "use the bytes of a file"),
        (7, "use the bytes of a file"),
    ],
)
def test_what_names_no_image_is_a_bad_line_that_says_so(tmp_path: Path, named: Any, says: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadLine, match=says):
        prompt(tmp_path, named)


def test_of_ten_thousand_images_no_more_are_read_than_a_prompt_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.png").write_bytes(png())
    read: list[str] = []
    inside = pictures._read
    monkeypatch.setattr(
        pictures, "_read", lambda folder, value, what: read.append(value) or inside(folder, value, what)
    )
    with pytest.raises(BadLine, match="has more than 16 images"):
        prompt(tmp_path, *["1.png"] * 10_000)
    assert len(read) == 16


@pytest.mark.parametrize("wrong", [b"no image", png()[:20], b"GIF89a" + bytes(20)])
def test_what_is_no_image_is_a_bad_line(tmp_path: Path, wrong: bytes) -> None:
    (tmp_path / "1.png").write_bytes(wrong)
    with pytest.raises(BadLine, match="cannot be read as PNG"):
        prompt(tmp_path, "1.png")


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png(size=(5000, 5000)))
    with pytest.raises(BadLine, match="5000 x 5000 pixels"):
        prompt(tmp_path, "1.png")


def test_prompts_that_differ_in_their_images_have_other_digests(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png())
    (tmp_path / "2.png").write_bytes(png("blue"))
    assert prompt(tmp_path, "1.png").digest != prompt(tmp_path, "2.png").digest


@pytest.mark.parametrize("is_column", [False, True])
def test_a_file_that_was_replaced_is_noticed_where_its_row_tells_its_digest(tmp_path: Path, is_column: bool) -> None:
    (tmp_path / "1.png").write_bytes(png())
    told = {"path": "1.png", "sha256": hashlib.sha256(png()).hexdigest()}
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": [{"type": "image", **told}]}], "label": ""}
    keys = {}
    if is_column:
        row, keys = {"prompt": "<image>", "label": "", "images": [told]}, {"image_key": "images"}
    assert made(tmp_path, [row], template=SHOWN, apply_chat_template=True, **keys)[0].images == [png()]
    (tmp_path / "1.png").write_bytes(png("blue"))
    with pytest.raises(BadLine, match="image 1 does not match its row: its sha256 is"):
        made(tmp_path, [row], template=SHOWN, apply_chat_template=True, **keys)[0]


#: As templates of the Qwen-VL kind have it: what a part holds, not what it says that it is.
QWEN = Template(
    lambda messages, **_: "".join(
        "[place]" if part.get("type") == "image" or "image" in part or "image_url" in part else part.get("text", "")
        for message in messages
        for part in message["content"]
    )
)


def asked_of(folder: Path, *parts: dict[str, Any], **keys: Any) -> Any:
    (folder / "1.png").write_bytes(png())
    row = {"prompt": [{"role": "user", "content": list(parts)}], "images": ["1.png"], "label": ""}
    return made(folder, [row], template=QWEN, apply_chat_template=True, **keys)[0]


def test_an_image_without_a_type_is_one_and_null_keys_are_none(tmp_path: Path) -> None:
    """As Qwen's own messages have it, and as a table has all keys in all parts."""
    found = asked_of(tmp_path, {"image": "1.png"}, {"type": "text", "text": "colour?"})
    assert (found.text, found.images) == ("[place]colour?", [png()])
    table = {"type": "image", "image": "1.png", "text": None}, {"type": "text", "image": None, "text": "colour?"}
    assert asked_of(tmp_path, *table) == found


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": "1.mp4"},
        {"video": "1.mp4"},
        {"type": "input_image", "image_url": "1.png"},
        {"type": "text", "text": "a", "image": "1.png"},
        {"type": ["video"], "video": "1.mp4"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
)
def test_what_a_template_would_make_a_place_of_is_no_prompt_without_it(tmp_path: Path, part: dict[str, Any]) -> None:
    with pytest.raises(BadLine, match="a prompt may have parts of types text and image only"):
        asked_of(tmp_path, part, {"type": "text", "text": "what?"})


@pytest.mark.parametrize(
    "parts",
    [
        ({"type": "text", "text": "see <im"}, {"type": "text", "text": "age> here"}),
        ({"type": "image", "image": "1.png", "text": "see <image>"},),
    ],
)
def test_a_mark_that_no_image_can_be_put_at_is_none(tmp_path: Path, parts: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(BadLine, match="contain 0 <image> marks, but 'images' has 1"):
        asked_of(tmp_path, *parts, image_key="images")
