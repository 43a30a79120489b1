"""The commands beside training: their options, and the functions that do the work; heavy imports are late."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from multigpu_cli.commands.options import (
    CHANGES,
    Command,
    Group,
    print_result,
    reject_idle_flags,
    run_argument,
    with_inference_options,
    with_train_options,
)
from multigpu_cli.config.schema import Config
from multigpu_cli.config.types import integer
from multigpu_cli.errors import FAILED, RequestError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_LOOK: dict[str, Any] = {"cls": Group, "rich_markup_mode": None, "context_settings": _CONTEXT}
app = typer.Typer(pretty_exceptions_enable=False, **_LOOK)
data_app = typer.Typer(help="Look at a dataset, or convert it.", **_LOOK)
app.add_typer(data_app, name="data")

_Json = Annotated[bool, typer.Option("--json", help="as JSON")]
_ModelDir = Annotated[str | None, typer.Option(metavar="DIR", help="where the run's pretrained model is now")]
_OwnCode = Annotated[bool, typer.Option(help="import your own code that the run names")]
_Run = Annotated[str, run_argument("RUN", "folder of a run")]
_SortBy = Annotated[
    str | None, typer.Option("--sort-by", metavar="KEY", help="best run first: val_accuracy, val_loss, steps, …")
]
_Weights = Annotated[str, run_argument("RUN", "run folder, best.pt, last.pt, or checkpoint")]


@app.command(cls=Command)
def recipes(as_json: _Json = False) -> None:
    """List the recipes that --config takes by name."""
    from multigpu_cli.config.recipes import format_recipes, list_recipes

    found = list_recipes()
    print_result(found, format_recipes(found), as_json=as_json)


@app.command(cls=Command)
@with_train_options
def selftest(
    context: typer.Context,
    *,
    steps: Annotated[str, typer.Option(metavar="N", help="optimizer steps of the compared runs")] = "4",
    **values: Any,
) -> int:
    """Check on your own model and data that 1 worker and several do the same; exit code 0 only if all checks hold."""
    config = _read_config(context, values)
    from multigpu_cli.commands.selftest.selftest import format_report, run_selftest

    report = run_selftest(config, steps)
    print_result(report.as_dict(), format_report(report), as_json=values["json"])
    return 0 if report.holds else FAILED


@app.command(cls=Command)
def verify(
    run_a: Annotated[str, run_argument("RUN_A", "folder of a run")],
    run_b: Annotated[str, run_argument("RUN_B", "folder of another run")],
    as_json: _Json = False,
) -> int:
    """Say whether two runs are the same to the last bit, and if not, at which step they first differ."""
    from multigpu_cli.commands.verify import compare_runs, format_comparison

    comparison = compare_runs(run_a, run_b)
    print_result(comparison.as_dict(), format_comparison(comparison), as_json=as_json)
    return 0 if comparison.same else FAILED


@app.command(cls=Command)
def checkpoints(run: _Run, as_json: _Json = False) -> int:
    """List a run's checkpoints and verify them; exit code 0 if it could go on and nothing is damaged."""
    from multigpu_cli.checkpoint.inspect import list_checkpoints
    from multigpu_cli.commands.clean import format_checkpoints

    entries = list_checkpoints(Path(run))
    healthy = any(each.resumes for each in entries) and all(each.state != "damaged" for each in entries)
    content = {"run": run, "healthy": healthy, "checkpoints": entries}
    print_result(content, format_checkpoints(run, entries), as_json=as_json)
    return 0 if healthy else FAILED


@app.command(cls=Command)
@partial(with_inference_options, options=CHANGES)
def export(
    checkpoint: Annotated[str, run_argument("CKPT", "run folder, best.pt, last.pt, or checkpoint")],
    to: Annotated[str, typer.Option(metavar="PATH", help="….safetensors, ….pt, ….pt2 or ….onnx; or a new folder")],
    kind: Annotated[
        str | None, typer.Option("--format", metavar="hf|adapter|merged", help="a folder for transformers and peft")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp16", help="half as large: weights alone, or --format hf and merged")
    ] = None,
    own_code: _OwnCode = False,
    as_json: _Json = False,
    **given: Any,
) -> None:
    """Write trained weights, or the whole network, for other programs, and check what was written."""
    from multigpu_cli.commands.requests import parse_changes, parse_export_target

    target, changes = parse_export_target(to, checkpoint, kind, dtype), parse_changes(given)
    from multigpu_cli.commands.export import export_run, format_export  # torch loads here

    written = export_run(checkpoint, target, format=kind, dtype=dtype, changes=changes, own_code=own_code)
    print_result(written, format_export(written), as_json=as_json)


@app.command(cls=Command)
@with_train_options
def doctor(context: typer.Context, **values: Any) -> int:
    """Check this machine: versions, GPUs, connections, disk; and whether a model fits. Exit code 1: not fit."""
    config = _read_config(context, values, allow_launcher=True)
    from multigpu_cli.commands.doctor.doctor import run_doctor
    from multigpu_cli.commands.doctor.system import format_findings

    findings, code = run_doctor(config, context.obj)
    if findings:
        print_result({"findings": findings}, format_findings(findings), as_json=values["json"])
    return code


