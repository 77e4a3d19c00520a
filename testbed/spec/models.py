"""The known models and the images that they take. Their code is in rank/models.py; nothing here needs torch.

The table lets a controller, or a container before it shapes its network, refuse what cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from testbed.spec.errors import refuse


@dataclass(frozen=True)
class ModelInfo:
    """What a model takes: square images whose sides have from `smallest` to `largest` pixels (None: no limit)."""

    smallest: int = 1
    largest: int | None = None
    channels: int | None = 3  # None: any number
    usual_channels: int = 3  # of the synthetic images that it gets
    parameters: int = 0  # with 10 classes; 0: not in this table
    name: str = ""

    @property
    def sizes(self) -> str:
        """The sizes in words."""
        least = f"{self.smallest} x {self.smallest}"
        if self.largest is None:
            return f"{least} and larger"
        return least if self.largest == self.smallest else f"{least} to {self.largest} x {self.largest}"


# Those of the published reports, made for 32 x 32 images.
REPORT_MODELS = {
    "vgg11": ModelInfo(32, 63, None, parameters=9_231_114),
    "resnet18": ModelInfo(1, None, None, parameters=11_173_962),
    "lenet5": ModelInfo(32, 35, None, 1, parameters=61_706),
}
# torchvision's classifiers.
_NAMES = """
alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6
efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf
regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf
regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13
vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
"""
FIXED_SIZE = 224
_LIMITS = {  # by the beginning of the name; all others take images of any size
    "alexnet": ModelInfo(63),
    "convnext": ModelInfo(32),
    "densenet": ModelInfo(29),
    "inception": ModelInfo(75),
    "squeezenet1_0": ModelInfo(21),
    "squeezenet1_1": ModelInfo(17),
    "maxvit": ModelInfo(FIXED_SIZE, FIXED_SIZE),
    "vgg": ModelInfo(32),
    "vit": ModelInfo(FIXED_SIZE, FIXED_SIZE),
}


def _of_torchvision(name: str) -> ModelInfo:
    return next((info for begin, info in _LIMITS.items() if name.startswith(begin)), ModelInfo())


TORCHVISION_MODELS = {name: _of_torchvision(name) for name in _NAMES.split()}
MODELS = TORCHVISION_MODELS | REPORT_MODELS  # two of torchvision's are replaced


def model_info(name: str) -> ModelInfo:
    """The model of that name; SpecError if there is none."""
    if name not in MODELS:
        others = ", ".join(each for each in TORCHVISION_MODELS if each not in REPORT_MODELS)
        raise refuse("model", name, "unknown", f"Use one of {', '.join(REPORT_MODELS)}, or of torchvision: {others}.")
    return replace(MODELS[name], name=name)
