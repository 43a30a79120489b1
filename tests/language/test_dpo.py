"""The DPO loss on a tiny Llama with an adapter, against formulas written by hand."""

import copy
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.data import TensorDataset

from multigpu_cli.checkpoint.initial_weights import load_initial_weights
from multigpu_cli.config.schema import AdapterConfig, TaskConfig
from multigpu_cli.data.collate import TokenCounts
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from multigpu_cli.language.adapter import add_adapter
from multigpu_cli.language.task import DPO, LanguageModel
from multigpu_cli.models.build import adapt_model
from multigpu_cli.runtime.factories import call_factory
from multigpu_cli.runtime.precision import Precision
from tests.support.tiny_language_models import SIZES
from tests.support.world import CPU

pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LENGTHS = [(7, 11), (9, 6), (5, 5)]  # tokens of the chosen and the rejected answer of each pair
ASKED = 3  # of these belong to the prompt
DATA = TensorDataset(torch.zeros(3, 2, 11, dtype=torch.int64), torch.zeros(3))


def make_network(adapter: bool = True, dropout: float = 0.0, reference: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=40, attention_dropout=dropout, **SIZES["llama"])
    torch.manual_seed(0)
    network: nn.Module = transformers.LlamaForCausalLM(config)
    if adapter:
        network = add_adapter(network, AdapterConfig(kind="lora", r=4, dropout=dropout), seed=1, reference=reference)
    return adapt_model(network)


