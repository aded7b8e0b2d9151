"""Images of a job: encoded files in its record, and their limits. No path and no URL is opened here."""

import io
from collections.abc import Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.system.extras import check_installed

#: Most images of one prompt, most bytes of one file, and of all of them together: they are on the control Redis.
MAX_IMAGES = 16
MAX_IMAGE_BYTES = 2 * 1024 * 1024
MAX_BYTES = 4 * 1024 * 1024
#: Most pixels of one; decoded it takes four bytes for each.
MAX_PIXELS = 16 * 1024 * 1024
#: Most pixels of all of one prompt: they are decoded together.
MAX_ALL_PIXELS = 2 * MAX_PIXELS
#: Most passes over its pixels in a JPEG: encoders make about ten, and 30 bytes request one.
MAX_SCANS = 100
#: Formats that are read: the decoders of others run programs, or are rarely maintained.
FORMATS = ("PNG", "JPEG", "WEBP")
#: Marker at the beginning of a JPEG, and of each of its scans.
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"


def check_images(images: Sequence[bytes], what: str) -> None:
    """Raise ConfigError if images are more, larger, or of another kind than a job may have. Decodes no pixel.

    Args:
        what: name of their owner, for the error.
    """
    if len(images) > MAX_IMAGES:
        raise ConfigError(f"{what} has {len(images)} images, more than the {MAX_IMAGES} of one prompt: take some out.")
    if (total := sum(map(len, images))) > MAX_BYTES:
        raise ConfigError(f"{what} has {total:,} bytes of images, more than {MAX_BYTES:,}: make them smaller.")
    sizes = [open_image(data, f"{what}, image {number}").size for number, data in enumerate(images, 1)]
    if (total := sum(width * height for width, height in sizes)) > MAX_ALL_PIXELS:
        raise ConfigError(f"{what} has {total:,} pixels of images, more than {MAX_ALL_PIXELS:,}: make them smaller.")


def open_image(data: bytes, what: str) -> Any:
    """Open a Pillow image without decoding its pixels. Raises ConfigError if it must not be decoded."""
    if len(data) > MAX_IMAGE_BYTES:
        raise ConfigError(f"{what} has {len(data):,} bytes, more than {MAX_IMAGE_BYTES:,}: make it smaller.")
    check_installed("PIL", "Images in prompts")
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as exc:  # the library raises what its readers raise
        raise ConfigError(f"{what} cannot be read as {', '.join(FORMATS)}: write it anew.") from exc
    if data.startswith(_JPEG) and (scans := data.count(_SCAN)) > MAX_SCANS:
        raise ConfigError(f"{what} is a JPEG of {scans:,} scans, more than {MAX_SCANS}: write it anew.")
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise ConfigError(f"{what} is of {width} x {height} pixels, more than {MAX_PIXELS:,}: make it smaller.")
    return image


def decoded(data: bytes, what: str) -> Any:
    """Open an image and decode its pixels, as RGB. Blocks for the decoding. Raises ConfigError."""
    image = open_image(data, what)
    try:
        return image.convert("RGB")
    except Exception as exc:
        raise ConfigError(f"{what} is damaged ({exc}): write it anew.") from exc
