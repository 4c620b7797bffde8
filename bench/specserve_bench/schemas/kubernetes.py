"""Objects of a cluster, like those of Kubernetes: nested records with a kind and a version."""

from specserve_bench.schemas.parts import (
    Maybe,
    Schema,
    any_of,
    const,
    defining,
    flag,
    form,
    many,
    mapping,
    match,
    maybe,
    number,
    one,
    or_null,
    record,
    ref,
    text,
    whole,
)

NAME = match("^[a-z]([a-z0-9-]{0,8}[a-z0-9])?$")
LABELS = mapping(match("^[a-z]{0,6}$"))
METADATA = record(name=NAME, namespace=maybe(NAME), labels=maybe(LABELS))
QUANTITY = match("^[1-9][0-9]{0,2}(m|Ki|Mi|Gi)?$")
PORT = whole(1, 65_535)
PORT_OR_NAME = any_of(PORT, NAME)
PROTOCOL = one("TCP", "UDP", "SCTP")
SELECTOR = record(matchLabels=LABELS)
RESOURCES = record(
    limits=maybe(record(cpu=maybe(QUANTITY), memory=maybe(QUANTITY))),
    requests=maybe(record(cpu=maybe(QUANTITY))),
)
ENV = record(name=match("^[A-Z_]{1,8}$"), value=maybe(text(8)))
PROBE = record(
    httpGet=record(path=match("^/[a-z]{0,8}$"), port=PORT_OR_NAME),
    periodSeconds=maybe(whole(1, 60)),
)
CONTAINER = record(
    name=NAME,
    image=match("^[a-z]{1,8}(:[0-9]{1,2})?$"),
    env=maybe(many(ENV, 2)),
    resources=maybe(RESOURCES),
    livenessProbe=maybe(PROBE),
)
POD = record(containers=many(CONTAINER, 1, 1), restartPolicy=maybe(one("Always", "Never")))
TEMPLATE = record(metadata=maybe(record(labels=LABELS)), spec=POD)


def made(kind: str, version: str = "v1", /, **fields: Schema | Maybe) -> Schema:
    head = record(apiVersion=const(version), kind=const(kind), metadata=METADATA)
    return record(head["properties"], **fields)


def with_spec(kind: str, version: str = "v1", /, **fields: Schema | Maybe) -> Schema:
    return made(kind, version, spec=record(**fields))


