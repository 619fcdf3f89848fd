# SPDX-License-Identifier: MIT
"""Text becomes the same windows in every run, and what is no text is refused in a sentence."""

import os
from types import SimpleNamespace

import pytest
import torch

from openmsa.training.text import Windows, read_files, split_files, text_files, tokens_of


class Characters:
    eos_token_id = 1

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(c) for c in text])


def test_files_come_once_and_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z.py", "b/a.md", "b/picture.png", "a.txt", "odd.name"):
        (tmp_path / name).write_text(name)
    names = [str(f.relative_to(tmp_path)) for f in text_files([tmp_path / "odd.name", tmp_path, tmp_path / "a.txt"])]
    assert names == ["odd.name", "a.txt", "b/a.md", "z.py"]
    other_names = [tmp_path / "b/../a.txt", tmp_path / "b/link.md"]
    other_names[1].symlink_to(tmp_path / "b/a.md")
    assert len(text_files([*other_names, tmp_path])) == 3, "under another name a file is the same"


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_place_without_text_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"--text must name .*{name}"):
        text_files([tmp_path / name])


def test_only_files_that_end_are_read(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "absent")
    (tmp_path / "itself.txt").symlink_to(tmp_path / "itself.txt")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    assert text_files([tmp_path]) == [tmp_path / "a.txt"]
    for name, rule in (("pipe.txt", "a pipe"), ("device.txt", "a device")):
        with pytest.raises(ValueError, match=f"--text must be a file, got .*{name}', {rule}, which may never end"):
            text_files([tmp_path / name])
    for name in ("nowhere.txt", "itself.txt", "x" * 300):
        with pytest.raises(ValueError, match=f"--text must name files or folders that exist, got .*{name}"):
            text_files([tmp_path / name])


def test_what_is_no_text_is_refused(tmp_path):
    for name, content, words in (("latin", "é".encode("latin-1"), "none at byte 0"), ("zeros", b"a\0b", "zero bytes")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_files([tmp_path / name], [tmp_path / name])
    (tmp_path / "good").write_text("good")
    files = [tmp_path / name for name in ("latin", "good", "zeros")]
    assert read_files(files, [tmp_path]) == ({files[1]: "good"}, [files[0], files[2]])
    with pytest.raises(ValueError, match="--text must name files that can be read"):
        read_files([tmp_path / "nothing"])


def test_the_split_is_by_file_and_does_not_depend_on_the_order(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(40)]
    for i, file in enumerate(files):
        file.write_text("x" * i)
    train, held = split_files(files, 0.1)
    assert len(held) == 4
    assert sorted(train + held) == sorted(files)
    assert set(split_files(files[::-1], 0.1)[1]) == set(held)
    assert split_files(files[:1], 0.1) == (files[:1], [])
    assert len(split_files(files[:2], 0.1)[1]) == 1
    assert split_files(files, 0) == (files, [])
    with pytest.raises(ValueError, match="--held-out must be from 0 to less than 1, got 1"):
        split_files(files, 1)


def test_texts_end_with_the_end_of_text():
    assert tokens_of(Characters(), ["ab", "c"]).tolist() == [97, 98, 1, 99, 1]


def test_every_window_is_drawn_once_an_epoch_and_epochs_differ():
    windows = Windows(torch.arange(7 * 4 + 3), 4, seed=3)
    assert len(windows) == 7
    drawn = windows.drawn(0, 14)[:, 0].div(4, rounding_mode="floor").tolist()
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == list(range(7))
    assert drawn[:7] != drawn[7:]
    # The position says it all: drawing on from a place gives what drawing in one go gives.
    assert torch.equal(torch.cat((windows.drawn(0, 5), windows.drawn(5, 9))), windows.drawn(0, 14))
    assert Windows(windows.tokens, 4, seed=4).drawn(0, 7).tolist() != windows.drawn(0, 7).tolist()
    assert len({windows.digest(), Windows(windows.tokens, 4, 4).digest(), Windows(windows.tokens + 1, 4, 3).digest()}) == 3


@pytest.mark.parametrize("length", [0, -4])
def test_a_window_has_a_token_at_least(length):
    with pytest.raises(ValueError, match=f"length must be at least 1, got {length}"):
        Windows(torch.arange(7), length)


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match=r"at least 8 tokens .*got 7"):
        Windows(torch.arange(7), 8)
