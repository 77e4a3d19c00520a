"""Models by name: the reports' sizes, the CIFAR stem, and any classifier of torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from testbed.rank.models import build_model, build_own_model, untrack_statistics
from testbed.spec.errors import SpecError
from testbed.spec.models import MAX_PARAMETERS_VARIABLE


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def build(name: str, channels: int = 3, dtype: torch.dtype = torch.float32, size: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, 10, (channels, size, size), dtype)


def test_vgg11_is_the_reports_vgg11() -> None:
    model = build("vgg11")
    assert count(model) == 9_231_114
    assert len(list(model.parameters())) == 34


def test_lenet5_is_r3s_lenet5() -> None:
    model = build("lenet5", channels=1)
    assert count(model) == 61_706
    kinds = [type(layer).__name__ for layer in model]  # type: ignore[attr-defined]
    assert kinds == ["Conv2d", "Tanh", "AvgPool2d"] * 2 + ["Conv2d", "Tanh", "Flatten", "Linear", "Tanh", "Linear"]


def test_resnet18_keeps_small_images_large_until_the_first_block() -> None:
    model = build("resnet18")
    seen: list[torch.Size] = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))  # type: ignore[operator, union-attr]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert seen == [torch.Size([2, 64, 32, 32])]
    assert count(model) == 11_173_962


@pytest.mark.parametrize(
    ("name", "channels"), [("vgg11", 3), ("vgg11", 1), ("lenet5", 1), ("lenet5", 3), ("resnet18", 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_takes_the_channels_and_the_type_it_was_built_for(name: str, channels: int, dtype: torch.dtype) -> None:
    logits = build(name, channels, dtype)(torch.zeros(2, channels, 32, 32, dtype=dtype))
    assert (logits.shape, logits.dtype) == ((2, 10), dtype)


def test_gpt_predicts_each_token_from_earlier_ones_only() -> None:
    torch.manual_seed(0)
    model = build_model("gpt", 256, (16,), torch.float64).eval()
    tokens = torch.randint(256, (2, 16))
    other = tokens.clone()
    other[:, 9] = (other[:, 9] + 1) % 256
    before, after = model(tokens), model(other)
    assert before.shape == (2, 16, 256)
    assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9], after[:, 9])


def test_gpt_has_one_parameter_for_its_first_and_its_last_layer() -> None:
    model = build_model("gpt", 256, (16,), torch.float32)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert {"tokens.weight", "head.weight"} < set(names) and len(names) == len(list(model.parameters())) + 1


def test_one_seed_gives_one_set_of_weights() -> None:
    one, again = build("lenet5").state_dict(), build("lenet5").state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_a_torchvision_classifier_is_found_by_name() -> None:
    model = build("squeezenet1_1")
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def test_a_model_that_another_torchvision_lacks_is_refused_with_a_way_out() -> None:
    with pytest.raises(SpecError, match=r"model 'vgg99': this node's torchvision does not have it\. Use the testbed's"):
        build("vgg99")


def test_googlenet_takes_small_images_and_gives_one_output() -> None:
    model = build("googlenet")
    assert model.training  # the trial that every such model gets leaves no trace
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["alexnet", "inception_v3", "vit_b_32"])
def test_a_model_for_larger_images_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(SpecError) as refusal:
        build(name)
    said = str(refusal.value)
    assert said.startswith(f"model '{name}': cannot take images of 32 x 32 (") and "another data.size" in said
    assert "\n" not in said


def test_a_model_for_larger_images_is_built_for_resized_ones() -> None:
    assert build("alexnet", size=64)(torch.zeros(2, 3, 64, 64)).shape == (2, 10)


def test_untracked_statistics_make_testing_like_training() -> None:
    model = build("vgg11")
    images = torch.randn(4, 3, 32, 32)
    assert not torch.allclose(model.eval()(images), model.train()(images))
    untrack_statistics(model)
    assert list(model.buffers()) == []
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), model.train()(images))


OWN = """
import torch
from torch import nn

def make(classes, channels):
    return nn.Linear(channels, classes)

class Rotated(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.frozen = nn.Linear(channels, 4).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(4, classes)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.5, 1.0])))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("rows", torch.arange(4))

def make_rotated(classes, channels):
    return Rotated(classes, channels)

def half(classes, channels):
    return nn.Linear(channels, classes).to(torch.bfloat16)

def several(classes, channels):
    return nn.Sequential(nn.Linear(channels, 4), nn.Linear(4, classes).to(torch.bfloat16))

def frozen(classes, channels):
    return nn.Linear(channels, classes).requires_grad_(False)

def number(classes, channels):
    return classes
"""


def own(folder: Path, function: str) -> nn.Module:
    (folder / "abc-m.py").write_text(OWN)
    return build_own_model(f"m.py:{function}", folder / "abc-m.py", 5, (12,), torch.float64)


def test_a_users_model_is_built_for_the_classes_and_channels_of_the_data_in_the_type_of_the_run(tmp_path: Path) -> None:
    model = own(tmp_path, "make")
    assert model(torch.zeros(2, 12, dtype=torch.float64)).shape == (2, 5)


def test_what_has_another_type_than_the_trained_parameters_of_a_users_model_stays_as_it_is(tmp_path: Path) -> None:
    """A complex constant would lose its imaginary part, and a frozen bfloat16 model would need twice the memory."""
    state = own(tmp_path, "make_rotated").state_dict()
    assert {name: value.dtype for name, value in state.items() if "bias" not in name} == {
        "frozen.weight": torch.bfloat16,
        "head.weight": torch.float64,
        "turns": torch.complex64,
        "scale": torch.float64,
        "rows": torch.int64,
    }
    torch.testing.assert_close(state["turns"].angle(), torch.tensor([0.5, 1.0]))


def test_a_users_model_that_is_too_large_for_the_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(each.numel() for each in own(tmp_path, "make").parameters())
    monkeypatch.setenv(MAX_PARAMETERS_VARIABLE, str(count))
    own(tmp_path, "make")
    monkeypatch.setenv(MAX_PARAMETERS_VARIABLE, str(count - 1))
    with pytest.raises(SpecError, match=f"it has {count} parameters, and these nodes can train {count - 1}. Use fewer"):
        own(tmp_path, "make")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("half", "its parameters are bfloat16, and a run trains float32 or float64. Keep parameters in float32"),
        ("several", "its parameters have 2 types, bfloat16, float32, and gradients are sent as one. Use one type"),
        ("frozen", "has no parameter that is trained. Set requires_grad of some to True."),
        ("number", "number returned int, and a torch.nn.Module is needed. Return the model."),
    ],
)
def test_a_users_model_that_cannot_be_trained_is_refused(tmp_path: Path, function: str, reason: str) -> None:
    with pytest.raises(SpecError) as refusal:
        own(tmp_path, function)
    assert str(refusal.value).startswith(f"model 'm.py:{function}': {reason}")
