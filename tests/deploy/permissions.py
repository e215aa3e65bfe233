"""What every deployment grants to every program in it, read from its own files: the table of docs/security.md.

python -m tests.deploy.permissions
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.deploy.deployments import DEPLOY, compose, kustomize, pod_templates, unit

HEAD = ("where", "program", "user", "capabilities", "more privileges", "its root", "writes to", "is reached by")
NOBODY = "nobody"


def table() -> str:
    """The table as Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *_compose(), *_kubernetes(), *_systemd()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _compose() -> Iterator[tuple[str, ...]]:
    for name, service in compose()["services"].items():
        mounts = [mount.split(":") for mount in service.get("volumes", [])]
        ports = [port.rpartition(":")[0].partition(":")[0] for port in service.get("ports", [])]
        networks = service.get("networks", [])
        reached = f"{', '.join(sorted(set(ports)))} of the host" if ports else ""
        within = ", ".join(sorted(networks)) if service.get("network_mode") != "none" else ""
        yield (
            "compose",
            f"`{name}`",
            service.get("user", "its image's"),
            ", ".join(service.get("cap_add", [])) or "none",
            "no" if service["security_opt"] == ["no-new-privileges:true"] else "YES",
            "read-only" if service.get("read_only") else "writable",
            ", ".join(f"`{mount[1]}`" for mount in mounts if mount[2:] != ["ro"]) or "nothing",
            "; ".join(filter(None, (reached, within and f"networks {within}"))) or NOBODY,
        )


def _kubernetes() -> Iterator[tuple[str, ...]]:
    templates: dict[str, Any] = {}
    for folder in ("base", "overlays/multi-node"):
        templates |= pod_templates(kustomize(DEPLOY / "kubernetes" / folder))
    for component, template in templates.items():
        spec = template["spec"]
        for one in spec["containers"]:
            security = one["securityContext"]
            yield (
                "Kubernetes",
                f"`{component}`: `{one['name']}`",
                f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}",
                "none" if security["capabilities"] == {"drop": ["ALL"]} else str(security["capabilities"]),
                "YES" if security["allowPrivilegeEscalation"] else "no",
                "read-only" if security["readOnlyRootFilesystem"] else "writable",
                ", ".join(f"`{mount['mountPath']}`" for mount in one["volumeMounts"] if not mount.get("readOnly"))
                or "nothing",
                _reached(component, one["name"]),
            )


def _reached(component: str, name: str) -> str:
    """By the NetworkPolicy: from the namespace, from the monitoring, from the server's own pods."""
    (policy,) = [one for one in kustomize(DEPLOY / "kubernetes" / "base") if one["kind"] == "NetworkPolicy"]
    port = 9425 if name == "exporter" else 8000
    by = []
    for rule in policy["spec"]["ingress"]:
        ports = {entry["port"] for entry in rule.get("ports", [])}
        if ports and port not in ports:
            continue
        for peer in rule["from"]:
            if "namespaceSelector" in peer:
                by.append(f"namespace {peer['namespaceSelector']['matchLabels']['kubernetes.io/metadata.name']}")
            elif peer == {"podSelector": {}}:
                by.append("pods of the namespace")
            else:
                by.append("the server's own pods")
    return f"{port}: {', '.join(by)}"


def _systemd() -> Iterator[tuple[str, ...]]:
    for name in ("vllm-k25-server.service", "vllm-k25-export.service"):
        settings = {key: values[-1] for key, values in unit(name).items()}
        folders = {"RuntimeDirectory": "/run", "StateDirectory": "/var/lib", "CacheDirectory": "/var/cache"}
        own = [f"`{root}/{settings[key]}`" for key, root in folders.items() if key in settings]
        alone = settings.get("IPAddressAllow") == "localhost" and settings.get("IPAddressDeny") == "any"
        yield (
            "systemd",
            f"`{name}`",
            settings["User"],
            settings["CapabilityBoundingSet"] + settings["AmbientCapabilities"] or "none",
            "no" if settings["NoNewPrivileges"] == "yes" else "YES",
            "read-only" if settings["ProtectSystem"] == "strict" else "writable",
            ", ".join([*own, *(["`/tmp` of its own"] if settings["PrivateTmp"] == "yes" else [])]),
            "this machine" if alone else "whom `server.env` says (127.0.0.1)",
        )


if __name__ == "__main__":
    print(table())
