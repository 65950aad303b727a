# Three images from one file: node (the default), control, bench.
#
#   docker build -t forebay-node .                            compiles the sources in the build stage
#   docker build -t forebay-bench --target bench .
#   docker build -t forebay-node --build-context bins=DIR .   takes the programs from DIR instead: see deploy/README.md
#
# The base can be any Debian with the C library that the programs were built against (--build-arg BASE_IMAGE=...).
# All run as user 7070 and need no privilege; deploy/README.md says what the kernel should grant them.

# The version is rust-toolchain.toml's; tests/run tidy compares them.
ARG RUST_IMAGE=rust:1.95.0-bookworm
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${RUST_IMAGE} AS build
WORKDIR /src
COPY . .
RUN deploy/programs /bins

# Only a name for what is copied below, so that a build context can stand in its place.
FROM scratch AS bins
COPY --from=build /bins/ /

# Certificates, for origins behind https; a user of our own, and the one folder that it may write to.
FROM ${BASE_IMAGE} AS base
RUN test -e /etc/ssl/certs/ca-certificates.crt \
    || (apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*)
RUN groupadd --gid 7070 forebay \
    && useradd --uid 7070 --gid 7070 --no-create-home --home-dir /var/lib/forebay --shell /usr/sbin/nologin forebay \
    && install -d -o forebay -g forebay -m 750 /var/lib/forebay
WORKDIR /var/lib/forebay
STOPSIGNAL SIGTERM

FROM base AS control
COPY --from=bins --chmod=755 forebay-control /usr/bin/
USER 7070:7070
VOLUME /var/lib/forebay
EXPOSE 7080
ENTRYPOINT ["/usr/bin/forebay-control"]
CMD ["--help"]

# The demo starts a control plane and a node, so all programs are in it.
FROM base AS bench
COPY --from=bins --chmod=755 forebay-bench forebay-node forebay-control /usr/bin/
USER 7070:7070
VOLUME /var/lib/forebay
ENTRYPOINT ["/usr/bin/forebay-bench"]
CMD ["--help"]

FROM base AS node
COPY --from=bins --chmod=755 forebay-node /usr/bin/
USER 7070:7070
VOLUME /var/lib/forebay
EXPOSE 7070/tcp 7070/udp 7071
ENTRYPOINT ["/usr/bin/forebay-node"]
CMD ["--help"]
