# Millstream with what its lock file names, a Java included. What it keeps is in /data.
# On Kubernetes it is also the image of Spark's executors: "executor" is a command of millstream.
FROM python:3.11-slim

RUN pip install --no-cache-dir "uv==0.13.*"
WORKDIR /app
ARG OPTIONS="--locked --no-cache --no-default-groups --extra spark --extra jre --extra postgres --extra kafka --extra s3 --extra ui"
# The packages first: they change less often than the source.
COPY pyproject.toml uv.lock ./
RUN uv sync ${OPTIONS} --no-install-project
COPY README.md LICENSE NOTICE ./
COPY src src
RUN uv sync ${OPTIONS} --no-editable \
    && useradd --create-home --uid 1000 millstream \
    && install --directory --owner millstream /data

USER 1000
WORKDIR /data
VOLUME /data
ENV PATH=/app/.venv/bin:$PATH MILLSTREAM_LOG=/data
ENTRYPOINT ["millstream"]
CMD ["--help"]
