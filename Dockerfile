# Lanekeeper as an image: not root, dependencies checked by hash.
#   docker build -t lanekeeper .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
COPY requirements.lock requirements-build.lock ./
RUN python3 -m venv /opt/lanekeeper \
 && /opt/lanekeeper/bin/pip install --quiet --require-hashes --only-binary=:all: -r requirements.lock \
 && python3 -m venv /opt/build \
 && /opt/build/bin/pip install --quiet --require-hashes --only-binary=:all: -r requirements-build.lock
COPY pyproject.toml README.md LICENSE ./
COPY lanekeeper lanekeeper
COPY topology topology
COPY consumers consumers
COPY service service
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir /dist ./lanekeeper . \
 && /opt/lanekeeper/bin/pip install --quiet --no-deps --no-index /dist/*.whl

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/lanekeeper /opt/lanekeeper
# For the store, unless LANEKEEPER_STORE_URL names another; to be a volume where it shall outlive the container.
RUN install -d -o 10001 -g 10001 -m 700 /var/lib/lanekeeper
ENV PATH=/opt/lanekeeper/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/var/lib
# By number, so that Kubernetes can see that it is not root; it needs no home and no name.
USER 10001:10001
WORKDIR /tmp
# It listens on the container's loopback, where the health check below finds it. To reach a gateway, or a worker's health,
# from outside: LANEKEEPER_GATEWAY__HOST=0.0.0.0.
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/healthz', timeout=2).close()"]
ENTRYPOINT ["lanekeeper"]
CMD ["serve"]