def move_adapter(network: nn.Module) -> nn.Module:
    """As training does: a fresh adapter changes nothing."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 3)
    return network


def make_task(noun: str = "pairs", beta: Any = 0.1, **config: Any) -> DPO:
    source = DataSource(train=DATA, val=None, test=None, input_shape=(11,), num_classes=40, noun=noun)
    return DPO(source, TaskConfig(**config), beta)


def draw_answers() -> list[tuple[Tensor, Tensor]]:
    """Of each pair, the tokens (t,) of both answers with their prompt."""
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for sizes in LENGTHS:
        prompt = torch.randint(40, (ASKED,), generator=generator)
        chosen, rejected = (torch.cat([prompt, torch.randint(40, (n - ASKED,), generator=generator)]) for n in sizes)
        pairs.append((chosen, rejected))
    return pairs


def make_batch() -> Batch:
    ids, targets = torch.zeros(3, 2, 11, dtype=torch.int64), torch.full((3, 2, 11), -100)
    for row, pair in enumerate(draw_answers()):
        for side, tokens in enumerate(pair):
            ids[row, side, : len(tokens)] = tokens
            targets[row, side, ASKED - 1 : len(tokens) - 1] = tokens[ASKED:]
    positions = torch.arange(11).expand(3, 2, 11)
    counts = TokenCounts(sum(map(sum, LENGTHS)), int((targets >= 0).sum()), ids.numel())
    return Batch({"input_ids": ids, "position_ids": positions}, targets, torch.arange(3), 0, counts)


def compute_log_ratios(network: Any) -> list[tuple[Tensor, Tensor]]:
    """log(π / π_ref) of both answers of each pair, by plain transformers and peft, one answer at a time."""

    def compute_likelihood(tokens: Tensor) -> Tensor:
        logits: Tensor = network.network(tokens[None]).logits[0, :-1]
        return logits.log_softmax(1)[torch.arange(len(tokens) - 1), tokens[1:]][ASKED - 1 :].sum()

    found = []
    for pair in draw_answers():
        with torch.no_grad(), network.network.disable_adapter():
            reference = [compute_likelihood(tokens) for tokens in pair]
        chosen, rejected = (compute_likelihood(tokens) - before for tokens, before in zip(pair, reference, strict=True))
        found.append((chosen, rejected))
    return found


def collect_gradients(network: nn.Module) -> dict[str, Tensor]:
    found = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
    network.zero_grad()
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradient_are_those_of_the_paper(smoothing: float) -> None:
    network, batch = move_adapter(make_network()).double(), make_batch()
    task = make_task(beta=0.3, label_smoothing=smoothing)
    if smoothing:  # with the logits of the learned tokens alone
        task.check_model(network, Precision("off", CPU))
        assert task.logits_note.startswith("of the learned tokens alone")
    loss = task.loss_sum(network, batch)
    loss.backward()
    found = collect_gradients(network)
    losses = []
    for chosen, rejected in compute_log_ratios(network):
        preferred = 1 / (1 + (-0.3 * (chosen - rejected)).exp())
        losses.append(-(1 - smoothing) * preferred.log() - smoothing * (1 - preferred).log())
    expected = torch.stack(losses).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    wanted = collect_gradients(network)
    assert wanted
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-9, atol=1e-12) for name in wanted)


def test_figures_and_losses_are_those_of_trl() -> None:
    """Its formula: -logsigmoid(β · ((π_c - ref_c) - (π_r - ref_r))), and rewards β · (π - ref)."""
    network, batch, task = move_adapter(make_network()), make_batch(), make_task()
    network.eval()
    with torch.no_grad():
        measured = task.measure(network, batch)
        ratios = torch.stack([torch.stack(pair) for pair in compute_log_ratios(network)])
    deltas = ratios[:, 0] - ratios[:, 1]
    assert float(measured.loss_sum) == pytest.approx(float(-logsigmoid(0.1 * deltas).sum()), rel=1e-5)
    right, (chosen, rejected) = int((deltas > 0).sum()), (0.1 * ratios.mean(0)).tolist()
    assert 0 < right < 3
    assert measured.sums is not None
    figures = task.figures(dict(zip(task.sums, (measured.sums / 3).tolist(), strict=True)))
    assert task.metrics(measured.counts, 3) == {"accuracy": right / 3}
    wanted = {"margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
    assert figures == pytest.approx(wanted, rel=1e-3)
    table = task.predictions(network, batch)
    assert table["rejected_reward"] == pytest.approx((0.1 * ratios[:, 1]).tolist(), rel=1e-4)


def test_the_loss_before_the_first_step_is_ln_2() -> None:
    network, batch = make_network(), make_batch()
    one = Batch({name: part[:1] for name, part in batch.inputs.items()}, batch.targets[:1], torch.arange(1), 0)
    assert torch.equal(make_task().loss_sum(network, one).detach(), torch.tensor(log(2)))
    assert torch.equal(make_task().measure(network, one).counts, torch.tensor([0, 0])), "equal rewards are not right"


def test_the_reference_is_the_adapter_as_it_was(tmp_path: Path) -> None:
    network, batch, task = make_network(reference=True), make_batch(), make_task()
    torch.save(move_adapter(make_network()).state_dict(), tmp_path / "adapter.pt")
    load_initial_weights(network, tmp_path / "adapter.pt", partial=False)
    assert task.loss_sum(network, batch).item() == pytest.approx(3 * log(2)), "with an adapter that counts"
    initial = copy.deepcopy(network)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "lora_B.default" in name:
                weight.mul_(3)
    targets = batch.targets.flatten(0, 1)
    gains = []
    for model in (network, initial):
        with torch.no_grad():
            logits = model({name: part.flatten(0, 1) for name, part in batch.inputs.items()})
        gains.append(logits.log_softmax(2).gather(2, targets.clamp(min=0)[..., None])[..., 0])
    rewards = 0.1 * torch.where(targets >= 0, gains[0] - gains[1], 0).sum(1)
    found = task.predictions(network, batch)
    assert found["chosen_reward"] == pytest.approx(rewards[::2].tolist(), rel=1e-4)
    assert max(map(abs, found["chosen_reward"])) > 0.01
    task.loss_sum(network, batch).backward()
    learning = collect_gradients(network)
    assert learning
    assert not [name for name in learning if "dpo_reference" in name]


def test_the_reference_has_no_dropout_and_draws_no_numbers() -> None:
    network, batch, task = move_adapter(make_network(dropout=0.5)).train(), make_batch(), make_task()
    modes = [module.training for module in network.modules()]
    torch.manual_seed(5)
    found = task.predictions(network, batch)
    assert [module.training for module in network.modules()] == modes
    plain: Any = copy.deepcopy(network)
    torch.manual_seed(5)
    inputs = {name: part.flatten(0, 1) for name, part in batch.inputs.items()}
    with torch.no_grad():
        trained = plain(inputs).log_softmax(2)
        with plain.network.disable_adapter():
            reference = plain.eval()(inputs).log_softmax(2)
    targets = batch.targets.flatten(0, 1)
    gains = (trained - reference).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    rewards = 0.1 * torch.where(targets >= 0, gains, 0).sum(1)
    assert found["chosen_reward"] == pytest.approx(rewards[::2].tolist(), rel=1e-4)


def test_what_can_not_be_compared_is_refused() -> None:
    with pytest.raises(RequestError, match="has no adapter") as raised:
        make_task().check_model(make_network(adapter=False), Precision("off", CPU))
    assert raised.value.remedy == "--adapter lora"
    make_task().check_model(make_network(), Precision("off", CPU))
    with pytest.raises(RequestError, match="the data are no preferences"):
        make_task(noun="samples")
    for beta in (0, -1, True, "much", float("nan"), float("inf")):
        with pytest.raises(RequestError, match=r"task\.args\.beta must be a number above 0"):
            call_factory(DPO, {"source": make_task().source, "config": TaskConfig()}, {"beta": beta}, where="task")
    with pytest.raises(RequestError, match=r"--label-smoothing 0\.5"):
        make_task(label_smoothing=0.5)
    with pytest.raises(RequestError, match="the data are preferences"):
        LanguageModel(make_task().source, TaskConfig())
