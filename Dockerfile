# Not needed: `make train` makes an environment of its own. For machines that have nothing but a container runtime.
#
#   docker build -t tril .
#   docker run --rm -it -v "$PWD/out:/tril/out" tril                               as `python train.py`
#   docker run --rm -it -v "$PWD/out:/tril/out" -v "$PWD/my.txt:/my.txt:ro" --gpus all --stop-timeout 60 tril \
#       python train.py --data.source /my.txt
#
# Runs stay in ./out. `docker stop` is a SIGTERM: the step is finished and saved. Without a GPU,
# --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives an image without CUDA.

FROM python:3.13-slim

# torch.compile, the default on a GPU, needs a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /tril
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir -c constraints.txt -e .
COPY . .

CMD ["python", "train.py"]
