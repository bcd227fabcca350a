"""Cluster: two nodes of two ranks on an emulated volume, each node with its own view. Shared by tests."""

from lilo_volume import Checkpoint, begin, latest, open_named
from lilo_volume.testing import run_ranks, thread_groups
from lilo_volume.testing.emulator import Emulator, Modes

WORLD, NODES = 4, ("n0", "n0", "n1", "n1")
SOON_S = 5.0


def shard(rank):
    return f"__{rank}_0.distcp"


ALL = [shard(rank) for rank in range(WORLD)]


class Cluster:
    def __init__(self, folder, **modes):
        self.emulator = Emulator(folder, modes=Modes(**modes))
        self.server = self.emulator.server
        self.containers = {node: self.emulator.mount(node) for node in dict.fromkeys(NODES)}

    def volume(self, rank):
        return self.emulator.volume(self.containers[NODES[rank]])

    def reader(self, **options):
        return self.emulator.volume(self.emulator.mount("reader", modes=Modes(), **options))

    def restart(self):
        for node, container in self.containers.items():
            container.crash()
            self.containers[node] = self.emulator.mount(node)

    def start(self, group, name="20", *, order=None, **options):
        return begin(
            options.pop("volume", self.volume(group.rank)),
            group,
            collection="run",
            kind="weights",
            name=name,
            order=int(name) if order is None else order,
            timeout_s=options.pop("timeout_s", SOON_S),
            node=options.pop("node", NODES[group.rank]),
            **options,
        )

    def save(self, group, name="20", *, text=None, ranks=range(WORLD), **options):
        """What every rank does: its shard, with its rank and `text` in it."""
        with self.start(group, name, **options) as attempt:
            if group.rank in ranks:
                with attempt.create(shard(group.rank)) as file:
                    file.write(f"{group.rank} {text or name}".encode())
            return attempt.publish(expected=ALL, layout={"dp": WORLD}, metadata={"text": name})

    def run(self, action):
        """`action(group)` on every rank; what each returned or raised. A rank that raised is gone for the others."""

        def rank(group):
            try:
                return action(group)
            except BaseException:
                group.close()
                raise

        return run_ranks(WORLD, rank, nodes=NODES)

    def saved(self, name="20", **options):
        """Save without a fault; the checkpoint."""
        outcomes = self.run(lambda group: self.save(group, name, **options))
        return one(outcomes)

    def latest(self, **options):
        return latest(self.reader(), "run", "weights", verify="full", **options)

    def newest(self):
        """Name of the newest good checkpoint, or None."""
        found = self.latest().checkpoint
        return None if found is None else found.publication.name

    def open(self, name):
        return open_named(self.reader(), "run", "weights", name, verify="full")

    def groups(self):
        return thread_groups(WORLD, nodes=NODES)

    def committed(self):
        return {entry.path for entry in self.server.list()}


def one(outcomes):
    """What all ranks returned is one checkpoint: rank 0's, in its view."""
    assert all(isinstance(outcome, Checkpoint) for outcome in outcomes), outcomes
    assert len({outcome.manifest.to_bytes() for outcome in outcomes}) == 1
    return outcomes[0]
