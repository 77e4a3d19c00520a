"""The table of models is that of the code: the same names, and the images that each really takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from testbed.rank.models import MAKERS, _torchvision
from testbed.spec.errors import SpecError
from testbed.spec.models import BUILT_IN_MODELS, MODELS, TORCHVISION_MODELS, ModelInfo, model_info
from testbed.spec.run import RunSpec


def test_the_names_are_those_of_the_code() -> None:
    models = _torchvision()
    assert set(TORCHVISION_MODELS) == set(models.list_models(module=models))
    assert list(BUILT_IN_MODELS) == list(MAKERS)


@pytest.mark.parametrize("name", [name for name in TORCHVISION_MODELS if name not in ("googlenet", "inception_v3")])
def test_the_number_of_parameters_is_that_of_torchvision(name: str) -> None:
    """Its table has the number with 1000 classes. What 990 more need is a multiple of 990: weights and a bias each."""
    published = {each.meta["num_params"] for each in _torchvision().get_model_weights(name)}  # of several image sizes
    more = [number - TORCHVISION_MODELS[name].parameters for number in published]
    assert any(number % 990 == 0 and 100 < number / 990 < 8000 for number in more)


def takes(name: str, size: int) -> bool:
    """Build the model without memory for its numbers, and try one forward pass."""
    with torch.device("meta"), torch.no_grad():
        if name in MAKERS:
            model: nn.Module = MAKERS[name](10, (3, size, size))
        else:
            options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
            model = _torchvision().get_model(name, num_classes=10, **options)
        try:
            model.eval()(torch.zeros(2, 3, size, size))
        except (RuntimeError, ValueError, AssertionError):
            return False
    return True


# One of each family; the deep ones take minutes to build.
FAMILIES = ["alexnet", "inception_v3", "squeezenet1_0", "squeezenet1_1", "vgg11_bn", "vgg11", "lenet5", "vit_b_16"]


@pytest.mark.parametrize("name", [*FAMILIES, "resnet18", "resnet34", "mobilenet_v2", "shufflenet_v2_x0_5", "googlenet"])
def test_the_sizes_are_those_that_a_model_takes(name: str) -> None:
    info = MODELS[name]
    assert takes(name, max(info.smallest, 32))
    assert info.smallest == 1 or not takes(name, info.smallest - 1)
    assert info.smallest == 1 or takes(name, info.smallest)
    if info.largest:
        assert takes(name, info.largest) and not takes(name, info.largest + 1)


@pytest.mark.parametrize("name", ["vgg99", "fcn_resnet50", "quantized_resnet18", "", "VGG11", "../x"])
def test_an_unknown_model_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        SpecError, match=f"model '{name}': unknown. Use one of vgg11, resnet18, lenet5, vit_tiny, gpt, FILE.py"
    ):
        model_info(name)
    with pytest.raises(SpecError, match=f"--model '{name}': unknown"):
        RunSpec.load({"model": name}, "")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"model": "vit_b_16"},
            "--model 'vit_b_16': takes images of 224 x 224, and these have 32 x 32. Use --set data.size=224, or",
        ),
        ({"model": "vit_b_16", "data": {"size": 225}}, "takes images of 224 x 224, and these have 225 x 225"),
        ({"model": "alexnet", "data": {"name": "synthetic"}}, "takes images of 63 x 63 and larger, and these have 32"),
        ({"model": "vgg11", "data": {"size": 64}}, "takes images of 32 x 32 to 63 x 63, and these have 64 x 64"),
        ({"model": "resnet50", "data": {"name": "mnist"}}, "takes images of 3 channels, and mnist has 1. Use vgg11, "),
        (
            {"model": "vit_tiny", "data": {"size": 30}},
            "takes images of 8 x 8 and larger multiples of 4, and these",
        ),
        ({"model": "gpt", "data": {"name": "cifar10"}}, "takes sequences, and cifar10 has images. Use one of vgg11, "),
        (
            {"model": "vgg11", "data": {"name": "text"}},
            "takes images, and text has sequences. Use one of gpt, or",
        ),
        ({"model": "gpt", "data": {"size": 1025}}, "--set data.size=1025: must be at most 1024"),
        ({"data": {"size": 7}}, "--set data.size=7: must be at least 8. Write e.g. --set data.size=224."),
    ],
)
def test_images_that_a_model_cannot_take_are_refused_before_anything_starts(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecError) as refusal:
        RunSpec.load(values, "")
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ({"model": "vit_b_16", "data": {"size": 224}}, (3, 224, 224)),
        ({"model": "lenet5", "data": {"name": "synthetic"}}, (1, 32, 32)),
        ({"model": "lenet5"}, (3, 32, 32)),
        ({"model": "vgg11", "data": {"name": "mnist", "size": 40}}, (1, 40, 40)),
        ({"model": "gpt"}, (64,)),
        ({"model": "gpt", "data": {"size": 128}}, (128,)),
    ],
)
def test_the_shape_of_a_sample_is_that_of_the_data_or_as_resized(
    values: dict[str, Any], shape: tuple[int, ...]
) -> None:
    assert RunSpec.load(values, "").sample_shape() == shape


def test_a_model_of_text_gets_text_where_no_data_is_named() -> None:
    assert RunSpec.load({"model": "gpt"}, "").data.name == "text"
    assert RunSpec.load({"model": "gpt", "data": {"test_subset": 9}}, "").data.model_dump()["test_subset"] == 9


@pytest.mark.parametrize("name", ["gpt", "vit_tiny"])
def test_the_number_of_parameters_is_that_of_our_transformers(name: str) -> None:
    shape = RunSpec.load({"model": name}, "").sample_shape()
    model = MAKERS[name](256 if name == "gpt" else 10, shape)
    assert sum(each.numel() for each in model.parameters()) == MODELS[name].parameters


def test_sizes_in_words() -> None:
    assert [ModelInfo(1).sizes, ModelInfo(9, 9).sizes, ModelInfo(8, 9).sizes] == [
        "1 x 1 and larger",
        "9 x 9",
        "8 x 8 to 9 x 9",
    ]
