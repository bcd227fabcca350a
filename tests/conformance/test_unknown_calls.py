"""Calls that are not offered: the client hears so, and its numbering goes on."""

from __future__ import annotations

from tests.conformance.test_ten_facts import binary, send_binary


def test_a_call_that_is_not_offered_uses_up_its_number(served):
    model_id, call = served.model(), "a_call_of_next_year"
    refused = served.post(call, {"model_id": model_id, "seq_id": 1, "path": "x", "type": call})
    assert refused.status_code == 404
    assert refused.json()["detail"]
    after = served.finished(send_binary(served, binary(model_id, 2, [1, 2, 3])))
    assert after.headers["content-type"] == "application/x-protobuf"
