"""The commands beside training: their options, and the functions that do the work; heavy imports are late."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from multigpu_cli.commands.completion import run_argument
from multigpu_cli.commands.options import Command, Group, reject_idle_flags, with_inference_options, with_train_options
from multigpu_cli.errors import FAILED, RequestError

app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

_Json = Annotated[bool, typer.Option("--json", help="as JSON")]
_OwnCode = Annotated[bool, typer.Option(help="import the code of yours that the run names")]
_Run = Annotated[str, run_argument("RUN", "folder of a run")]
_Weights = Annotated[str, run_argument("RUN", "run folder, best.pt, last.pt, or checkpoint")]


@app.command(cls=Command)
def recipes(as_json: _Json = False) -> None:
    """List the recipes that --config takes by name."""
    from multigpu_cli.commands.recipes import list_recipes, print_recipes

    print_recipes(list_recipes(), as_json=as_json)


@app.command(cls=Command)
@with_train_options
def selftest(
    context: typer.Context,
    *,
    steps: Annotated[str, typer.Option(metavar="N", help="optimizer steps of the runs that are compared")] = "4",
    **values: Any,
) -> int:
    """Check on your own model and data that 1 worker and several do the same; exit code 0 only if all holds."""
    from multigpu_cli.commands.requests import build_config

    config = build_config(reject_idle_flags("selftest", values), context.obj)
    from multigpu_cli.commands.selftest.selftest import print_report, run_selftest  # torch loads here

    _refuse_launcher("selftest", context.obj)
    report = run_selftest(config, steps)
    print_report(report, as_json=values["json"])
    return 0 if report.holds else FAILED


@app.command(cls=Command)
def verify(
    run_a: Annotated[str, run_argument("RUN_A", "folder of a run")],
    run_b: Annotated[str, run_argument("RUN_B", "folder of another run")],
    as_json: _Json = False,
) -> int:
    """Say whether two runs are the same to the last bit, and if not, at which step they part."""
    from multigpu_cli.commands.verify import compare_runs, print_comparison

    comparison = compare_runs(run_a, run_b)
    print_comparison(comparison, as_json=as_json)
    return 0 if comparison.same else FAILED


@app.command(cls=Command)
def checkpoints(run: _Run, as_json: _Json = False) -> int:
    """List a run's checkpoints and verify them; exit code 0 if it could go on and nothing is damaged."""
    from multigpu_cli.commands.checkpoints import is_healthy, print_checkpoints, verify_checkpoints

    entries = verify_checkpoints(run)
    print_checkpoints(run, entries, as_json=as_json)
    return 0 if is_healthy(entries) else FAILED


@app.command(cls=Command)
def export(
    checkpoint: Annotated[str, run_argument("CKPT", "run folder, best.pt, last.pt, or checkpoint")],
    to: Annotated[str, typer.Option(metavar="FILE", help="….safetensors, ….pt, ….pt2 or ….onnx")],
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="where the run's dataset is now")] = None,
    own_code: _OwnCode = False,
    as_json: _Json = False,
) -> None:
    """Write trained weights, or the whole network, for other programs, and check what was written."""
    from multigpu_cli.commands.requests import parse_export_target

    target = parse_export_target(to, checkpoint)
    from multigpu_cli.commands.inference.export import export_run, print_export  # torch loads here

    print_export(export_run(checkpoint, target, data_dir=data_dir, own_code=own_code), as_json=as_json)


@app.command(cls=Command)
@with_train_options
def doctor(context: typer.Context, **values: Any) -> int:
    """Check this machine: versions, GPUs, connections, disk; and whether a model fits. Exit code 1: not fit."""
    from multigpu_cli.commands.requests import build_config

    config = build_config(reject_idle_flags("doctor", values), context.obj)
    from multigpu_cli.commands.doctor.doctor import print_findings, run_checks, run_job_checks  # torch loads here
    from multigpu_cli.faults.stop import interruptible
    from multigpu_cli.runtime.launch_env import LaunchEnv

    if launch_env := LaunchEnv.from_environment(context.obj):
        findings, code = run_job_checks(config, context.obj, launch_env)
    else:
        with interruptible():
            findings = run_checks(config, context.obj)
        code = FAILED if any(finding.verdict == "fail" for finding in findings) else 0
    if findings:
        print_findings(findings, as_json=values["json"])
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
    from multigpu_cli.commands.requests import build_config

    config = build_config(reject_idle_flags("plan", values), context.obj)
    _refuse_launcher("plan", context.obj)
    from multigpu_cli.commands.plan.plan import make_plan, parse_plan_request, print_plan, save_plan  # torch loads here
    from multigpu_cli.faults.stop import interruptible

    request = parse_plan_request(interconnect, workers, price_per_gpu_hour, noise_scale, gpus_per_node)
    with interruptible():
        forecast = make_plan(config, request)
    if config.checkpoint.save_dir is not None:
        save_plan(forecast, Path(config.checkpoint.save_dir))
    print_plan(forecast, as_json=values["json"])


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
    from multigpu_cli.commands.requests import build_config, parse_positive

    config = build_config(reject_idle_flags("bench", values), context.obj)
    _refuse_launcher("bench", context.obj)
    from multigpu_cli.commands.bench import bench as benchmark  # torch loads here
    from multigpu_cli.commands.bench.loading import measure_loading, print_loading
    from multigpu_cli.faults.stop import interruptible

    length = None if steps is None else int(parse_positive("--steps", steps, whole=True))
    times = int(parse_positive("--repetitions", repetitions, whole=True))
    if data_only:
        print_loading(measure_loading(config, times), as_json=values["json"])
        return
    counts, folder = benchmark.parse_worker_counts(workers, config), benchmark.make_output_dir(out)
    with interruptible():
        measured = benchmark.run_benchmark(config, counts, length, times, context.obj)
    files = benchmark.write_files(measured, folder)
    benchmark.print_benchmark(measured, files, as_json=values["json"])


