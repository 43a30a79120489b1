import math

import pytest

from multigpu_cli.monitor import format

FIELDS = {"event": "train", "time": 1.0, "step": 50, "epoch": 1, "samples": 9, "mean_loss": 0.123456, "lr": 2e-3}


def test_a_training_line_leaves_out_what_is_unknown() -> None:
    assert format.format_train_line(FIELDS, 400) == "step 50/400  epoch 1  loss since the last line 0.1235  lr 0.002000"
    rated = FIELDS | {"samples_per_second": 5230.4, "step_ms": 2000.0}
    assert (
        format.format_train_line(rated, 0)
        == "step 50  epoch 1  loss since the last line 0.1235  lr 0.002000  5,230 samples/s"
    )
    assert format.format_train_line(rated, 400).endswith("  5,230 samples/s  11 min 40 s left")
    assert format.format_train_line(rated, 50).endswith("  5,230 samples/s"), "nothing is left"


def test_a_line_of_acting_tells_of_episodes() -> None:
    fields = {"step": 16, "episode_reward": 21.5, "env_steps_per_second": 9120.0, "samples_per_second": 36e3}
    assert format.format_train_line(fields, 0) == "step 16  episode reward 21.50  9,120 env steps/s"


def test_verbose_names_every_other_number_as_people_read_it() -> None:
    more = {
        "comm_share": None,
        "data_wait_share": 0.0216,
        "memory": [2**28, 3 * 2**29],
        "memory_reserved": [2**20, None],
    }
    assert format.format_other_numbers(FIELDS | {"loss": 0.5, "grad_norm": 1.5, "mfu": 0.5} | more).split("  ") == [
        "loss 0.5000", "grad norm 1.500", "mfu 50.0 %", "data wait share 2.2 %", "memory 256 MiB / 1.5 GiB",
        "memory reserved 1 MiB / -",
    ]  # fmt: skip


def test_the_bar_has_the_memory_of_the_fullest_gpu() -> None:
    rated = FIELDS | {"loss": 0.12345, "samples_per_second": 5230.4, "memory": [2**28, 3 * 2**29]}
    assert format.format_bar_facts(rated) == ["loss 0.1235", "5,230 samples/s"], "of a process, not of a GPU"
    assert format.format_bar_facts(rated | {"memory_reserved": [2**29, 2**31]})[-1] == "GPU 1.5 GiB"
    assert format.format_bar_facts({"step": 3, "tokens_per_second": 1e6, "samples_per_second": 1.0}) == [
        "1,000,000 tokens/s"
    ]


def test_learned_tokens_stand_beside_all_tokens_and_the_padding() -> None:
    rates = {"tokens_per_second": 1234.5, "all_tokens_per_second": 5678.0, "padding_share": 0.0312}
    shown = ["1,234 of 5,678 tokens/s learned", "padding 3.1 %"]
    assert format.format_bar_facts(FIELDS | rates)[:2] == shown
    assert "  ".join(shown) in format.format_train_line(FIELDS | rates, 9)
    assert "padding" not in format.format_other_numbers(FIELDS | rates)
    pairs = {"samples_per_second": 12.0, "all_tokens_per_second": 5678.0, "padding_share": 0.0312}  # of --task dpo
    assert format.format_bar_facts(FIELDS | pairs) == ["12 samples/s", "5,678 tokens/s", "padding 3.1 %"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59.9, "60 s"), (200, "3 min 20 s"), (18720, "5 h 12 min"), (273600, "3 d 4 h")]
)
def test_durations(seconds: float, said: str) -> None:
    assert format.format_duration(seconds) == said


def test_evaluation_lines_stand_in_columns() -> None:
    fields = {"event": "eval", "time": 1.0, "epoch": 2, "step": 9, "split": "val", "loss": 0.5, "accuracy": 0.97222}
    first = format.format_eval_line(fields | {"samples": 1800})
    assert first == "epoch 2    val   loss 0.5000    accuracy 97.22 %   (1,800 samples)"
    later = format.format_eval_line(
        fields | {"samples": 359, "epoch": 100, "split": "test", "loss": 0.051234, "accuracy": 1.0}
    )
    assert later == "epoch 100  test  loss 0.05123   accuracy 100.00 %  (359 samples)"
    assert format.format_eval_line({"loss": 0.5}) == "val   loss 0.5000"


