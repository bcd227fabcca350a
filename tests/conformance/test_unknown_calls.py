"""Calls that are not offered: the client hears so, and its numbering goes on."""

from __future__ import annotations

import pytest

from tests.conformance.test_ten_facts import binary, send_binary


@pytest.mark.parametrize("call", ["save_weights_external", "a_call_of_next_year"])
def test_a_call_that_is_not_offered_uses_up_its_number(served, call):
    model_id = served.model()
    refused = served.post(call, {"model_id": model_id, "seq_id": 1, "path": "x", "type": call})
    assert refused.status_code == 404
    assert refused.json()["detail"]
    after = served.finished(send_binary(served, binary(model_id, 2, [1, 2, 3])))
    assert after.headers["content-type"] == "application/x-protobuf"
