"""torchvision, imported so that a CUDA build works beside a CPU torch.

Such a build's compiled operators do not load, and the import dies over the schema of two of them. We use neither:
declaring the schemas is enough for datasets, transforms and models.
"""

from __future__ import annotations

import torch

try:
    from torchvision import models
except RuntimeError:
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import models

__all__ = ["models"]