@app.command(cls=Command)
@with_train_options
def plan(
    context: typer.Context,
    *,
    workers: Annotated[str, typer.Option(metavar="N,N", help="numbers of workers")] = "1,2,4,8",
    interconnect: Annotated[
        str | None, typer.Option(metavar="WIRE", help="measured, pcie4, nvlink4, ethernet-25|100, infiniband-400")
    ] = None,
    gpus_per_node: Annotated[str, typer.Option(metavar="N", help="workers on one machine")] = "8",
    price_per_gpu_hour: Annotated[str | None, typer.Option(metavar="X", help="for the cost of a run")] = None,
    noise_scale: Annotated[str | None, typer.Option(metavar="X", help="of the gradient, from a train line")] = None,
    **values: Any,
) -> None:
    """Forecast memory, time and cost of a run on several workers, from what one takes here."""
    config = _read_config(context, values)
    from multigpu_cli.commands.plan.plan import format_plan, make_plan, parse_plan_request, save_plan

    request = parse_plan_request(interconnect, workers, price_per_gpu_hour, noise_scale, gpus_per_node)
    forecast = make_plan(config, request)
    if config.checkpoint.save_dir is not None and forecast.rows:
        save_plan(forecast, Path(config.checkpoint.save_dir))
    print_result(forecast, format_plan(forecast), as_json=values["json"])


@app.command(cls=Command)
@with_train_options
def bench(
    context: typer.Context,
    *,
    workers: Annotated[str | None, typer.Option(metavar="N,N", help="default: 1, 2, 4, … devices")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="of each run; default: 64, or 4 s of them")] = None,
    repetitions: Annotated[str, typer.Option(metavar="N", help="runs on each number of workers")] = "3",
    out: Annotated[str, typer.Option(metavar="DIR", help="for bench.json and bench.png")] = "bench",
    data_only: Annotated[bool, typer.Option(help="loading alone, by the number of loader processes")] = False,
    **values: Any,
) -> None:
    """Run the trainer on 1, 2, … workers: speed, where the time goes, and how far the forecast is off."""
    from multigpu_cli.commands.requests import parse_option

    config = _read_config(context, values)
    from multigpu_cli.commands import bench as benchmark
    from multigpu_cli.commands.bench_overlap import format_loading, measure_loading

    length = parse_option(integer(1), "--steps", steps)
    times = parse_option(integer(1), "--repetitions", repetitions)
    if data_only:
        loading = measure_loading(config, times)
        print_result(loading, format_loading(loading), as_json=values["json"])
        return
    counts, folder = benchmark.choose_worker_counts(workers, config), benchmark.make_output_dir(out)
    measured = benchmark.run_benchmark(config, counts, length, times, context.obj)
    files = benchmark.write_files(measured, folder)
    print_result(measured, benchmark.format_benchmark(measured, files), as_json=values["json"])


@data_app.command(cls=Command)
@with_train_options
def preview(
    context: typer.Context,
    *,
    samples: Annotated[str, typer.Option(metavar="N", help="how many samples are shown")] = "3",
    **values: Any,
) -> None:
    """Show the tokens of a few samples of a language model's data, and which of them are learned."""
    from multigpu_cli.commands.requests import parse_option

    config, count = _read_config(context, values), parse_option(integer(1), "--samples", samples)
    from multigpu_cli.commands.language.samples import choose_marks, format_preview, preview_data  # torch loads here

    found = preview_data(config, count)
    print_result(found, format_preview(found, choose_marks(sys.stdout, context.obj)), as_json=values["json"])


@data_app.command(cls=Command)
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=".parquet, .csv, .tsv or .jsonl file, or a folder")],
    to: Annotated[str, typer.Option(metavar="DIR", help="a new folder, for --data arrow")],
    as_json: _Json = False,
) -> None:
    """Write Parquet, CSV or JSON lines as Arrow files once, for --data arrow; a piece at a time, in little memory."""
    from multigpu_cli.data.rows.convert import convert_data, format_conversion

    found = convert_data(source, to)
    print_result(found, format_conversion(found), as_json=as_json)


def _read_config(context: typer.Context, values: Mapping[str, Any], *, allow_launcher: bool = False) -> Config:
    """The settings of a command that takes the options of a training, checked as far as that goes without torch."""
    from multigpu_cli.commands.requests import build_config

    command = str(context.info_name)
    config = build_config(reject_idle_flags(command, values), context.obj)
    from multigpu_cli.distributed.launch_env import LaunchEnv

    if not allow_launcher and LaunchEnv.from_environment(context.obj):
        raise RequestError(f"{command} under torchrun", remedy=f"{command} without torchrun: it starts its own workers")
    return config


