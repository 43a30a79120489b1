"""Networks of torchvision, timm and transformers, with random weights, about which the guard is quiet."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.run.guard.test_examine import examine_samples, sum_entropies

pytestmark = pytest.mark.slow
_SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL |= {"intermediate_size": 64, "max_position_embeddings": 64}
_TINY_T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (32, {}),
    "resnet50d": (32, {"drop_path_rate": 0.2}),
    "efficientnet_b0": (32, {"drop_rate": 0.2, "drop_path_rate": 0.2}),
    "mobilenetv3_small_050": (32, {}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "drop_path_rate": 0.1}),
    "swin_tiny_patch4_window7_224": (64, {"img_size": 64, "window_size": 2}),
    "convnext_atto": (32, {"drop_path_rate": 0.1}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "regnety_002": (32, {}),
    "densenet121": (32, {}),
    "vgg11_bn": (32, {}),
    "nf_resnet50": (32, {}),
    "ghostnet_050": (32, {}),
    "dm_nfnet_f0": (64, {}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28}),
    "repvit_m0_9": (64, {}),
    "levit_128s": (64, {"img_size": 64}),
}
TORCHVISION = {"resnet18": 32, "mobilenet_v2": 32, "shufflenet_v2_x0_5": 32, "squeezenet1_1": 64, "swin_t": 64}
TORCHVISION |= {"efficientnet_v2_s": 32, "convnext_tiny": 32}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": _SMALL,
    "RobertaForSequenceClassification": _SMALL | {"pad_token_id": 1},
    "ElectraForSequenceClassification": _SMALL | {"embedding_size": 32},
    "AlbertForSequenceClassification": _SMALL | {"embedding_size": 16},
    "GPT2LMHeadModel": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "LlamaForCausalLM": _SMALL,
    "MixtralForCausalLM": _SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
    "Qwen2ForCausalLM": _SMALL | {"num_key_value_heads": 2},
    "Gemma2ForCausalLM": _SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "MambaForCausalLM": {"vocab_size": 100, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
    "T5ForConditionalGeneration": _TINY_T5 | {"decoder_start_token_id": 0},
}


def check_images(model: nn.Module, size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    images, targets = torch.randn(16, 3, size, size, generator=draw), torch.randint(0, 10, (16,), generator=draw)
    examination = examine_samples(model, images, targets, sum_entropies)
    assert (examination.findings, examination.failure) == ([], "")


@pytest.mark.parametrize("name", TIMM)
def test_guard_is_quiet_about_networks_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    size, options = TIMM[name]
    check_images(timm.create_model(name, num_classes=10, **options), size)


@pytest.mark.parametrize("name", TORCHVISION)
def test_guard_is_quiet_about_networks_of_torchvision(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    check_images(torchvision.models.get_model(name, weights=None, num_classes=10), TORCHVISION[name])


class Labelled(nn.Module):
    """A network of transformers that is called with its own tokens, or with classes, as labels."""

    def __init__(self, network: nn.Module, *, has_classes: bool) -> None:
        super().__init__()
        self.network, self._has_classes = network, has_classes

    def forward(self, tokens: Tensor) -> Tensor:
        labels = tokens[:, 0] % 2 if self._has_classes else tokens
        loss: Tensor = self.network(input_ids=tokens, labels=labels).loss
        return loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_guard_is_quiet_about_networks_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)
    network_class: Callable[..., nn.Module] = getattr(transformers, name)
    network = network_class(network_class.config_class(**TRANSFORMERS[name]))  # type: ignore[attr-defined]
    tokens = torch.randint(1, 100, (16, 12), generator=torch.Generator().manual_seed(0))
    model = Labelled(network, has_classes=name.endswith("Classification"))
    examination = examine_samples(model, tokens, tokens, lambda loss, targets: loss * len(targets))
    assert (examination.findings, examination.failure) == ([], "")
