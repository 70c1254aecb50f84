"""Free TCP ports for process groups on this machine."""

import socket


def free_ports(count: int) -> list[int]:
    """Ports that are free now. All probes stay open until the last one is bound, so no port comes twice."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
