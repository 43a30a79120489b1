"""MLflow: one run there, found by a tag, whose rows are the same however often they are sent.

Server and experiment come from MLflow's own environment variables: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_USERNAME,
MLFLOW_EXPERIMENT_NAME and so on. This file is imported in the process that follows the journal, and nowhere else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow import environment_variables as variables
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from multigpu_cli.loggers.base import Ending, Row, RunIdentity

_ID, _CONFIG = "multigpu.run_id", "multigpu.config."  # tags: our id, and settings that were changed on resume
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "killed": "KILLED", "failed": "FAILED"}
_LONGEST = 500  # characters of a parameter that every version of a server takes


class MLflowLogger:
    """A run of an MLflow server, or of a local store."""

    confirms_each = True

    def __init__(self) -> None:
        for variable, value in (
            (variables.MLFLOW_HTTP_REQUEST_TIMEOUT, 30),
            (variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES, 1),
        ):
            if not variable.is_set():
                variable.set(value)  # the sender tries again by itself
        self._client = MlflowClient()
        self._run = ""
        self._there: set[tuple[str, int, int]] = set()

    def open(self, run: RunIdentity, sent: int) -> int:
        """Find the run by its tag, or create it."""
        experiment = self._find_experiment(run.project)
        found = self._client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        if found:
            there = found[0]
            self._client.update_run(there.info.run_id, "RUNNING")
        else:
            tags = {_ID: run.id, "multigpu.folder": run.folder}
            there = self._client.create_run(experiment, round(1000 * run.began), tags, run.name)
            sent = 0
        self._run = there.info.run_id
        rows = [row for name in there.data.metrics for row in self._client.get_metric_history(self._run, name)]
        self._there = {(row.key, row.timestamp, row.step) for row in rows}  # a process may die before it notes them
        self._log_config(run.config, there.data.params)
        return sent

    def send(self, rows: Sequence[Row]) -> None:
        """Send the numbers that are not there."""
        metrics = [
            Metric(name, value, stamp, row.step)
            for row in rows
            for stamp in [round(1000 * row.time)]
            for name, value in row.numbers.items()
            if (name, stamp, row.step) not in self._there
        ]
        for at in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[at : at + _MOST_METRICS])

    def finish(self, ending: Ending) -> None:
        """Set the status, and the hashes of checkpoint and best weights as tags; no file is uploaded."""
        tags = {"multigpu.fingerprint": ending.fingerprint, "multigpu.checkpoint": ending.checkpoint}
        tags |= {
            f"multigpu.sha256/{name.removeprefix(ending.checkpoint + '/')}": sum for name, sum in ending.files.items()
        }
        given = [RunTag(name, value) for name, value in tags.items() if value]
        self._client.log_batch(self._run, tags=given[:_MOST_PARAMS])
        self._client.set_terminated(self._run, _STATUS[ending.status])

    def _find_experiment(self, name: str) -> str:
        """The id of the experiment that the environment names, or of that of this name, which is created."""
        if given := variables.MLFLOW_EXPERIMENT_ID.get():
            return str(given)
        name = str(variables.MLFLOW_EXPERIMENT_NAME.get() or name)
        if found := self._client.get_experiment_by_name(name):
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run may have created it just now
            if found := self._client.get_experiment_by_name(name):
                return str(found.experiment_id)
            raise

    def _log_config(self, config: Mapping[str, Any], there: Mapping[str, str]) -> None:
        """Parameters can't change in MLflow: a setting that was changed on resume becomes a tag."""
        texts = {name: str(value)[:_LONGEST] for name, value in config.items()}
        params = [Param(name, text) for name, text in texts.items() if name not in there]
        changed = [RunTag(_CONFIG + name, text) for name, text in texts.items() if there.get(name, text) != text]
        for at in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[at : at + _MOST_PARAMS])
        if changed:
            self._client.log_batch(self._run, tags=changed[:_MOST_PARAMS])
