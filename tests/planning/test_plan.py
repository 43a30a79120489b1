from dataclasses import replace
from typing import Any

from multigpu_cli.planning.batch import BatchPlan, plan_batches
from multigpu_cli.planning.plan import Plan
from multigpu_cli.planning.schedule import plan_schedule, resolve_learning_rate


def make_plan(
    *,
    max_steps: int | None = None,
    warmup: float | None = None,
    epochs: int = 4,
    idle: tuple[str, ...] = (),
    **batch: int,
) -> Plan:
    usual: dict[str, Any] = {"samples": 1000, "micro_batch": 16, "workers": 4}
    batches = plan_batches(**usual | batch)
    rate = resolve_learning_rate(
        given=None, base=1e-3, base_batch=32, global_batch=batches.global_batch, rule="sqrt", optimizer="adamw"
    )
    return Plan(
        placement_reason="ddp: torchrun started 4 processes",
        strategy="ddp",
        device="cpu",
        batches=batches,
        rate=rate,
        schedule=plan_schedule(
            peak=rate.value,
            shape="cosine",
            steps_per_epoch=batches.steps_per_epoch,
            epochs=epochs,
            max_steps=max_steps,
            warmup_epochs=warmup,
        ),
        base_lr=1e-3,
        base_batch_size=32,
        precision="off",
        precision_reason="on CPU, fp32",
        description="convnet on digits",
        resume_reason="a new run",
        save_dir="checkpoints/x",
        epochs=epochs,
        threads=1,
        unused_flags=list(idle),
    )


def test_the_batch_line_multiplies_out() -> None:
    rows = dict(make_plan(accumulation=2).rows())
    assert rows["batch"] == "16 per device × 2 accumulation × 4 workers = 128 global batch"
    assert "1e-3" not in rows["learning rate"]
    assert rows["learning rate"] == "base rate 0.001 × √(128/32) (sqrt rule) = 0.002; cosine schedule"
    assert rows["where"] == "ddp: torchrun started 4 processes"


def test_an_uneven_batch_says_how_it_is_shared() -> None:
    assert dict(make_plan(global_batch=100).rows())["batch"] == (
        "global batch 100 as 7 micro-batches of up to 16, at most 2 on each of 4 workers"
    )
    assert "idle" not in dict(make_plan(global_batch=60).rows())["batch"], "four micro-batches for four workers"


def test_idle_workers_are_named_with_the_way_out() -> None:
    plan, busy = make_plan(global_batch=32), make_plan(global_batch=32, micro_batch=8)
    assert dict(plan.rows())["batch"].endswith("; 2 workers idle")
    (warning,) = plan.warnings()
    assert warning == (
        "only 2 of 4 workers have work: a step of 32 samples is that many micro-batches; "
        "try --batch-size 8 (in Python, the DataLoader's batch_size)"
    )
    assert "idle" not in dict(busy.rows())["batch"]
    assert dict(make_plan(global_batch=48).rows())["batch"].endswith("; 1 worker idle")
    assert not list(busy.warnings())


def test_the_length_counts_optimizer_steps_and_what_is_left_over() -> None:
    text = dict(make_plan().rows())["length"]
    assert text.startswith("64 optimizer steps: 16 per epoch, 4 epochs; ")
    assert text.endswith("the epoch's last 40 samples are trained as a short batch")
    assert dict(make_plan(drop_last=True).rows())["length"].endswith("40 samples are left out (--drop-last)")
    assert dict(make_plan(samples=961).rows())["length"].endswith(
        "the epoch's last 1 sample is trained as a short batch"
    )
    assert "last" not in dict(make_plan(samples=640).rows())["length"]
    assert dict(make_plan(samples=20).rows())["length"].endswith(
        "; the epoch's 20 samples are trained as a short batch"
    )


def test_max_steps_says_what_it_cuts() -> None:
    rows = dict(make_plan(max_steps=24, warmup=2).rows())
    assert "24 optimizer steps: 16 per epoch, 1.5 epochs of 4, cut by --max-steps" in rows["length"]
    assert rows["warm-up"] == "32 optimizer steps from near zero to 0.001414, which --max-steps cuts short at 24"
    assert "cuts short" in dict(make_plan(max_steps=32, warmup=2).rows())["warm-up"], "its last step is not at the peak"
    assert "cuts short" not in dict(make_plan(max_steps=33, warmup=2).rows())["warm-up"]


def test_a_run_of_a_few_steps_has_a_warm_up_of_one_or_none() -> None:
    assert (
        dict(make_plan(samples=64, global_batch=64, warmup=1).rows())["warm-up"]
        == "1 optimizer step from near zero to 0.001414"
    )
    assert dict(make_plan(samples=64, warmup=0).rows())["warm-up"] == "none"


def test_the_machine_readable_plan_has_the_same_figures() -> None:
    found = make_plan(global_batch=100).as_dict()
    assert {
        "workers": 4,
        "batch_size": 16,
        "grad_accum_steps": 2,
        "global_batch_size": 100,
        "samples": 1000,
        "left_over": 0,
        "steps_per_epoch": 10,
        "total_steps": 40,
        "warmup_steps": 4,
        "lr_rule": "sqrt",
        "strategy": "ddp",
        "because": "ddp: torchrun started 4 processes",
        "contents": "convnet on digits",
        "hooks": [],
        "adapter": "",
    }.items() <= found.items()
    assert found["learning_rate"] == 1e-3 * (100 / 32) ** 0.5
    assert "compiled" not in found


def test_what_not_every_run_has_is_a_row_where_there_is_some() -> None:
    rows = dict(replace(make_plan(), notes={"hooks": ["first", "second"], "adapter": "LoRA", "logits": ""}).rows())
    assert (rows["hook 1"], rows["hook 2"], rows["adapter"]) == ("first", "second", "LoRA")
    assert not rows.keys() & {"logits", "data", "optimizer"}
    rows = dict(replace(make_plan(), data="3 documents", optimizer="AdamW").rows())
    assert (rows["data"], rows["optimizer"]) == ("3 documents", "AdamW")


def test_flags_without_effect_are_named() -> None:
    assert "no effect" not in dict(make_plan().rows())
    assert dict(make_plan(idle=("--bucket-cap-mb",)).rows())["no effect"].startswith("--bucket-cap-mb: ")


def test_the_plan_of_a_step_is_the_same_for_any_number_of_workers() -> None:
    plan = make_plan(global_batch=100)
    alone: BatchPlan = replace(plan.batches, workers=1)
    assert replace(plan, batches=alone).as_dict() | {"workers": 4, "grad_accum_steps": 2} == plan.as_dict()
