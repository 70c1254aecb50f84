"""`Watch`: ranks that die are noticed by all others, and strangers by none."""

import socket
import time
from queue import Queue

import pytest

from prompt_r1.distributed.lost_ranks import Watch


class Meeting:
    """The watches of several ranks in this process, and the sentences with which they would leave."""

    def __init__(self, count: int) -> None:
        self.place: tuple[int, bytes] = (0, b"")
        self.sentences: list[Queue[str]] = [Queue() for _ in range(count)]
        self.watches = [
            Watch(rank, count, self.from_first, leave=self.sentences[rank].put) for rank in range(count)
        ]
        deadline = time.monotonic() + 10
        while len(self.watches[0]._peers) < count - 1 and time.monotonic() < deadline:
            time.sleep(0.001)

    def from_first(self, place: tuple[int, bytes]) -> tuple[int, bytes]:
        """Rank 0 is the first to call it."""
        self.place = place if place[0] else self.place
        return self.place

    def join(self) -> None:
        """Wait for the threads, which close their connections."""
        for watch in self.watches:
            watch.thread.join(timeout=10)
            assert not watch.thread.is_alive()

    def die(self, rank: int) -> None:
        """Close the connections of a rank, as its operating system does."""
        self.watches[rank].ended = True  # its thread does not notice it
        for connection in list(self.watches[rank]._peers):
            connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def meeting(monkeypatch) -> Meeting:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return Meeting(3)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_the_death_of_a_rank_is_known_to_all_others_by_its_name(meeting, dead):
    meeting.die(dead)
    for rank, sentences in enumerate(meeting.sentences):
        if rank != dead:
            assert sentences.get(timeout=10).startswith(
                f"rank {dead} has died or has left the run: rank {rank}"
            )
            assert meeting.watches[rank].lost.is_set()
    meeting.join()


def test_ranks_that_say_goodbye_are_not_lost(meeting):
    for watch in meeting.watches:
        watch.say_goodbye()
    meeting.join()
    assert all(sentences.empty() for sentences in meeting.sentences)


def test_rank_0_is_reached_at_both_kinds_of_addresses(monkeypatch):
    """It listened only at the kind that it found first for its own name; others may find the other kind."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    if not socket.has_dualstack_ipv6():
        pytest.skip("no socket of both kinds here")
    places: list[tuple[int, bytes]] = []
    sentences: Queue[str] = Queue()
    first = Watch(0, 2, lambda place: places.append(place) or place, leave=sentences.put)
    monkeypatch.setenv("MASTER_ADDR", "::1")
    second = Watch(1, 2, lambda _: places[0], leave=sentences.put)
    for watch in (second, first):
        watch.say_goodbye()
    for watch in (second, first):
        watch.thread.join(timeout=10)
    assert sentences.empty()


def test_a_stranger_that_connects_and_leaves_is_not_taken_for_a_rank(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    sentences: Queue[str] = Queue()
    places: list[tuple[int, bytes]] = []
    first = Watch(0, 2, lambda place: places.append(place) or place, leave=sentences.put)
    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(20), bytes(20)):
        with socket.create_connection(("127.0.0.1", places[0][0])) as stranger:
            stranger.sendall(greeting)
    second = Watch(1, 2, lambda _: places[0], leave=sentences.put)
    for watch in (second, first):
        watch.say_goodbye()
    for watch in (second, first):
        watch.thread.join(timeout=10)
        assert not watch.thread.is_alive()
    assert sentences.empty()
