"""What an engine writes beside the records is its own, also when two have the same data folder for a moment."""

from lilo_engine.config import DataFolder
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records

from tests.processes import in_memory


def test_the_next_engine_removes_what_the_last_one_left_and_shares_no_folder_with_it(tmp_path):
    data = DataFolder(root=tmp_path)
    data.create()
    folders = []
    for _ in range(2):
        records = Records.at(tmp_path)
        lease = Lease.take(records, "one engine")
        folders.append(in_memory.parts(data, records, lease).own_segments())
        folders[-1].mkdir(parents=True)
        (folders[-1] / "left").touch()
        lease.give_back()
        records.close()
    assert folders[0] != folders[1]
    assert [folder.exists() for folder in folders] == [False, True]
