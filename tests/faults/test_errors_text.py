"""Errors in words: short, and readable on a terminal of any width."""

import shlex

import pytest

import main_multi_gpu
from multigpu_cli.config.sources import NAMES_ELSEWHERE
from multigpu_cli.faults.explain import shorten_message

LONG = "error: --data-dir data/with/a/long/path-to-somewhere holds no such thing\n  try: another folder, or mend it"
LONG += "\n\n    a/"


def test_without_a_terminal_lines_are_left_alone() -> None:
    assert shorten_message(LONG) == LONG
    assert shorten_message("\n".join("abc")) == "a\nb\nc"


def test_on_a_terminal_lines_are_folded_between_words_and_paths_stay_whole() -> None:
    assert shorten_message(LONG, 30).splitlines() == [
        "error: --data-dir",
        "  data/with/a/long/path-to-somewhere",
        "  holds no such thing",
        "  try: another folder, or mend",
        "    it",
        "",
        "    a/",
    ]


def test_what_is_too_long_is_cut_and_said_so() -> None:
    lines = shorten_message("\n".join(map(str, range(40)))).splitlines()
    assert lines[:13] == [str(number) for number in range(13)]
    assert lines[13:] == ["  … and 27 more lines: --debug shows all"]


def find_remedy(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the remedy of a wrong request; it is one line."""
    assert main_multi_gpu.run(argv) == 2
    _, remedy = capsys.readouterr().err.split("\n  try: ")
    return remedy.strip()


MOMENTUM = "optimizer.args.momentum, which is the name here, with optimizer sgd"


@pytest.mark.parametrize("ours", NAMES_ELSEWHERE)
def test_remedy_translates_flags_of_other_trainers(ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With dashes and with underscores; what it advises is an option."""
    for name in NAMES_ELSEWHERE[ours].split():
        remedies = {find_remedy([flag, "1"], capsys) for flag in (f"--{name}", f"--{name.replace('-', '_')}=1")}
        (remedy,) = remedies
        options = [word for word in shlex.split(remedy) if word.startswith("--")]
        assert options
        options = [option for option in options if option not in ("--exact", "--ema", "--grad-checkpointing")]
        for option in options:
            assert main_multi_gpu.run([option]) == 2
            assert f"'{option}' requires an argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        ("--num_gpus 2", "--nproc-per-node N for the number, or --gpu-ids 0,1 for the choice"),
        ("--output_dir runs/a", "--save-dir"),
        ("--devices 2", "--nproc-per-node N for the number, or --gpu-ids 0,1 for the choice"),
        ("--precision bf16", "--amp"),
        ("--batch_size 8", "did you mean '--batch-size'?"),
        ("--Batch-Size 8", "did you mean '--batch-size'?"),
        ("--per_device_train_batch_size 8", "--batch-size"),
        ("--accelerator gpu", "--multi-gpu"),
        ("--momentum 0.9", "--set optimizer.args.momentum=0.9 with --optimizer sgd"),
        ("--set momentum=0.9", MOMENTUM),
        ("tune --objective val_loss:min --search momentum=range(0,0.9) --trials 2 --save-dir none", MOMENTUM),
        ("--set dropout=0.5", "model.args.dropout, which is the name here"),
        ("--set block_size=64", "data.block, which is the name here, or max_length N with model_dir"),
        ("--fsdp full_shard", "--multi-gpu fsdp for sharded weights"),
        ("--ddp", "--multi-gpu ddp"),
        ("--use_lora", "--adapter lora"),
        ("--imgsz 640", "--set data.size=224"),
        ("--block_size 128", "--set data.block=128, or --max-length N with --model-dir"),
        ("--eval_steps 100", "--epochs N: an evaluation follows each epoch"),
        ("--set output_dir=runs/a", "save_dir, which is the name here"),
        ("--optimiser sgd", "did you mean '--optimizer'?"),
    ],
)
def test_remedy_names_the_option_that_was_meant(argv: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_remedy(argv.split(), capsys) == remedy


def test_remedy_of_a_command_names_only_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--save-dir" not in find_remedy(["status", "--output-dir", "runs/a"], capsys)


@pytest.mark.parametrize(
    ("argv", "way_out"),
    [("export here", "--to PATH"), ("--lr", "--help"), ("--zzz", "--help"), ("--adapter.r 8", "--set adapter.r=")],
)
def test_what_an_option_takes_is_said(argv: str, way_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(argv.split()) == 2
    assert capsys.readouterr().err.splitlines()[1].startswith(f"  try: {way_out}")


def test_a_missing_argument_is_shown_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["verify", "here"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: missing argument 'RUN_B'",
        f"  try: {main_multi_gpu._program_name()} verify [OPTIONS] RUN_A RUN_B",
    ]
