"""Models by name: VGG-11, LeNet-5 and ResNet-18 for small images, two transformers, and torchvision's classifiers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from testbed.rank.own_code import call
from testbed.spec.datasets import Shape
from testbed.spec.errors import one_line, refuse
from testbed.spec.models import MAX_PARAMETERS_VARIABLE
from testbed.spec.own_files import own_code

VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")  # widths, M: max-pool 2
_declared: list[torch.library.Library] = []


@functools.cache
def _torchvision() -> ModuleType:
    """Import torchvision.models and return it. The import takes a second, so only runs with such a model pay for it.

    If torchvision is a CUDA build and torch is a CPU build, torchvision's compiled operators do not load. The import
    then fails because the schemas of two operators are missing. No model uses these operators, so it is enough to
    declare the schemas.
    """
    try:
        from torchvision import models
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        _declared.append(library)  # the schemas last as long as this object
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision import models
    module: ModuleType = models
    return module


def vgg11(classes: int, shape: Shape) -> nn.Module:
    """Return VGG-11 for 32 x 32 images: 9,231,114 parameters in 34 tensors with 10 classes and 3 channels."""
    layers: list[nn.Module] = []
    width = shape[0]
    for item in VGG11:
        if isinstance(item, int):
            layers += [nn.Conv2d(width, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
            width = item
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, classes))


def lenet5(classes: int, shape: Shape) -> nn.Module:
    """Return LeNet-5 for 32 x 32 images, as in the published experiment R3 (experiments/r3.toml)."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)),
    )


def resnet18(classes: int, shape: Shape) -> nn.Module:
    """Return torchvision's ResNet-18 with the CIFAR stem: a 3 x 3 convolution, no pooling before the first block."""
    model: nn.Module = _torchvision().resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def vit_tiny(classes: int, shape: Shape) -> nn.Module:
    """Return torchvision's vision transformer, size tiny: 12 layers of width 192, patches of 4 x 4 pixels."""
    model: nn.Module = _torchvision().VisionTransformer(
        image_size=shape[1],
        patch_size=4,
        num_layers=12,
        num_heads=3,
        hidden_dim=192,
        mlp_dim=768,
        num_classes=classes,
    )
    model.conv_proj = nn.Conv2d(shape[0], 192, kernel_size=4, stride=4)
    return model


class Block(nn.Module):
    """A layer of GPT: attention to earlier tokens, then two linear layers; both parts have a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = split.unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + added


class GPT(nn.Module):
    """A decoder of 6 layers of width 384; returns logits for each token. Embedding and last layer share weights."""

    LAYERS, WIDTH, HEADS = 6, 384, 6
    DEVIATION = 0.02  # standard deviation of the initial weights, as in GPT-2

    def __init__(self, tokens: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, self.WIDTH), nn.Embedding(length, self.WIDTH)
        self.blocks = nn.Sequential(*(Block(self.WIDTH, self.HEADS) for _ in range(self.LAYERS)))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, tokens, bias=False)
        self.head.weight = self.tokens.weight
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=self.DEVIATION)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))
        return logits


def gpt(classes: int, shape: Shape) -> nn.Module:
    """Return GPT for sequences of this length: 10.8 million parameters with 256 tokens, one for each byte value."""
    return GPT(classes, shape[0])


# All other names are looked up in torchvision.
MAKERS = {"vgg11": vgg11, "resnet18": resnet18, "lenet5": lenet5, "vit_tiny": vit_tiny, "gpt": gpt}


def build_model(name: str, classes: int, shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Build a model for samples of this shape. Its weights come from torch's global generator, which the caller seeds.

    RunSpec has checked the name and the shape. SpecError is raised if this node has another version of torchvision,
    which lacks the model.
    """
    make = MAKERS.get(name)
    model = make(classes, shape) if make else _from_torchvision(name, classes, shape)
    return model.to(dtype)


def build_own_model(name: str, file: Path, classes: int, shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Build a user's model with `function(classes, channels)` of `file`, the copy of the file that `name` refers to.

    Trained parameters get the type of the run, as do others and buffers that have theirs. Those of another type, e.g.
    frozen bfloat16 or complex constants, stay as they are. Raises SpecError if the model cannot be trained.
    """
    own = own_code(name)
    assert own is not None, name
    model = call(file, own.function, (classes, shape[0] if shape else 0), f"model {name!r}", own.path)
    if not isinstance(model, nn.Module):
        rule = f"{own.function} returned {type(model).__name__}, and a torch.nn.Module is needed"
        raise refuse("model", name, rule, "Return the model.")
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.requires_grad})
    if not dtypes:
        raise refuse("model", name, "has no parameter that is trained", "Set requires_grad of some to True.")
    if len(dtypes) > 1:
        rule = f"its parameters have {len(dtypes)} types, {', '.join(dtypes)}, and gradients are sent as one"
        raise refuse("model", name, rule, "Use one type, and convert inside forward.")
    if dtypes[0] not in ("float32", "float64"):
        rule = f"its parameters are {dtypes[0]}, and a run trains float32 or float64"
        raise refuse("model", name, rule, "Keep parameters in float32, and convert inside forward.")
    largest, count = os.environ.get(MAX_PARAMETERS_VARIABLE), sum(each.numel() for each in model.parameters())
    if largest and count > int(largest):
        rule = f"it has {count} parameters, and these nodes can train {largest}"
        raise refuse("model", name, rule, "Use fewer, or --on netns or compose.")
    written = getattr(torch, dtypes[0])
    model._apply(lambda each: each.to(dtype) if each.dtype == written else each)
    return model


def _from_torchvision(name: str, classes: int, shape: Shape) -> nn.Module:
    models = _torchvision()
    if name not in models.list_models(module=models):
        raise refuse("model", name, "this node's torchvision does not have it", "Use the testbed's image on all nodes.")
    # Two models have auxiliary outputs, which the training loop does not use.
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    _check_shape(name, model, shape)
    return model


def _check_shape(name: str, model: nn.Module, shape: Shape) -> None:
    """Try one forward pass. Raises SpecError if the model cannot take samples of this shape."""
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(2, *shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = one_line(str(error).splitlines()[0])
        rule = f"cannot take images of {shape[1]} x {shape[2]} ({reason})"
        raise refuse("model", name, rule, "Use another, or another data.size.") from None
    model.train()


def untrack_statistics(model: nn.Module) -> None:
    """Make every BatchNorm layer use the statistics of the batch, also in evaluation."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
