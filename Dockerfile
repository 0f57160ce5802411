# The server with its CUDA libraries. Building needs no GPU; running on one needs the NVIDIA
# container toolkit: docker run --gpus all -e MOESTRO_API_KEY=... -p 8000:8000 -v models:/models ...
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04 AS build

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/moestro
WORKDIR /src
# The dependencies first: they change less often than the code, so their layer is reused.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY moestro/__init__.py moestro/__init__.py
RUN /opt/moestro/bin/pip install --no-cache-dir -c constraints.txt '.[cuda]'
COPY moestro moestro
RUN /opt/moestro/bin/pip install --no-cache-dir --no-deps --force-reinstall .

FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04
# Triton compiles a small C launcher for each kernel, hence the compiler and Python's headers.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --create-home moestro \
 && install -d -o moestro -g moestro /models
COPY --from=build /opt/moestro /opt/moestro

ENV PATH=/opt/moestro/bin:$PATH \
    HF_HOME=/models/hub \
    XDG_CACHE_HOME=/models/cache \
    MOESTRO_HOST=0.0.0.0 \
    MOESTRO_PORT=8000
USER moestro
WORKDIR /home/moestro
VOLUME /models
EXPOSE 8000
# Loading a large model takes minutes, during which /health answers 503 with the progress.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['MOESTRO_PORT'] + '/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["moestro"]
CMD ["serve"]
