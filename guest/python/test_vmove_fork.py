"""Tests of vmove_fork against the other end of a socket, which says what a host says, and in what pieces."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import unittest

import vmove_fork
from vmove_fork import MAX_LINE, ForkError, Port, Refused, Result, Role

BUSY = '{"error":"busy","message":"too many lines"}\n'
CHILD = '{"role":"child","index":3,"size":4,"ticket":"t"}\n'
PARENT = '{"role":"parent","index":0,"size":2,"ticket":"t"}\n'


class Host:
    """Reads a line, then says the next of its answers in pieces."""

    def __init__(self, *answers: str, piece: int = 7) -> None:
        guest, self.socket = socket.socketpair()
        self.port = Port.of_descriptor(guest.detach())
        self.answers, self.piece = answers, piece
        self.heard: list[str] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with self.socket.makefile("r", encoding="utf-8", newline="\n") as lines:
            for answer in self.answers:
                self.heard.append(lines.readline().rstrip("\n"))
                data = answer.encode()
                for at in range(0, len(data), self.piece):
                    self.socket.sendall(data[at : at + self.piece])
                    time.sleep(0.001)

    def end(self) -> None:
        # First: a host that was asked too little ends by it.
        self.port.close()
        self.thread.join()
        self.socket.close()


class Tests(unittest.TestCase):
    def host(self, *answers: str, piece: int = 7) -> Host:
        host = Host(*answers, piece=piece)
        self.addCleanup(host.end)
        return host

    def test_a_busy_host_is_asked_again(self) -> None:
        host = self.host(BUSY, CHILD)
        self.assertEqual(host.port.fork(4), Role(3, 4, "t"))
        self.assertEqual(host.heard, ['{"fork":4}'] * 2)

    def test_long_answers_are_read_and_others_passed_over(self) -> None:
        long = "r" * 60_000
        children = [{"index": index, "result": long} for index in range(1, 20)] + [{"index": 20, "lost": "killed"}]
        joined = json.dumps({"joined": "t", "children": children})
        host = self.host(f'{CHILD}{{"joined":"u","children":[]}}\n{joined}\n', piece=33_333)
        results = host.port.join("t")
        self.assertEqual(results[18], Result(19, long))
        self.assertEqual(results[19], Result(20, None, "killed"))

    def test_signals_disturb_nothing(self) -> None:
        host = self.host('{"killed":"t","children":12}\n', piece=1)
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            self.assertEqual(host.port.kill("t"), 12)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def test_refusals_have_codes(self) -> None:
        host = self.host('{"error":"forbidden","message":"this host lets no guest fork itself"}\n')
        with self.assertRaises(Refused) as caught:
            host.port.exit("t", {"ä": [1]})
        self.assertEqual(caught.exception.code, "forbidden")
        self.assertEqual(host.heard, ['{"exit":"t","result":{"ä":[1]}}'])

    def test_what_is_too_long_or_no_answer_is_told(self) -> None:
        host = self.host("OK\n")
        with self.assertRaisesRegex(ForkError, "65536 bytes at most"):
            host.port.exit("t", "x" * MAX_LINE)
        with self.assertRaisesRegex(ForkError, "found b'OK'"):
            host.port.join("t")

    def test_a_map_puts_results_in_order(self) -> None:
        joined = json.dumps(
            {"joined": "t", "children": [{"index": 1, "result": {"values": [0, 4, 16]}}, {"index": 2, "result": {"values": [1, 9]}}]}
        )
        host = self.host(PARENT, joined + "\n")
        self.assertEqual(host.port.map(lambda n: n * n, range(5), children=2), [0, 1, 4, 9, 16])
        self.assertEqual(host.port.map(lambda n: n, [], children=2), [])

    def test_a_map_tells_of_children_that_fail(self) -> None:
        joined = '{"joined":"t","children":[{"index":1,"result":{"error":"ZeroDivisionError"}},{"index":2,"lost":"killed"}]}\n'
        host = self.host(PARENT, joined)
        with self.assertRaisesRegex(vmove_fork.Ended, "child 1: ZeroDivisionError"):
            host.port.map(lambda n: n, range(5), children=2)


if __name__ == "__main__":
    unittest.main()
