# The server and the command line in a slim image, run by a user without rights.
#
#   docker build -t stillhouse .                                 CPU; the model is mounted at /models
#   docker build -t stillhouse --build-arg MODEL=smollm2 .       CPU, with the default model inside
#   docker build -t stillhouse:cuda --build-arg PRESET=cuda \
#     --build-arg BUILD_BASE=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#     --build-arg RUNTIME_BASE=docker.io/nvidia/cuda:13.0.1-runtime-ubuntu24.04 .
#
#   docker run -p 127.0.0.1:7070:7070 -v store:/var/lib/stillhouse stillhouse --insecure-listen
#   docker run -p 7070:7070 -v store:/var/lib/stillhouse -v ./admin.key:/run/secrets/admin.key:ro stillhouse
ARG BUILD_BASE=docker.io/library/debian:bookworm-slim
ARG RUNTIME_BASE=docker.io/library/debian:bookworm-slim

FROM ${BUILD_BASE} AS build
ARG PRESET=cpu
ARG MODEL=none
ARG JOBS
WORKDIR /src
COPY tests/install_packages.sh tests/
RUN tests/install_packages.sh
# Before the sources, so that a changed line of code does not fetch it again.
COPY deploy/get_model.sh deploy/
RUN mkdir -p /out/models && \
    case "$MODEL" in none) ;; smollm2) deploy/get_model.sh /out/models ;; \
      *) echo "MODEL is none or smollm2, not $MODEL" >&2; exit 2 ;; esac
COPY . .
RUN cmake --preset "$PRESET" -DSTILLHOUSE_TESTS=OFF && \
    cmake --build --preset "$PRESET" -j "${JOBS:-$(nproc)}" --target stillhouse-server stillhouse stillhouse-tune && \
    install -D -s -t /out/bin "build/$PRESET/bin/stillhouse-server" "build/$PRESET/bin/stillhouse" \
      "build/$PRESET/bin/stillhouse-tune"
# The Debian or Ubuntu packages that the programs load, by asking the linker: names differ between releases. What
# belongs to no package (a vendor's toolkit) comes with the runtime base.
RUN ldd /out/bin/* | awk '/=> \// {print $3}' | sort -u | while read -r library; do \
      dpkg -S "$(readlink -f "$library")" "$library" 2>/dev/null | grep -v '^diversion' | head -n 1 | cut -d: -f1; \
    done | sort -u > /out/packages.txt && cat /out/packages.txt

FROM ${RUNTIME_BASE}
COPY --from=build /out/packages.txt /usr/share/stillhouse/packages.txt
RUN apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive xargs -r apt-get install -y -qq --no-install-recommends ca-certificates \
      < /usr/share/stillhouse/packages.txt > /dev/null && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --system --gid 10001 stillhouse && \
    useradd --system --uid 10001 --gid 10001 --home-dir /var/lib/stillhouse --shell /usr/sbin/nologin stillhouse && \
    install -d -o stillhouse -g stillhouse -m 0750 /var/lib/stillhouse
COPY --from=build /out/bin/ /usr/local/bin/
COPY --from=build /out/models/ /models/
COPY LICENSE /usr/share/doc/stillhouse/LICENSE
USER 10001:10001
ENV STILLHOUSE_MODEL=/models/SmolLM2-135M-Instruct.Q4_1.gguf \
    STILLHOUSE_STORE=/var/lib/stillhouse \
    STILLHOUSE_ADDRESS=127.0.0.1:7070
VOLUME ["/var/lib/stillhouse"]
EXPOSE 7070 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["stillhouse", "--quiet", "--attempts", "1", "--timeout", "4", "server", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["stillhouse-server", "--address", "0.0.0.0:7070", "--metrics-address", "0.0.0.0:9464"]
# Callers need keys, unless this is replaced by --insecure-listen (a network that is safe by itself).
CMD ["--admin-key-file", "/run/secrets/admin.key"]
