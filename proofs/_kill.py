"""Rounds of publishing by real processes of which some are killed or stopped at random moments; told as JSON.

2 nodes of 2 ranks, over the tcp group. This process never loads more than lilo-volume and starts every rank by fork,
so that a round costs milliseconds. It ends only processes that it started, by their ids. Used by `kill.py` and by
tests/volume/test_kill.py: `python proofs/_kill.py --rounds 200 --seed 1`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from _kill_places import Directory, Views
from _kill_ranks import COLLECTION, KIND, NODES, WORLD, fork, is_whole, publish, read_on
from lilo_volume import Retention, collect_garbage, latest, survey

KEPT = 2
POLICY = Retention(keep_last=KEPT, reader_guard_s=0, attempt_guard_s=0)
REFUSALS = ("PublishRefused", "MissingFiles", "UnexpectedFiles", "RankFailed", "NameTaken")
"""Errors that promise that nothing was published."""
HANG_S = 30.0
"""A rank that has not ended by then hangs."""


@dataclass
class Tally:
    """What happened, over all rounds."""

    rounds: int = 0
    killed: int = 0
    stopped: int = 0
    resumed: int = 0
    whole: int = 0
    """Rounds that published."""
    readings: int = 0
    """Times that a reader beside the publishers loaded a checkpoint whole."""
    collections: int = 0
    dead_collections: int = 0
    steps_hit: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    longest_wait_s: float = 0.0
    """Of a rank in one collective, beyond the deadline it was given."""
    longest_after_fault_s: float = 0.0
    """From the fault to the end of the last rank that was not hit, less the deadline."""
    most_files: int = 0
    """In the committed state after a collection."""
    violations: list[str] = field(default_factory=list)


class Rank:
    """A child that publishes, as the parent sees it."""

    def __init__(self, rank: int, process: int, pipe: int) -> None:
        self.rank, self.process, self.pipe = rank, process, pipe
        self.hit: str | None = None
        self.step = "start"
        self.ended: str | None = None
        self.text = ""
        self.gone = False
        self.reaped = False
        self.over_s = 0.0
        self.end_at: float | None = None
        self._rest = b""

    def take(self) -> None:
        """Take in what it tells; at the end of the pipe it is gone."""
        data = os.read(self.pipe, 65536)
        if not data:
            self.gone = True
            self.end_at = time.monotonic()
            os.close(self.pipe)
            if not self.reaped:
                os.waitpid(self.process, 0)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for told in map(json.loads, lines):
            self.step = told.get("step", self.step)
            self.ended = told.get("ended", self.ended)
            self.text = told.get("text", self.text)
            self.over_s = max(self.over_s, told.get("over", 0.0))


class Runner:
    """Runs the rounds on one kind of volume."""

    def __init__(self, place, rng: random.Random, deadline_s: float, tally: Tally) -> None:
        self.place, self.rng, self.deadline_s, self.tally = place, rng, deadline_s, tally
        self.good = 0
        """The newest step that is known to be published."""
        self.unsettled: set[int] = set()
        """Later steps whose publisher died on the way: a node that ends in order may still commit the manifest."""
        self.healthy_s = 0.3
        self.reader: tuple[int, int] | None = None
        self._reader_rest = b""

    def violation(self, step: int, text: str) -> None:
        self.tally.violations.append(f"{self.place.name} round {step}: {text}")

    def start_reader(self) -> None:
        self.reader = fork(lambda tell: read_on(self.place, tell))

    def hear_reader(self) -> None:
        """What the reader has told since."""
        if self.reader is None:
            return
        while select.select([self.reader[1]], [], [], 0)[0]:
            data = os.read(self.reader[1], 65536)
            if not data:
                self.violation(0, "the reader ended")
                self.reader = None
                return
            *lines, self._reader_rest = (self._reader_rest + data).split(b"\n")
            for told in map(json.loads, lines):
                self.tally.readings += "read" in told
                if "violation" in told:
                    self.violation(0, told["violation"])

    def stop_reader(self) -> None:
        self.hear_reader()
        if self.reader is not None:
            os.kill(self.reader[0], signal.SIGKILL)
            os.waitpid(self.reader[0], 0)
            os.close(self.reader[1])
            self.reader = None

    def round(self, step: int, *, fault: str) -> None:
        """One save with one fault; `fault` is none, kill, kill node, or stop."""
        self.tally.rounds += 1
        self.place.start_round(self.rng)
        name = "same" if self.rng.random() < 0.4 else f"step{step}"
        ranks = self._start(step, name)
        victims = self._victims(ranks, fault)
        start = time.monotonic()
        hit_at = start + (self.rng.uniform(0, 1.15) * self.healthy_s if victims else 0)
        self._watch(ranks, until=hit_at, only_until=True)
        for rank in victims:
            if not rank.gone:
                self._hit(rank, "stop" if fault == "stop" else "kill")
        hit_at = time.monotonic()
        untouched = [rank for rank in ranks if rank.hit is None]
        self._watch(untouched, until=hit_at + HANG_S)
        self._judge_ranks(step, untouched, hit_at, any(rank.hit for rank in ranks))
        self._end_stopped(step, ranks)
        if all(rank.ended == "published" for rank in ranks):
            self.healthy_s += 0.2 * (time.monotonic() - start - self.healthy_s)
        self._judge_volume(step, ranks)
        self.hear_reader()

    def _start(self, step: int, name: str) -> list[Rank]:
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        token = secrets.token_hex(16)
        ranks = []
        for rank in range(WORLD):

            def act(tell, rank=rank):
                publish(
                    self.place, listener, address, token, rank, step, name, self.deadline_s, tell
                )

            ranks.append(Rank(rank, *fork(act)))
        listener.close()
        return ranks

    def _victims(self, ranks: list[Rank], fault: str) -> list[Rank]:
        if fault == "none":
            return []
        if fault == "kill node":
            node = self.rng.choice(NODES)
            return [rank for rank in ranks if NODES[rank.rank] == node]
        return [self.rng.choice(ranks)]

    def _hit(self, rank: Rank, how: str) -> None:
        rank.hit = how
        if how == "kill":
            os.kill(rank.process, signal.SIGKILL)
            self.tally.killed += 1
            self._watch([rank], until=time.monotonic() + HANG_S)
        else:
            self.tally.stopped += 1
            while True:
                os.kill(rank.process, signal.SIGSTOP)
                _, status = os.waitpid(rank.process, os.WUNTRACED)
                if not os.WIFSTOPPED(status):  # it had ended by itself
                    rank.reaped, rank.hit = True, None
                    self.tally.stopped -= 1
                    return
                if not self.place.holds_server(rank.process):
                    break
                os.kill(rank.process, signal.SIGCONT)
                time.sleep(self.rng.uniform(0, 0.003))
        self.tally.steps_hit[rank.step.partition(" ")[0]] += 1

    def _watch(self, ranks: list[Rank], *, until: float, only_until: bool = False) -> None:
        """Take in what ranks tell, until all of them are gone (or, with `only_until`, the time has come)."""
        while True:
            live = [rank for rank in ranks if not rank.gone]
            left = until - time.monotonic()
            if left <= 0 or not (live or only_until):
                return
            ready, _, _ = select.select([rank.pipe for rank in live], [], [], left)
            for rank in live:
                if rank.pipe in ready:
                    rank.take()

    def _judge_ranks(self, step: int, ranks: list[Rank], hit_at: float, was_hit: bool) -> None:
        for rank in ranks:
            if not rank.gone:
                self.violation(step, f"rank {rank.rank} hangs in {rank.step}")
                os.kill(rank.process, signal.SIGKILL)
                self._watch([rank], until=time.monotonic() + HANG_S)
            elif rank.ended is None:
                self.violation(step, f"rank {rank.rank} ended without a word in {rank.step}")
            self.tally.longest_wait_s = max(self.tally.longest_wait_s, rank.over_s)
            if was_hit and rank.end_at is not None:
                late = rank.end_at - hit_at - self.deadline_s
                self.tally.longest_after_fault_s = max(self.tally.longest_after_fault_s, late)
            if rank.ended not in (None, "published"):
                self.tally.errors[rank.ended] += 1
        if not was_hit:
            for rank in ranks:
                if rank.ended != "published":
                    self.violation(step, f"nobody was hit, and: {rank.text}")

    def _end_stopped(self, step: int, ranks: list[Rank]) -> None:
        """Some stopped ranks go on, and must end by themselves; the others are killed."""
        for rank in ranks:
            if rank.gone:
                continue
            if self.rng.random() < 0.5:
                self.tally.resumed += 1
                os.kill(rank.process, signal.SIGCONT)
                self._watch([rank], until=time.monotonic() + HANG_S)
                if not rank.gone:
                    self.violation(step, f"rank {rank.rank} hangs after it went on in {rank.step}")
            if not rank.gone:
                os.kill(rank.process, signal.SIGKILL)
                self._watch([rank], until=time.monotonic() + HANG_S)

    def _judge_volume(self, step: int, ranks: list[Rank]) -> None:
        volume = self.place.open("gc")
        found = latest(volume, COLLECTION, KIND, verify="full", node="gc").checkpoint
        got = 0 if found is None else found.publication.order
        if not any(rank.ended in REFUSALS for rank in ranks):
            self.unsettled.add(step)
        if got not in self.unsettled | {self.good}:
            what = f"neither {self.good} nor one of {sorted(self.unsettled)}"
            self.violation(step, f"readers get step {got}, {what}")
        if found is not None and not is_whole(found):
            self.violation(step, f"readers get a mix in step {got}")
        if got != step and any(rank.ended == "published" for rank in ranks):
            self.violation(step, f"a rank was told that it was published; readers get step {got}")
        self.tally.whole += got == step
        self.good = got
        self.unsettled = {other for other in self.unsettled if other > got}

    def collect(self, *, killed: bool) -> None:
        """Garbage collection, by a process that may be killed; the next one finishes its work."""
        self.tally.collections += 1
        # The policy has no guard for attempts that may still run, so no node may be left that could commit.
        self.place.start_round(self.rng)
        if killed:
            self.tally.dead_collections += 1
            process, pipe = fork(
                lambda tell: collect_garbage(self.place.open("gc"), POLICY) and None
            )
            time.sleep(self.rng.uniform(0, 0.05))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(pipe)
        volume = self.place.open("gc")
        collect_garbage(volume, POLICY)
        found = latest(volume, COLLECTION, KIND, verify="full", node="gc").checkpoint
        got = 0 if found is None else found.publication.order
        if got != self.good:
            self.violation(got, f"after a collection readers get {got} instead of {self.good}")
        looked = survey(volume)
        foreign = [item.folder for item in looked.leftovers if item.state == "foreign"]
        if foreign:
            there = [entry.path for entry in volume.list_committed(foreign[0])]
            self.violation(got, f"nobody knows whose {there} are")
        self.tally.most_files = max(self.tally.most_files, len(volume.list_committed("")))


def run(rounds: int, seed: int, deadline_s: float, places: list[str]) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lilo-kill-") as folder:
        kinds = {"directory": Directory, "views": Views}
        runners = [Runner(kinds[name](Path(folder)), rng, deadline_s, tally) for name in places]
        for number, runner in enumerate(runners):
            share = range(number, rounds, len(runners))
            with contextlib.ExitStack() as stack:
                runner.round(1, fault="none")
                runner.start_reader()
                stack.callback(runner.stop_reader)
                for turn, _ in enumerate(share):
                    fault = rng.choices(
                        ("kill", "kill node", "stop", "none"), (0.45, 0.1, 0.4, 0.05)
                    )[0]
                    runner.round(turn + 2, fault=fault)
                    if turn % 25 == 24:
                        spent = time.monotonic() - start
                        print(
                            f"{runner.place.name}: {turn + 1} rounds, {spent:.0f} s",
                            file=sys.stderr,
                        )
                    if turn % 6 == 5:
                        runner.collect(killed=rng.random() < 0.4)
                runner.collect(killed=False)
    return tally


def main() -> None:
    """Print the tally."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--places", nargs="+", default=["directory", "views"])
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.rounds * 3 + 60, exit=True)
    tally = run(options.rounds, options.seed, options.deadline, options.places)
    json.dump(vars(tally), sys.stdout)
    print()


if __name__ == "__main__":
    main()
