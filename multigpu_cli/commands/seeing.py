"""The commands that look: doctor, plan, bench, status, report; their words on the command line, and nothing heavy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from multigpu_cli.commands.completion import run_argument
from multigpu_cli.commands.options import Command, with_train_options, without_idle
from multigpu_cli.errors import FAILED, RequestError

Action = Callable[[], int]


def add_to(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Give the front door these commands."""
    app.command(cls=Command)(_doctor(environ))
    app.command(cls=Command)(_plan(environ))
    app.command(cls=Command)(_bench(environ))
    app.command(cls=Command)(status)
    app.command(cls=Command)(report)


def _doctor(environ: Mapping[str, str]) -> Callable[..., Action]:
    @with_train_options
    def doctor(
        context: typer.Context, *, results: Annotated[str | None, typer.Option(hidden=True)] = None, **values: Any
    ) -> Action:
        """Check this machine: versions, GPUs, connections, disk; and whether a model fits. Exit code 1: not fit."""

        def examine() -> int:
            from multigpu_cli.commands.doctor import examined, of_the_job, show, work
            from multigpu_cli.commands.request import requested
            from multigpu_cli.faults.stop import interruptible
            from multigpu_cli.runtime.world import Rendezvous

            config = requested(without_idle("doctor", values), environ)
            if results is not None:
                work(config, Path(results), environ)
                return 0
            if meeting := Rendezvous.from_environment(environ):
                found, code = of_the_job(config, environ, meeting)
                if found:
                    show(found, as_json=values["json"])
                return code
            with interruptible():
                findings = examined(config, environ)
            show(findings, as_json=values["json"])
            return FAILED if any(finding.verdict == "fail" for finding in findings) else 0

        return examine

    return doctor


def _plan(environ: Mapping[str, str]) -> Callable[..., Action]:
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
        results: Annotated[str | None, typer.Option(hidden=True)] = None,
        **values: Any,
    ) -> Action:
        """Forecast memory, time and cost of a run on several workers, from what one takes here."""

        def forecast() -> int:
            from multigpu_cli.commands.plan import keep, planned, show, wishes
            from multigpu_cli.commands.plan_measure import take_part
            from multigpu_cli.commands.request import requested
            from multigpu_cli.faults.stop import interruptible
            from multigpu_cli.runtime.world import Rendezvous

            config = requested(without_idle("plan", values), environ)
            if meeting := Rendezvous.from_environment(environ):
                take_part(config, _asked_for("plan", results), meeting)
                return 0
            wished = wishes(interconnect, workers, price_per_gpu_hour, noise_scale, gpus_per_node)
            with interruptible():
                found = planned(config, wished)
            if config.checkpoint.save_dir is not None:
                keep(found, Path(config.checkpoint.save_dir))
            show(found, as_json=values["json"])
            return 0

        return forecast

    return plan


def _bench(environ: Mapping[str, str]) -> Callable[..., Action]:
    @with_train_options
    def bench(
        context: typer.Context,
        *,
        workers: Annotated[str | None, typer.Option(metavar="N,N", help="default: 1, 2, 4, … devices")] = None,
        steps: Annotated[str | None, typer.Option(metavar="N", help="of each run; default: 64, or 4 s of them")] = None,
        repetitions: Annotated[str, typer.Option(metavar="N", help="runs on each number of workers")] = "3",
        out: Annotated[str, typer.Option(metavar="DIR", help="for bench.json and bench.png")] = "bench",
        data_only: Annotated[bool, typer.Option(help="loading alone, by the number of loader processes")] = False,
        results: Annotated[str | None, typer.Option(hidden=True)] = None,
        **values: Any,
    ) -> Action:
        """Run the trainer on 1, 2, … workers: speed, where the time goes, and how far the forecast is off."""

        def measure() -> int:
            from multigpu_cli.commands import bench_data
            from multigpu_cli.commands.bench import benched, counts, place, show, write
            from multigpu_cli.commands.bench_overlap import take_part
            from multigpu_cli.commands.plan import positive
            from multigpu_cli.commands.request import requested
            from multigpu_cli.faults.stop import interruptible
            from multigpu_cli.runtime.world import Rendezvous

            config = requested(without_idle("bench", values), environ)
            if meeting := Rendezvous.from_environment(environ):
                take_part(config, _asked_for("bench", results), meeting)
                return 0
            length = None if steps is None else int(positive("--steps", steps, whole=True))
            times = int(positive("--repetitions", repetitions, whole=True))
            if data_only:
                bench_data.show(bench_data.loading(config, times), as_json=values["json"])
                return 0
            rungs, folder = counts(workers, config), place(out)
            with interruptible():
                found = benched(config, rungs, length, times, environ)
            show(found, write(found, folder), as_json=values["json"])
            return 0

        return measure

    return bench


def _asked_for(command: str, results: str | None) -> Path:
    """The folder that the command has named to its own workers.

    Raises:
        RequestError: it has not; somebody else has started these.
    """
    if results is None:
        raise RequestError(f"{command} under torchrun", remedy=f"without it: {command} starts its own workers")
    return Path(results)


def status(
    runs: Annotated[list[str] | None, run_argument("[RUN]", "folders of runs, or of folders")] = None,
    again: Annotated[bool, typer.Option("--watch", help="redraw until none of them is at work")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON; with --watch one line each time")] = False,
) -> Action:
    """Say how far runs are, how fast, and what is wrong with them; without RUN, those under checkpoints/."""

    def shown() -> int:
        from multigpu_cli.commands.status import watch

        watch(runs or [], as_json=as_json, repeat=again)
        return 0

    return shown


def report(
    runs: Annotated[list[str], run_argument("RUN", "folders of runs, or of folders")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="where to write (default: RUN/report, ./report)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="where the files are, as JSON")] = False,
) -> Action:
    """Write one HTML page about a run, or about several to compare them, and its pictures as PNG files."""

    def write() -> int:
        from multigpu_cli.commands.report import reported, show

        show(reported(runs, out), as_json=as_json)
        return 0

    return write
