"""RayMember: the driver's handle on a rank that is a Ray actor."""

from __future__ import annotations

import contextlib

import ray
import ray.exceptions
from lilo_engine.commands import frames
from ray.actor import ActorHandle

from lilo_miles_backend.cluster.actor import Whereabouts
from lilo_miles_backend.launchers.carried_member import CarriedMember, places_of
from lilo_miles_backend.launchers.mailboxes import Beat, Mailbox
from lilo_miles_backend.launchers.member import LinkLost


class RayMember(CarriedMember):
    """One actor."""

    def __init__(
        self, rank: int, actor: ActorHandle, whereabouts: Whereabouts, publication_workers: int
    ) -> None:
        """Take over an actor that told where it is."""
        super().__init__(rank, whereabouts.node, places_of(rank, publication_workers))
        self._actor = actor
        self._whereabouts = whereabouts
        self.carry()

    @property
    def pid(self) -> int:
        """Of the actor's process, on its machine."""
        return self._whereabouts.pid

    def kill(self) -> None:
        """Have Ray end the process."""
        # It may be gone already, or so may be the connection, with which all actors end.
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor, no_restart=True)
        # Ray tells of an end when something is asked of the actor.
        self.post("beat", frames.encode(Beat()))

    def exchange(self, mailbox: Mailbox, place: int, frame: bytes) -> bytes:
        """One call of the actor."""
        call = self._actor.answer.options(concurrency_group=mailbox)
        try:
            return bytes(ray.get(call.remote(frame)))
        except ray.exceptions.RayError as error:
            self.end(_fate(error, self._whereabouts))
            raise LinkLost from error


def _fate(error: ray.exceptions.RayError, whereabouts: Whereabouts) -> str:
    """What Ray says about an end, in one line; a signal is not what it knows of."""
    text = " ".join(str(error).split())
    if _node_is_dead(whereabouts.ray_node):
        return f"is gone with its machine {whereabouts.address} (Ray: {_reason(text)})"
    return f"has died, by a signal or for want of memory (Ray: {_reason(text)})"


def _reason(text: str) -> str:
    """The telling part of Ray's paragraph."""
    for before in ("Worker exit detail: ", "The actor is dead because ", "The actor died because "):
        if before in text:
            text = text.partition(before)[2]
            break
    return text.partition(" Some common causes")[0][:300]


def _node_is_dead(node_id: str) -> bool:
    try:
        listed = ray.nodes()
    except Exception:  # the head may be what is gone
        return True
    return not any(entry["Alive"] and entry["NodeID"] == node_id for entry in listed)
