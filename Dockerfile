# SPDX-License-Identifier: Apache-2.0
# Images that have this checkout's package installed; docs/install.md explains the commands.
#   docker build --target cpu -t flashplan:cpu .
#   docker build --target cuda --build-arg ARCHITECTURES=90a -t flashplan:cuda .

FROM python:3.12 AS cpu
RUN --mount=type=bind,target=/flashplan,rw \
  pip install --no-cache-dir /flashplan
CMD ["python", "-m", "flashplan"]

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-pip
ARG ARCHITECTURES=release
RUN --mount=type=bind,target=/flashplan,rw \
  pip wheel --no-deps --wheel-dir /wheels /flashplan \
    -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$ARCHITECTURES"

FROM python:3.12 AS cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
  pip install --no-cache-dir /wheels/*.whl
CMD ["python", "-m", "flashplan"]
