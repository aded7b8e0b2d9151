"""Import it first: declares what torchvision's wheel looks for at import; it is of a CUDA library, and never called."""

import torch

for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
