"""What a run needs of the network and of those who are told about it, for `draftmill doctor`."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator

from draftmill.config import RunConfig, TrackingConfig
from draftmill.run.doctor import Finding
from draftmill.run.doctor_checks import REFUSED
from draftmill.run.placement import Placement
from draftmill.run.tracking import listening_socket

NETWORK = "network"


def network(config: RunConfig, placement: Placement | None) -> Iterator[Finding]:
    if placement is not None and placement.ranks > 1:
        yield ranks_meet()
    yield from tracking(config.tracking)


def ranks_meet() -> Finding:
    """The ranks of one host find each other by a file in the run folder, and talk over its own loopback."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    consequence = "the drafter's ranks cannot reach each other, and the run ends at its start"
    if interface not in (name for _, name in socket.if_nameindex()):
        found, remedy = f"there is no network interface {interface}", "set GLOO_SOCKET_IFNAME to one that is there"
        return Finding(NETWORK, "ranks", "error", found, consequence, remedy)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            pass
    except OSError as error:
        found = f"127.0.0.1 does not answer ({error.strerror or error})"
        return Finding(
            NETWORK, "ranks", "error", found, consequence, "bring the loopback interface up (ip link set lo up)"
        )
    return Finding(
        NETWORK, "ranks", "ok", f"they meet by a file in the run folder and talk over {interface}; no port is fixed"
    )


def tracking(config: TrackingConfig) -> Iterator[Finding]:
    """Packages and port, where somebody is to be told."""
    if config.wandb.project is not None:
        yield _package("wandb", "wandb", f"tracking.wandb.project={config.wandb.project}", "wandb")
    if (port := config.prometheus_port) is None:
        return
    host, key = config.prometheus_host, f"tracking.prometheus_port={port}"
    finding = _package("Prometheus", "prometheus_client", key, "prometheus")
    if finding.level == "ok" and (why := _taken(host, port)):
        remedy = "choose another port, or end who uses it (ss -ltnp lists them); or another tracking.prometheus_host"
        finding = Finding(NETWORK, "Prometheus", "error", f"{key}: {why}", REFUSED, remedy)
    yield finding


def _package(name: str, module: str, key: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        remedy = f"pip install 'draftmill[{extra}]', or leave the key out"
        return Finding(NETWORK, name, "error", f"{key}, but {module} is not installed", REFUSED, remedy)
    return Finding(NETWORK, name, "ok", key)


def _taken(host: str, port: int) -> str | None:
    """Why the port cannot be had, as the run would want it."""
    try:
        with listening_socket(host, port):
            return None
    except OSError as error:
        return f"{host}:{port} cannot be had ({error.strerror})"
