# syntax=docker/dockerfile:1
# specserve for NVIDIA GPUs. In the root of a checkout:
#   docker build -f deploy/docker/cuda.Dockerfile -t specserve:cuda .

# nvcc is needed at run time, too: FlashInfer compiles its kernels at the first start of a model,
# about a minute for each size of heads, into the home folder. Keep that in a volume.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Triton compiles a few lines of C against Python's headers; FlashInfer runs ninja.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# First torch alone: the other packages then take the build that is there. TORCH_INDEX_URL names
# another index than pip's, for another version of CUDA.
ARG TORCH_INDEX_URL
RUN python3 -m venv /opt/specserve \
    && /opt/specserve/bin/pip install -c constraints.txt \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0 \
    && /opt/specserve/bin/python -c "import torch; assert torch.version.cuda is not None, \
'this is a torch without CUDA: name an index of CUDA builds by --build-arg TORCH_INDEX_URL=...'"
COPY . .
# The wheel has the C++ kernels, of which n-grams are used beside a GPU, too.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install -c constraints.txt hatchling \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .
# A wheel for any platform is one whose kernels could not be compiled.
RUN if ls /wheels/*-any.whl; then exit 1; fi \
    && wheel="$(ls /wheels/*.whl)" \
    && /opt/specserve/bin/pip install -c constraints.txt "specserve[gpu,otel] @ file://$wheel"

FROM base
ARG REVISION=unknown
LABEL org.opencontainers.image.title="specserve" \
    org.opencontainers.image.description="An LLM inference server for low latency, on GPUs" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="$REVISION"
# The home holds models of the hub, compiled kernels and measurements: all that is written.
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
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["specserve-probe", "/health/live"]
ENTRYPOINT ["specserve", "serve", "--host", "0.0.0.0", "--set", "model.device=cuda"]
# Who gives arguments of his own says again where the keys are, or --allow-no-keys.
CMD ["--api-key-file", "/run/secrets/api-keys"]
