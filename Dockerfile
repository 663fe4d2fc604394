# Millstream with what its lock file names, a Java included. What it keeps is in /data.
FROM python:3.11-slim

RUN pip install --no-cache-dir "uv==0.13.*"
WORKDIR /app
COPY pyproject.toml uv.lock README.md LICENSE NOTICE ./
COPY src src
RUN uv sync --locked --no-cache --no-editable --no-default-groups \
        --extra spark --extra jre --extra postgres --extra kafka --extra s3 --extra ui \
    && useradd --create-home --uid 1000 millstream \
    && install --directory --owner millstream /data

USER 1000
WORKDIR /data
VOLUME /data
ENV PATH=/app/.venv/bin:$PATH MILLSTREAM_LOG=/data
ENTRYPOINT ["millstream"]
CMD ["--help"]