def _refuse_launcher(command: str, environ: Mapping[str, str]) -> None:
    """Raises RequestError where torchrun has started this process."""
    from multigpu_cli.runtime.launch_env import LaunchEnv

    if LaunchEnv.from_environment(environ):
        raise RequestError(f"{command} under torchrun", remedy=f"without it: {command} starts its own workers")


@app.command(cls=Command)
def status(
    runs: Annotated[list[str] | None, run_argument("[RUN]", "folders of runs, or of folders")] = None,
    again: Annotated[bool, typer.Option("--watch", help="redraw until none of them is at work")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON; with --watch one line each time")] = False,
) -> None:
    """Say how far runs are, how fast, and what is wrong with them; without RUN, those under checkpoints/."""
    from multigpu_cli.commands.status import watch_runs

    watch_runs(runs or [], as_json=as_json, repeat=again)


@app.command(cls=Command)
def report(
    runs: Annotated[list[str], run_argument("RUN", "folders of runs, or of folders")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="where to write (default: RUN/report, ./report)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="where the files are, as JSON")] = False,
) -> None:
    """Write one HTML page about a run, or about several to compare them, and its pictures as PNG files."""
    from multigpu_cli.commands.report.report import print_report, write_report

    print_report(write_report(runs, out), as_json=as_json)


@app.command(cls=Command)
@with_inference_options
def evaluate(run: _Weights, *, own_code: _OwnCode = False, as_json: _Json = False, **given: Any) -> None:
    """Evaluate a run's best weights, on any number of workers; each sample counts once."""
    from multigpu_cli.commands.requests import parse_inference_request

    request = parse_inference_request(run, given, own_code=own_code)
    from multigpu_cli.commands.inference.evaluate import evaluate_run, print_metrics  # torch loads here

    if metrics := evaluate_run(request):
        print_metrics(metrics, as_json=as_json)


@app.command(cls=Command)
@with_inference_options
def predict(
    run: _Weights,
    *,
    out: Annotated[str, typer.Option(metavar="FILE", help="the table to write: ….csv")],
    own_code: _OwnCode = False,
    **given: Any,
) -> None:
    """Write what a run's best weights say of each sample, in order, as a table; on any number of workers."""
    from multigpu_cli.commands.requests import parse_csv_target, parse_inference_request

    request, target = parse_inference_request(run, given, own_code=own_code), parse_csv_target(out)
    from multigpu_cli.commands.inference.predict import predict_run, print_prediction  # torch loads here

    if prediction := predict_run(request, target):
        print_prediction(prediction)


@app.command(cls=Command)
def sample(
    run: _Weights,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="what the text begins with")] = "\n",
    length: Annotated[str, typer.Option(metavar="N", help="tokens to add")] = "500",
    temperature: Annotated[
        str, typer.Option(metavar="X", help="below 1: more of the likely; 0: the likeliest")
    ] = "0.8",
    top_k: Annotated[str | None, typer.Option(metavar="N", help="draw from so many of the likeliest only")] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="of the draws")] = "42",
    own_code: _OwnCode = False,
) -> None:
    """Let a run's language model write text."""
    from multigpu_cli.commands.requests import parse_inference_request, parse_sampling

    request = parse_inference_request(run, {}, own_code=own_code)
    sampling = parse_sampling(length, temperature, top_k, seed)
    from multigpu_cli.commands.inference.sample import generate_text, print_text  # torch loads here

    print_text(generate_text(request, prompt, **sampling))
