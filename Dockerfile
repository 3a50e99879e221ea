# syntax=docker/dockerfile:1.7
# keepleft in a container, for CPUs or for NVIDIA GPUs. docs/install.md says how to run it.
#
#   docker build --tag keepleft:cpu .
#   docker build --tag keepleft:cuda --build-arg VARIANT=cuda .
#
# Versions and hashes are those of requirements/*.lock, as with make. The base images are pinned by version; to pin
# the very bytes, give --build-arg PYTHON_IMAGE=python:TAG@sha256:DIGEST.
ARG VARIANT=cpu
ARG PYTHON_IMAGE=python:3.13.9-slim-trixie
ARG NODE_IMAGE=node:22.21.1-bookworm-slim

# -- the explorer's page -------------------------------------------------------------------------
FROM ${NODE_IMAGE} AS page
WORKDIR /web
COPY web/package.json web/package-lock.json ./
RUN npm ci --omit=dev --ignore-scripts --no-audit --no-fund
COPY web/build.mjs ./
COPY web/src ./src
RUN node build.mjs /page

# -- wheels: what is locked and published as source only is built here, and keepleft itself ------
FROM ${PYTHON_IMAGE} AS wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements/build.lock requirements/base.lock requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.lock \
    && pip wheel --no-deps --no-build-isolation --require-hashes --requirement requirements/base.lock \
        --wheel-dir /wheels/locked
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY web ./web
COPY src ./src
COPY translator ./translator
COPY --from=page /page ./src/keepleft/serving/explorer/page
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels/own . ./translator

# -- the environment without keepleft, which changes rarely: a large layer that stays cached ------
FROM ${PYTHON_IMAGE} AS environment-cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/keepleft \
    && /opt/keepleft/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" "${TORCH}"
RUN --mount=type=bind,from=wheels,source=/wheels/locked,target=/wheels \
    /opt/keepleft/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl

FROM ${PYTHON_IMAGE} AS environment-cuda
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements/torch.lock /requirements/
RUN python -m venv /opt/keepleft \
    && /opt/keepleft/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement /requirements/torch.lock
RUN --mount=type=bind,from=wheels,source=/wheels/locked,target=/wheels \
    /opt/keepleft/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl

# -- what differs at run time --------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime-cpu

FROM ${PYTHON_IMAGE} AS runtime-cuda
# Triton compiles a small launcher for each kernel with the system's C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# a stage of this file, which has no tag
# hadolint ignore=DL3006
FROM environment-${VARIANT} AS environment

# -- the image -----------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM runtime-${VARIANT} AS runtime
LABEL org.opencontainers.image.title="keepleft" \
      org.opencontainers.image.description="Train, run, serve, see and audit Transformers that do not peek" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 keepleft \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin keepleft \
    && install --directory --owner keepleft --group keepleft /models
COPY --from=environment /opt/keepleft /opt/keepleft
RUN --mount=type=bind,from=wheels,source=/wheels/own,target=/wheels \
    /opt/keepleft/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
# Everything that is written goes to the volume: fetched models, the hub's cache, compiled kernels.
ENV PATH=/opt/keepleft/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    KEEPLEFT_DATA=/models \
    HF_HOME=/models/hub \
    TRITON_CACHE_DIR=/models/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/models/cache/inductor
VOLUME /models
WORKDIR /models
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["keepleft"]
CMD ["serve", "translator", "--host", "0.0.0.0"]
