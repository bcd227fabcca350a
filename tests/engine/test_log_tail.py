"""The last words of a child: all of them for one that never worked, its complaints for one that did."""

import pytest
from lilo_engine.log_tail import complaint, last_words

NEWS = "2026-11-30 16:26:07,323 INFO __main__: backend miles is ready, epoch 1"
ERROR = "2026-11-30 16:26:08,100 ERROR __main__: the trainer is lost: rank 1 was ended"


@pytest.fixture
def log(tmp_path):
    def write(*lines):
        path = tmp_path / "backend.log"
        path.write_text("an earlier child\n" + "\n".join(lines))
        return path, len("an earlier child\n")

    return write


def test_news_of_its_work_are_no_complaint(log):
    assert complaint(*log(NEWS, NEWS)) == ""
    assert NEWS in last_words(*log(NEWS))


def test_a_complaint_is_one_line_without_the_head_of_its_log(log):
    said = complaint(*log(NEWS, "CUDA error: out of memory", "", ERROR, NEWS))
    assert said == (
        "; its last words: CUDA error: out of memory | the trainer is lost: rank 1 was ended"
    )


def test_what_came_before_a_crash_below_python_tells_more_than_its_stacks(log):
    said = complaint(
        *log("an illegal memory access", "Fatal Python error: Segmentation fault", "", "  File x")
    )
    assert said.endswith("an illegal memory access | Fatal Python error: Segmentation fault")


def test_a_log_that_is_not_there_says_nothing(tmp_path):
    assert complaint(tmp_path / "none", 0) == ""
    assert last_words(tmp_path / "none", 0) == "it said nothing"
