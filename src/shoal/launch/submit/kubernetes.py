"""Manifests of a run on Kubernetes: a TrainJob of Kubeflow Trainer v2, or an Indexed Job of the core API.

In both, torchrun in each pod reads PET_* variables: Kubeflow's torch plugin injects them, the manifest of the Indexed
Job sets them. Pods mount one volume that all can write to, for the run's folder.
"""

from __future__ import annotations

import json
from typing import Literal

from shoal.launch.submit.request import CannotSubmit, Request

Kind = Literal["trainjob", "job"]
GRACE_S = 120
"""How long pods may take to stop with a checkpoint."""


def manifest(request: Request, *, kind: str, image: str | None, claim: str, mount: str, secret: str | None) -> str:
    """The manifest, as YAML."""
    if kind not in ("trainjob", "job"):
        raise CannotSubmit(f"--kind {kind!r}: expected trainjob (Kubeflow Trainer v2) or job (Indexed Job)")
    if image is None:
        raise CannotSubmit("--on k8s needs --image: a container image with Shoal, torch and the job's file")
    if not request.folder.startswith(mount.rstrip("/") + "/"):
        raise CannotSubmit(
            f"--folder {request.folder}: pods share the volume at {mount}; name a folder there, such as "
            f"{mount.rstrip('/')}/runs/{request.name}"
        )
    secret = secret or f"{request.name}-token"
    words = ["torchrun", "--shutdown-timeout", str(GRACE_S - 10), "-m", "shoal", *request.train]
    text = {"trainjob": _train_job, "job": _indexed_job}[kind](request, words, image, claim, mount, secret)
    return f"""# The ranks share a secret; make it once:
#   kubectl create secret generic {secret} --from-literal=token="$(openssl rand -hex 16)"
{text}"""


def _resources(request: Request) -> str:
    rows = {"cpu": str(request.cpus_per_rank * request.ranks_per_node)}
    rows |= {"nvidia.com/gpu": str(request.gpus_per_node)} if request.gpus_per_node else {}
    return json.dumps({"requests": rows, "limits": rows})


def _train_job(request: Request, words: list[str], image: str, claim: str, mount: str, secret: str) -> str:
    return f"""apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {request.name}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: {json.dumps(image)}
    numNodes: {request.nodes}
    numProcPerNode: {request.ranks_per_node}
    command: {json.dumps(words)}
    env:
      - name: SHOAL_TOKEN
        valueFrom: {{secretKeyRef: {{name: {secret}, key: token}}}}
      - {{name: OMP_NUM_THREADS, value: "{request.cpus_per_rank}"}}
    resourcesPerNode: {_resources(request)}
  runtimePatches:
    - manager: shoal.dev/submit
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: {GRACE_S}
                        volumes:
                          - name: shared
                            persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}
                        containers:
                          - name: node
                            volumeMounts: [{{name: shared, mountPath: {json.dumps(mount)}}}]
"""


def _indexed_job(request: Request, words: list[str], image: str, claim: str, mount: str, secret: str) -> str:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    deadline = f"\n  activeDeadlineSeconds: {60 * request.minutes}" if request.minutes is not None else ""
    return f"""apiVersion: v1
kind: Service
metadata:
  name: {request.name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{batch.kubernetes.io/job-name: {request.name}}}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {request.name}
spec:
  completions: {request.nodes}
  parallelism: {request.nodes}
  completionMode: Indexed
  backoffLimit: {request.retries * request.nodes}{deadline}
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      - action: Ignore
        onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
  template:
    spec:
      subdomain: {request.name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {GRACE_S}
      volumes:
        - name: shared
          persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}
      containers:
        - name: shoal
          image: {json.dumps(image)}
          command: {json.dumps(words)}
          env:
            - {{name: PET_NNODES, value: "{request.nodes}"}}
            - {{name: PET_NPROC_PER_NODE, value: "{request.ranks_per_node}"}}
            - name: PET_NODE_RANK
              valueFrom: {{fieldRef: {{fieldPath: "{index}"}}}}
            - {{name: PET_MASTER_ADDR, value: {request.name}-0.{request.name}}}
            - {{name: PET_MASTER_PORT, value: "29500"}}
            - name: SHOAL_TOKEN
              valueFrom: {{secretKeyRef: {{name: {secret}, key: token}}}}
            - {{name: OMP_NUM_THREADS, value: "{request.cpus_per_rank}"}}
          resources: {_resources(request)}
          volumeMounts: [{{name: shared, mountPath: {json.dumps(mount)}}}]
"""