KUBERNETES: dict[str, Schema] = {
    "pod": made("Pod", spec=POD),
    "service": with_spec(
        "Service",
        type=one("ClusterIP", "NodePort", "LoadBalancer"),
        ports=many(
            record(port=PORT, targetPort=maybe(PORT_OR_NAME), protocol=maybe(PROTOCOL)), 2, 1
        ),
        selector=maybe(LABELS),
    ),
    "deployment": with_spec(
        "Deployment", "apps/v1", replicas=whole(0, 9), selector=SELECTOR, template=TEMPLATE
    ),
    "stateful_set": with_spec(
        "StatefulSet", "apps/v1", serviceName=NAME, template=TEMPLATE, replicas=maybe(whole(0, 5))
    ),
    "daemon_set": with_spec("DaemonSet", "apps/v1", selector=SELECTOR, template=TEMPLATE),
    "job": with_spec(
        "Job",
        "batch/v1",
        backoffLimit=maybe(whole(0, 6)),
        parallelism=maybe(whole(1, 4)),
        template=TEMPLATE,
    ),
    "cron_job": with_spec(
        "CronJob",
        "batch/v1",
        schedule=match("^([0-9]{1,2}|\\*) \\* \\* \\* \\*$"),
        suspend=maybe(flag()),
        concurrencyPolicy=one("Allow", "Forbid", "Replace"),
    ),
    "config_map": made("ConfigMap", data=maybe(mapping(text(16))), immutable=maybe(flag())),
    "secret": made(
        "Secret", type=const("Opaque"), data=mapping(match("^([A-Za-z0-9+/]{4}){0,3}$"))
    ),
    "namespace": made("Namespace"),
    "ingress": with_spec(
        "Ingress",
        "networking.k8s.io/v1",
        rules=many(
            record(
                host=match("^[a-z]{1,8}\\.example$"),
                paths=many(
                    record(path=match("^/[a-z]{0,6}$"), pathType=one("Exact", "Prefix")), 2, 1
                ),
            ),
            2,
            1,
        ),
    ),
    "network_policy": with_spec(
        "NetworkPolicy",
        "networking.k8s.io/v1",
        podSelector=SELECTOR,
        policyTypes=many(one("Ingress", "Egress"), 2, 1),
        ingress=maybe(many(record(ports=many(record(port=PORT, protocol=PROTOCOL), 2)), 1)),
    ),
    "volume": with_spec(
        "PersistentVolume",
        capacity=record(storage=QUANTITY),
        accessModes=many(one("ReadWriteOnce", "ReadOnlyMany"), 2, 1),
        hostPath=maybe(record(path=match("^(/[a-z]{1,6}){1,3}$"))),
    ),
    "claim": with_spec(
        "PersistentVolumeClaim",
        resources=record(requests=record(storage=QUANTITY)),
        storageClassName=or_null(NAME),
    ),
    "storage_class": made(
        "StorageClass",
        "storage.k8s.io/v1",
        provisioner=match("^[a-z]{1,8}/[a-z]{1,8}$"),
        reclaimPolicy=maybe(one("Delete", "Retain")),
    ),
    "role": made(
        "Role",
        "rbac.authorization.k8s.io/v1",
        rules=many(
            record(
                apiGroups=many(one("", "apps", "batch"), 2, 1),
                resources=many(one("pods", "services", "jobs"), 2, 1),
                verbs=many(one("get", "list", "watch", "create"), 3, 1),
            ),
            2,
            1,
        ),
    ),
    "role_binding": made(
        "RoleBinding",
        "rbac.authorization.k8s.io/v1",
        subjects=many(record(kind=one("User", "Group", "ServiceAccount"), name=NAME), 2),
        roleRef=record(kind=one("Role", "ClusterRole"), name=NAME),
    ),
    "service_account": made("ServiceAccount", automountServiceAccountToken=maybe(flag())),
    "autoscaler": with_spec(
        "HorizontalPodAutoscaler",
        "autoscaling/v2",
        minReplicas=maybe(whole(1, 3)),
        maxReplicas=whole(3, 9),
        metrics=many(
            record(type=const("Resource"), target=record(averageUtilization=whole(1, 100))), 1
        ),
    ),
    "disruption_budget": with_spec(
        "PodDisruptionBudget",
        "policy/v1",
        minAvailable=any_of(whole(0, 9), match("^[1-9][0-9]?%$")),
        selector=SELECTOR,
    ),
    "priority_class": made(
        "PriorityClass",
        value=whole(-(10**9), 10**9),
        globalDefault=maybe(flag()),
        description=maybe(text(16)),
    ),
    "quota": with_spec("ResourceQuota", hard=mapping(QUANTITY, "^(cpu|memory|pods)$", 3)),
    "limit_range": with_spec(
        "LimitRange",
        limits=many(
            record(
                type=one("Container", "Pod"),
                max=maybe(record(cpu=QUANTITY)),
                min=maybe(record(cpu=QUANTITY)),
            ),
            2,
            1,
        ),
    ),
    "endpoints": made(
        "Endpoints",
        subsets=many(
            record(addresses=many(record(ip=form("ipv4")), 2, 1), ports=many(record(port=PORT), 1)),
            1,
        ),
    ),
    "node": with_spec(
        "Node",
        podCIDR=match("^10\\.[0-9]{1,2}\\.0\\.0/16$"),
        taints=maybe(many(record(key=NAME, effect=one("NoSchedule", "NoExecute")), 2)),
        unschedulable=maybe(flag()),
    ),
    "event": made(
        "Event",
        reason=match("^[A-Z][a-z]{2,8}$"),
        count=maybe(whole(1, 99)),
        lastTimestamp=or_null(form("date-time")),
        type=one("Normal", "Warning"),
    ),
    "lease": with_spec("Lease", holderIdentity=or_null(NAME), leaseDurationSeconds=whole(1, 60)),
    "status": record(
        kind=const("Status"),
        status=one("Success", "Failure"),
        code=whole(200, 599),
        message=maybe(text(20)),
    ),
    "list": record(kind=const("List"), items=many(made("Namespace"), 1)),
    "container": CONTAINER,
    "resources": RESOURCES,
    "toleration": record(
        key=maybe(NAME),
        operator=one("Exists", "Equal"),
        tolerationSeconds=maybe(or_null(whole(0, 600))),
    ),
    "affinity": record(
        terms=many(
            record(
                weight=whole(1, 100), key=NAME, operator=one("In", "NotIn"), values=many(NAME, 2, 1)
            ),
            2,
        )
    ),
    "volumes": many(
        any_of(
            record(name=NAME, emptyDir=record()),
            record(name=NAME, configMap=record(name=NAME, optional=maybe(flag()))),
            record(name=NAME, secret=record(secretName=NAME, defaultMode=maybe(whole(0, 511)))),
        ),
        3,
        1,
    ),
    "security": record(
        runAsUser=maybe(whole(0, 65_535)),
        privileged=maybe(flag()),
        capabilities=maybe(record(add=many(one("NET_ADMIN", "SYS_TIME"), 2))),
    ),
    "custom_resource": record(
        {"apiVersion": match("^[a-z]{1,6}\\.example/v[12]$"), "kind": match("^[A-Z][a-z]{1,8}$")},
        metadata=METADATA,
        spec=record(size=whole(1, 5), ratio=number(0, 1)),
        status=maybe(record(ready=flag())),
    ),
    "schema_of_a_schema": defining(
        ref("props"),
        props=any_of(
            record(type=one("string", "integer"), description=maybe(text(12))),
            record(type=const("array"), items=ref("props"), maxItems=maybe(whole(0, 9))),
        ),
    ),
    "patch": many(
        any_of(
            record(
                op=one("add", "replace"), path=match("^(/[a-z]{1,5}){1,3}$"), value=or_null(text(8))
            ),
            record(op=const("remove"), path=match("^(/[a-z]{1,5}){1,3}$")),
        ),
        3,
        1,
    ),
    "probe": any_of(PROBE, record(exec=record(command=many(text(8, 1), 3, 1)))),
    "kustomization": record(
        resources=many(match("^[a-z]{1,8}\\.yaml$"), 3, 1),
        images=maybe(many(record(name=NAME, newTag=match("^v[0-9]{1,2}$")), 1)),
        commonLabels=maybe(LABELS),
    ),
}
