# Two images: `penstock` for every part but the workers, `worker` with the CPU engine in an environment of its own.
# For GPUs put another engine environment into `worker` and name its interpreter in engine.python.
FROM python:3.11-slim-bookworm AS penstock
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /penstock
# More arguments for pip, such as the index of a torch without CUDA.
ARG PIP_ARGS=""
RUN pip install --no-cache-dir $PIP_ARGS torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY console console
COPY penstock penstock
COPY producer producer
COPY workers workers
COPY buffer buffer
COPY consumers consumers
RUN pip install --no-cache-dir -e '.[all]'
COPY examples examples
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["penstock"]

FROM penstock AS worker
# g++ and numactl: what SGLang on CPU looks for at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN bash workers/engine_env/install.sh .engine
