"""The commands beside training: their options, and the functions that do the work; heavy imports are late."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from multigpu_cli.commands import requests
from multigpu_cli.commands.help import CONTEXT, format_topic
from multigpu_cli.commands.options import (
    CHANGES,
    Command,
    Group,
    option,
    print_result,
    reject_idle_flags,
    run_argument,
    with_inference_options,
    with_train_options,
)
from multigpu_cli.config.paths import format_recipes, list_recipes
from multigpu_cli.config.schema import Config
from multigpu_cli.config.types import integer
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.errors import FAILED, RequestError, make_printable

_LOOK: dict[str, Any] = {"cls": Group, "rich_markup_mode": None, "context_settings": CONTEXT}
app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="[COMMAND]", **_LOOK)
data_app = typer.Typer(help="Preview a dataset, or convert it.", **_LOOK)
app.add_typer(data_app, name="data")

_Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
_ModelDir = Annotated[str | None, option("DIR", "new location of the pretrained model")]
_OwnCode = Annotated[bool, typer.Option("--own-code", help="allow importing custom code referenced by the run")]
_Run = Annotated[str, run_argument("RUN", "run folder")]
_SortBy = Annotated[str | None, option("KEY", "best run first: val_accuracy, val_loss, steps, …")]
_Weights = Annotated[str, run_argument("RUN", "run folder, best.pt, last.pt, or checkpoint")]


@app.command("help", cls=Command)
def show_help(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="chapter, command")] = None,
) -> None:
    """Show a chapter of the help, or the help of a command."""
    typer.echo(format_topic(topic, context.find_root()), color=context.color)


@app.command(cls=Command)
def recipes(as_json: _Json = False) -> None:
    """List the recipes that --config takes by name."""
    found = list_recipes()
    print_result(found, format_recipes(found), as_json=as_json)


@app.command(cls=Command)
@with_train_options
def selftest(
    context: typer.Context,
    *,
    steps: Annotated[str, option("N", "number of optimizer steps to compare")] = "4",
    **values: Any,
) -> int:
    """Check that one worker and several give the same results. Exit code 0 if all checks hold."""
    config = _read_config(context, values)
    from multigpu_cli.commands.selftest.selftest import format_report, run_selftest

    report = run_selftest(config, steps)
    print_result(report.as_dict(), format_report(report), as_json=values["json"])
    return 0 if report.holds else FAILED


@app.command(cls=Command)
def verify(
    run_a: Annotated[str, run_argument("RUN_A", "run folder")],
    run_b: Annotated[str, run_argument("RUN_B", "another run folder")],
    as_json: _Json = False,
) -> int:
    """Compare two runs bit by bit. If they differ, name the first step that does."""
    from multigpu_cli.commands.verify import compare_runs, format_comparison

    comparison = compare_runs(run_a, run_b)
    print_result(comparison, format_comparison(comparison), as_json=as_json)
    return 0 if comparison.same else FAILED


@app.command(cls=Command)
def checkpoints(run: _Run, as_json: _Json = False) -> int:
    """List and verify the checkpoints of a run. Exit code 0 if none is damaged and the run can be resumed."""
    from multigpu_cli.commands.clean import format_checkpoints, list_checkpoints

    entries = list_checkpoints(Path(run))
    healthy = any(each.resumes for each in entries) and all(each.state != "damaged" for each in entries)
    content = {"run": run, "healthy": healthy, "checkpoints": entries}
    print_result(content, format_checkpoints(run, entries), as_json=as_json)
    return 0 if healthy else FAILED


@app.command(cls=Command)
@partial(with_inference_options, options=CHANGES)
def export(
    checkpoint: Annotated[str, run_argument("CKPT", "run folder, best.pt, last.pt, or checkpoint")],
    to: Annotated[str, option("PATH", "a .safetensors, .pt, .pt2 or .onnx file; or a new folder")],
    kind: Annotated[str | None, option("hf|adapter|merged", "a folder for transformers or peft", "--format")] = None,
    dtype: Annotated[str | None, option("bf16|fp16", "half as large: weights alone, or --format hf and merged")] = None,
    own_code: _OwnCode = False,
    as_json: _Json = False,
    **given: Any,
) -> None:
    """Export the weights or the whole network. The written file is loaded and checked."""
    target = requests.parse_export_target(to, kind, dtype)
    request = requests.parse_inference_request(checkpoint, given, own_code=own_code)
    from multigpu_cli.commands.export import export_run, format_export  # torch loads here

    written = export_run(request, target)
    print_result(written, format_export(written), as_json=as_json)


@app.command(cls=Command)
@with_train_options
def doctor(context: typer.Context, **values: Any) -> int:
    """Check versions, GPUs, network, disk, and whether a model fits. Exit code 1: something does not work."""
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
    workers: Annotated[str, option("N,N", "worker counts to forecast")] = "1,2,4,8",
    interconnect: Annotated[
        str | None, option("NAME", "measured, pcie4, nvlink4, ethernet-25|100, infiniband-400")
    ] = None,
    gpus_per_node: Annotated[str, option("N", "workers on one machine")] = "8",
    price_per_gpu_hour: Annotated[str | None, option("X", "price, for the cost of a run")] = None,
    noise_scale: Annotated[str | None, option("X", "gradient noise scale, from the journal")] = None,
    **values: Any,
) -> None:
    """Forecast memory, time and cost on several workers. The forecast starts from what one worker takes here."""
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
    workers: Annotated[str | None, option("N,N", "worker counts (default: 1, 2, 4, …)")] = None,
    steps: Annotated[str | None, option("N", "steps of each run (default: 64, or 4 s)")] = None,
    repetitions: Annotated[str, option("N", "runs per worker count")] = "3",
    out: Annotated[str, option("DIR", "folder for bench.json and bench.png")] = "bench",
    data_only: Annotated[bool, typer.Option("--data-only", help="measure data loading only")] = False,
    **values: Any,
) -> None:
    """Measure the training speed on 1, 2, … workers. Also where the time goes, and how far the forecast is off."""
    config = _read_config(context, values)
    from multigpu_cli.commands import bench as benchmark
    from multigpu_cli.commands.bench_overlap import format_loading, measure_loading

    length = requests.parse_option(integer(1), "--steps", steps)
    times = requests.parse_option(integer(1), "--repetitions", repetitions)
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
    context: typer.Context, *, samples: Annotated[str, option("N", "number of samples")] = "3", **values: Any
) -> None:
    """Show the tokens of a few samples. Those that are trained on are marked."""
    config, count = _read_config(context, values), requests.parse_option(integer(1), "--samples", samples)
    from multigpu_cli.commands.language.samples import choose_marks, format_preview, preview_data  # torch loads here

    found = preview_data(config, count)
    print_result(found, format_preview(found, choose_marks(sys.stdout, context.obj)), as_json=values["json"])


@data_app.command(cls=Command)
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=".parquet, .csv, .tsv or .jsonl file, or a folder")],
    to: Annotated[str, option("DIR", "a new folder, for --data arrow")],
    as_json: _Json = False,
) -> None:
    """Convert Parquet, CSV or JSON lines to Arrow files, for --data arrow. Needs little memory."""
    from multigpu_cli.data.rows.convert import convert_data, format_conversion

    found = convert_data(source, to)
    print_result(found, format_conversion(found), as_json=as_json)


def _read_config(context: typer.Context, values: Mapping[str, Any], *, allow_launcher: bool = False) -> Config:
    """The settings of a command that takes the options of a training, checked as far as that goes without torch."""
    command = str(context.info_name)
    config = requests.build_config(reject_idle_flags(command, values), context.obj)
    if not allow_launcher and LaunchEnv.from_environment(context.obj):
        raise RequestError(f"{command} under torchrun", remedy=f"{command} without torchrun: it starts its own workers")
    return config


@app.command(cls=Command)
def status(
    runs: Annotated[list[str] | None, run_argument("RUN", "run folders, or folders that contain some")] = None,
    again: Annotated[bool, typer.Option("--watch", help="repeat until no run is active")] = False,
    sort_by: _SortBy = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON; with --watch one line each time")] = False,
) -> None:
    """Show progress, speed and problems of runs. Without RUN: of those under checkpoints/."""
    from multigpu_cli.commands.status import watch_runs

    watch_runs(runs or [], as_json=as_json, repeat=again, sort_by=sort_by)


@app.command(cls=Command)
def report(
    runs: Annotated[list[str], run_argument("RUN", "run folders, or folders that contain some")],
    out: Annotated[str | None, option("DIR", "folder (default: RUN/report or ./report)")] = None,
    sort_by: _SortBy = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the paths of the files as JSON")] = False,
) -> None:
    """Write an HTML page about one run or several. The plots are also written as PNG files."""
    from multigpu_cli.commands.report.report import format_report, write_report

    written = write_report(runs, out, sort_by)
    print_result(written, format_report(written), as_json=as_json)


@app.command(cls=Command)
def mirror(run: _Run, to: Annotated[str, option("URL", "s3://…, gs://… or file:…")], as_json: _Json = False) -> None:
    """Copy a run to remote storage. That is its newest checkpoint and its weights; --mirror does it during training."""
    from multigpu_cli.mirror.part import format_mirrored, mirror_run

    found = mirror_run(run, to)
    print_result(found, format_mirrored(found), as_json=as_json)


@app.command(cls=Command)
def log(
    run: _Run,
    *,
    to: Annotated[list[str], option("NAME", "mlflow, wandb or module:Class; may be repeated")],
    again: Annotated[bool, typer.Option("--again", help="send everything again")] = False,
    as_json: _Json = False,
) -> None:
    """Send the journal of a run to experiment loggers. Only lines that have not arrived yet are sent."""
    from multigpu_cli.loggers.part import format_sent, send_journal

    sent = send_journal(run, to, again=again)
    print_result(sent, format_sent(sent), as_json=as_json)


@app.command(cls=Command)
def profile(
    run: _Run,
    steps: Annotated[str, option("N", "optimizer steps to profile (default: 20)")] = "20",
    as_json: _Json = False,
) -> None:
    """Profile some steps of a run while it trains. Prints the top operators, and writes a Chrome trace."""
    from multigpu_cli.monitor.run_state import MOST_STEPS
    from multigpu_cli.profiling.command import format_profile, profile_run

    found = profile_run(run, requests.parse_option(integer(1, MOST_STEPS), "--steps", steps))
    print_result(found, format_profile(found), as_json=as_json)


@app.command(cls=Command)
def clean(
    runs: Annotated[list[str], run_argument("DIR", "run folders, or folders that contain some")],
    yes: Annotated[bool, typer.Option("--yes", help="remove them; otherwise they are only listed")] = False,
    as_json: _Json = False,
) -> None:
    """List the checkpoints of completed runs; --yes removes them. The best weights (best.pt) stay."""
    from multigpu_cli.commands.clean import clean_runs, format_cleaning

    found = clean_runs(runs, remove=yes)
    print_result(found, format_cleaning(found), as_json=as_json)


@app.command(cls=Command)
@with_inference_options
def evaluate(run: _Weights, *, own_code: _OwnCode = False, as_json: _Json = False, **given: Any) -> None:
    """Evaluate the best weights of a run. Any number of workers gives the same result."""
    request = requests.parse_inference_request(run, given, own_code=own_code)
    from multigpu_cli.commands.inference import evaluate_run, format_metrics  # torch loads here

    if metrics := evaluate_run(request):
        print_result(metrics, format_metrics(metrics), as_json=as_json)


@app.command(cls=Command)
@with_inference_options
def predict(
    run: _Weights,
    *,
    out: Annotated[str, option("FILE", "a .csv, .npy or .npz file, or a new folder for images")],
    own_code: _OwnCode = False,
    **given: Any,
) -> None:
    """Write the predictions for each sample. The result is a table, arrays or images."""
    request = requests.parse_inference_request(run, given, own_code=own_code)
    target = requests.parse_prediction_target(out)
    from multigpu_cli.commands.predict.predict import predict_run  # torch loads here

    if written := predict_run(request, target):
        print(make_printable(written))


@app.command(cls=Command)
def sample(
    run: _Weights,
    prompt: Annotated[str, option("TEXT", "beginning of the text, or a question")] = "\n",
    length: Annotated[str, option("N", "number of tokens to generate")] = "500",
    temperature: Annotated[str, option("X", "0: always the likeliest token")] = "0.8",
    top_k: Annotated[str | None, option("N", "sample from the N likeliest tokens only")] = None,
    seed: Annotated[str, option("N", "random seed")] = "42",
    raw: Annotated[bool, typer.Option("--raw", help="continue the prompt, without a chat template")] = False,
    model: Annotated[str | None, option("NAME", "own model of the run: allows its import")] = None,
    model_dir: _ModelDir = None,
    own_code: _OwnCode = False,
) -> None:
    """Generate text with a language model. A model with a chat template answers the prompt."""
    request = requests.parse_inference_request(run, {"model": model, "model_dir": model_dir}, own_code=own_code)
    sampling = requests.parse_sampling(length, temperature, top_k, seed)
    from multigpu_cli.commands.language.samples import Sampling, generate_text  # torch loads here

    print(make_printable(generate_text(request, prompt, Sampling(**sampling, raw=raw))))