def test_rows_put_the_test_accuracy_first_and_leave_out_what_is_missing() -> None:
    summary = {
        "status": "completed",
        "steps": 1200,
        "train_seconds": 3.25,
        "final": {"train_loss": 0.5, "val_accuracy": 0.9, "test_loss": None, "test_accuracy": 0.975},
        "best_by": "val_accuracy",
        "best": {"epoch": 4, "step": 480, "loss": 0.25, "val_loss": 0.25, "val_accuracy": 0.925},
        "samples_per_second": 659.4,
        "step_ms": {"p50": 1.06, "p95": 410.4},
        "fingerprint": "abc",
        "save_dir": "runs/x",
    }
    assert format.format_result_rows(summary) == [
        ("status", "completed 1,200 steps in 3.2 s"),
        ("test accuracy", "97.50 %"),
        ("val accuracy", "90.00 %"),
        ("train loss", "0.5000"),
        ("best epoch", "4 (by val accuracy; val loss 0.2500, val accuracy 92.50 %)"),
        ("speed", "659 samples/s; a step takes 1.1 ms (median), 95 % at most 410.4 ms"),
        ("fingerprint", "abc"),
        ("save dir", "runs/x"),
    ]
    assert format.format_result_rows({"status": "failed"}) == [("status", "failed")]
    assert format.format_result_rows({"status": "stopped", "steps": 3, "final": {"train_loss": 0.5}}) == [
        ("status", "stopped 3 steps; run the same command again to resume"),
        ("train loss, epoch so far", "0.5000"),
    ]


def test_class_rows_are_named_and_aligned() -> None:
    rows = [{"precision": 1.0, "recall": 0.5, "f1": 0.6667, "samples": 12}] * 2
    lines = list(format.format_class_table(rows, ("cat", "horse")))
    assert [line.split()[0] for line in lines[1:]] == ["class", "cat", "horse"]
    assert lines[2].split() == ["cat", "1.0000", "0.5000", "0.6667", "12"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_long_class_names_are_cut() -> None:
    name = "a name without any end that somebody gave to a class"
    table = list(format.format_class_table([{"f1": 0.5}], [name]))[2:]
    matrix = list(format.format_confusion_table([[3]], [name]))[2:]
    assert [table[0].split("  ")[0], matrix[0].split("  ")[0]] == [f" {name[:31]}…", f" 0 {name[:31]}…"]


def test_of_many_classes_the_weakest_are_shown() -> None:
    rows = [{"f1": at / 100} for at in range(100)]
    lines = list(format.format_class_table(rows, ()))
    assert [line.split()[0] for line in lines[2:22]] == [str(at) for at in range(20)]
    assert "20 weakest of 100" in lines[-1]


def test_a_confusion_matrix_is_shown_where_it_fits() -> None:
    matrix = [[5, 1], [0, 7]]
    lines = list(format.format_confusion_table(matrix, ("cat", "dog")))
    assert [line.split() for line in lines[2:]] == [["0", "cat", "5", "1"], ["1", "dog", "0", "7"]]
    assert "summary.json" in list(format.format_confusion_table(matrix, ("c" * 80, "dog"), width=30))[-1]
    big = [[0] * 21 for _ in range(21)]
    assert "21 classes" in list(format.format_confusion_table(big, ()))[-1]
    assert len(list(format.format_confusion_table([row[:20] for row in big[:20]], ()))) == 22


def test_numbers() -> None:
    assert [format.format_number(value) for value in (0.5, 123456.0, 7, "x", math.nan)] == [
        "0.5000", "1.235e+05", "7", "x", "nan",
    ]  # fmt: skip
