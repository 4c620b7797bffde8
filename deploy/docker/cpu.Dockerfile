# syntax=docker/dockerfile:1
# specserve for CPUs. In the root of a checkout, with the address of an index that has torch's CPU
# build (pytorch.org, "Get started", tells it), which is a tenth of the size of the usual one:
#   docker build -f deploy/docker/cpu.Dockerfile --build-arg TORCH_INDEX_URL=... -t specserve:cpu .

FROM python:3.11.14-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The compiler stays in this stage: the wheel has the kernels for every instruction set.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# First torch alone: the other packages then take the build that is there. The refusal is here, as
# the build for GPUs would serve, too, but take gigabytes.
ARG TORCH_INDEX_URL
RUN python -m venv /opt/specserve \
    && /opt/specserve/bin/pip install -c constraints.txt \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0 \
    && /opt/specserve/bin/python -c "import torch; assert torch.version.cuda is None, \
'this is a torch for GPUs: name an index of CPU builds by --build-arg TORCH_INDEX_URL=...'"
COPY . .
RUN python -m pip install -c constraints.txt hatchling \
    && python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .
# A wheel for any platform is one whose kernels could not be compiled.
RUN if ls /wheels/*-any.whl; then exit 1; fi \
    && wheel="$(ls /wheels/*.whl)" \
    && /opt/specserve/bin/pip install -c constraints.txt "specserve[otel] @ file://$wheel"

FROM python:3.11.14-slim-bookworm
ARG REVISION=unknown
LABEL org.opencontainers.image.title="specserve" \
    org.opencontainers.image.description="An LLM inference server for low latency, on CPUs" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="$REVISION"
# The home holds models of the hub and measurements, so it is the one folder that is written.
RUN groupadd --gid 10001 specserve \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/specserve specserve \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/specserve
COPY --from=build /opt/specserve /opt/specserve
COPY --chmod=0755 deploy/docker/probe.py /usr/local/bin/specserve-probe
ENV PATH=/opt/specserve/bin:$PATH \
    HOME=/var/lib/specserve \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/specserve
VOLUME /var/lib/specserve
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["specserve-probe", "/health/live"]
ENTRYPOINT ["specserve", "serve", "--host", "0.0.0.0"]
# Who gives arguments of his own says again where the keys are, or --allow-no-keys.
CMD ["--api-key-file", "/run/secrets/api-keys"]
