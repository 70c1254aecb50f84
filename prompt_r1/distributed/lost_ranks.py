"""Notice within seconds that a rank has died, whatever this one is doing: playing, computing or waiting.

A collective may wait for a dead rank until `--rank-timeout`, and a rank that plays its games is in none.
Therefore every rank keeps a TCP connection with rank 0. The operating system closes the connections of a
process that ends in any way, and a thread on each rank waits for that. Rank 0 passes on who was lost.
"""

import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

GRACE = 10.0  # seconds that this rank gets to end by itself, after another was lost
GOODBYE = b"."  # the last byte of a rank that has ended its work
TOKEN_BYTES = 16
# Options of a connection: probe it after 10 s of silence, and close it after three lost probes.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Watch:
    """The connections of this rank, and the thread that waits for one of them to close."""

    def __init__(
        self,
        rank: int,
        count: int,
        from_first: Callable[[tuple[int, bytes]], tuple[int, bytes]],
        *,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        """Called by every rank.

        `from_first` returns rank 0's argument on every rank. `leave` is called in the thread with the
        sentence that says who was lost. None: if this program does not end by itself, its process exits with
        code 75 after GRACE seconds.
        """
        self.lost = threading.Event()
        self.sentence = ""
        self.ended = False  # this rank's work: it may go now, and so may the others
        self._rank = rank
        self._leave = leave or _leave
        self._peers: dict[socket.socket, str] = {}  # open connections, with the names of their ranks
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None
        self._expected = count - 1 if rank == 0 else 0  # connections that rank 0 still waits for
        meeting = (0, b"")  # port and token
        if rank == 0:
            # Where a name has addresses of both kinds, another rank may choose another one than this.
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._server = socket.create_server(("", 0), family=family, backlog=count, dualstack_ipv6=both)
            self._selector.register(self._server, selectors.EVENT_READ)
            meeting = (self._server.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))
        port, self._token = from_first(meeting)
        if rank:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=60)
            connection.sendall(self._token + rank.to_bytes(4, "big"))
            self._add(connection, "rank 0")
        self.thread = threading.Thread(target=self._wait, name="lost ranks", daemon=True)
        self.thread.start()

    def say_goodbye(self) -> None:
        """Tell the other ranks that this one has ended its work."""
        self.ended = True
        for connection in list(self._peers):
            with suppress(OSError):
                connection.sendall(GOODBYE)

    def _add(self, connection: socket.socket, name: str) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._peers[connection] = name
        self._selector.register(connection, selectors.EVENT_READ)

    def _accept(self) -> None:
        """Accept the connection of a rank; close that of a stranger."""
        assert self._server is not None
        connection, _ = self._server.accept()
        connection.settimeout(5)
        try:
            greeting = connection.recv(TOKEN_BYTES + 4, socket.MSG_WAITALL)
        except OSError:
            greeting = b""
        if (
            not secrets.compare_digest(greeting[:TOKEN_BYTES], self._token)
            or len(greeting) != TOKEN_BYTES + 4
        ):
            connection.close()
            return
        self._add(connection, f"rank {int.from_bytes(greeting[TOKEN_BYTES:], 'big')}")
        self._expected -= 1
        if not self._expected:
            self._close(self._server)

    def _wait(self) -> None:
        """Wait until a rank is lost or all have ended their work; then end this process, or this thread."""
        lost = ""
        while not lost and (self._expected or self._peers):
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._server:
                    self._accept()
                else:
                    lost = lost or self._read(connection)
        if lost:
            self._leave_without(lost)
        for connection in list(self._peers):
            self._forget(connection)
        if self._server is not None:
            self._server.close()
        self._selector.close()

    def _read(self, connection: socket.socket) -> str:
        """Read from a connection that is ready: the name of the rank that was lost; "" after a goodbye."""
        try:
            data = connection.recv(100)
        except OSError:
            data = b""
        if data.startswith(GOODBYE) or self.ended:
            self._forget(connection)
            return ""
        return data.decode() or self._peers[connection]  # rank 0 sends the name of another rank

    def _leave_without(self, name: str) -> None:
        self.sentence = (
            f"{name} has died or has left the run: rank {self._rank} ends too; the same command resumes from "
            "the last checkpoint"
        )
        for connection in self._peers if self._rank == 0 else ():
            with suppress(OSError):
                connection.sendall(name.encode())
        self.lost.set()
        self._leave(self.sentence)

    def _forget(self, connection: socket.socket) -> None:
        del self._peers[connection]
        self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _leave(sentence: str) -> None:
    """Exit with code 75, unless the program ends by itself before."""
    threading.Event().wait(GRACE)
    print(f"\n{os.path.basename(sys.argv[0])}: {sentence}", file=sys.stderr, flush=True)
    os._exit(75)