@app.command(cls=Command)
def status(
    runs: Annotated[list[str] | None, run_argument("[RUN]", "folders of runs, or of folders")] = None,
    again: Annotated[bool, typer.Option("--watch", help="redraw until none of them is running")] = False,
    sort_by: _SortBy = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON; with --watch one line each time")] = False,
) -> None:
    """Show the progress, the speed and the problems of runs; without RUN, of those under checkpoints/."""
    from multigpu_cli.commands.status import watch_runs

    watch_runs(runs or [], as_json=as_json, repeat=again, sort_by=sort_by)


@app.command(cls=Command)
def report(
    runs: Annotated[list[str], run_argument("RUN", "folders of runs, or of folders")],
    out: Annotated[str | None, typer.Option(metavar="DIR", help="folder (default: RUN/report, ./report)")] = None,
    sort_by: _SortBy = None,
    as_json: Annotated[bool, typer.Option("--json", help="where the files are, as JSON")] = False,
) -> None:
    """Write one HTML page about a run, or about any number to compare them, and its plots as PNG files."""
    from multigpu_cli.commands.report.report import format_report, write_report

    written = write_report(runs, out, sort_by)
    print_result(written, format_report(written), as_json=as_json)


@app.command(cls=Command)
def mirror(
    run: _Run,
    to: Annotated[str, typer.Option(metavar="URL", help="s3://…, gs://… or file:…")],
    as_json: _Json = False,
) -> None:
    """Copy the newest checkpoint and the weights of a run to a remote folder, as --mirror does while it trains."""
    from multigpu_cli.mirror.part import format_mirrored, mirror_run

    found = mirror_run(run, to)
    print_result(found, format_mirrored(found), as_json=as_json)


@app.command(cls=Command)
def log(
    run: _Run,
    *,
    to: Annotated[list[str], typer.Option(metavar="NAME", help="mlflow, wandb or your module:Class; may be repeated")],
    again: Annotated[bool, typer.Option("--again", help="from the beginning, whatever has arrived")] = False,
    as_json: _Json = False,
) -> None:
    """Send a run's journal to experiment loggers: what has not arrived; twice gives the same rows."""
    from multigpu_cli.loggers.part import format_sent, send_journal

    sent = send_journal(run, to, again=again)
    print_result(sent, format_sent(sent), as_json=as_json)


@app.command(cls=Command)
def clean(
    runs: Annotated[list[str], run_argument("DIR", "folders of runs, or of folders")],
    yes: Annotated[bool, typer.Option("--yes", help="remove them; without it they are only listed")] = False,
    as_json: _Json = False,
) -> None:
    """List the checkpoints of completed runs and what they take; --yes removes them, and leaves the best weights."""
    from multigpu_cli.commands.clean import clean_runs, format_cleaning

    found = clean_runs(runs, remove=yes)
    print_result(found, format_cleaning(found), as_json=as_json)


@app.command(cls=Command)
@with_inference_options
def evaluate(run: _Weights, *, own_code: _OwnCode = False, as_json: _Json = False, **given: Any) -> None:
    """Evaluate a run's best weights, on any number of workers; each sample counts once."""
    from multigpu_cli.commands.requests import parse_inference_request

    request = parse_inference_request(run, given, own_code=own_code)
    from multigpu_cli.commands.inference import evaluate_run, format_metrics  # torch loads here

    if metrics := evaluate_run(request):
        print_result(metrics, format_metrics(metrics), as_json=as_json)


@app.command(cls=Command)
@with_inference_options
def predict(
    run: _Weights,
    *,
    out: Annotated[str, typer.Option(metavar="FILE", help="….csv, ….npy, ….npz, or a new folder for images")],
    own_code: _OwnCode = False,
    **given: Any,
) -> None:
    """Write what a run's best weights predict of each sample, in order: a table, arrays or images."""
    from multigpu_cli.commands.requests import parse_inference_request, parse_prediction_target

    request, target = parse_inference_request(run, given, own_code=own_code), parse_prediction_target(out)
    from multigpu_cli.commands.predict.predict import predict_run  # torch loads here

    if written := predict_run(request, target):
        print(written)


@app.command(cls=Command)
def sample(
    run: _Weights,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="the beginning of the text, or a question")] = "\n",
    length: Annotated[str, typer.Option(metavar="N", help="tokens to add")] = "500",
    temperature: Annotated[str, typer.Option(metavar="X", help="lower: likelier tokens; 0: the likeliest")] = "0.8",
    top_k: Annotated[str | None, typer.Option(metavar="N", help="draw from the N likeliest only")] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="of the draws")] = "42",
    raw: Annotated[bool, typer.Option("--raw", help="go on from the prompt, without a chat template")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="your own network, as the run names it: allows its import")
    ] = None,
    model_dir: _ModelDir = None,
    own_code: _OwnCode = False,
) -> None:
    """Write text with a run's language model; one with a chat template answers the prompt."""
    from multigpu_cli.commands.requests import parse_inference_request, parse_sampling

    request = parse_inference_request(run, {"model": model, "model_dir": model_dir}, own_code=own_code)
    sampling = parse_sampling(length, temperature, top_k, seed)
    from multigpu_cli.commands.language.samples import Sampling, generate_text  # torch loads here

    print(generate_text(request, prompt, Sampling(**sampling, raw=raw)))
