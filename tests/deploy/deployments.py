"""Readers of the files in deploy/: just enough of Compose and of kustomize for the tests here."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
"""Variables that LeaderWorkerSet sets, as in the second pod of two."""
KUSTOMIZATIONS = ("base", "overlays/multi-node", "overlays/multi-node-ray")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def compose() -> dict[str, Any]:
    return load(DEPLOY / "compose" / "compose.yml")


def default_of(text: str) -> str:
    """A Compose value with its variables at their defaults."""
    return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda match: match.group(1) or "", text)


def pinned_vllm() -> str:
    """The version of vLLM that this package is tested with."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        (requirement,) = tomllib.load(file)["project"]["optional-dependencies"]["cpu"]
    return requirement.split("==")[1]


def kustomize(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization: `resources`, and patches that merge maps, delete an object, or are JSON 6902."""
    kustomization = load(folder / "kustomization.yaml")
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "patches"}, "a field that is not read here"
    objects: list[dict[str, Any]] = []
    for resource in kustomization["resources"]:
        path = folder / resource
        objects += kustomize(path) if path.is_dir() else _documents(path)
    for patch in kustomization.get("patches", []):
        change = load(folder / patch["path"])
        if isinstance(change, list):
            for operation in change:
                _apply(_one(objects, patch["target"]["kind"], patch["target"]["name"]), operation)
        else:
            found = _one(objects, change["kind"], change["metadata"]["name"])
            if change.pop("$patch", "") == "delete":
                objects.remove(found)
            else:
                _merge(found, change)
    return objects


def _documents(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        # Aliases become copies, so that a patch changes one place.
        return [copy.deepcopy(_unshared(document)) for document in yaml.safe_load_all(file)]


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


def _one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def _merge(target: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        assert not isinstance(value, list), "merging lists depends on their keys, which are not known here"
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _apply(target: Any, operation: dict[str, Any]) -> None:
    *parents, last = operation["path"].lstrip("/").split("/")
    for step in parents:
        target = target[int(step) if isinstance(target, list) else step]
    assert operation["op"] in ("add", "replace")
    assert isinstance(target, dict)
    assert (last in target) == (operation["op"] == "replace"), operation["path"]
    target[last] = operation["value"]


def pod_templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every pod template among the objects, by the component that its label names."""
    templates = []
    for one in objects:
        spec = one.get("spec", {})
        templates += [spec["template"]] if "template" in spec else []
        for key in ("leaderTemplate", "workerTemplate"):
            templates += [spec["leaderWorkerTemplate"][key]] if "leaderWorkerTemplate" in spec else []
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def container(template: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in template["spec"]["containers"] if one["name"] == name]
    return found


def environment(one: dict[str, Any]) -> dict[str, str]:
    """Variables of a container or of a service, as far as they are given as values."""
    variables = one.get("env", one.get("environment", {}))
    if isinstance(variables, list):
        return {variable["name"]: variable["value"] for variable in variables if "value" in variable}
    return {name: default_of(str(value)) for name, value in variables.items()}


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a systemd unit, all values of each."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / name).read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


def words(text: str) -> list[str]:
    """A shell command's words from `vllm serve` on; what follows in the command must end there."""
    return re.sub(r"\"\$\w+\"", "2", text.partition("vllm serve ")[2]).split()


def serve_commands() -> dict[str, list[str]]:
    """The arguments of `vllm serve` in every deployment, its variables filled in."""
    services = compose()["services"]
    commands = {
        "compose cpu": words(services["vllm-cpu"]["command"][0]),
        "compose gpu": [default_of(word) for word in services["vllm-gpu"]["command"]],
    }
    server = dict(
        line.split("=", 1)
        for line in (DEPLOY / "systemd" / "server.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    commands["systemd"] = [server["VLLM_MODEL"], *server["VLLM_ARGS"].split()]
    for folder in KUSTOMIZATIONS:
        for component, template in pod_templates(kustomize(DEPLOY / "kubernetes" / folder)).items():
            arguments = container(template, "vllm")["args"]
            if len(arguments) == 1:
                if "vllm serve" not in arguments[0]:
                    continue
                arguments = words(arguments[0])
            commands[f"{folder} {component}"] = [
                re.sub(r"\$\((\w+)\)", lambda match: GROUP[match.group(1)], argument) for argument in arguments
            ]
    return commands
