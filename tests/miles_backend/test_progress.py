"""Progress: what tells those who wait for a long command that it gets on."""

from lilo_miles_backend import progress
from lilo_miles_backend.progress import Progress


def test_a_command_that_gets_on_is_as_fresh_as_its_last_part(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    seen = Progress()
    with seen.of("a pass"):
        now_s[0] += 60.0
        assert seen.view().age_s == 60.0
        seen.moved()
        now_s[0] += 5.0
        view = seen.view()
        assert (view.running, view.age_s, view.completed_commands) == ("a pass", 5.0, 0)
    assert (seen.view().age_s, seen.view().completed_commands) == (0.0, 1)
