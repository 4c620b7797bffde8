"""The Helm chart: its values without helm, and with it what Kubernetes and the server get."""

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from specserve.cli import command as cli
from specserve.config import load_config
from specserve.server.serve import FLUSH_SECONDS
from specserve.version import VERSION
from tests.deploy.tools import helm, program

HELM = Path(__file__).parents[2] / "deploy/helm"
CHART = HELM / "specserve"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VARIANTS = sorted(CHART.glob("ci/*.yaml"))
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda path: path.stem)


def read(path):
    return yaml.safe_load(path.read_text())


def merged(values, others):
    """As helm merges values: tables key by key."""
    both = {k: merged(values[k], others[k]) for k in others if isinstance(values.get(k), dict)}
    return values | others | both


def values(variant):
    return merged(read(CHART / "values.yaml"), read(variant))


def settings(config):
    return {f"{section}.{key}": v for section, keys in config.items() for key, v in keys.items()}


def test_the_schema_has_the_settings_of_the_config():
    spec = importlib.util.spec_from_file_location("write_schema", HELM / "write_schema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.with_settings(SCHEMA) == SCHEMA, "run python deploy/helm/write_schema.py"


def test_the_chart_is_of_this_version_and_its_schema_names_every_value():
    chart = read(CHART / "Chart.yaml")
    assert chart["appVersion"] == VERSION
    assert {*SCHEMA["properties"]} == {*read(CHART / "values.yaml"), "global"}


@each_variant
def test_the_values_are_those_of_the_schema_and_settings_that_the_server_knows(variant):
    jsonschema.validate(values(variant), SCHEMA)
    load_config(None, settings(values(variant)["config"]))


def test_the_schema_refuses_a_setting_that_the_server_does_not_know():
    wrong = merged(values(VARIANTS[0]), {"config": {"server": {"drain_secs": 3}}})
    with pytest.raises(jsonschema.ValidationError, match="drain_secs"):
        jsonschema.validate(wrong, SCHEMA)


def template(*flags):
    command = [helm(), "template", "mine", str(CHART), "--namespace=ns", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(*flags):
    """The manifests by their kinds."""
    told = template(*flags)
    assert told.returncode == 0, told.stderr
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(told.stdout)}


def pod(manifests):
    spec = manifests["Deployment"]["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


@pytest.mark.slow
@each_variant
def test_helm_finds_nothing_to_complain_of(variant):
    command = [helm(), "lint", "--strict", "--quiet", "-f", variant, CHART]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.slow
@pytest.mark.parametrize("release", ["1.27", "1.37"])
@each_variant
def test_kubernetes_takes_the_manifests(variant, release, tmp_path):
    manifests = tmp_path / "manifests.yaml"
    manifests.write_text(template("-f", variant).stdout)
    command = [program("kubernetes-validate"), "--strict", "-k", release, manifests]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0 and "passed for resource deployment" in told.stdout, told.stdout


@pytest.mark.slow
@each_variant
def test_the_server_gets_the_config_of_the_values(variant, tmp_path):
    manifests = rendered("-f", variant)
    file = tmp_path / "config.toml"
    file.write_text(manifests["ConfigMap"]["data"]["config.toml"])
    asked = values(variant)
    assert load_config(file) == load_config(None, settings(asked["config"]))
    _, container = pod(manifests)
    args = cli.parser({}).parse_args(["serve", *container["args"]])
    assert [*map(str, args.config)] == ["/etc/specserve/config/config.toml"]
    assert args.api_key_file == "/etc/specserve/keys/api-keys"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/etc/specserve/config", "/etc/specserve/keys", "/var/lib/specserve", "/tmp"} <= mounted
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (
        2 if asked["device"] == "cuda" else None
    )


@pytest.mark.slow
@each_variant
def test_a_pod_has_longer_to_end_than_the_server_takes(variant):
    spec, container = pod(rendered("-f", variant))
    asked = values(variant)
    needed = asked["preStopSeconds"] + asked["config"]["server"]["drain_seconds"] + FLUSH_SECONDS
    assert spec["terminationGracePeriodSeconds"] > needed
    [_, seconds] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert int(seconds) == asked["preStopSeconds"]


@pytest.mark.slow
def test_a_pod_is_probed_with_its_key_where_it_has_keys():
    _, container = pod(rendered("--set=auth.existingSecret=mine"))
    command = ["specserve-probe", "/health/ready", "/etc/specserve/keys/api-keys"]
    for probe in "startupProbe", "readinessProbe":
        assert container[probe]["exec"]["command"] == command
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    _, container = pod(rendered("--set=auth.allowNoKeys=true"))
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert "--allow-no-keys" in container["args"]
    assert "keys" not in {mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.slow
def test_a_pod_runs_as_nobody_and_writes_in_its_volumes_alone():
    spec, container = pod(rendered("--set=auth.allowNoKeys=true"))
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and own["capabilities"] == {"drop": ["ALL"]}
    assert own["allowPrivilegeEscalation"] is False


@pytest.mark.slow
def test_a_change_of_the_config_or_the_keys_starts_other_pods():
    def annotations(*flags):
        deployment = rendered("-f", VARIANTS[0], *flags)["Deployment"]
        return deployment["spec"]["template"]["metadata"]["annotations"]

    usual = annotations()
    assert annotations("--set=service.port=81") == usual
    assert annotations("--set=config.server.drain_seconds=9") != usual
    assert annotations("--set=auth.keys={other}") != usual


@pytest.mark.slow
def test_what_the_page_says_to_install_is_a_chart():
    page = (HELM.parents[1] / "docs/deployment.md").read_text()
    [flags] = re.findall(r"^helm install mine deploy/helm/specserve (.*)", page, re.MULTILINE)
    _, container = pod(rendered(*shlex.split(flags)))
    assert container["image"] == f"registry.example/specserve:{VERSION}-cpu"


ROUTED = "--set=auth.allowNoKeys=true", "--set=router.enabled=true", "--set=router.image=a/router"


@pytest.mark.slow
def test_a_router_finds_the_pods_and_its_service_finds_the_router_alone():
    told = yaml.safe_load_all(template(*ROUTED, "--set=replicas=3").stdout)
    named = {(each["kind"], each["metadata"]["name"]): each for each in told}
    pods, router = (
        named["Deployment", name]["spec"] for name in ("mine-specserve", "mine-specserve-router")
    )
    assert pods["replicas"] == 3
    [container] = router["template"]["spec"]["containers"]
    args = container["args"]
    looked_for = dict(each.split("=") for each in args[args.index("--selector") + 1 :])
    assert looked_for.items() <= pods["template"]["metadata"]["labels"].items()
    [port] = [each["containerPort"] for each in pods["template"]["spec"]["containers"][0]["ports"]]
    assert f"--service-discovery-port={port}" in args
    assert "--service-discovery-namespace=ns" in args
    labels = [each["template"]["metadata"]["labels"] for each in (pods, router)]
    for name, found in (("mine-specserve", 0), ("mine-specserve-router", 1)):
        chosen = named["Service", name]["spec"]["selector"].items()
        assert [chosen <= each.items() for each in labels] == [found == 0, found == 1]


@pytest.mark.slow
def test_kubernetes_takes_the_router_and_an_ingress_leads_to_it(tmp_path):
    told = template(*ROUTED, "--set=ingress.enabled=true", "--set=ingress.host=a.example")
    (tmp_path / "manifests.yaml").write_text(told.stdout)
    command = [
        program("kubernetes-validate"),
        "--strict",
        "-k",
        "1.37",
        tmp_path / "manifests.yaml",
    ]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0 and "passed for resource rolebinding" in checked.stdout
    [ingress] = [m for m in yaml.safe_load_all(told.stdout) if m["kind"] == "Ingress"]
    [path] = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == "mine-specserve-router"


REFUSED = {
    "no word about keys": (["auth.allowNoKeys=false"], "set exactly one of auth.keys"),
    "two ways to keys": (["auth.existingSecret=mine"], "set exactly one of auth.keys"),
    "an unknown setting": (["config.server.drain_secs=3"], "drain_secs"),
    "a value out of range": (["config.scheduler.max_running=0"], "max_running"),
    "no time to drain": (["config.server.drain_seconds=null"], "drain_seconds"),
    "an address": (["config.server.host=::"], "config.server.host is set by the chart"),
    "a port as argument": (["extraArgs={--port=1}"], "--port=1 is set by the chart"),
    "a device of its own": (["config.model.device=cuda"], "set device = cpu or cuda instead"),
    "a folder without a volume": (["config.model.path=/models/m"], "set models.existingClaim"),
    "a draft model without a volume": (["config.drafter.model=/models/m"], "config.drafter"),
    "a download without a network": (
        ["config.model.path=a/b", "networkPolicy.enabled=true", "networkPolicy.allowEgress=false"],
        "allowEgress = false forbids",
    ),
    "KEDA without Prometheus": (["autoscaling.kind=keda"], "set autoscaling.prometheusAddress"),
    "more pods at least than at most": (
        ["autoscaling.kind=hpa", "autoscaling.minReplicas=9"],
        "exceeds autoscaling.maxReplicas",
    ),
    "a router without an image": (["router.enabled=true"], "set router.image"),
    "a router before keys": (
        ["router.enabled=true", "router.image=a", "auth.allowNoKeys=false", "auth.keys={a}"],
        "router.enabled needs servers without keys",
    ),
    "an ingress without a host": (["ingress.enabled=true"], "set ingress.host"),
    "a certificate": (["config.server.tls_certificate_file=a"], "TLS is the ingress's"),
    "a key of TLS": (["config.server.tls_key_file=a"], "TLS is the ingress's"),
    "a certificate as argument": (["extraArgs={--ssl-certfile=a}"], "TLS is the ingress's"),
    "a certificate by --set": (
        ["extraArgs={--set=server.tls_key_file=a}"],
        "TLS is the ingress's",
    ),
    "requests of keys without keys": (
        ["config.server.max_requests_per_key=2"],
        "max_requests_per_key needs keys",
    ),
    "tokens of keys without keys": (
        ["config.server.max_tokens_per_minute_per_key=2"],
        "max_tokens_per_minute_per_key needs keys",
    ),
    "an interval for other streams": (
        ["config.server.stream_interval_ms=20"],
        "set that, too, or leave it out",
    ),
    "more GPUs than ranks": (["device=cuda", "gpus=2"], "set gpus = 1"),
    "fewer GPUs than ranks": (
        ["device=cuda", "config.parallel.tensor=2", "config.parallel.pipeline=2"],
        "4 ranks, which use a GPU each: set gpus = 4",
    ),
    "ranks of other pods": (
        ["config.parallel.tensor=2", "config.parallel.address=a:1"],
        "all ranks of a server are in its pod",
    ),
    "ranks as argument": (["extraArgs={--tensor-parallel-size=2}"], "set config.parallel instead"),
    "a key with a space": (["auth.keys={a b}"], "auth/keys"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_it_is_installed(flags, complaint):
    told = template("--set=auth.allowNoKeys=true", *(f"--set={flag}" for flag in flags))
    assert told.returncode != 0 and complaint in told.stderr, told.stderr


@pytest.mark.slow
def test_limits_of_keys_and_an_interval_are_taken_with_what_they_need():
    server = "max_requests_per_key=2", "stream_flush=interval", "stream_interval_ms=20"
    flags = (f"--set=config.server.{setting}" for setting in server)
    assert rendered("--set=auth.existingSecret=mine", *flags)
