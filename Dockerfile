# Reprise in an image, for one machine or for the pods of docs/kuberay.md:
#   docker build -t reprise .
#   docker build -t reprise --build-arg EXTRAS=cuda,ray .        NVIDIA GPUs
#   docker run --rm -v "$PWD:/work" reprise train --gin_file=own.gin
FROM python:3.11-slim
ARG EXTRAS=ray,serve
COPY . /opt/reprise
RUN pip install --no-cache-dir -c /opt/reprise/constraints.txt "/opt/reprise[${EXTRAS}]" \
    && python -m reprise.models.kernels
WORKDIR /work
ENTRYPOINT ["reprise"]
CMD ["--help"]
