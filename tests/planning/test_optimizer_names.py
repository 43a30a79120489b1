"""The table of optimizers is that of torch.optim, each a choice or refused with a reason."""

import inspect

import torch

from multigpu_cli.planning.schedule import OPTIMIZERS, REFUSED


def test_every_optimizer_of_torch_is_a_choice_or_refused() -> None:
    kinds = [kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert {known.class_name for known in OPTIMIZERS.values()} | {"Muon"} >= names - _refused(names)
    assert all(known.class_name in names for known in OPTIMIZERS.values() if known.class_name != "Muon")
    assert _refused(names) == {"LBFGS", "SparseAdam", "Rprop", "ASGD"}


def _refused(names: set[str]) -> set[str]:
    return {name for name in names if name.lower() in REFUSED}


def test_rates_are_torchs_own_but_for_those_with_a_source_and_who_needs_whole_weights_says_so() -> None:
    kinds = {name: getattr(torch.optim, known.class_name, None) for name, known in OPTIMIZERS.items()}
    rates = {name: inspect.signature(kind).parameters["lr"].default for name, kind in kinds.items() if kind}
    assert {name: OPTIMIZERS[name].rate for name, rate in rates.items() if rate != OPTIMIZERS[name].rate} == {
        "sgd": 0.1,
        "rmsprop": 1e-3,
    }
    assert {name for name, known in OPTIMIZERS.items() if known.needs_whole_weights} == {"adafactor", "muon"}


def test_a_name_is_that_of_its_class() -> None:
    assert all(name == known.class_name.lower() for name, known in OPTIMIZERS.items())
    assert not OPTIMIZERS.keys() & REFUSED.keys()
