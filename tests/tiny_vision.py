"""A tiny policy that sees images, of the shape that examples/vision trains: random weights that let images be seen."""

import io
from pathlib import Path

from tests.unit.example_parts import load

#: What `examples/vision` makes its model and tokenizer by.
PREPARE = load("vision/prepare.py")
#: What the weights are multiplied by: as they are made, every image would be answered nearly alike.
SPREAD = 3.0
#: Of a token's side, in pixels.
TOKEN = 28


def make_tiny_vision(folder: Path, seed: int = 0) -> Path:
    """Write config, tokenizer, image processor and float32 weights to ``folder``. Takes a second."""
    import torch
    from transformers import Qwen2VLImageProcessorPil

    settings, tokenizer = PREPARE.Settings(seed=seed, hidden=64, mlp=64, heads=2), PREPARE.make_tokenizer()
    model = PREPARE.make_model(settings, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SPREAD)
    side = PREPARE.SIDE
    Qwen2VLImageProcessorPil(min_pixels=side * side, max_pixels=4 * side * side).save_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def png(seed: int, width: int = 2, height: int = 2) -> bytes:
    """A file of noise, ``width`` x ``height`` tokens large: a size that nobody changes."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height * TOKEN, width * TOKEN, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def asked(*texts: str) -> str:
    """A prompt with an image between each two of ``texts``."""
    return "<|vision_start|><|image_pad|><|vision_end|>".join(texts)
