"""Messages of Ray's servers go into a file, not between the lines that a run prints."""

import ray._private.worker

from megarl.cluster import ray_messages_in


def test_words_of_ray_are_appended_to_a_file_and_not_printed(tmp_path, capsys):
    path, printed = tmp_path / "logs" / "ray.log", ray._private.worker.print_to_stdstream
    for word in ("first", "second"):
        with ray_messages_in(path):
            # As Ray's thread calls it (listen_error_messages of Ray 2.60), by the name in its module.
            data = {"lines": [f"A worker died: {word}\n"], "pid": "raylet", "is_err": False}
            ray._private.worker.print_to_stdstream(data, ignore_prefix=False)
        assert ray._private.worker.print_to_stdstream is printed
    assert capsys.readouterr() == ("", "")
    lines = path.read_text().splitlines()
    assert [line.partition(" raylet: ")[2] for line in lines] == [
        "A worker died: first",
        "A worker died: second",
    ]
