import math

from multigpu_cli.monitor import result


def test_a_training_line_leaves_out_what_is_unknown() -> None:
    fields = {"event": "train", "time": 1.0, "step": 50, "epoch": 1, "samples": 9, "loss": 0.123456, "lr": 2e-3}
    assert result.train_line(fields, 400) == "step 50/400  epoch 1  loss 0.1235  lr 0.002000"
    assert result.train_line(fields | {"samples_per_second": 5230.4}, 0).startswith("step 50  epoch 1")
    assert result.train_line(fields | {"samples_per_second": 5230.4}, 0).endswith("5,230 samples/s")


def test_verbose_lines_name_every_other_number() -> None:
    fields = {"event": "train", "time": 1.0, "step": 5, "grad_norm": 1.5, "comm_share": None, "memory": 12}
    assert result.train_line(fields, 0, everything=True) == "step 5  grad norm 1.500  memory 12"


def test_an_evaluation_line() -> None:
    fields = {"event": "eval", "time": 1.0, "epoch": 2, "step": 9, "split": "val", "loss": 0.5, "accuracy": 0.97222}
    assert (
        result.eval_line(fields | {"samples": 1800}) == "epoch 2  val  loss 0.5000  accuracy 97.22 %  (1,800 samples)"
    )


def test_rows_put_the_test_accuracy_first_and_leave_out_what_is_missing() -> None:
    summary = {
        "status": "completed",
        "steps": 1200,
        "train_seconds": 3.25,
        "final": {"train_loss": 0.5, "val_accuracy": 0.9, "test_loss": None, "test_accuracy": 0.975},
        "best": {"epoch": 4},
        "samples_per_second": None,
        "fingerprint": "abc",
        "save_dir": "runs/x",
    }
    assert result.rows(summary) == [
        ("status", "completed 1,200 steps in 3.2 s"),
        ("test accuracy", "97.50 %"),
        ("val accuracy", "90.00 %"),
        ("train loss", "0.5000"),
        ("best epoch", "4"),
        ("fingerprint", "abc"),
        ("save dir", "runs/x"),
    ]
    assert result.rows({"status": "failed"}) == [("status", "failed")]


def test_class_rows_are_named_and_aligned() -> None:
    rows = [{"precision": 1.0, "recall": 0.5, "f1": 0.6667, "samples": 12}] * 2
    lines = list(result.class_table(rows, ("cat", "horse")))
    assert [line.split()[0] for line in lines[1:]] == ["class", "cat", "horse"]
    assert lines[2].split() == ["cat", "1.0000", "0.5000", "0.6667", "12"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_of_many_classes_the_weakest_are_shown() -> None:
    rows = [{"f1": at / 100} for at in range(100)]
    lines = list(result.class_table(rows, ()))
    assert [line.split()[0] for line in lines[2:22]] == [str(at) for at in range(20)]
    assert "20 weakest of 100" in lines[-1]


def test_a_confusion_matrix_is_shown_where_it_fits() -> None:
    matrix = [[5, 1], [0, 7]]
    lines = list(result.confusion_table(matrix, ("cat", "dog")))
    assert [line.split() for line in lines[2:]] == [["0", "cat", "5", "1"], ["1", "dog", "0", "7"]]
    assert "summary.json" in list(result.confusion_table(matrix, ("c" * 80, "dog"), width=80))[-1]
    big = [[0] * 21 for _ in range(21)]
    assert "21 classes" in list(result.confusion_table(big, ()))[-1]
    assert len(list(result.confusion_table([row[:20] for row in big[:20]], ()))) == 22


def test_numbers() -> None:
    assert [result.number(value) for value in (0.5, 123456.0, 7, "x", math.nan)] == [
        "0.5000", "1.235e+05", "7", "x", "nan",
    ]  # fmt: skip
