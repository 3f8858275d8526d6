"""For Python programs in a guest of vmove that forks itself: the whole machine is forked, and this process goes on in each child.

    import vmove_fork

    squares = vmove_fork.map(lambda number: number * number, range(100), children=4)

or step by step:

    with vmove_fork.Port() as port:
        role = port.fork(4)
        if role.index > 0:
            port.exit(role.ticket, role.index**2)  # in each of four machines: ends it
        for result in port.join(role.ticket):
            print(result.index, result.value)

One module, Python 3.9 or newer, nothing but the standard library. A result is whatever JSON can say; with what is around it, it has
65,536 bytes at most. See docs/guest-forks.md.
"""

from __future__ import annotations

import errno
import json
import os
import select
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Callable, Iterable, NoReturn, Optional, TypeVar, Union

__all__ = ["Ended", "ForkError", "Lost", "Port", "Refused", "Result", "Role", "exit", "fork", "join", "kill", "map"]

NAME = "org.vmove.fork"
"""Name of the virtio-serial port."""
MAX_LINE = 65536
"""Longest line that the host takes, in bytes without its end."""

_PATIENCE = 10.0
"""Seconds for which the port may be another process's, or nobody's on the host."""
_BUSY_FOR = 30.0
"""Seconds for which the host may be busy."""
_BUSY_AGAIN = 0.5
"""Seconds until a busy host is asked again. It counts lines, and takes eight in a second."""
_AGAIN = 0.02
"""Seconds until a port is tried again that cannot be waited for."""

Item = TypeVar("Item")
Path = Union[str, "os.PathLike[str]"]


class ForkError(Exception):
    """The host did not do it; the text says what was expected, what was found and what to do."""


class Refused(ForkError):
    """The host refuses. `code` is `forbidden`, `bad-request`, `busy` or another of docs/errors.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the host refuses ({code}): {message}")
        self.code = code
        self.message = message


class Lost(ForkError):
    """The host let go of the port before it answered, as when vmoved restarts: whether it did what was asked is not known."""


class NobodyListens(ForkError):
    """Nobody on the host listens to the port."""


class Ended(ForkError):
    """A child of `map` has ended without results, or by an exception, whose traceback the text has."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"child {index}: {why}")
        self.index = index
        self.why = why


@dataclass(frozen=True)
class Role:
    """What a machine is after a fork."""

    index: int
    """0 in the parent; in children from 1 to `size`."""
    size: int
    """Children of this fork."""
    ticket: str
    """By which the parent joins or kills them, and a child ends."""

    @property
    def is_child(self) -> bool:
        return self.index > 0


@dataclass(frozen=True)
class Result:
    """How a child has ended."""

    index: int
    """From 1."""
    value: Any
    """What it left; None if it was lost."""
    lost: Optional[str] = None
    """Why it left nothing."""


def find() -> str:
    """The device of the port: where udev gives names to devices, by that; else as the kernel tells it."""
    named = f"/dev/virtio-ports/{NAME}"
    if os.path.exists(named):
        return named
    ports = "/sys/class/virtio-ports"
    for port in sorted(os.listdir(ports)) if os.path.isdir(ports) else []:
        try:
            with open(f"{ports}/{port}/name", encoding="utf-8") as file:
                if file.read().rstrip("\n") == NAME:
                    return f"/dev/{port}"
        except OSError:
            continue
    raise ForkError(
        f"expected a virtio-serial port named {NAME}, found none: start the VM with a virtserialport of this name, and load virtio_console"
    )


