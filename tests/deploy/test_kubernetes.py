"""deploy/kubernetes.yaml against what the public definitions of its objects allow, and against our own flags."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import main_multi_gpu
from multigpu_cli.commands.requests import build_config

FILE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes.yaml"
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGT]i|m)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
RESOURCES = {"cpu": QUANTITY, "memory": QUANTITY, "nvidia.com/gpu": int, "storage": QUANTITY}
CONTAINER = {
    "name!": NAME,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": re.compile(r"[A-Za-z_]\w*"), "value": str}],
    "resources": {"requests": RESOURCES, "limits": RESOURCES},
    "securityContext": {"allowPrivilegeEscalation": bool, "runAsNonRoot": bool},
    "volumeMounts": [{"name!": NAME, "mountPath!": re.compile(r"/.*")}],
}
POD = {
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
    "containers!": [CONTAINER],
    "volumes": [
        {
            "name!": NAME,
            "persistentVolumeClaim": {"claimName!": NAME},
            "emptyDir": {"medium": ("", "Memory"), "sizeLimit": QUANTITY},
        }
    ],
}
REPLICAS = {
    "replicas": int,
    "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
    "template": {"spec!": POD},
}
KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "PersistentVolumeClaim"): {
        "accessModes": [("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")],
        "resources": {"requests": RESOURCES},
        "storageClassName": str,
    },
    ("kubeflow.org/v1", "PyTorchJob"): {  # training-operator 1.9: manifests/base/crds/kubeflow.org_pytorchjobs.yaml
        "nprocPerNode": str,
        "runPolicy": {
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "cleanPodPolicy": ("All", "Running", "None"),
            "suspend": bool,
            "ttlSecondsAfterFinished": int,
        },
        "elasticPolicy": {
            "maxReplicas": int,
            "maxRestarts": int,
            "minReplicas": int,
            "rdzvBackend": ("c10d", "etcd", "etcd-v2"),
            "rdzvConf": [{"key": str, "value": str}],
            "rdzvHost": str,
            "rdzvId": str,
            "rdzvPort": int,
        },
        "pytorchReplicaSpecs!": {"Master": REPLICAS, "Worker": REPLICAS},
    },
}


def faults(value: Any, allowed: Any, where: str) -> list[str]:
    """What a value has that its definition does not allow; "name!" must be there."""
    if isinstance(allowed, dict):
        if not isinstance(value, dict):
            return [f"{where}: no object"]
        fields = {name.rstrip("!"): each for name, each in allowed.items()}
        missing = [name for name in allowed if name.endswith("!") and name.rstrip("!") not in value]
        wrong = [f"{where}: unknown field {name}" for name in value if name not in fields]
        wrong += [f"{where}: {name.rstrip('!')} is missing" for name in missing]
        for name in value.keys() & fields.keys():
            wrong += faults(value[name], fields[name], f"{where}.{name}")
        return wrong
    if isinstance(allowed, list):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [fault for number, each in enumerate(value) for fault in faults(each, allowed[0], f"{where}[{number}]")]
    if isinstance(allowed, tuple):
        return [] if value in allowed else [f"{where}: {value!r} is none of {allowed}"]
    if isinstance(allowed, re.Pattern):
        return [] if isinstance(value, str) and allowed.fullmatch(value) else [f"{where}: {value!r}"]
    return [] if type(value) is allowed else [f"{where}: {value!r} is no {allowed.__name__}"]


def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text()))


def faults_of(found: dict[str, Any]) -> list[str]:
    kind = (found.get("apiVersion", ""), found.get("kind", ""))
    shape = {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": {"name!": NAME, "labels": dict},
        "spec!": KINDS.get(kind, {}),
    }
    return faults(found, shape, found.get("kind", "?")) if kind in KINDS else [f"unknown kind {kind}"]


def job() -> dict[str, Any]:
    [found] = [each["spec"] for each in objects() if each["kind"] == "PyTorchJob"]
    return found  # type: ignore[no-any-return]


def test_each_object_is_what_its_definition_allows() -> None:
    assert [fault for each in objects() for fault in faults_of(each)] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "elasticPolicy", "minNodes"], 1),
        (["spec", "elasticPolicy", "maxRestarts"], "100"),
        (["spec", "pytorchReplicaSpecs", "Worker", "restartPolicy"], "OnError"),
        (["spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers"], [{"name": "pytorch"}]),
        (["apiVersion"], "kubeflow.org/v2"),
    ],
)
def test_what_is_not_allowed_shows(path: list[str], value: Any) -> None:
    spoilt = objects()[1]
    place = spoilt
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert faults_of(spoilt) != []


def test_the_job_is_elastic_and_its_volumes_are_there() -> None:
    policy, worker = job()["elasticPolicy"], job()["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] < worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch", "the operator gives its variables to this one"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = next(each for each in objects() if each["kind"] == "PersistentVolumeClaim")
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_its_command_passes_torchruns_parser_and_our_door() -> None:
    [container] = job()["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["tini", "--", "torchrun"]
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(container["args"])
    assert (given.module, given.training_script) == (True, "main_multi_gpu")
    context = typer.main.get_group(main_multi_gpu.app).make_context("multigpu", given.training_script_args)
    config = build_config(context.params, {})
    assert config.checkpoint.save_dir == "/runs/digits"
    assert config.batch.global_size == 256, "the curve does not depend on how many nodes there are"
