"""The known models and the samples that they take. Their code is in rank/models.py; nothing here needs torch.

By this table a controller, or a container before it shapes its network, refuses a model that cannot take the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from testbed.spec.datasets import Unit
from testbed.spec.errors import did_you_mean, refuse
from testbed.spec.own_files import OwnFile, looks_like_code, own_code

# Variable of a rank: the largest number of parameters of a user's model, which is known only when a rank has built it.
MAX_PARAMETERS_VARIABLE = "TESTBED_MAX_PARAMETERS"


@dataclass(frozen=True)
class ModelInfo:
    """What a model takes: square images or sequences, of `smallest` to `largest` pixels or tokens (None: no limit)."""

    smallest: int = 1
    largest: int | None = None
    takes: Unit = "images"
    multiple: int = 1  # a side is a multiple of so many pixels
    channels: int | None = 3  # None: any number
    usual_channels: int = 3  # of the synthetic images for this model
    parameters: int = 0  # with 10 classes
    name: str = ""
    own: OwnFile | None = None  # the user's file that contains the model

    @property
    def sizes(self) -> str:
        """The accepted sizes in words."""
        if self.multiple > 1:
            return f"{self.in_words(self.smallest)} and larger multiples of {self.multiple}"
        if self.largest is None:
            return f"{self.in_words(self.smallest)} and larger"
        if self.largest == self.smallest:
            return self.in_words(self.smallest)
        return f"{self.in_words(self.smallest)} to {self.in_words(self.largest)}"

    def fits(self, size: int) -> bool:
        """Return True if the model takes images with sides of `size` pixels, or sequences of `size` tokens."""
        return self.smallest <= size <= (self.largest or size) and size % self.multiple == 0

    def in_words(self, size: int) -> str:
        """Return a size with its unit."""
        return f"{size} x {size}" if self.takes == "images" else f"{size} tokens"


# Models of the published reports, made for 32 x 32 images, and two transformers.
BUILT_IN_MODELS = {
    "vgg11": ModelInfo(32, 63, channels=None, parameters=9_231_114),
    "resnet18": ModelInfo(1, channels=None, parameters=11_173_962),
    "lenet5": ModelInfo(32, 35, channels=None, usual_channels=1, parameters=61_706),
    "vit_tiny": ModelInfo(8, multiple=4, channels=None, parameters=5_362_762),
    "gpt": ModelInfo(8, 1024, "sequences", parameters=10_770_432),  # for 64 tokens
}
# torchvision's classifiers, with their numbers of parameters for 10 classes.
_PARAMETERS = """
alexnet:57044810 convnext_base:87576714 convnext_large:196245706 convnext_small:49462378 convnext_tiny:27827818
densenet121:6964106 densenet161:26494090 densenet169:12501130 densenet201:18112138 efficientnet_b0:4020358
efficientnet_b1:6525994 efficientnet_b2:7715084 efficientnet_b3:10711602 efficientnet_b4:17566546
efficientnet_b5:28361274 efficientnet_b6:40758754 efficientnet_b7:63812570 efficientnet_v2_l:117247082
efficientnet_v2_m:52871166 efficientnet_v2_s:20190298 googlenet:5610154 inception_v3:21806058 maxvit_t:30412744
mnasnet0_5:950322 mnasnet0_75:1902018 mnasnet1_0:3115122 mnasnet1_3:5014066 mobilenet_v2:2236682
mobilenet_v3_large:4214842 mobilenet_v3_small:1528106 regnet_x_16gf:52250026 regnet_x_1_6gf:8286266
regnet_x_32gf:105315770 regnet_x_3_2gf:14297642 regnet_x_400mf:5098986 regnet_x_800mf:6593386 regnet_x_8gf:37670858
regnet_y_128gf:637493824 regnet_y_16gf:80595390 regnet_y_1_6gf:10322320 regnet_y_32gf:141370900
regnet_y_3_2gf:17938468 regnet_y_400mf:3907554 regnet_y_800mf:5655362 regnet_y_8gf:37384642 resnet101:42520650
resnet152:58164298 resnet18:11181642 resnet34:21289802 resnet50:23528522 resnext101_32x8d:86762826
resnext101_64x4d:81426762 resnext50_32x4d:23000394 shufflenet_v2_x0_5:352042 shufflenet_v2_x1_0:1263854
shufflenet_v2_x1_5:2488874 shufflenet_v2_x2_0:5365486 squeezenet1_0:740554 squeezenet1_1:727626 swin_b:86753474
swin_s:48844948 swin_t:27527044 swin_v2_b:86916098 swin_v2_s:48976132 swin_v2_t:27590260 vgg11:128807306
vgg11_bn:128812810 vgg13:128991818 vgg13_bn:128997706 vgg16:134301514 vgg16_bn:134309962 vgg19:139611210
vgg19_bn:139622218 vit_b_16:85806346 vit_b_32:87462922 vit_h_14:630777610 vit_l_16:303311882 vit_l_32:305520650
wide_resnet101_2:124858186 wide_resnet50_2:66854730
"""
FIXED_SIZE = 224
_LIMITS = {  # by the beginning of the model's name; all other models take images of any size
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


TORCHVISION_MODELS = {
    name: replace(_of_torchvision(name), parameters=int(count))
    for name, _, count in (word.partition(":") for word in _PARAMETERS.split())
}
MODELS = TORCHVISION_MODELS | BUILT_IN_MODELS  # vgg11 and resnet18 of torchvision are replaced


def model_info(name: str) -> ModelInfo:
    """Return the model of that name. Raises SpecError if there is none."""
    if code := own_code(name):
        return ModelInfo(takes="samples", channels=None, name=name, own=code)
    if looks_like_code(name):
        raise refuse("model", name, "a model of your own is FILE.py:FUNCTION", "Write e.g. my_model.py:make.")
    if name not in MODELS:
        others = ", ".join(each for each in TORCHVISION_MODELS if each not in BUILT_IN_MODELS)
        way_out = f"Use one of {', '.join(BUILT_IN_MODELS)}, FILE.py:FUNCTION, or of torchvision: {others}."
        way_out += did_you_mean(name, MODELS)
        raise refuse("model", name, "unknown", way_out)
    return replace(MODELS[name], name=name)