class Port:
    """An open port: the device at `path`, or else the one with the name NAME. Not for several threads at once."""

    def __init__(self, path: Optional[Path] = None) -> None:
        self._buffer = bytearray()
        self._descriptor = -1
        self._descriptor = _open(os.fspath(path) if path is not None else find())

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Port:
        """Takes a descriptor that is open for reading and writing, such as a socket's; closes it with the port."""
        port = cls.__new__(cls)
        port._buffer = bytearray()
        port._descriptor = descriptor
        os.set_blocking(descriptor, False)
        return port

    def __enter__(self) -> Port:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def fork(self, count: int) -> Role:
        """Forks this machine. Returns in the parent, and in each of `count` children."""
        answer = self._ask({"fork": count}, lambda answer: "role" in answer)
        return Role(answer["index"], answer["size"], answer["ticket"])

    def join(self, ticket: str) -> list[Result]:
        """Waits until all children of a ticket have ended. The ticket is used up then."""
        answer = self._ask_again({"join": ticket}, lambda answer: answer.get("joined") == ticket)
        return [Result(end["index"], end.get("result"), end.get("lost")) for end in answer["children"]]

    def kill(self, ticket: str) -> int:
        """Ends all children of a ticket. Gives how many lived."""
        answer = self._ask_again({"kill": ticket}, lambda answer: answer.get("killed") == ticket)
        return int(answer["children"])

    def exit(self, ticket: str, value: Any = None) -> NoReturn:
        """Ends this machine, which is a child of the ticket, and leaves a result. Returns by no way but an exception."""
        while True:
            try:
                # No answer is awaited but a refusal.
                self._ask({"exit": ticket, "result": value}, lambda answer: False)
            except (Lost, NobodyListens):
                # The host may be without its daemon for a while. It counts once, however often it is said.
                continue

    def map(self, function: Callable[[Item], Any], items: Iterable[Item], children: int) -> list[Any]:
        """As the function `map` of this module, over this port."""
        everything = list(items)
        if not everything:
            return []
        role = self.fork(min(children, len(everything)))
        if role.is_child:
            self._work(role, function, everything)
        found: list[Any] = [None] * len(everything)
        problem: Optional[Ended] = None
        for end in self.join(role.ticket):
            if end.lost is not None:
                problem = problem or Ended(end.index, end.lost)
            elif "error" in end.value:
                problem = problem or Ended(end.index, end.value["error"])
            else:
                found[end.index - 1 :: role.size] = end.value["values"]
        if problem is not None:
            raise problem
        return found

    def _work(self, role: Role, function: Callable[[Item], Any], items: list[Item]) -> NoReturn:
        try:
            try:
                left: dict[str, Any] = {"values": [function(item) for item in items[role.index - 1 :: role.size]]}
                length = len(_line({"exit": role.ticket, "result": left}))
                if length > MAX_LINE:
                    raise ValueError(
                        f"expected results of {MAX_LINE} bytes at most from one child, found {length}: "
                        "use more children, or write results to storage"
                    )
            except BaseException:  # Whatever it is, no child goes on where only the parent should.
                left = {"error": traceback.format_exc()[-MAX_LINE // 8 :]}
            self.exit(role.ticket, left)
        finally:
            # The machine should have ended. Its parent is told by `kill` or by the operator.
            os._exit(1)

    def _ask_again(self, request: dict[str, Any], is_answer: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What may be asked twice."""
        while True:
            try:
                return self._ask(request, is_answer)
            except Lost:
                continue

    def _ask(self, request: dict[str, Any], is_answer: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Asks until the host is not busy. Passes over answers to what others have asked before."""
        deadline = time.monotonic() + _BUSY_FOR
        line = _line(request)
        self._say(line)
        while True:
            heard = self._hear()
            try:
                answer = json.loads(heard)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise ForkError(f"expected an answer in JSON, found {heard[:200]!r}")
            if "error" in answer:
                if answer["error"] != "busy" or time.monotonic() > deadline:
                    raise Refused(str(answer["error"]), str(answer.get("message", "")))
                time.sleep(_BUSY_AGAIN)
                self._say(line)
            elif is_answer(answer):
                return answer

    def _say(self, line: bytes) -> None:
        """Writes a line. What is still there to be read answers what somebody asked who is gone: it is thrown away."""
        if len(line) > MAX_LINE:
            raise ForkError(f"expected a line of {MAX_LINE} bytes at most, found {len(line)}: leave less as the result")
        while self._take():
            pass
        self._buffer.clear()
        left = memoryview(line + b"\n")
        deadline = time.monotonic() + _PATIENCE
        while left:
            try:
                count = os.write(self._descriptor, left)
            except BlockingIOError:
                count = 0
            if count > 0:
                left = left[count:]
                deadline = time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline:
                raise NobodyListens(
                    f"nobody on the host has listened to the port for {_PATIENCE:.0f} s: vmoved must run there, and the port's socket be "
                    "{vmdir}/fork.sock"
                )
            else:
                self._wait(select.POLLOUT, _AGAIN)

    def _hear(self) -> bytes:
        """Reads a line, however long that takes."""
        searched, gone = 0, False
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return line
            searched = len(self._buffer)
            taken = self._take()
            if taken is False:
                gone = True
                # Of a line that was broken off the rest does not come.
                self._buffer.clear()
                searched = 0
                time.sleep(_AGAIN)
            elif taken is None:
                # Who listens again knows nothing of what was asked.
                if gone:
                    raise Lost(Lost.__doc__)
                self._wait(select.POLLIN, 1.0)

    def _take(self) -> Optional[bool]:
        """Reads what is there. None: nothing for now. False: nobody is connected."""
        try:
            part = os.read(self._descriptor, 16384)
        except BlockingIOError:
            return None
        self._buffer += part
        return bool(part)

    def _wait(self, what: int, seconds: float) -> None:
        """Until the port is ready, or the time is over."""
        poll = select.poll()
        poll.register(self._descriptor, what)
        # A hang-up is said at once and always, while nobody is connected.
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(seconds * 1000)):
            time.sleep(_AGAIN)


def _line(request: dict[str, Any]) -> bytes:
    return json.dumps(request, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _open(path: str) -> int:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise ForkError(f"{path}: {error.strerror}") from error
            if time.monotonic() > deadline:
                raise ForkError(f"{path}: another process has had it open for {_PATIENCE:.0f} s: one at a time can use it") from error
        time.sleep(_AGAIN)


_port: Optional[Port] = None


def _shared() -> Port:
    """The port of the functions below. It stays open, since a child goes on with the descriptor of its parent."""
    global _port
    if _port is None:
        _port = Port()
    return _port


def fork(count: int) -> Role:
    """Forks this machine. Returns in the parent, and in each of `count` children."""
    return _shared().fork(count)


def join(ticket: str) -> list[Result]:
    """Waits until all children of a ticket have ended. The ticket is used up then."""
    return _shared().join(ticket)


def kill(ticket: str) -> int:
    """Ends all children of a ticket. Gives how many lived."""
    return _shared().kill(ticket)


def exit(ticket: str, value: Any = None) -> NoReturn:
    """Ends this machine, which is a child of the ticket, and leaves a result."""
    _shared().exit(ticket, value)


def map(function: Callable[[Item], Any], items: Iterable[Item], children: int) -> list[Any]:
    """Forks this machine, shares the items among the children, and gives the function's results in the order of the items.

    The function sees all that this process has in memory. What it changes there is lost with the child; it gives what JSON can say
    (tuples become lists). Raises Ended, after all children have ended, if one did not give its results.
    """
    return _shared().map(function, items, children)
