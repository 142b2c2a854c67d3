"""One end of TCP connections between two hosts: to measure a link's rate, or to keep it busy.

    python link_probe.py receive ADDRESS BYTES     prints the seconds that BYTES took
    python link_probe.py send ADDRESS BYTES
    python link_probe.py drain ADDRESS             receives from all who connect, until killed
    python link_probe.py flood ADDRESS COUNT       sends over COUNT connections, until killed

A fifth as many bytes as are measured go ahead uncounted: the token bucket lets its first burst
through at once.
Imports the standard library only, so that it starts in no time.
"""

from __future__ import annotations

import select
import socket
import sys
import time

_PORT = 29400
_TRAFFIC_PORT = 29401
_BLOCK_BYTES = 64 * 1024


def receive(address: str, counted_bytes: int) -> float:
    """Return the seconds in which the last ``counted_bytes`` of one connection arrived."""
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(30)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(30)
        _take(connection, counted_bytes // 5)
        start = time.perf_counter()
        _take(connection, counted_bytes)
        return time.perf_counter() - start


def send(address: str, counted_bytes: int) -> None:
    """Send ``counted_bytes`` and a fifth more, once the receiver listens."""
    left = counted_bytes // 5 + counted_bytes
    with _connect(address) as connection:
        while left > 0:
            connection.sendall(bytes(min(left, _BLOCK_BYTES)))
            left -= _BLOCK_BYTES


def drain(address: str) -> None:
    """Receive whatever comes, for ever."""
    with socket.create_server((address, _TRAFFIC_PORT)) as server:
        connections = [server]
        while True:
            for ready in select.select(connections, [], [])[0]:
                if ready is server:
                    connections.append(server.accept()[0])
                elif not ready.recv(_BLOCK_BYTES):
                    connections.remove(ready)


def flood(address: str, count: int) -> None:
    """Send over ``count`` connections as fast as they take it, for ever."""
    connections = [_connect(address, _TRAFFIC_PORT) for _ in range(count)]
    for connection in connections:
        connection.setblocking(False)
    block = bytes(_BLOCK_BYTES)
    while True:
        for ready in select.select([], connections, [])[1]:
            ready.send(block)


def _connect(address: str, port: int = _PORT) -> socket.socket:
    give_up = time.perf_counter() + 30
    while True:
        try:
            return socket.create_connection((address, port), timeout=30)
        except ConnectionRefusedError:
            if time.perf_counter() > give_up:
                raise
            time.sleep(0.02)


def _take(connection: socket.socket, count_bytes: int) -> None:
    while count_bytes > 0:
        block = connection.recv(min(count_bytes, _BLOCK_BYTES))
        if not block:
            raise ConnectionError("the sender closed the connection early")
        count_bytes -= len(block)


if __name__ == "__main__":
    role, to, *number = sys.argv[1:]
    if role == "receive":
        print(receive(to, int(number[0])))
    elif role == "send":
        send(to, int(number[0]))
    elif role == "drain":
        drain(to)
    else:
        flood(to, int(number[0]))
