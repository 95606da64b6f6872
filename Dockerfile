# One image for every role: `docker run grapevine-rl worker verifier v-0 --settings ...` and so on.
#
# TORCH=cpu (the default) takes the CPU build of torch, which is several GB smaller; TORCH=cuda the one for NVIDIA GPUs.

FROM python:3.11-slim AS build
ARG TORCH=cpu
ENV PATH=/opt/grapevine/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# A compiler for pycosat, which has no wheels; it stays behind in this stage.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/grapevine
WORKDIR /src
# torch first, and alone: what changes with every commit must not fetch it again.
COPY constraints.txt ./
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
    && case "$TORCH" in \
        cpu) pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" ;; \
        cuda) pip install -c constraints.txt "torch===$version" ;; \
        *) echo "TORCH is '$TORCH' but can only be cpu or cuda" >&2; exit 1 ;; \
    esac
COPY . .
RUN pip install -c constraints.txt ".[all]"

FROM python:3.11-slim
ENV PATH=/opt/grapevine/bin:$PATH PYTHONUNBUFFERED=1
# The folders exist with their owner, so that volumes mounted there are the user's as well.
RUN useradd --uid 10001 --create-home grapevine \
    && mkdir -p /srv/grapevine/runs /srv/grapevine/cache \
    && chown -R grapevine:grapevine /srv/grapevine
COPY --from=build /opt/grapevine /opt/grapevine
USER grapevine
WORKDIR /srv/grapevine
ENTRYPOINT ["grapevine"]
CMD ["--help"]
