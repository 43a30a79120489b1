"""The command `export --format`: folders that transformers and peft load as they are."""

import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import main_multi_gpu
from multigpu_cli.commands.language import export_folder
from multigpu_cli.errors import RequestError
from tests.support.tiny_language_models import SIZES, make_model_folder, make_tokenizer
from tests.support.trained_folders import save_trained_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untied (llama) and tied (qwen2, gpt2)."""
    folders = {name: make_model_folder(tmp_path_factory.mktemp(name), name) for name in SIZES}
    for folder in folders.values():
        generation = {"eos_token_id": [1, 2], "temperature": 0.5, "do_sample": False}  # fails transformers' own check
        (folder / "generation_config.json").write_text(json.dumps(generation))
        (folder / "LICENSE").write_text("a licence")
    return folders


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compute_logits(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad():
        found = model.eval()(**inputs) if inputs else model.eval()(TOKENS)
    logits: Tensor = getattr(found, "logits", found)
    return logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def export(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main_multi_gpu.run(["export", *words, "--json"]) == 0, capsys.readouterr().err
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.mark.parametrize("architecture", SIZES)
def test_a_whole_model_loads_as_it_is(
    architecture: str, models: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = save_trained_run(here / "run", models[architecture])
    told = export("run", "--to", "out", "--format", "hf", capsys=capsys)
    assert told["difference"] == 0
    assert (told["file"], told["origin"]) == ("out", "run/best.pt")
    assert told["bytes"] == sum(file.stat().st_size for file in Path("out").iterdir())
    found = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert torch.equal(compute_logits(found, input_ids=TOKENS), compute_logits(live))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (models[architecture], Path("out")))
    assert after == before | {"dtype": "float32"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"):
        assert Path("out", name).read_bytes() == (models[architecture] / name).read_bytes()
    tied = architecture != "llama"
    weights = Path("out/model.safetensors").stat().st_size
    one = found.get_input_embeddings().weight.nbytes
    assert weights < found.num_parameters() * 4 + 0.5 * one, "each weight once"
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == tied
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft's use of transformers
@pytest.mark.parametrize("architecture", SIZES)
def test_an_adapter_loads_in_peft_and_is_merged(
    architecture: str, models: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = compute_logits(save_trained_run(here / "run", models[architecture], adapter="lora"))
    assert export("run", "--to", "adapter", "--format", "adapter", capsys=capsys)["difference"] <= 1e-6
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["inference_mode"]) == (str(models[architecture]), True)
    found = peft.AutoPeftModelForCausalLM.from_pretrained("adapter")
    assert_close(compute_logits(found, input_ids=TOKENS), live)
    size = Path("adapter/adapter_model.safetensors").stat().st_size
    assert size < (models[architecture] / "model.safetensors").stat().st_size

    assert 0 <= export("run", "--to", "merged", "--format", "merged", capsys=capsys)["difference"] < 1e-5
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged")
    assert_close(compute_logits(merged, input_ids=TOKENS), live)


def test_half_precision_is_merged_in_float32_and_else_stays(
    models: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half: dict[str, Any] = {"model.args": {"dtype": "bfloat16"}}
    save_trained_run(here / "whole", models["qwen2"], **half)
    bits: dict[str, Any] = {"model.args": half["model.args"] | {"quantize": "4bit"}}
    save_trained_run(here / "lora", models["qwen2"], adapter="lora", **bits)
    assert export("whole", "--to", "out", "--format", "hf", capsys=capsys)["difference"] == 0
    export("lora", "--to", "merged", "--format", "merged", capsys=capsys)
    for folder, dtype in (("out", "bfloat16"), ("merged", "float32")):
        assert json.loads(Path(folder, "config.json").read_text())["dtype"] == dtype
        found = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert {weight.dtype for weight in found.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_a_whole_model_is_written_in_half_precision(
    half: str, models: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum of base and adapter is rounded, and not each of them; a dtype of the base does not matter."""
    args: dict[str, Any] = {"model.args": {"dtype": "bfloat16"}} if half == "bf16" else {}
    save_trained_run(here / "lora", models["qwen2"], adapter="lora", **args)
    export("lora", "--to", "merged", "--format", "merged", capsys=capsys)
    told = export("lora", "--to", "half", "--format", "merged", "--dtype", half, capsys=capsys)
    assert told["difference"] == 0, "of the rounded weights, computed as before"
    moved = float(told["checked"].partition(f"; {half} moved one by ")[2])
    assert 1e-5 < moved < {"bf16": 0.1, "fp16": 0.01}[half]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    assert json.loads(Path("half/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    whole, rounded = (
        transformers.AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("merged", "half")
    )
    assert whole.keys() == rounded.keys()
    assert all(torch.equal(weight.to(dtype), rounded[name]) for name, weight in whole.items())
    assert sum(file.stat().st_size for file in Path("half").glob("*.safetensors")) == pytest.approx(
        sum(file.stat().st_size for file in Path("merged").glob("*.safetensors")) / 2, rel=0.1
    )


def test_shards_are_written_one_by_one(
    models: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no time are more bytes of tensors in memory than the model has, and one shard."""
    live = save_trained_run(here / "run", models["llama"], template="{{ messages }}")
    expected, own = compute_logits(live), sum(weight.nbytes for weight in live.parameters())
    del live
    counts: list[int] = []
    monkeypatch.setattr(export_folder, "_SHARD", "40KB")
    monkeypatch.setattr(export_folder, "_TOKENS", (1, 2))
    gc.collect()
    gc.freeze()  # all that is there: a count would look through it for half a second
    before = count_bytes()

    def count(save: Any) -> Any:
        def count_and_call(*args: Any, **named: Any) -> Any:
            counts.append(count_bytes() - before)
            return save(*args, **named)

        return count_and_call

    modeling = transformers.modeling_utils
    monkeypatch.setattr(modeling, "safe_save_file", count(modeling.safe_save_file))
    monkeypatch.setattr(export_folder, "_compute_logits", count(export_folder._compute_logits))
    export("run", "--to", "out", "--format", "hf", capsys=capsys)
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    shards = {Path("out", name).stat().st_size for name in index["weight_map"].values()}
    assert len(counts) == len(set(index["weight_map"].values())) + 2 > 4
    assert max(counts) < own + max(shards), "also while it is loaded again"
    assert torch.equal(
        compute_logits(transformers.AutoModelForCausalLM.from_pretrained("out"), input_ids=TOKENS), expected
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer.chat_template == "{{ messages }}", "that of the run, and not the model's"


def count_bytes() -> int:
    """Of all tensors that are in memory."""
    gc.collect()
    storages = (
        each.untyped_storage()
        for each in gc.get_objects()
        if type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided and not each.is_meta
    )
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_what_can_not_be_exported_is_refused_and_nothing_is_written(
    models: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models["llama"], "moved")
    save_trained_run(here / "whole", here / "moved")
    save_trained_run(here / "lora", models["llama"], adapter="lora")
    shutil.move("moved", "model")
    Path("mine").mkdir()
    Path("mine/model.safetensors").write_text("mine")
    at = ["--model-dir", "model"]
    cases = (
        (["whole", "--to", "mine", "--format", "hf", *at], 2, "--to mine: it already exists"),
        (["whole", "--to", "out", "--format", "gguf", *at], 2, "--format must be hf or adapter or merged, not 'gguf'"),
        (["whole", "--to", "out.pt", "--format", "hf", *at], 2, "writes a folder, not a file"),
        (
            ["lora", "--to", "out", "--format", "adapter", "--dtype", "bf16"],
            2,
            "--dtype bf16 can't be used with --format",
        ),
        (["whole", "--to", "out.pt2", "--dtype", "fp16"], 2, "--dtype fp16 can't be used with --to out.pt2"),
        (["whole", "--to", "out", "--format", "hf", "--dtype", "int8"], 2, "--dtype must be bf16 or fp16, not 'int8'"),
        (["whole", "--to", "out", "--format", "merged", *at], 2, "of a run without --adapter"),
        (["lora", "--to", "out", "--format", "hf"], 2, "--format merged for a whole model"),
        (["whole", "--to", "out", "--format", "hf"], 2, "moved: no such folder"),
    )
    for words, code, message in cases:
        assert main_multi_gpu.run(["export", *words]) == code, words
        assert message in capsys.readouterr().err
    monkeypatch.setattr(export_folder, "merge_adapter", lambda model: model.unload())
    assert main_multi_gpu.run(["export", "lora", "--to", "out", "--format", "merged"]) == 1
    assert "the logits of the exported model differ by" in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["lora", "mine", "model", "whole"]
    assert Path("mine/model.safetensors").read_text() == "mine"
    assert main_multi_gpu.run(["export", "whole", "--to", "out", "--format", "hf", *at]) == 0
    assert make_tokenizer().chat_template == transformers.AutoTokenizer.from_pretrained("out").chat_template


def plant(kind: str, base: Path, outside: Path) -> str:
    """Make a trap in a model's folder; return the name of the file at fault."""
    outside.mkdir()
    (outside / "id_rsa").write_text("a private key")
    (base / "tokenizer_files").mkdir(parents=True)
    match kind:
        case "file":
            (base / "LICENSE").symlink_to(outside / "id_rsa")
            return "LICENSE"
        case "relative":
            (base / "LICENSE").symlink_to(Path("..", outside.name, "id_rsa"))
            return "LICENSE"
        case "folder":
            (base / "vocab_x").symlink_to(outside)
            return "vocab_x"
        case "loop":
            (base / "vocab_x").symlink_to(".")
            return "vocab_x"
        case "inner file":
            (base / "tokenizer_files" / "a").symlink_to(outside / "id_rsa")
        case "inner folder":
            (base / "tokenizer_files" / "a").symlink_to(outside)
        case _:
            os.mkfifo(base / "tokenizer_files" / "a")
    return "tokenizer_files/a"


@pytest.mark.parametrize("kind", ["file", "relative", "folder", "loop", "inner file", "inner folder", "FIFO"])
def test_export_copies_nothing_through_planted_links(kind: str, tmp_path: Path) -> None:
    name = plant(kind, tmp_path / "base", tmp_path / "outside")
    (tmp_path / "draft").mkdir()
    with pytest.raises(RequestError, match=f"--model-dir: .*base/{name} is a "):
        export_folder._copy_text_files(tmp_path / "base", tmp_path / "draft", None)
    assert not list((tmp_path / "draft").iterdir())


def test_export_copies_links_of_hugging_faces_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "5678").write_text("a licence")
    (snapshot / "LICENSE").symlink_to("../../blobs/5678")
    (snapshot / "NOTICE").symlink_to("LICENSE")
    (tmp_path / "draft").mkdir()
    export_folder._copy_text_files(snapshot, tmp_path / "draft", None)
    assert {file.name: file.read_text() for file in (tmp_path / "draft").iterdir()} == {
        "LICENSE": "a licence",
        "NOTICE": "a licence",
    }
