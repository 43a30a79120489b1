"""Networks and transforms of torchvision, the real package, as a user asks for them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import main_multi_gpu
from multigpu_cli.commands.doctor.doctor import check_machine
from multigpu_cli.config.schema import Config, ModelConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import build_model
from multigpu_cli.runtime.factories import import_extra
from tests.support.fork import exit_code
from tests.support.run_training import run_training

OFFERED = {"input_shape": (3, 32, 32), "num_classes": 7, "task": "classification", "mode": "flatten", "seed": 1}


class Augmented(Dataset[Any]):
    """Images whose brightest channel is their class, augmented one by one."""

    classes = ("red", "green", "blue")

    def __init__(self) -> None:
        from torchvision.transforms import v2

        self.augment = v2.RandAugment(num_ops=1)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.full((3, 16, 16), 40, dtype=torch.uint8)
        image[index % 3] = 200
        return self.augment(image).float() / 255, index % 3


def build(name: str, **args: Any) -> torch.nn.Module:
    return build_model(ModelConfig(args=args), name, OFFERED)


@pytest.mark.parametrize("name", ["torchvision/squeezenet1_1", "torchvision.models:squeezenet1_1"])
def test_it_has_the_classes_of_the_data(name: str) -> None:
    assert build(name)(torch.rand(2, 3, 32, 32)).shape == (2, 7)


def test_one_that_downloads_a_part_by_default_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", lambda *_, **__: pytest.fail("it was downloaded"))
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *_, **__: pytest.fail("it was downloaded")
    )
    assert build("torchvision/lraspp_mobilenet_v3_large").eval()(torch.rand(1, 3, 32, 32))["out"].shape[1] == 7


@pytest.mark.slow
def test_a_resnet_learns_augmented_images_with_the_same_bits_on_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags: dict[str, Any] = {
        "data": f"{__name__}:Augmented",
        "model": "torchvision/resnet18",
        "exact": True,
        "num_workers": 0,
    }
    flags |= {"global_batch_size": 8, "batch_size": 4, "max_steps": 3}
    ends = [run_training(workers, **flags, save_dir=f"{workers}") for workers in (1, 2)]
    assert not ends[0].error + ends[1].error
    assert ends[0].summary["fingerprint"] == ends[1].summary["fingerprint"]


@contextmanager
def forget_packages() -> Iterator[None]:
    """Neither package has been imported, and what is imported meanwhile is forgotten afterwards."""

    def loaded() -> dict[str, ModuleType]:
        ours = ("torchvision", "timm", "mine_with_torchvision")
        return {name: module for name, module in sys.modules.items() if name.startswith(ours)}

    before = loaded()
    for name in before:
        del sys.modules[name]
    yield
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torchvision that fails as PyPI's does beside a torch for CPUs."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (tmp_path / "mine_with_torchvision.py").write_text(
        "def early():\n    import torchvision\n"
        "def hidden():\n"  # as transformers does
        "    try:\n        import torchvision\n"
        "    except RuntimeError as error:\n        raise ModuleNotFoundError('could not import a module') from error\n"
    )
    (tmp_path / "mine_at_import.py").write_text("import torchvision\n")
    (tmp_path / "mine_as_peft.py").write_text(
        "try:\n    import torchvision\n"
        "except RuntimeError as error:\n    raise ImportError('BloomPreTrainedModel') from error\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with forget_packages():
        yield


@pytest.mark.parametrize(
    "name", ["torchvision/resnet18", "timm/resnet18", "mine_at_import:net", "torchvision.models:resnet18"]
)
def test_a_torchvision_for_another_torch_gets_one_line_with_the_way_out(broken: None, name: str) -> None:
    with pytest.raises(RequestError) as refused:
        build_model(ModelConfig(), name, OFFERED)
    assert "the installed torchvision is not built for torch" in refused.value.problem
    assert len(refused.value.problem.splitlines()) == 1
    assert "pip install --force-reinstall --no-deps 'torchvision==0." in refused.value.remedy


@pytest.mark.parametrize("name", ["early", "hidden"])
def test_so_does_one_that_a_factory_imports(broken: None, name: str) -> None:
    with pytest.raises(RequestError, match=f"--model mine_with_torchvision:{name}: the installed torchvision"):
        build_model(ModelConfig(), f"mine_with_torchvision:{name}", OFFERED)


def test_an_optional_package_that_imports_torchvision_names_it(broken: None) -> None:
    with pytest.raises(RequestError, match="import mine_as_peft: the installed torchvision is not built for torch"):
        import_extra("mine_as_peft", "it is not installed", "pip install it")
    with pytest.raises(RequestError, match="it is not installed"):
        import_extra("mine_that_is_missing", "it is not installed", "pip install it")


def test_an_unrelated_error_is_not_blamed_on_torchvision(broken: None, tmp_path: Path) -> None:
    (tmp_path / "unrelated.py").write_text("def net():\n    raise RuntimeError('no such layer')\n")
    with pytest.raises(RequestError, match=r"raised RuntimeError in unrelated\.py:2: no such layer"):
        build_model(ModelConfig(), "unrelated:net", OFFERED)


def test_doctor_warns_of_a_torchvision_for_another_torch(broken: None) -> None:
    (finding,) = (found for found in check_machine(Config(), {}, 1) if found.name == "torchvision")
    assert finding.verdict == "warn"
    assert finding.evidence.startswith("models of timm, torchvision and transformers: the installed torchvision")
    assert finding.fix.startswith("pip install --force-reinstall --no-deps 'torchvision==0.")


def test_the_command_ends_with_two_lines(broken: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: main_multi_gpu.leave(main_multi_gpu.run(["--model", "timm/resnet18"]))) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2, said
    assert said[0].startswith("error: --model timm/resnet18: the installed torchvision is not built for torch")


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_one_that_is_not_installed_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with forget_packages(), monkeypatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        with pytest.raises(RequestError, match=f"the package {package} is not installed") as refused:
            build(f"{package}/resnet18")
    assert refused.value.remedy == "pip install 'multigpu-cli[vision]'"
