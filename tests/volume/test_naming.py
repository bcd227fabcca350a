"""Names: any text is one safe component and comes back; paths cannot leave their folder."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lilo_volume import InvalidPath
from lilo_volume.naming import MAX_COMPONENT, check_relative, decode, encode

ANY_TEXT = st.text(st.characters(), max_size=80) | st.text("aA.=~/\\:% ", max_size=300)


@given(ANY_TEXT)
def test_an_encoded_name_is_one_safe_component(text):
    component = encode(text)
    assert component.isascii()
    assert component == component.lower()
    assert 0 < len(component) <= MAX_COMPONENT
    assert not set(component) & set('/\\:*?"<>|% ~\0')
    assert not component.startswith(".")
    assert not component.endswith(".")


@given(ANY_TEXT)
def test_an_encoded_name_comes_back_or_was_too_long(text):
    back = decode(encode(text))
    assert back == text or (back is None and len(text.encode("utf-8", "surrogatepass")) > 66)


@given(ANY_TEXT, ANY_TEXT)
def test_different_names_never_meet_whatever_the_file_system_ignores(one, other):
    def seen(text):
        return unicodedata.normalize("NFKC", encode(text)).casefold()

    assert (one == other) == (seen(one) == seen(other))


@pytest.mark.parametrize("text", ["", ".", "..", "CON", "nul", "com1.txt", "a.", "Step", "step"])
def test_awkward_names_are_encoded_apart(text):
    assert decode(encode(text)) == text
    assert encode(text).split(".")[0] not in {"", "con", "nul", "com1"}


def test_a_run_id_with_colons_stays_readable():
    assert encode("0a1b-2c:train:0") == "0a1b-2c=3atrain=3a0"


@pytest.mark.parametrize("component", ["A", "=", "=3", "=41x=zz", "a/b", ".x", "=61", "=ff"])
def test_what_was_not_encoded_is_not_decoded(component):
    with pytest.raises(InvalidPath):
        decode(component)


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b c", "\\", "é"]), min_size=1, max_size=5))
def test_a_relative_path_stays_inside_or_is_refused(parts):
    path = "/".join(parts)
    if set(parts) & {"..", ".", "", "\\"}:
        with pytest.raises(InvalidPath):
            check_relative(path)
    else:
        assert check_relative(path) == path
