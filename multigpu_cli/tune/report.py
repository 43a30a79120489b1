"""`tune report`: the best trials with their commands, importance, front, idle share, and a picture of all trials."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.config.sources import resolve
from multigpu_cli.config.yaml_text import list_arguments
from multigpu_cli.monitor.journal import read_json
from multigpu_cli.monitor.plot_style import STYLE, color_of_run, save_png
from multigpu_cli.tune.driver import BASE, list_sets, plan_batch
from multigpu_cli.tune.sampler import measure_importance
from multigpu_cli.tune.scheduler import rank_trials
from multigpu_cli.tune.space import Dimension, find_place, parse_search
from multigpu_cli.tune.study import SUMMARY
from multigpu_cli.tune.trials import Study, Trial, read_study


def report_study(path: Path, top: int | None) -> dict[str, Any]:
    """The best trials with their commands; without `top` also the rest, and report.png is written."""
    (study, trials), base = read_study(path), str(path / BASE)
    ranked, found = rank_trials(study, trials), []
    for trial in ranked[: top or 10]:  # each as a run of its own, which evaluates the test split
        config = resolve({"seed": study.seed}, plan_batch(study, trial.params, base)[0], base)
        found.append(trial.as_dict() | {"command": shlex.join(["multigpu", *list_arguments(config)])})
    if top is not None:
        return {"study": path, "best": found}
    summary, picture = read_json(path / SUMMARY, "study's summary"), path / "report.png"
    space = parse_search([f"{key}={text}" for key, text in study.search.items()])
    publish(picture, draw_study(study, space, ranked, trials))
    names = ("status", "idle_share", "start_share", "slot_hours", "epochs", "front")
    more = {name: summary.get(name) for name in names}
    more |= {"test": (summary.get("best") or {}).get("test"), "importance": measure_importance(study, space, trials)}
    more["importance_trials"] = sum(bool(trial.values) for trial in trials)
    return {"study": path, "best": found, "states": Counter(t.state for t in trials), "picture": picture} | more


def format_study(found: dict[str, Any]) -> Iterator[str]:
    """The lines that show a report."""
    if "picture" not in found:
        yield from (each["command"] for each in found["best"])
        return
    states = ", ".join(f"{count} {state}" for state, count in sorted(found["states"].items()))
    yield f"{found['study']}: {found['status'] or 'under way'}; trials: {states}"
    if found["idle_share"] is not None:
        shares = f"idle {found['idle_share']:.1%}, starting runs {found['start_share'] or 0:.1%}"
        yield f"{found['slot_hours']:.3g} slot-hours, {found['epochs']} epochs; slots: {shares}"
    for each in found["best"]:
        values = ", ".join(f"epoch {epochs}: {value}" for epochs, value in each["values"].items())
        yield f"trial {each['number']}  {values}  {' '.join(list_sets(each['params']))}"
    for shares in found["importance"]:
        parts = (f"{name} {share:.2f} ± {error:.2f}" for name, (share, error) in shares.items())
        yield f"importance (fANOVA, {found['importance_trials']} trials, ± standard error): {', '.join(parts)}"
    if len(found["front"] or ()) > 1:
        yield f"front: trials {', '.join(map(str, found['front']))}"
    if found["test"]:
        yield "test, of the best: " + ", ".join(f"{name} {value:.6g}" for name, value in found["test"].items())
    yield from (each["command"] for each in found["best"][:1])
    yield str(found["picture"])


def draw_study(study: Study, space: Sequence[Dimension], ranked: Sequence[Trial], trials: Sequence[Trial]) -> bytes:
    """A PNG file: curves of all trials, parallel coordinates, and two objectives against each other; best in blue."""
    goals, front = len(study.goals), ranked if len(study.goals) > 1 else ranked[:1]
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2 * (goals + 1 + (goals == 2))), layout="constrained")
        curves = [figure.add_subplot(goals + 1 + (goals == 2), 1, 1 + at) for at in range(goals + 1 + (goals == 2))]
        for trial in sorted((trial for trial in trials if trial.values), key=lambda trial: trial in front):
            look: dict[str, Any] = {"color": color_of_run(0 if trial in front else 7), "alpha": 0.7, "marker": "."}
            for at, name in enumerate(study.objectives):
                curves[at].plot(list(trial.values), [each[at] for each in trial.values.values()], **look)
                curves[at].set(title=name, xlabel="epoch")
            curves[goals].plot([find_place(each, trial.params) for each in space], **look)
            if goals == 2:
                curves[-1].plot(*trial.values[max(trial.values)], **look)
                curves[-1].set(xlabel=study.objectives[0], ylabel=study.objectives[1])
        curves[goals].set_xticks(range(len(space)), [f"{each.key}\n{each.text}" for each in space])
        return save_png(figure)
